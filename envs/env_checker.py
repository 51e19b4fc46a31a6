"""Checks an env's contract: `check_vector_env(env)` plays a few episodes and names the first broken rule.

For authors of plug-ins: run it in a test on an env of 3 rows or more. It takes about five episodes' worth of steps.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from embodied.core.arrays import Observation, is_text, leaves, map_obs, take_rows, text_arrays
from embodied.core.errors import EmbodiedError, NotFinite, WrongShape
from embodied.core.types import EpisodeSpec
from embodied.envs.vector_env import VectorEnv, action_space, observation_space

SEED = 20_001
CHUNK = 3
FEW = 8  # steps of a short check


class ContractViolation(EmbodiedError):
    """An env breaks a rule of the contract."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"rule {rule!r} is broken: {what}")
        self.rule = rule


def check_vector_env(env: VectorEnv, atol: float = 0.0) -> None:
    """Raise `ContractViolation` for the first broken rule.

    `atol`: tolerance for the influence of other rows in the batch on a row's numbers, for simulators that are not
    exact; relative for numbers above 1. The same batch must always give the same numbers.
    """
    if env.num_envs < 3:
        raise ValueError(f"the check needs 3 env rows or more, this env has {env.num_envs}")
    try:
        Checker(env, atol).run()
    except NotFinite as err:
        raise ContractViolation("finite", str(err)) from err
    except WrongShape as err:
        raise ContractViolation("observation", str(err)) from err
    except NotImplementedError as err:
        missing = traceback.extract_tb(err.__traceback__)[-1].name
        raise ContractViolation("methods", f"{type(env).__name__} does not implement {missing}") from err


