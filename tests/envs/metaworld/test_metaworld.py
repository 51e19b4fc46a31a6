"""MetaWorld's tasks in the interpreter that has them: the contract, benchmarks by name, scripts, and pictures."""

import re

import numpy as np
import pytest
from pydantic import TypeAdapter

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, make_env
from embodied.envs.config import EnvConfig
from embodied.envs.env_checker import check_vector_env
from embodied.envs.interpreter import locked

pytestmark = pytest.mark.skipif(locked.problem_of("metaworld") != "", reason=f"needs {locked.how_to_make('metaworld')}")


def config(name, **options):
    return TypeAdapter(EnvConfig).validate_python({"name": f"metaworld:{name}", "python": "auto", **options})


@pytest.fixture
def env(request):
    made = []

    def make(name, num_envs=3, **options):
        made.append(make_env(config(name, **options), num_envs))
        return made[-1]

    yield make
    for each in made:
        each.close()


def started(env, *tasks, seed=5):
    specs = [EpisodeSpec(task, -1, seed, row) for row, task in enumerate(tasks)]
    return env.reset(options={"episodes": specs})[0]


def test_a_task_keeps_the_contract(env):
    check_vector_env(env("push-v3", 4, max_episode_steps=8))


def test_pictures_follow_the_arm_and_stand_upright(env):
    one = env("push-v3", 1, cameras=["corner"], image_size=48)
    if one.video_problem():
        pytest.skip(one.video_problem())
    before = started(one, "push-v3")["images"]["corner"][0]
    after = one.step_chunk(np.ones((1, 10, 4), np.float32)).obs["images"]["corner"][0]
    assert before.shape == (48, 48, 3) and (before != after).any()
    assert before[:5].std() < before[-20:].std()  # a plain wall above, the table below


def test_a_script_solves_its_task_and_an_episode_is_the_same_on_any_row(env):
    one = env("drawer-open-v3")
    expert = one.expert()
    obs = started(one, *["drawer-open-v3"] * 3)["state"]
    assert obs.shape == (3, 39) and (obs[0] == obs[2]).all() and obs[0, -3:].any()
    expert.begin(np.arange(3))
    solved = np.zeros(3, bool)
    for _ in range(150):
        result = one.step_chunk(expert.act()[:, None])
        solved |= result.success[:, -1]
    assert solved.all()


def test_benchmarks_are_named_number_their_tasks_and_hide_their_goals(env):
    kind = env_class(config("MT10"))
    tasks = kind.tasks(config("MT10"))
    assert len(tasks) == 10 and kind.mixes_tasks and len(kind.tasks(config("MT50"))) == 50
    assert len(kind.tasks(config("ML45"))) == 45 and not {*kind.tasks(config("ML45"))} & {
        *kind.tasks(config("ML45/test"))
    }
    obs = started(env("MT10", 2), tasks[0], tasks[9])["state"]
    assert obs.shape == (2, 49) and obs[0, 39:].tolist() == [1, *[0] * 9] and obs[1, 48] == 1
    hidden = started(env("ML1/push-v3", 2), "push-v3", "push-v3")["state"]
    shown = started(env("push-v3", 2), "push-v3", "push-v3")["state"]
    assert not hidden[:, -3:].any() and shown[:, -3:].any() and (hidden[:, :-3] == shown[:, :-3]).all()


def test_an_unknown_metaworld_task_is_refused_with_the_nearest_name():
    chosen = config("draw-open-v3")
    with pytest.raises(ConfigError, match=re.escape("did you mean 'drawer-open-v3'?")):
        env_class(chosen).check(chosen)
