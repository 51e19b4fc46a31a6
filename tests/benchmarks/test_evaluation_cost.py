"""The other side of the comparison plays as many episodes, and growth of memory is told from warming up."""

import numpy as np
import pytest

from benchmarks.evaluation_cost import bare_stepping, recorded, replay, slope
from embodied.core.types import EpisodeSpec
from embodied.envs.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv


def test_bare_stepping_plays_as_many_episodes_as_it_is_told():
    env = PointMassEnv(PointMassConfig(name="pointmass", max_episode_steps=7, on_success="continue"), 4)
    done = []
    step = env.step_chunk
    env.step_chunk = lambda actions: done.append(step(actions)) or done[-1]
    bare_stepping(env, 12)
    assert sum(int(result.done.sum()) for result in done) == 12
    assert sum(int(result.mask.sum()) for result in done) == 12 * 7


def test_memory_that_only_warms_up_does_not_grow():
    assert slope([100, 500, 700, 700, 700], episodes=200) == pytest.approx(0)
    assert slope([0, 0, *(3.0 * np.arange(4))], episodes=200) == pytest.approx(1.5)


def test_a_recording_replays_to_the_same_episodes():
    config = PointMassConfig(name="pointmass", max_episode_steps=7, on_success="continue")
    env, other = PointMassEnv(config, 3), PointMassEnv(config, 3)
    rng = np.random.default_rng(0)
    with recorded(PointMassEnv) as asked:
        env.reset(seed=5)
        env.reset(options={"reset_mask": np.ones(3, bool), "episodes": [EpisodeSpec("reach", -1, 4, 0)] * 3})
        for _ in range(3):
            last = env.step_chunk(rng.uniform(-1, 1, (3, 1, 2)).astype(np.float32))
    replay(other, asked[1:])
    assert [what for what, _ in asked] == ["reset", "reset", *["step_chunk"] * 3]
    np.testing.assert_array_equal(other.observe()["state"], last.obs["state"])
    env.reset(seed=1)
    assert len(asked) == 5
