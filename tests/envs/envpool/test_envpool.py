"""EnvPool's tasks: the contract, its refusals, and the same steps as Gymnasium's own tasks."""

import importlib.util
import re

import gymnasium
import numpy as np
import pytest
from pydantic import TypeAdapter

from embodied import evaluate
from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, make_env
from embodied.envs.config import EnvConfig
from embodied.envs.env_checker import check_vector_env

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning"),  # Gymnasium's, about EnvPool's spaces
    pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="needs envpool"),
]
REACH = {"name": "envpool:MetaWorld/Reach-v3", "kwargs": {"partially_observable": False}}


def config(name, **options):
    return TypeAdapter(EnvConfig).validate_python({"name": name, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"name": "envpool:Ant-v5"},
        REACH,
        {"name": "envpool:CartPole-v1"},
        {"name": "envpool:FrozenLake-v1"},
        {"name": "envpool:Pong-v5"},
    ],
    ids=str,
)
def test_envpool_tasks_keep_the_contract(options):
    env = make_env(config(max_episode_steps=12, **options), 4)
    check_vector_env(env)
    env.close()


@pytest.mark.parametrize("task", ["Swimmer-v5", "Walker2d-v5", "Ant-v5"])
def test_steps_of_envpool_equal_those_of_gymnasium(task):
    """From one state, with the same actions. Contacts differ between versions of MuJoCo, and decide how Ant goes on."""
    mujoco = pytest.importorskip("mujoco")
    if task == "Ant-v5" and not mujoco.__version__.startswith("3.6."):
        pytest.skip("needs MuJoCo 3.6, which EnvPool contains")
    env, reference = make_env(config(f"envpool:{task}"), 1), gymnasium.make(task).unwrapped
    obs, _ = env.reset(options={"episodes": [EpisodeSpec(task, -1, 3, 0)]})
    reference.reset(seed=0)
    hidden = 1 if task == "Walker2d-v5" else 2  # numbers of the position that the observation leaves out
    seen, positions = obs["state"][0], reference.model.nq
    velocities = seen[positions - hidden :][: reference.model.nv]
    reference.set_state(np.concatenate([np.zeros(hidden), seen[: positions - hidden]]), velocities)
    rng = np.random.default_rng(0)
    for _ in range(20):
        action = rng.uniform(-1, 1, env.env_spec.action.dim)
        obs, rewards, *_ = env.step(action[None])
        expected, reward, *_ = reference.step(action * reference.action_space.high)
        np.testing.assert_allclose(obs["state"][0], expected, atol=1e-3)  # it began from a state in float32
        assert rewards[0] == pytest.approx(reward, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "envpool:Ant-v9"}, "did you mean 'Ant-v"),
        ({"name": "envpool:Ant-v5", "kwargs": {"legs": 3}}, "does not take env.kwargs={'legs': 3}"),
        ({"name": "envpool:Ant-v5", "kwargs": {"num_threads": 3}}, "num_threads follows from other options"),
    ],
)
def test_an_unsupported_envpool_task_is_refused_before_the_run(options, message):
    chosen = config(**options)
    with pytest.raises(ConfigError, match=re.escape(message)):
        env_class(chosen).check(chosen)


def test_frames_are_drawn_and_leave_the_episode_as_it_is():
    env = make_env(config(video_size=64, **REACH), 3)
    if env.video_problem():
        pytest.skip(env.video_problem())
    env.reset(seed=0)
    frames = env.render_rows(np.array([2, 0]))
    assert frames.shape == (2, 64, 64, 3) and frames.std() > 10
    assert "render not implemented" in make_env(config("envpool:FrozenLake-v1"), 1).video_problem()


def test_results_do_not_depend_on_the_number_of_workers_or_rows(tmp_path):
    short = (
        "env.name=envpool:CartPole-v1 checkpoint=random eval.episodes=6 eval.videos=0 cluster.backend=inline"
    ).split()
    played = []
    for workers in (1, 2):
        sims = f"placement={{'sim,policy': 'cpu:0-{workers - 1}*{workers}', learner: 'cpu:0'}}"
        folder = tmp_path / str(workers)
        assert evaluate.main([*short, f"run.dir={folder}", f"eval.num_envs={workers + 1}", sims]) == 0
        played.append(next(folder.glob("*/episodes.csv")).read_text())
    assert played[0] == played[1] and len(played[0].splitlines()) == 7