class Checker:
    def __init__(self, env: VectorEnv, atol: float) -> None:
        self.env, self.atol = env, atol
        self.spec = env.env_spec
        self.num = env.num_envs
        self.rng = np.random.default_rng(SEED)
        self.first = self.episodes(SEED)
        self.others = self.episodes(SEED + 500)
        self.lead = min(2, self.spec.max_episode_steps - 1)  # steps by which row 1 is behind when episodes end

    def run(self) -> None:
        self.spaces_match_the_spec()
        self.reset_gives_observations_and_success()
        self.reset_without_options_follows_the_seed()
        self.reset_touches_masked_rows_only()
        self.an_episode_starts_the_same_anywhere()
        self.an_episode_goes_the_same_anywhere()
        self.arrays_stay_as_they_were_returned()
        self.actions_are_clipped_and_checked()
        played = self.finished_rows_end_once_and_freeze()
        self.a_chunk_is_its_steps(played)
        if self.spec.images:
            images_are_painted_where_promised(self)
        self.frames_change_nothing()
        self.a_saved_state_continues()

    # The rules

    def spaces_match_the_spec(self) -> None:
        env = self.env
        if (mode := env.metadata.get("autoreset_mode")) != AutoresetMode.DISABLED:
            fail("autoreset", f"metadata says {mode}, it must be AutoresetMode.DISABLED")
        wanted = observation_space(self.spec, env.dtype), action_space(self.spec)
        for name, space in zip(("single_observation_space", "single_action_space"), wanted, strict=True):
            if (have := getattr(env, name)) != space:
                fail("spaces", f"{name} is {have}, env_spec means {space}")

    def reset_gives_observations_and_success(self) -> None:
        obs, info = self.reset(self.first)
        self.looks_right(obs)
        self.success_of(info)
        obs, rewards, terminated, truncated, info = self.step(self.actions(1)[:, 0])
        self.looks_right(obs)
        self.success_of(info)
        array_is("rewards", rewards, self.env.dtype, (self.num,), "step-arrays")
        array_is("terminated", terminated, bool, (self.num,), "step-arrays")
        array_is("truncated", truncated, bool, (self.num,), "step-arrays")

    def reset_without_options_follows_the_seed(self) -> None:
        first, _ = self.env.reset(seed=SEED)
        first = copy_of(first)
        again, _ = self.env.reset(seed=SEED)
        self.expect_equal("reset-without-mask", first, again, "reset(seed=s) twice shows different states", exact=True)

    def reset_touches_masked_rows_only(self) -> None:
        self.reset(self.first)
        before = copy_of(self.play(self.actions(2)).obs[-1])
        after, _ = self.reset(self.others, [1])
        kept = np.delete(np.arange(self.num), 1)
        self.expect_equal(
            "reset-mask", rows_of(before, kept), rows_of(after, kept), "resetting row 1 changed other rows"
        )

    def an_episode_starts_the_same_anywhere(self) -> None:
        """Checks that an episode starts equally alone in a partial reset, in another row, and copied into all rows."""
        rule = "same-initial-state"
        start = copy_of(self.reset(self.first)[0])
        everywhere, _ = self.reset([self.first[0]] * self.num)
        zeros = np.zeros(self.num, int)
        self.expect_equal(rule, rows_of(start, zeros), everywhere, "one EpisodeSpec in all rows gives different states")
        self.reset(self.others)
        last = np.array([self.num - 1])
        alone, _ = self.reset([self.first[0]] * self.num, last)
        elsewhere = "an EpisodeSpec starts differently beside other rows"
        self.expect_equal(rule, rows_of(start, zeros[:1]), rows_of(alone, last), elsewhere)

    def an_episode_goes_the_same_anywhere(self) -> None:
        rule = "same-trajectory"
        actions = self.actions(min(FEW, self.spec.max_episode_steps))
        once = self.play(actions, self.first)
        self.expect_same_episode(
            rule, once, self.play(actions, self.first), "the same batch played twice differs", exact=True
        )
        moved = np.roll(np.arange(self.num), 1)  # row r plays the episode of row r-1, beside other rows
        specs = [self.first[row] for row in moved]
        specs[0], elsewhere = self.others[0], actions[moved].copy()
        elsewhere[0] = self.actions(actions.shape[1])[0]
        again = self.play(elsewhere, specs)
        rows = np.arange(1, self.num)
        self.expect_same_episode(
            rule, once.select(rows - 1), again.select(rows), "an episode depends on its row or its company"
        )

    def arrays_stay_as_they_were_returned(self) -> None:
        first, _ = self.reset(self.first)
        shown = copy_of(first)
        later = self.env.step_chunk(self.actions(1))
        rewards = later.rewards.copy()
        self.env.step_chunk(self.actions(2))
        self.expect_equal(
            "fresh-arrays", shown, first, "a later step wrote into an observation that was handed out", exact=True
        )
        if not np.array_equal(rewards, later.rewards):
            fail("fresh-arrays", "a later step wrote into rewards that were handed out")

    def actions_are_clipped_and_checked(self) -> None:
        action = self.spec.action
        refused = {
            "a wrong number of rows": self.actions(1)[1:],
            "a dimension too many": np.repeat(self.actions(1), 2, 2),
        }
        if action.discrete:
            refused["a choice that does not exist"] = np.full((self.num, 1, 1), action.num_choices)
        else:
            refused["NaN"] = np.full((self.num, 1, action.dim), np.nan, np.float32)
            wild = np.where(self.actions(3) < 0, -7.0, 7.0).astype(np.float32)
            clipped = self.play(np.clip(wild, -1, 1), self.first)
            same = "actions outside [-1, 1] do not act as if they were clipped"
            self.expect_same_episode("action-range", clipped, self.play(wild, self.first), same, exact=True)
        for what, actions in refused.items():
            self.reset(self.first)
            try:
                self.env.step_chunk(actions)
            except ValueError:
                continue
            fail("action-errors", f"actions with {what} are accepted; they must raise ValueError")

    def finished_rows_end_once_and_freeze(self) -> Played:
        """Whole episodes, step by step, with row 1 a few steps behind the other rows."""
        start, over = self.stagger()
        self.whole = self.actions(self.spec.max_episode_steps + FEW)
        played = self.play(self.whole)
        for row in np.flatnonzero(~over):
            self.row_ends_well(row, played, start)
        if self.env.step_chunk(self.actions(2)).mask.any():
            fail("frozen", "mask is True for rows that are done")
        return played

    def row_ends_well(self, row: int, played: Played, start: Observation) -> None:
        limit = self.spec.max_episode_steps - (0 if row == 1 else self.lead)
        last = played.last_step(row)
        if last is None or last >= limit:
            fail("truncation", f"row {row} continues after max_episode_steps={self.spec.max_episode_steps}")
        terminated, truncated = played.terminated[row], played.truncated[row]
        if terminated[last] and truncated[last]:
            fail("truncation", f"row {row} is terminated and truncated at once")
        if played.done[row, last + 1 :].any() or played.rewards[row, last + 1 :].any():
            fail("frozen", f"row {row} is done, but later steps report rewards or ends without a reset")
        if played.success is not None:
            self.success_ends_well(row, last, played)
        if last > 0:
            begin, before, end = (flat(obs, row) for obs in (start, played.obs[last - 1], played.obs[last]))
            if np.array_equal(begin, end) and not np.array_equal(begin, before):
                fail("autoreset", f"the last observation of row {row} is the first of a new episode")

    def success_ends_well(self, row: int, last: int, played: Played) -> None:
        success = played.success[row]
        if (success[last + 1 :] != success[last]).any():
            fail("frozen", f"success of row {row} changes after its episode is over")
        policy = self.env.config.on_success
        if policy == "continue" or self.env.config.after_success:
            return
        ended = played.truncated[row] if policy == "truncate" else played.terminated[row]
        if success[:last].any() or (success[last] and not ended[last]):
            fail("success", f"row {row} succeeds, but on_success={policy} does not end its episode as it should")

    def a_chunk_is_its_steps(self, played: Played) -> None:
        """The same episodes in chunks whose borders do not fall on the step limit of the rows ahead."""
        self.stagger()
        limit = self.spec.max_episode_steps - self.lead
        size = next((c for c in (7, 5, 4, 3, 2) if limit % c), 7)
        for first in range(0, self.whole.shape[1] - size + 1, size):
            steps = slice(first, first + size)
            frames: list[np.ndarray] = []
            result = self.env.step_chunk(self.whole[:, steps], on_frame=lambda moved, f=frames: f.append(moved.copy()))
            self.chunk_is(result, played.select(steps=steps), first)
            if not np.array_equal(np.array(frames).reshape(-1, self.num).T, result.mask[:, : len(frames)]):
                fail("on-frame", "on_frame is not called once per env step with the rows that took it")

    def chunk_is(self, result: Any, steps: Played, first: int) -> None:
        for row in range(self.num):
            mask = result.mask[row]
            if (mask[1:] & ~mask[:-1]).any():
                fail("mask", f"row {row} becomes active again inside a chunk: mask {mask.tolist()}")
            if result.rewards[row, ~mask].any() or (result.terminated | result.truncated)[row, ~mask].any():
                fail("mask", f"row {row} has rewards or ends where its mask is False")
        for name in ("rewards", "terminated", "truncated", "success"):
            if not np.array_equal(getattr(result, name), getattr(steps, name)):
                fail("step-chunk", f"{name} of a chunk differ from those of its single steps (from step {first})")
        for row in np.flatnonzero(result.mask.any(axis=1)):
            last = int(result.mask[row].sum()) - 1
            if not np.array_equal(flat(result.obs, row), flat(steps.obs[last], row)):
                rule = "final-observation" if last + 1 < len(steps.obs) else "step-chunk"
                wanted = f"the state after step {first + last}, the last it took in the chunk"
                fail(rule, f"row {row} does not show {wanted}")

    def frames_change_nothing(self) -> None:
        if self.env.video_problem():
            return
        actions = self.actions(min(2, self.spec.max_episode_steps))  # a frame takes a second without a GPU
        self.reset(self.first)
        plain = self.env.step_chunk(actions)
        self.reset(self.first)
        rows = np.array([0, self.num - 1])
        frames: list[np.ndarray] = []
        drawn = self.env.step_chunk(actions, on_frame=lambda moved: frames.append(self.env.render_rows(rows)))
        shape = frames[0].shape
        fits = len(shape) == 4 and shape[0] == 2 and shape[3] == 3
        if not fits or any(frame.dtype != np.uint8 or frame.shape != shape for frame in frames):
            fail("frames", f"render_rows of 2 rows gives {frames[0].dtype} {list(shape)}, not uint8 [2, H, W, 3]")
        self.expect_equal("frames", plain.obs, drawn.obs, "drawing frames changes observations", exact=True)
        if not np.array_equal(plain.rewards, drawn.rewards):
            fail("frames", "drawing frames changes the rewards")

    def a_saved_state_continues(self) -> None:
        if len(over := np.flatnonzero(self.play(self.actions(3), self.first).done.any(axis=1))):
            self.reset(self.others, over)  # as players do: what an ended episode looks like is not kept
        state = self.env.get_state()
        if not state:
            return
        if wrong := [name for name, array in state.items() if len(array) != self.num]:
            fail("saved-state", f"{wrong} do not have one row per env")
        state = {name: np.array(array) for name, array in state.items()}
        actions = self.actions(FEW)
        expected = self.play(actions)
        self.reset(self.others)
        self.looks_right(self.env.set_state(state))
        self.expect_same_episode(
            "saved-state", expected, self.play(actions), "steps after set_state differ", exact=True
        )

    # Helpers of the rules

    def episodes(self, seed: int) -> list[EpisodeSpec]:
        spec = EpisodeSpec(self.env.config.task, -1, seed, 0)
        return [spec._replace(seed=seed + row, index=row) for row in range(self.num)]

    def reset(self, specs: list[EpisodeSpec], rows: Sequence[int] | None = None) -> tuple[Observation, dict[str, Any]]:
        """Begin these episodes, in all rows or in the rows of a mask."""
        mask = np.ones(self.num, bool) if rows is None else np.isin(np.arange(self.num), rows)
        episodes = [spec if chosen else None for spec, chosen in zip(specs, mask, strict=True)]
        return self.env.reset(options={"reset_mask": mask, "episodes": episodes})

    def stagger(self) -> tuple[Observation, np.ndarray]:
        """Plays rows other than 1 ahead. Returns the first observations and which rows are over [N]."""
        start = copy_of(self.reset(self.first)[0])
        over = np.zeros(self.num, bool)
        if self.lead:
            over |= self.play(np.zeros_like(self.actions(self.lead))).done.any(axis=1)
        self.reset(self.first, [1])
        over[1] = False
        return start, over

    def actions(self, steps: int) -> np.ndarray:
        action = self.spec.action
        if action.discrete:
            return self.rng.integers(action.num_choices, size=(self.num, steps, 1))
        return self.rng.uniform(-1, 1, (self.num, steps, action.dim)).astype(np.float32)

    def step(self, actions: np.ndarray) -> Any:
        return self.env.step(actions[:, 0] if self.spec.action.discrete else actions)

    def play(self, actions: np.ndarray, specs: list[EpisodeSpec] | None = None) -> Played:
        """Take these steps, from the start of these episodes or from the rows' current states."""
        if specs:
            self.reset(specs)
        rows = []
        for t in range(actions.shape[1]):
            obs, *ends, info = self.step(actions[:, t])
            rows.append((*ends, info.get("success"), copy_of(obs)))
        *arrays, obs = zip(*rows, strict=True)
        return Played(*(None if array[0] is None else np.stack(array, 1) for array in arrays), list(obs))

    def looks_right(self, obs: Observation) -> None:
        for name, space in self.env.single_observation_space.spaces.items():
            if name not in obs:
                fail("observation", f"{name} is missing; the observation has {sorted(obs)}")
            if name == "instruction":
                if len(obs[name]) != self.num or not all(isinstance(text, str) for text in obs[name]):
                    fail("observation", f"instruction must be a list of {self.num} texts")
            elif name == "images":
                for camera, wanted in space.spaces.items():
                    array_is(f"images.{camera}", obs[name].get(camera), wanted.dtype, (self.num, *wanted.shape))
            else:
                array_is(name, obs[name], space.dtype, (self.num, *space.shape))
        if extra := obs.keys() - self.env.single_observation_space.spaces.keys():
            fail("observation", f"{sorted(extra)} are observed but not announced in env_spec")

    def success_of(self, info: dict[str, Any]) -> None:
        success = info.get("success")
        if self.spec.has_success != (success is not None):
            has = "has no" if success is None else "has"
            fail("success", f"has_success is {self.spec.has_success}, but info {has} success")
        if success is not None:
            array_is("success", success, bool, (self.num,), "success")

    def expect_equal(self, rule: str, first: Observation, other: Observation, what: str, exact: bool = False) -> None:
        difference = largest_difference(first, other)
        if not difference <= (0.0 if exact else self.atol):
            fail(rule, f"{what} (by {difference:.3g})")

    def expect_same_episode(self, rule: str, first: Played, other: Played, what: str, exact: bool = False) -> None:
        for t, (a, b) in enumerate(zip(first.obs, other.obs, strict=True)):
            live = np.flatnonzero(~first.done[:, :t].any(axis=1))
            self.expect_equal(rule, rows_of(a, live), rows_of(b, live), f"{what}: observations after step {t}", exact)
        atol = 0.0 if exact else self.atol
        for name in ("rewards", "terminated", "truncated", "success"):
            a, b = getattr(first, name), getattr(other, name)
            if a is not None and not np.allclose(a.astype(float), b.astype(float), rtol=atol, atol=atol):
                fail(rule, f"{what}: {name}")


