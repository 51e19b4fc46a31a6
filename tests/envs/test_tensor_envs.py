"""Envs whose observations are tensors: the base treats them as it treats arrays, and fetches nothing large."""

import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from embodied.core.arrays import FiniteChecks, host, map_obs
from embodied.core.errors import NotFinite
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.config import ExternalEnvConfig

N, CHUNK = 3, 4


@pytest.fixture(autouse=True)
def watched_env(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "support"))
    yield
    sys.modules.pop("watched_env", None)


def build(kind):
    env = make_env(ExternalEnvConfig(name=f"watched_env:{kind}", max_episode_steps=6), N)
    episodes = [EpisodeSpec("reach", -1, seed, seed) for seed in range(N)]
    env.reset(options={"episodes": episodes})
    again = [EpisodeSpec("reach", -1, 9, 9), None, None]
    env.step_chunk(as_given(kind, np.zeros((N, 1, 2), np.float32)))
    env.reset(options={"reset_mask": np.array([True, False, False]), "episodes": again})  # row 0 is a step behind
    return env


def as_given(kind, actions):
    return torch.from_numpy(actions) if kind == "TensorEnv" else actions


def test_a_chunk_in_which_episodes_end_gives_the_same_as_tensors():
    plain, tensors = build("ImageEnv"), build("TensorEnv")
    rng = np.random.default_rng(0)
    for _ in range(2):  # rows 1 and 2 end in the second chunk before row 0 does
        actions = rng.uniform(-2, 2, (N, CHUNK, 2)).astype(np.float32)
        a, b = plain.step_chunk(actions), tensors.step_chunk(torch.from_numpy(actions))
        np.testing.assert_array_equal(a.rewards, b.rewards)
        np.testing.assert_array_equal(a.mask, b.mask)
        np.testing.assert_array_equal(a.success, b.success)
        parts = (b.obs["state"], b.obs["images"]["near"], b.rewards)
        assert all(isinstance(part, torch.Tensor) for part in parts)
        seen = map_obs(host, b.obs)
        np.testing.assert_array_equal(a.obs["state"], seen["state"])
        for camera, frames in a.obs["images"].items():
            np.testing.assert_array_equal(frames, seen["images"][camera])
    assert a.done.all() and a.mask.sum(axis=1).tolist() == [2, 1, 1]


@pytest.mark.parametrize("later", [False, True])
def test_actions_and_states_that_are_not_finite_are_refused_by_row_at_once_or_after_many_decisions(monkeypatch, later):
    env = build("TensorEnv")

    @contextmanager
    def refused(kind, what):
        if not later:
            with pytest.raises(kind, match=rf"{what} NaN or infinite"):
                yield
            return
        env.checks = FiniteChecks()
        yield
        env.step_chunk(torch.zeros((N, 1, 2)))
        with pytest.raises(kind, match=rf"{what} NaN or infinite"):
            env.check_noted()
        env.check_noted()

    actions = torch.zeros((N, 1, 2))
    actions[1, 0, 1] = torch.nan
    with refused(ValueError, r"actions of env rows \[1\] are"):
        env.step_chunk(actions)
    observe = env._observe

    def broken():
        obs = observe()
        obs["state"][2, 0] = torch.inf
        return obs

    monkeypatch.setattr(env, "_observe", broken)
    with refused(NotFinite, "state is"):
        env.step_chunk(torch.zeros((N, 1, 2)))
