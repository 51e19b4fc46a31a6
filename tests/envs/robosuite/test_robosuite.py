"""robosuite's tasks and the user's own derived from them, as docs/libero.md has them; what is refused is one line."""

import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from embodied import evaluate, train
from embodied.config.recipe import load
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.env_checker import check_vector_env
from embodied.envs.robosuite.config import RobosuiteConfig

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # robosuite's and numba's own
    pytest.mark.usefixtures("plain_scenes"),
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('libero')", reason="needs robosuite"),
]
PAGE = (Path(__file__).parents[3] / "docs" / "libero.md").read_text()
PAGE = PAGE.partition("## A task of robosuite's")[2].split("\n## ")[0]
INLINE = ["cluster.backend=inline", "eval.episodes=1", "eval.videos=0"]
SHORT = ["run.env_steps=null", "run.iterations=1", "env.num_envs=2", "env.max_episode_steps=6"]
SHORT += ["algo.rollout_decisions=4", "algo.minibatch_size=4"]

MORE = """
from robosuite.environments.manipulation.lift import Lift

from my_nudge import Nudge


class Noisy(Lift):  # draws while it plays, from both generators
    def __init__(self, robots, reward_shaping=False, **options):
        super().__init__(robots=robots, reward_shaping=reward_shaping, **options)

    def reward(self, action=None):
        return np.random.random() + random.random()


class Ending(Nudge):  # the task itself ends an episode in its second step
    def _post_action(self, action):
        reward, done, info = super()._post_action(action)
        return reward, done or self.timestep == 2, info


class Untold(Nudge):
    def reward(self, action=None):
        return 0.5

    def _check_success(self):
        raise NotImplementedError


class Broken(Nudge):
    def reward(self, action=None):
        return self.cubed


class Fine:
    pass
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """The page's files, in the folder where the user is."""
    for text in re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S):
        (tmp_path / text.splitlines()[0].strip("# ")).write_text(text)
    (tmp_path / "more.py").write_text("import random\n\nimport numpy as np\n" + MORE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in ("my_nudge", "more"):
        sys.modules.pop(name, None)


def config(task="Lift", **options):
    return RobosuiteConfig(name="robosuite", task=task, **options)


def play(env, *seeds, steps=3):
    """What is seen and given in each step, with actions that belong to the seeds."""
    episodes = [EpisodeSpec(env.config.task, -1, seed, row) for row, seed in enumerate(seeds)]
    draws = [np.random.default_rng(seed) for seed in seeds]
    seen = [env.reset(options={"episodes": episodes})[0]["state"]]
    told = []
    for _ in range(steps):
        obs, rewards, *_ = env.step(np.stack([rng.uniform(-1, 1, 7) for rng in draws]).astype(np.float32))
        seen.append(obs["state"])
        told.append(rewards)
    return np.stack(seen, 1), np.stack(told, 1)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["Stack", "Door", "NutAssemblySingle", "PickPlaceSingle", "Wipe", "TwoArmLift"])
def test_robosuites_own_tasks_keep_the_contract_with_pictures(task):
    env = make_env(config(task, max_episode_steps=4, cameras=["agentview"]), 3)
    check_vector_env(env)
    env.close()


def test_an_episode_follows_from_its_seed_and_leaves_nothing_global(mine):
    before = np.random.get_state()[1].copy(), random.getstate()
    one, two = make_env(config("more:Noisy"), 1), make_env(config("more:Noisy"), 2)
    seen, told = play(one, 6)
    again, retold = play(two, 7, 6)
    assert np.array_equal(seen[0], again[1]) and np.array_equal(told[0], retold[1])
    assert not np.allclose(again[0, 0], again[1, 0]) and not np.allclose(retold[0], retold[1])
    assert len({single.env.cube.size[0] for single in two._singles}) == 2  # drawn by the episode's seed too
    assert np.array_equal(np.random.get_state()[1], before[0]) and random.getstate() == before[1]
    one.close(), two.close()


def test_numbers_are_those_of_robosuites_own_loop():
    env = make_env(config(max_episode_steps=8), 1)
    seen, told = play(env, 3)
    env.close()
    import robosuite

    controller = robosuite.load_controller_config(default_controller="OSC_POSE")
    options = {"has_renderer": False, "has_offscreen_renderer": False, "use_camera_obs": False}
    before = np.random.get_state()
    theirs = robosuite.make("Lift", robots="Panda", controller_configs=controller, reward_shaping=True, **options)
    np.random.seed(3)
    state = theirs.reset()
    np.random.set_state(before)
    rng = np.random.default_rng(3)
    for step in range(4):
        wanted = np.concatenate([state["robot0_proprio-state"], state["object-state"]])
        assert np.array_equal(seen[0, step], wanted.astype(np.float32))
        if step < 3:
            state, reward, *_ = theirs.step(rng.uniform(-1, 1, 7).astype(np.float32))
            assert told[0, step] == np.float32(reward)
    theirs.close()


