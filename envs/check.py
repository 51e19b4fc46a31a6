"""Does an env keep the contract? `check_vector_env(env)` plays a few episodes and names the first rule that is broken.

For authors of plug-ins: run it in a test on an env of 3 rows or more. It takes about five episodes' worth of steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from gymnasium.vector import AutoresetMode

from embodied.core.errors import EmbodiedError, NotFinite, WrongShape
from embodied.core.types import EpisodeSpec, Observation
from embodied.envs.base import VectorEnv, action_space, observation_space
from embodied.envs.check_images import images_are_painted_where_promised

SEED = 20_001
FEW = 8  # steps where a few are enough
Seen = dict[str, np.ndarray]  # an observation as copies, images by `images.camera`, texts as objects


@dataclass
class Played:
    """What T env steps gave: arrays [N, T], and the observation after each step."""

    rewards: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    success: np.ndarray | None
    seen: list[Seen]

    @property
    def done(self) -> np.ndarray:
        return self.terminated | self.truncated

    def arrays(self) -> dict[str, np.ndarray]:
        """Everything but the observations, by name; without success where the env has none."""
        found = {name: getattr(self, name) for name in ("rewards", "terminated", "truncated", "success")}
        return {name: array for name, array in found.items() if array is not None}

    def part(self, rows: Any, steps: slice = slice(None)) -> Played:
        """These rows, in these steps."""
        arrays = {"success": None} | {name: array[rows, steps] for name, array in self.arrays().items()}
        return Played(**arrays, seen=[rows_of(seen, rows) for seen in self.seen[steps]])


class ContractViolation(EmbodiedError):
    """An env breaks a rule of the contract."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"rule {rule!r} is broken: {what}")
        self.rule = rule


def check_vector_env(env: VectorEnv, atol: float = 0.0) -> None:
    """Raise `ContractViolation` for the first broken rule.

    `atol` is how far a row's numbers may depend on which other rows are simulated with it, for simulators that are not
    exact; repeating the same batch has to give the same numbers in any case.
    """
    if env.num_envs < 3:
        raise ValueError(f"the check needs 3 env rows or more, this env has {env.num_envs}")
    try:
        Checker(env, atol).run()
    except NotFinite as err:
        raise ContractViolation("finite", str(err)) from err
    except WrongShape as err:
        raise ContractViolation("observation", str(err)) from err


