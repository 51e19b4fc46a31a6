"""What the base promises, on an env that only counts: every off-by-one shows."""

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.core.errors import WrongShape
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.vector_env import NotFinite, StepResult, VectorEnv

LIMIT = 5


class CountingEnv(VectorEnv):
    """The state is the number of steps; the reward is that number; the episode's seed is the step that terminates it.

    A seed of 100 + k succeeds at step k, and only there.
    """

    def __init__(self, num_envs, on_success="truncate", limit=LIMIT, action=None, after_success=0):
        config = ExternalEnvConfig(name="counting:CountingEnv", on_success=on_success, after_success=after_success)
        spec = EnvSpec(action or ActionSpec(2), state_dim=1, max_episode_steps=limit, has_success=True)
        super().__init__(config, num_envs, spec)
        self.count = np.zeros(num_envs, np.float32)
        self.ends = np.zeros(num_envs, int)
        self.num_observed = self.num_stepped = 0
        self.bad_rows = np.zeros(num_envs, bool)

    def _reset_rows(self, rows, episodes):
        self.count[rows] = 0
        self.ends[rows] = [episode.seed for episode in episodes]
        return self.ends[rows] == 100

    def _step(self, actions, active):
        self.actions = actions
        self.num_stepped += 1
        self.count = self.count + 1
        rewards = np.where(self.bad_rows, np.nan, self.count)
        return StepResult(rewards, self.count == self.ends, self.count == self.ends - 100)

    def _observe(self):
        self.num_observed += 1
        return {"state": self.count[:, None].copy()}


def specs(*seeds):
    return [EpisodeSpec("count", -1, seed, index) for index, seed in enumerate(seeds)]


def begin(*seeds, **kwargs):
    env = CountingEnv(len(seeds), **kwargs)
    env.reset(options={"reset_mask": np.ones(len(seeds), bool), "episodes": specs(*seeds)})
    env.num_observed = 0
    return env


def chunk(env, steps):
    return env.step_chunk(np.zeros((env.num_envs, steps, 2), np.float32))


def test_a_chunk_is_observed_once_when_nothing_ends_before_its_border():
    env = begin(99, 3)
    assert chunk(env, 3).obs["state"].tolist() == [[3], [3]]
    assert env.num_observed == 1


def test_success_at_reset_is_reported_and_does_not_end_the_episode():
    env = CountingEnv(2)
    _, info = env.reset(options={"episodes": specs(100, 99)})
    assert info["success"].tolist() == [True, False]
    assert chunk(env, 1).mask.all()


def test_a_done_row_is_frozen_until_it_is_reset():
    env = begin(1, 99)
    chunk(env, 1)
    obs, rewards, terminated, truncated, _ = env.step(np.zeros((2, 2), np.float32))
    assert (rewards.tolist(), terminated.any(), truncated.any()) == ([0, 2], False, False)
    obs, _ = env.reset(options={"reset_mask": np.array([True, False]), "episodes": [*specs(99), None]})
    assert obs["state"].tolist() == [[0], [2]]
    assert chunk(env, 1).rewards.tolist() == [[1], [3]]


def test_a_row_that_was_never_reset_counts_as_done():
    env = CountingEnv(2)
    env.reset(options={"reset_mask": np.array([False, True]), "episodes": [None, *specs(99)]})
    assert chunk(env, 1).mask.tolist() == [[False], [True]]


def test_the_step_limit_counts_from_each_rows_own_reset():
    env = begin(99, 99)
    chunk(env, 3)
    env.reset(options={"reset_mask": np.array([True, False]), "episodes": [*specs(99), None]})
    assert chunk(env, LIMIT).mask.sum(axis=1).tolist() == [LIMIT, LIMIT - 3]


def test_on_frame_gets_the_rows_that_moved():
    env, moved = begin(99, 2), []
    env.step_chunk(np.zeros((2, 3, 2)), on_frame=lambda rows: moved.append(rows.tolist()))
    assert moved == [[True, True], [True, True], [True, False]]


def expected_rows(end, on_success, after_success, sizes):
    """A slow reference: the results of an env row's steps in chunks of these sizes, and its state after each chunk. An
    episode ends at its end, at the limit, or so many steps after its first success."""
    rows, shown, count, over, first, success = [], [], 0, False, None, False
    for size in sizes:
        for _ in range(size):
            if over:
                rows.append((0, False, False, False, success))
                continue
            count += 1
            success = count == end - 100
            first = count if success and first is None else first
            terminated = count == end
            truncated = count == LIMIT and not terminated
            if first is not None and count == first + after_success and on_success != "continue":
                terminated |= on_success == "terminate"
                truncated = not terminated
            over = terminated or truncated
            rows.append((count, terminated, truncated, True, success))
        shown.append(count)
    return rows, shown