def test_an_own_class_decides_about_reward_success_and_limit(mine):
    env = make_env(config("my_nudge:Nudge"), 2)
    assert env.env_spec.max_episode_steps == 100
    _, told = play(env, 3, 4, steps=1)
    assert (told > 0).all() and (told < 0.5).all()
    cube = env._singles[0].env
    place = cube.sim.data.get_joint_qpos("cube_joint0")
    cube.sim.data.set_joint_qpos("cube_joint0", place + np.array([0.1, 0, 0, 0, 0, 0, 0]))
    _, rewards, terminated, truncated, info = env.step(np.zeros((2, 7), np.float32))
    assert info["success"].tolist() == [True, False] and rewards[0] == 1
    assert truncated.tolist() == [True, False] and not terminated.any()  # env.on_success=truncate
    env.close()


def test_the_end_of_a_task_terminates_the_episode_and_a_task_may_report_no_success(mine):
    ending, untold = make_env(config("more:Ending"), 1), make_env(config("more:Untold", max_episode_steps=2), 1)
    still = np.zeros((1, 7), np.float32)
    for env in (ending, untold):
        env.reset(seed=1)
    ends = [[bool(flag[0]) for flag in env.step(still)[2:4]] for env in (ending, ending, untold, untold)]
    assert ends == [[False, False], [True, False], [False, False], [False, True]]
    assert ending.env_spec.has_success and not untold.env_spec.has_success
    ending.close(), untold.close()


def test_robosuite_takes_cameras_proprio_robots_and_control_modes(mine):
    options = {"cameras": ["frontview", "robot0_eye_in_hand"], "image_size": 32, "state": "proprio"}
    env = make_env(config(reward_mode="sparse", robot="IIWA", control_mode="JOINT_POSITION", **options), 1)
    obs, _ = env.reset(seed=3)
    assert [*obs["images"]] == options["cameras"]
    assert all(image.shape == (1, 32, 32, 3) for image in obs["images"].values())
    assert all(image.std() > 10 for image in obs["images"].values())
    assert obs["state"].shape == (1, 40) and env.env_spec.action.dim == 8  # 7 joints and the gripper
    moved, rewards, *_ = env.step(np.ones((1, 8), np.float32))
    assert rewards[0] == 0 and (moved["images"]["frontview"] != obs["images"]["frontview"]).any()
    env.close()


def test_a_class_is_found_by_what_it_is(mine):
    for named in ("env.name=my_nudge:Nudge", "env.task=my_nudge:Nudge"):
        for recipe in ("maniskill_ppo", "libero_ppo", "robosuite_ppo"):
            env = load([f"recipe={recipe}", named]).config.env
            assert (env.name, env.task) == ("robosuite", "my_nudge:Nudge"), (named, recipe)
    task = "env.task=robosuite.environments.manipulation.lift:Lift"
    whole = load(["run.iterations=1", task], entry="check").config.env
    assert whole.name == "robosuite"


def test_an_own_robosuite_class_is_trained_and_evaluated(mine):
    assert train.main(["recipe=robosuite_ppo", "env.task=my_nudge:Nudge", *SHORT, *INLINE]) == 0
    (run,) = (mine / "runs").glob("robosuite_ppo-*")
    assert evaluate.main([f"checkpoint={run}", *INLINE[:2], "eval.videos=1", "eval.failure_videos=0"]) == 0
    assert len(list(run.glob("eval/*-evaluate/videos/*.mp4"))) == 1


@pytest.mark.usefixtures("rehearsed_here")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["env.task=Lifft"], "robosuite has Lift, .*my_tasks:MyLift; did you mean 'Lift'"),
        (["env.task=more:Fine"], "is no class derived from robosuite's tasks"),
        (["env.task=more:Broken"], r"AttributeError: .*cubed.*more.py, line \d+"),
        (["env.kwargs={tablefull_size: 1}"], "Lift takes no tablefull_size; did you mean 'table_full_size'"),
        (["env.kwargs={hard_reset: false}"], r"env.task=Lift .*multiple values for keyword argument 'hard_reset'"),
    ],
)
def test_a_dry_run_refuses_an_impossible_task_in_one_line(mine, capsys, arguments, says):
    assert train.main(["recipe=robosuite_ppo", *arguments, *INLINE, "--dry-run"]) == 2
    err = capsys.readouterr().err
    assert re.search(says, err) and err.count("\n") == 1, err