def fail(rule: str, what: str) -> None:
    raise ContractViolation(rule, what)


def array_is(name: str, array: Any, dtype: Any, shape: tuple[int, ...], rule: str = "observation") -> None:
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.shape != shape:
        have = f"{array.dtype} {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
        fail(rule, f"{name} is {have}, not {np.dtype(dtype)} {list(shape)}")


# Results, and comparisons of two episodes


@dataclass
class Played:
    """The results of T env steps: arrays [N, T], and the observation after each step."""

    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray | None
    obs: list[Observation]

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    def last_step(self, row: int) -> int | None:
        """The step at which this row's episode ended."""
        return int(self.done[row].argmax()) if self.done[row].any() else None

    def select(self, rows: Any = slice(None), steps: slice = slice(None)) -> Played:
        arrays = (self.rewards, self.terminated, self.truncated, self.success)
        kept = (None if array is None else array[rows, steps] for array in arrays)
        return Played(*kept, [rows_of(obs, rows) for obs in self.obs[steps]])


def copy_of(obs: Observation) -> Observation:
    return map_obs(lambda array: np.array(array, object if is_text(array) else None), obs)


def rows_of(obs: Observation, rows: Any) -> Observation:
    return take_rows(text_arrays(obs), rows)


def flat(obs: Observation, row: int) -> np.ndarray:
    """All observed numbers of a row as one vector (texts do not change inside an episode)."""
    numbers = [np.asarray(array[row], float).ravel() for array in leaves(obs) if not is_text(array)]
    return np.concatenate([np.empty(0), *numbers])