class Checker:
    """The rules, each a method named for what it demands, and the tools they play with."""

    def __init__(self, env: VectorEnv, atol: float) -> None:
        self.env, self.atol = env, atol
        self.spec = env.env_spec
        self.num = env.num_envs
        self.rng = np.random.default_rng(SEED)
        self.first, self.others = self.episodes(SEED), self.episodes(SEED + 500)
        self.lead = min(2, self.spec.max_episode_steps - 1)  # steps by which row 1 is behind when episodes end
        self.second = np.arange(self.num) == 1

    def run(self) -> None:
        self.spaces_match_the_spec()
        self.reset_and_step_give_what_the_spec_promises()
        self.reset_without_options_follows_the_seed()
        self.reset_touches_masked_rows_only()
        self.an_episode_starts_the_same_anywhere()
        self.an_episode_goes_the_same_anywhere()
        self.arrays_stay_as_they_were_returned()
        self.actions_are_clipped_and_checked()
        played = self.finished_rows_end_once_and_freeze()
        self.a_chunk_is_its_steps(played)
        if self.spec.images:
            images_are_painted_where_promised(self, fail)
        self.a_video_changes_nothing()
        self.a_saved_state_continues()

    def spaces_match_the_spec(self) -> None:
        env = self.env
        if env.metadata.get("autoreset_mode") != AutoresetMode.DISABLED:
            fail("autoreset", f"metadata says {env.metadata.get('autoreset_mode')}, it must be AutoresetMode.DISABLED")
        wanted = observation_space(self.spec, env.dtype), action_space(self.spec)
        for name, space in zip(("single_observation_space", "single_action_space"), wanted, strict=True):
            if getattr(env, name) != space:
                fail("spaces", f"{name} is {getattr(env, name)}, env_spec means {space}")

    def reset_and_step_give_what_the_spec_promises(self) -> None:
        obs, info = self.env.reset(options={"reset_mask": np.ones(self.num, bool), "episodes": self.first})
        self.looks_right(obs, info)
        obs, _, _, _, info = self.step(self.actions(1)[:, 0])
        self.looks_right(obs, info)

    def reset_without_options_follows_the_seed(self) -> None:
        first, again = (seen_in(self.env.reset(seed=SEED)[0]) for _ in range(2))
        self.same("reset-without-mask", first, again, "reset(seed=s) twice shows different states", exact=True)

    def reset_touches_masked_rows_only(self) -> None:
        self.reset(self.first)
        before = self.play(self.actions(2)).seen[-1]
        after = self.reset_rows(self.second, self.others)
        kept = ~self.second
        self.same("reset-mask", rows_of(before, kept), rows_of(after, kept), "resetting row 1 changed other rows")

    def an_episode_starts_the_same_anywhere(self) -> None:
        """Alone in a partial reset, in another row and in a full batch of itself."""
        rule = "same-initial-state"
        start, everywhere = self.reset(self.first), self.reset([self.first[0]] * self.num)
        zeros = np.zeros(self.num, int)
        self.same(rule, rows_of(start, zeros), everywhere, "one EpisodeSpec in all rows gives different states")
        self.reset(self.others)
        alone = self.reset_rows(np.arange(self.num) == self.num - 1, [self.first[0]] * self.num)
        what = "an EpisodeSpec starts elsewhere in other company"
        self.same(rule, rows_of(start, [0]), rows_of(alone, [-1]), what)

    def an_episode_goes_the_same_anywhere(self) -> None:
        rule, actions = "same-trajectory", self.actions(min(FEW, self.spec.max_episode_steps))
        once, again = self.play(actions, self.first), self.play(actions, self.first)
        self.equal(rule, once, again, "the same batch played twice differs", exact=True)
        moved = np.roll(np.arange(self.num), 1)  # row r plays what row r-1 played, but row 0 something new
        specs, elsewhere = [self.first[row] for row in moved], actions[moved].copy()
        specs[0], elsewhere[0] = self.others[0], self.actions(actions.shape[1])[0]
        again, rows = self.play(elsewhere, specs), np.arange(1, self.num)
        self.equal(rule, once.part(rows - 1), again.part(rows), "an episode depends on its row or its company")

    def arrays_stay_as_they_were_returned(self) -> None:
        held, _ = self.env.reset(options={"reset_mask": np.ones(self.num, bool), "episodes": self.first})
        shown = seen_in(held)
        later = self.env.step_chunk(self.actions(1))
        rewards = later.rewards.copy()
        self.env.step_chunk(self.actions(2))
        what = "a later step wrote into an observation that was handed out"
        self.same("fresh-arrays", shown, seen_in(held), what, exact=True)
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
            clipped, played = self.play(np.clip(wild, -1, 1), self.first), self.play(wild, self.first)
            same = "actions outside [-1, 1] do not act as if they were clipped"
            self.equal("action-range", clipped, played, same, exact=True)
        for what, actions in refused.items():
            self.reset(self.first)
            try:
                self.env.step_chunk(actions)
            except ValueError:
                continue
            fail("action-errors", f"actions with {what} are accepted; they must raise ValueError")

    def finished_rows_end_once_and_freeze(self) -> Played:
        """Whole episodes, step by step, with row 1 a little behind the others."""
        start, over = self.stagger()
        self.whole = self.actions(self.spec.max_episode_steps + FEW)
        played = self.play(self.whole)
        for row in np.flatnonzero(~over):
            self.row_ends_well(row, played, start)
        if self.env.step_chunk(self.actions(2)).mask.any():
            fail("frozen", "mask is True for rows that are done")
        return played

    def row_ends_well(self, row: int, played: Played, start: Seen) -> None:
        limit, done = self.spec.max_episode_steps - (0 if row == 1 else self.lead), played.done[row]
        last = int(done.argmax())  # the step at which the episode ends
        if not done.any() or last >= limit:
            fail("truncation", f"row {row} goes on after max_episode_steps={self.spec.max_episode_steps}")
        terminated, truncated = played.terminated[row], played.truncated[row]
        if terminated[last] and truncated[last]:
            fail("truncation", f"row {row} is terminated and truncated at once")
        if done[last + 1 :].any() or played.rewards[row, last + 1 :].any():
            fail("frozen", f"row {row} is done, but later steps report rewards or ends without a reset")
        if played.success is not None:
            ended = {"truncate": truncated, "terminate": terminated}.get(self.env.config.on_success)
            self.success_ends_well(row, played.success[row], last, ended)
        if last > 0:
            begin, before, end = (flat(seen, row) for seen in (start, played.seen[last - 1], played.seen[last]))
            if np.array_equal(begin, end) and not np.array_equal(begin, before):
                fail("autoreset", f"the last observation of row {row} is the first of a new episode")

    def success_ends_well(self, row: int, success: np.ndarray, last: int, ended: np.ndarray | None) -> None:
        """`ended` says where the episode ended in the way that on_success asks for, if it asks for one."""
        if (success[last + 1 :] != success[last]).any():
            fail("frozen", f"success of row {row} changes after its episode is over")
        if ended is not None and (success[:last].any() or (success[last] and not ended[last])):
            policy = self.env.config.on_success
            fail("success", f"row {row} succeeds, but on_success={policy} does not end its episode so")

    def a_chunk_is_its_steps(self, played: Played) -> None:
        """The same episodes in chunks whose borders do not fall on the step limit of the rows ahead."""
        self.stagger()
        limit = self.spec.max_episode_steps - self.lead
        size = next((c for c in (7, 5, 4, 3, 2) if limit % c), 7)
        for first in range(0, self.whole.shape[1] - size + 1, size):
            steps = slice(first, first + size)
            frames: list[np.ndarray] = []
            result = self.env.step_chunk(self.whole[:, steps], on_frame=lambda moved, f=frames: f.append(moved.copy()))
            self.chunk_is(result, played.part(slice(None), steps), first)
            if not np.array_equal(np.array(frames).reshape(-1, self.num).T, result.mask[:, : len(frames)]):
                fail("on-frame", "on_frame is not called once per env step with the rows that took it")

    def chunk_is(self, result: Any, steps: Played, first: int) -> None:
        for row in range(self.num):
            mask = result.mask[row]
            if (mask[1:] & ~mask[:-1]).any():
                fail("mask", f"row {row} comes back to life inside a chunk: mask {mask.tolist()}")
            frozen = ~mask
            if result.rewards[row, frozen].any() or (result.terminated | result.truncated)[row, frozen].any():
                fail("mask", f"row {row} has rewards or ends where its mask is False")
        for name, single in steps.arrays().items():
            if not np.array_equal(getattr(result, name), single):
                fail("step-chunk", f"{name} of a chunk differ from those of its single steps (from step {first})")
        seen = seen_in(result.obs)
        for row in np.flatnonzero(result.mask.any(axis=1)):
            last = int(result.mask[row].sum()) - 1
            if not np.array_equal(flat(seen, row), flat(steps.seen[last], row)):
                rule = "final-observation" if last + 1 < len(steps.seen) else "step-chunk"
                what = f"row {row} does not show the state after step {first + last}, the last it took in the chunk"
                fail(rule, what)

    def a_video_changes_nothing(self) -> None:
        if self.env.film_problem():
            return
        actions = self.actions(min(4, self.spec.max_episode_steps))
        self.reset(self.first)
        plain = self.env.step_chunk(actions)
        self.reset(self.first)
        rows = np.array([0, self.num - 1])
        frames: list[np.ndarray] = []
        shown = self.env.step_chunk(actions, on_frame=lambda moved: frames.append(self.env.render_rows(rows)))
        shape = frames[0].shape
        fits = len(shape) == 4 and shape[::3] == (2, 3)
        if not fits or any(frame.dtype != np.uint8 or frame.shape != shape for frame in frames):
            fail("frames", f"render_rows of 2 rows gives {frames[0].dtype} {list(shape)}, not uint8 [2, H, W, 3]")
        self.same("frames", seen_in(plain.obs), seen_in(shown.obs), "a video changes what is observed", exact=True)
        if not np.array_equal(plain.rewards, shown.rewards):
            fail("frames", "a video changes the rewards")

    def a_saved_state_continues(self) -> None:
        self.reset(self.first)
        self.play(self.actions(3))
        state = self.env.get_state()
        if not state:
            return
        if wrong := [name for name, array in state.items() if len(array) != self.num]:
            fail("saved-state", f"{wrong} do not have one row per env")
        state = {name: np.array(array) for name, array in state.items()}
        actions = self.actions(FEW)
        expected = self.play(actions)
        self.reset(self.others)
        self.looks_right(self.env.set_state(state), self.env._info())
        self.equal("saved-state", expected, self.play(actions), "steps after set_state differ", exact=True)

    # Tools

    def episodes(self, seed: int) -> list[EpisodeSpec]:
        spec = EpisodeSpec(self.env.config.task, -1, seed, 0)
        return [replace(spec, seed=seed + row, index=row) for row in range(self.num)]

    def reset(self, specs: list[EpisodeSpec]) -> Seen:
        return self.reset_rows(np.ones(self.num, bool), specs)

    def reset_rows(self, mask: np.ndarray, specs: list[EpisodeSpec]) -> Seen:
        """Reset the rows of a mask; the others have no episode among those handed over."""
        episodes = [spec if there else None for spec, there in zip(specs, mask, strict=True)]
        return seen_in(self.env.reset(options={"reset_mask": mask, "episodes": episodes})[0])

    def stagger(self) -> tuple[Seen, np.ndarray]:
        """Row 1 at the start of its episode, the others ahead. Returns the first observations and the rows over."""
        start, over = self.reset(self.first), np.zeros(self.num, bool)
        if self.lead:
            over |= self.play(np.zeros_like(self.actions(self.lead))).done.any(axis=1)
        self.reset_rows(self.second, self.first)
        return start, over & ~self.second

    def actions(self, steps: int) -> np.ndarray:
        action = self.spec.action
        if action.discrete:
            return self.rng.integers(action.num_choices, size=(self.num, steps, 1))
        return self.rng.uniform(-1, 1, (self.num, steps, action.dim)).astype(np.float32)

    def step(self, actions: np.ndarray) -> Any:
        return self.env.step(actions[:, 0] if self.spec.action.discrete else actions)

    def play(self, actions: np.ndarray, specs: list[EpisodeSpec] | None = None) -> Played:
        """Env steps one by one, from the start of these episodes, or from where the env is."""
        if specs:
            self.reset(specs)
        steps = []
        for t in range(actions.shape[1]):
            obs, rewards, terminated, truncated, info = self.step(actions[:, t])
            steps.append((seen_in(obs), rewards, terminated, truncated, info.get("success")))
        seen, *arrays, success = zip(*steps, strict=True)
        success = None if success[0] is None else np.stack(success, 1)
        return Played(*(np.stack(array, 1) for array in arrays), success, list(seen))

    def looks_right(self, obs: Observation, info: dict[str, Any]) -> None:
        """What the base does not check already: it refuses wrong shapes and numbers that are not finite."""
        if obs.keys() != (wanted := self.env.single_observation_space.spaces.keys()):
            fail("observation", f"it has {sorted(obs)}, env_spec means {sorted(wanted)}")
        texts = obs.get("instruction", [""] * self.num)
        if len(texts) != self.num or not all(isinstance(text, str) for text in texts):
            fail("observation", f"instruction must be a list of {self.num} texts")
        for name, part in seen_in(obs).items():
            dtype = np.dtype(np.uint8) if name.startswith("images.") else self.env.dtype
            if part.dtype not in (dtype, object):
                fail("observation", f"{name} is {part.dtype}, not {dtype}")
        if self.spec.has_success != (there := info.get("success") is not None):
            fail("success", f"has_success is {self.spec.has_success}, but info has{'' if there else ' no'} success")

    def same(self, rule: str, one: Seen, other: Seen, what: str, exact: bool = False) -> None:
        difference = max((far(part, other[name]) for name, part in one.items()), default=0.0)
        if not difference <= (0.0 if exact else self.atol):
            fail(rule, f"{what} (by {difference:.3g})")

    def equal(self, rule: str, one: Played, other: Played, what: str, exact: bool = False) -> None:
        for t, (a, b) in enumerate(zip(one.seen, other.seen, strict=True)):
            live = ~one.done[:, :t].any(axis=1)
            self.same(rule, rows_of(a, live), rows_of(b, live), f"{what}: observations after step {t}", exact)
        atol, arrays = 0.0 if exact else self.atol, other.arrays()
        for name, array in one.arrays().items():
            if not np.allclose(array.astype(float), arrays[name].astype(float), rtol=0, atol=atol):
                fail(rule, f"{what}: {name}")


def fail(rule: str, what: str) -> NoReturn:
    raise ContractViolation(rule, what)


def seen_in(obs: Observation) -> Seen:
    """Copies of all that an observation shows."""
    parts = {name: part for name, part in obs.items() if not isinstance(part, dict)}
    parts |= {f"images.{camera}": image for camera, image in obs.get("images", {}).items()}
    return {name: np.array(part, object if isinstance(part, list) else None) for name, part in parts.items()}


def rows_of(seen: Seen, rows: Any) -> Seen:
    return {name: part[rows] for name, part in seen.items()}


def flat(seen: Seen, row: int) -> np.ndarray:
    """Everything one row sees as one vector of numbers (texts do not change inside an episode)."""
    return np.concatenate([part[row].astype(float).ravel() for part in seen.values() if part.dtype != object])


def far(one: np.ndarray, other: np.ndarray) -> float:
    """The largest difference of two arrays; infinite where texts differ."""
    if one.dtype == object:
        return 0.0 if np.array_equal(one, other) else np.inf
    return float(np.abs(one.astype(float) - other.astype(float)).max(initial=0.0))