@settings(deadline=None)
@given(
    ends=st.lists(st.integers(1, 8) | st.integers(101, 108), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, LIMIT + 2), min_size=1, max_size=6),
    on_success=st.sampled_from(["truncate", "terminate", "continue"]),
    after_success=st.integers(0, 3),
)
def test_chunks_of_any_size_tell_of_every_row_what_a_slow_reference_tells(ends, sizes, on_success, after_success):
    after_success = after_success if on_success == "truncate" else 0
    env = begin(*ends, on_success=on_success, after_success=after_success)
    expected = [expected_rows(end, on_success, after_success, sizes) for end in ends]
    begun = 0
    for number, size in enumerate(sizes):
        stepped = env.num_stepped
        result = chunk(env, size)
        for row, (rows, shown) in enumerate(expected):
            said = [
                getattr(result, name)[row].tolist()
                for name in ("rewards", "terminated", "truncated", "mask", "success")
            ]
            assert [*zip(*said, strict=True)] == rows[begun : begun + size]
            assert result.done[row] == any(said[1] + said[2])
            assert not result.mask[row].any() or result.obs["state"][row] == shown[number]
        assert env.num_stepped - stepped == result.mask.sum(axis=1).max(), "no step without a live row"
        begun += size


def test_actions_are_clipped():
    env = begin(99)
    env.step_chunk(np.array([[[-3.0, 0.5]]]))
    assert env.actions.tolist() == [[-1.0, 0.5]]


def test_discrete_actions_arrive_as_whole_numbers():
    env = begin(99, 99, action=ActionSpec(1, 4))
    env.step_chunk(np.array([[[3]], [[0]]]))
    assert env.actions.tolist() == [3, 0]
    env.step(np.array([1, 2]))
    assert env.actions.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros((2, 3)), r"\[2, 3\], this env takes \[2 envs, chunk of 1 or more, 2 dimensions\]"),
        (np.zeros((2, 0, 2)), r"\[2, 0, 2\]"),
        (np.zeros((3, 1, 2)), r"\[3, 1, 2\]"),
        (np.zeros((2, 1, 2), int), "int64, this env takes floating-point"),
        (np.full((2, 1, 2), np.nan), r"rows \[0, 1\] are NaN"),
    ],
)
def test_wrong_actions_are_refused_with_the_numbers(actions, message):
    with pytest.raises(ValueError, match=message):
        begin(99, 99).step_chunk(actions)


def test_wrong_choices_are_refused():
    env = begin(99, action=ActionSpec(1, 4))
    with pytest.raises(ValueError, match=r"rows \[0\] are outside 0..3"):
        env.step_chunk(np.array([[[4]]]))
    with pytest.raises(ValueError, match="whole numbers below 4"):
        env.step_chunk(np.zeros((1, 1, 1)))
    with pytest.raises(ValueError, match=r"\[1, 2\], this env takes \[1\]"):
        env.step(np.zeros((1, 2), int))


def test_nan_actions_of_frozen_rows_do_not_matter():
    env = begin(1, 99)
    chunk(env, 1)
    env.step_chunk(np.array([[[np.nan, 0]], [[0.5, 0]]]))
    assert env.actions.tolist() == [[0, 0], [0.5, 0]]


def test_a_nan_reward_names_env_rows_and_steps():
    env = begin(99, 99)
    chunk(env, 2)
    env.bad_rows[1] = True
    with pytest.raises(NotFinite, match=r"reward is NaN or infinite in env rows \[1\] at steps \[2\]"):
        chunk(env, 1)


def test_nan_of_frozen_rows_does_not_matter():
    env = begin(1, 99)
    chunk(env, 1)
    env.bad_rows[0] = True
    env.count[0] = np.nan
    assert chunk(env, 1).rewards.tolist() == [[0], [2]]


def test_a_nan_state_is_an_error():
    env = begin(99, 99)
    env.count[1] = np.nan
    env._step = lambda actions, active: StepResult(np.ones(2), np.zeros(2, bool), np.zeros(2, bool))
    with pytest.raises(NotFinite, match="state is NaN"):
        chunk(env, 1)


NO, NAN = np.zeros(2, bool), np.array([0, np.nan])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([NO], "success is missing"),
        ([NAN, NO], "terminated is float64, it must be bool"),
        ([NO, NAN], "success is float64"),
        ([NO, NO, np.zeros(2, int)], "truncated is int64"),
    ],
)
def test_a_flag_that_is_missing_or_no_bool_is_an_error(flags, message):
    env = begin(99, 99)
    env._step = lambda actions, active: StepResult(np.ones(2), *flags)
    with pytest.raises(WrongShape, match=message):
        chunk(env, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reset_mask": np.ones(3, bool)}, r"bool \[3\], it must be bool \[2\]"),
        ({"reset_mask": np.ones(2)}, r"float64 \[2\]"),
        ({"episodes": specs(1)}, "1 entries, one per env row is 2"),
        ({"episodes": [*specs(1), None]}, r"rows \[1\] are to be reset but have no episode"),
        ({"mask": np.ones(2, bool)}, r"\['mask'\] are unknown"),
    ],
)
def test_wrong_reset_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CountingEnv(2).reset(options=options)


def test_our_vector_env_is_a_gymnasium_vector_env_without_autoreset():
    env = CountingEnv(3)
    assert env.metadata["autoreset_mode"] == AutoresetMode.DISABLED
    obs, _ = env.reset(seed=1)
    assert obs in env.observation_space
    assert env.action_space.shape == (3, 2)
    drawn = env.ends.tolist()
    env.reset(seed=1)
    assert env.ends.tolist() == drawn
    env.reset()
    assert env.ends.tolist() != drawn
    assert env.get_state() == {}
    env.close()


def test_an_env_needs_a_step_limit():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        CountingEnv(1, limit=0)