def largest_difference(first: Observation, other: Observation) -> float:
    """The largest difference of two observations, relative for numbers above 1; infinite if texts differ."""

    def distance(ours: Any, others: Any) -> float:
        if is_text(ours):
            return 0.0 if list(ours) == list(others) else np.inf
        ours, others = ours.astype(float), others.astype(float)
        return float((np.abs(ours - others) / np.maximum(1.0, np.abs(ours))).max(initial=0.0))

    return max(leaves(map_obs(distance, first, other)), default=0.0)


def images_are_painted_where_promised(check: Checker) -> None:
    """Check envs that leave their images to `_paint`: a row is painted when it begins, at the border of a chunk if it
    moved, and when its episode ends inside a chunk, once for each new image."""
    env, everybody = check.env, np.arange(check.num)
    with painted_rows(env) as counts:
        check.reset(check.first)
        if not counts.any():
            return  # its observations contain images
        expect_counts(counts, np.ones(check.num, int), "a reset of all rows")
        moved = env.step_chunk(check.actions(CHUNK)).mask.any(axis=1)
        expect_counts(counts, moved.astype(int), f"a chunk of {CHUNK} steps")
        check.reset(check.others, [1])
        expect_counts(counts, (everybody == 1).astype(int), "a reset of row 1")
        check.stagger()
        counts[:] = 0
        size = check.spec.max_episode_steps - check.lead + 1  # other rows end inside the chunk, row 1 continues
        moved = env.step_chunk(check.actions(size)).mask.any(axis=1)
        expect_counts(counts, moved.astype(int), "a chunk in which episodes end")
        env.step_chunk(check.actions(1))
        expect_counts(counts, np.where(everybody == 1, counts, 0), "a step of rows that are done")
    again = env._paint(everybody)
    for camera, frames in env._paint(everybody[:1]).items():
        if not np.array_equal(frames[0], again[camera][0]):
            fail("images", f"row 0 painted alone by {camera!r} looks different from row 0 painted with the others")


def expect_counts(counts: np.ndarray, wanted: np.ndarray, when: str) -> None:
    if not np.array_equal(counts, wanted):
        fail("images", f"{when} paints rows {counts.tolist()} times, it must be {wanted.tolist()}")
    counts[:] = 0


@contextmanager
def painted_rows(env: VectorEnv) -> Iterator[np.ndarray]:
    """Counts how often each row is painted inside."""
    counts = np.zeros(env.num_envs, int)
    paint = env._paint

    def counted(rows: np.ndarray):
        counts[rows] += 1
        return paint(rows)

    env._paint = counted
    try:
        yield counts
    finally:
        del env._paint
