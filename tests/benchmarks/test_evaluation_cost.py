"""The other side of the comparison plays as many episodes, and growth of memory is told from warming up."""

import numpy as np
import pytest

from benchmarks.evaluation_cost import bare_stepping, slope
from embodied.envs.config import PointMassConfig
from embodied.envs.pointmass import PointMassEnv


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
