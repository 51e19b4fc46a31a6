"""The env contract: N rows side by side, driven from outside, never reset by themselves. `sim_worker.py` builds
them, `player.py` plays rollouts and evaluations with them.

A plug-in implements `_reset_rows`, `_step`, `_observe`, for videos `render_rows` and for images `_paint`; this class
implements resets, time limits, action chunks, freezing of finished rows and the meaning of success. A row that is done
stays frozen (reward 0, mask False) until `reset` names it, and a row that was never reset counts as done. Images are
drawn only when they are needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector import VectorEnv as GymnasiumVectorEnv
from gymnasium.vector.utils import batch_space

from embodied.core.arrays import (
    FiniteChecks,
    Observation,
    as_type,
    copy_of,
    finite_rows,
    host,
    is_tensor,
    map_obs,
    on_cpu,
    room_for,
    side_by_side,
    tensor_of,
    text_arrays,
    text_lists,
    with_rows,
)
from embodied.core.errors import ConfigError, NotFinite, WrongShape
from embodied.core.types import Array, ChunkResult, EnvSpec, EpisodeSpec
from embodied.envs.capabilities import EnvCapabilities
from embodied.envs.own_modules import explain_errors, own_reward

ACTIONS = "actions"
COUNTERS = ("live", "elapsed", "since", "success")
KEYS = ("init_state_id", "seed", "index")  # of an episode, beside its task; -1: the row has none
TEXT = "".join(chr(code) for code in range(32, 127))


@dataclass(frozen=True)
class StepResult:
    """One env step of all rows. Its values for inactive rows are ignored.

    Tensors stay on their device, except flags that can end an episode: the host reads these in every step. If only the
    step limit ends episodes (`on_success=continue`, and `terminated` is an array), the host reads nothing.

    `terminated` may include success: `on_success` decides whether success ends the episode. A simulator whose episodes
    can continue after success (`on_success=continue`) reports failures only.
    """

    rewards: Array  # float [N]
    terminated: Array  # bool [N]
    success: Array | None = None  # bool [N]; None for envs that have no success
    truncated: Array | None = None  # bool [N], if the simulator itself cuts episodes short


class VectorEnv(EnvCapabilities, GymnasiumVectorEnv):
    """Base of every env plug-in, constructed as `MyEnv(config, num_envs)`."""

    worker = "embodied.envs.sim_worker:SimWorker"  # by name: the driver never imports a simulator's worker
    mixes_tasks = False  # whether rows of one env may play different tasks at the same time
    metadata = {"autoreset_mode": AutoresetMode.DISABLED, "render_modes": ["rgb_array"]}  # noqa: RUF012
    render_mode = "rgb_array"

    def __init__(self, config: Any, num_envs: int, env_spec: EnvSpec, dtype: type = np.float32) -> None:
        """`dtype` is that of states and rewards."""
        if env_spec.max_episode_steps <= 0:
            raise ValueError(f"max_episode_steps must be at least 1, not {env_spec.max_episode_steps}")
        self.config = config
        self.num_envs = num_envs
        self.env_spec = env_spec
        self.dtype: np.dtype = np.dtype(dtype)
        self.single_observation_space = observation_space(env_spec, self.dtype)
        self.single_action_space = action_space(env_spec)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._image_cache = ImageCache(num_envs, env_spec.images, lambda rows: self._paint(rows))
        self._live = np.zeros(num_envs, bool)
        self._elapsed = np.zeros(num_envs, np.int64)
        self._since = np.zeros(num_envs, np.int64)  # env steps since the first success, including it
        self._success: Array = np.zeros(num_envs, bool)
        self._reward = Reward(config, num_envs, env_spec)
        self._rewards: Array = np.zeros(num_envs, self.dtype)
        self.given_up: dict[int, str] = {}  # a plug-in names rows whose episode it gives up: `_step` truncates them
        self.checks: FiniteChecks | None = None  # of tensors, if `check_noted` is called later for many decisions

    # Methods of a plug-in. It never writes again to an array that it has returned.

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> Array | None:
        """Start these episodes on these rows, in one batch, leaving other rows alone.

        Returns bool [len(rows)], whether the initial state already is a success (a tensor: of all N rows); None stands
        for "nowhere".
        """
        raise NotImplementedError

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        """Advance one env step without observing.

        `actions` is float [N, A] within [-1, 1], or int [N] for discrete ones. Rows that are not `active` (bool [N])
        may be stepped or not.
        """
        raise NotImplementedError

    def _observe(self) -> Observation:
        """The observations of all rows now; images may be left to `_paint`."""
        raise NotImplementedError

    def _paint(self, rows: np.ndarray) -> Images:
        """Images of these rows now, by camera: uint8 [len(rows), H, W, 3]. Called only for rows that have moved, at the
        border of a chunk and where an episode ends inside it."""
        raise NotImplementedError

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [len(rows), H, W, 3]: a frame of each of these rows for a video."""
        raise NotImplementedError

    def video_problem(self) -> str:
        """Why `render_rows` cannot work on this machine; empty if it can."""
        return " ".join(self._missing_frames())

    def drawn_by(self) -> str:
        """The name of what draws the images, as its driver gives it; empty if unknown."""
        return ""

    @classmethod
    def _missing_frames(cls) -> list[str]:
        drawn = cls.render_rows is not VectorEnv.render_rows
        return [] if drawn else [f"{cls.__name__} has no method render_rows, which draws the frames of videos"]

    @classmethod
    def remarks(cls, config: Any, proofs: Path) -> list[str]:
        """Says that nothing can be recorded if no frames can be drawn."""
        return [f"no videos: {problem}" for problem in cls._missing_frames()]

    def _get_state(self) -> dict[str, np.ndarray] | None:
        """Arrays with one row per env that `_set_state` restores bitwise; None if the simulator cannot save its
        state."""
        return None

    def _set_state(self, state: dict[str, np.ndarray]) -> None:
        raise NotImplementedError

    # Methods for callers.

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Start episodes: `options={"reset_mask": bool [N], "episodes": list of N EpisodeSpec or None}`.

        Without a mask all rows are reset; without episodes they get ones drawn from `seed`. Rows outside the mask keep
        everything. The observation is of all rows. `"elapsed"`: int [N], how much of the step limit counts as used up.
        """
        super().reset(seed=seed)
        rows, episodes = self._read_reset_options(options or {})
        elapsed = (options or {}).get("elapsed")
        if len(rows):
            success = self._begin(rows, episodes)
            if is_tensor(success):
                begun = np.isin(np.arange(self.num_envs), rows)
                self._success = with_rows(self._success, begun, success if self._stays else host(success))
            else:
                self._success = np.array(host(self._success))
                self._success[rows] = False if success is None else success
            self._live[rows] = self._image_cache.stale[rows] = True
            self._elapsed[rows] = 0 if elapsed is None else np.asarray(elapsed)[rows]
            self._since[rows] = 0
            self._reward.begin(rows)
        obs = self._observation()
        self._check(obs, self._live)
        return obs, self._info()

    def step(self, actions: np.ndarray) -> tuple[Observation, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """One env step for each row, as Gymnasium has it: actions [N, A], or [N] for discrete ones."""
        actions = np.asarray(actions)
        if actions.shape != self.action_space.shape:
            wanted = list(self.action_space.shape or ())
            raise ValueError(f"actions are {list(actions.shape)}, this env takes {wanted}")
        result = self.step_chunk(actions.reshape(self.num_envs, 1, -1))
        info = self._info()
        return result.obs, result.rewards[:, 0], result.terminated[:, 0], result.truncated[:, 0], info

    def step_chunk(self, actions: np.ndarray, on_frame: Callable[[np.ndarray], None] | None = None) -> ChunkResult:
        """Play one decision: actions [N, C, A], C env steps of every live row. Returns a `ChunkResult`.

        `on_frame(moved)` is called after each env step with the rows that took it (bool [N]). Rows done before
        the chunk are frozen; their observation is whatever the simulator shows.
        """
        actions = self._prepare_actions(actions)
        shape = actions.shape[:2]
        terminated, truncated, mask = np.zeros((3, *shape), bool)
        rewards: list[Array] = []  # of each env step
        success: list[Array] = []
        began_live = self._live.copy()
        finals: list[tuple[np.ndarray, Observation]] = []
        for c in range(shape[1]):
            moved = self._live.copy()
            if not moved.any():
                break
            done = self._advance(actions[:, c], moved, terminated[:, c], truncated[:, c])
            mask[:, c] = moved
            self._image_cache.stale |= moved
            rewards.append(self._rewards)
            success.append(copy_of(self._success))
            if on_frame is not None:
                on_frame(moved)
            if done.any() and c + 1 < shape[1] and self._live.any():
                finals.append((np.flatnonzero(done), self._observation(np.flatnonzero(done))))
        rest = shape[1] - len(rewards)
        rewards += [room_for(self._rewards, self.num_envs)] * rest
        success += [copy_of(self._success)] * rest
        obs = self._observation()
        for rows, final in finals:
            obs = put_rows(obs, final, rows)
        self._check(obs, began_live)
        reported = side_by_side(success) if self.env_spec.has_success else None
        errors, self.given_up = tuple(self.given_up.items()), {}
        return ChunkResult(obs, side_by_side(rewards), terminated, truncated, mask, reported, errors)

    def try_out(self) -> None:
        """Reset and step once, to find mistakes."""
        action = self.env_spec.action
        self.reset(seed=0)
        self.step_chunk(np.zeros((self.num_envs, 1, action.dim), int if action.discrete else np.float32))

    def render(self) -> tuple[np.ndarray, ...]:
        return tuple(self.render_rows(np.arange(self.num_envs)))

    def observe(self, rows: np.ndarray | None = None) -> Observation:
        """The observations of all rows now, inside a chunk too: for records, not for policies. Images are up to date
        for `rows` (None: for all)."""
        return self._observation(rows)

    def last_step(self) -> tuple[np.ndarray, np.ndarray]:
        """Reward and success of the rows that took the latest env step: [N] and bool [N]."""
        return host(self._rewards), host(self._success)

    def check_noted(self) -> None:
        """Raise where numbers were not finite that `checks` noted since the last call."""
        for what, rows in self.checks.read().items() if self.checks else ():
            if what == ACTIONS:
                raise ValueError(f"actions of env rows {rows[:8].tolist()} are NaN or infinite")
            raise NotFinite(self._describe_rows(what, rows, "of the last rollout"))

    @property
    def saves_state(self) -> bool:
        """True if `get_state` holds everything needed to continue."""
        return type(self)._get_state is not VectorEnv._get_state

    def get_state(self) -> dict[str, np.ndarray]:
        """Everything that later steps depend on, one array row per env; empty where the simulator cannot be saved."""
        state = self._get_state()
        if state is None:
            return {}
        counters = {name: getattr(self, f"_{name}") for name in COUNTERS} | {"reward": self._reward.memory}
        return {name: np.array(host(array)) for name, array in {**state, **counters}.items()}

    def set_state(self, state: dict[str, np.ndarray]) -> Observation:
        """Continue from `get_state`. Returns the observation of all rows."""
        state = {name: np.array(array) for name, array in state.items()}
        for name in COUNTERS:
            setattr(self, f"_{name}", state.pop(name))
        self._reward.memory[:] = state.pop("reward")
        self._set_state(state)
        self._image_cache.stale[:] = True
        return self._observation()

    def free_gpu_memory(self) -> bool:
        """Free this env's memory on a GPU, if the simulation can go on without: False if the env has to be closed for
        it. Called only between rollouts; what is freed comes back when it is needed."""
        return False

    # How it is done.

    def _begin(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> Array | None:
        return self._reset_rows(rows, episodes)

    def _observation(self, rows: np.ndarray | None = None) -> Observation:
        """The observations of all rows now; images are up to date for these rows (None: for all)."""
        obs = self._observe()
        if self.env_spec.images and "images" not in obs:
            obs["images"] = self._image_cache.images(rows)
        return obs

    @property
    def _stays(self) -> bool:
        """True if success stays on its device: it ends no episode."""
        return self.config.on_success == "continue" and self._reward.on_device

    def _advance(self, actions, moved, terminated, truncated) -> np.ndarray:
        """One env step; keeps its rewards, fills the two columns and returns which rows finished (bool [N])."""
        actions = actions[:, 0] if self.env_spec.action.discrete else actions
        step = self._step(actions, moved)
        for name in ("rewards", "terminated", "success", "truncated"):
            needed = name in ("rewards", "terminated") or (name == "success" and self.env_spec.has_success)
            if (array := getattr(step, name)) is not None or needed:
                self._check_shape(name, array, ())
                if name != "rewards" and array.dtype != bool and str(array.dtype) != "torch.bool":
                    raise WrongShape(f"{self.config.name} {self.config.task}: {name} is {array.dtype}, it must be bool")
        step = self._read_flags(step)
        given = self._reward.of(self, actions, step, moved)
        self._check_shape("rewards", given, ())
        self._rewards = self._moved_rewards(given, moved)
        self._elapsed += moved
        np.logical_and(step.terminated, moved, out=terminated)
        cut = self._elapsed >= self.env_spec.max_episode_steps
        if step.truncated is not None:
            cut |= step.truncated
        if step.success is not None:
            self._success = with_rows(self._success, moved, step.success)
            if self.config.on_success == "truncate":
                terminated &= ~self._success
                self._since += moved & (self._success | (self._since > 0))
                cut |= self._since > self.config.after_success
            elif self.config.on_success == "terminate":
                terminated |= self._success & moved
        np.logical_and(cut, moved & ~terminated, out=truncated)
        done = terminated | truncated
        self._live &= ~done
        return done

    def _read_flags(self, step: StepResult) -> StepResult:
        """The step with flags in the host's memory, read in one copy, where episodes may end by them or a reward asks
        for them."""
        names = ["terminated", "truncated"] if self._stays else ["terminated", "truncated", "success"]
        names += [] if self._reward.on_device else ["rewards"]
        parts = {name: flags for name in names if is_tensor(flags := getattr(step, name))}
        if not parts:
            return step
        read = zip(parts, on_cpu([*parts.values()]), strict=True)
        return replace(step, **{name: array if name == "rewards" else array.astype(bool) for name, array in read})

    def _moved_rewards(self, given: Array, moved: np.ndarray) -> Array:
        """The rewards of the rows that moved, and 0 for other rows, in the env's dtype."""
        if not is_tensor(given):
            rewards = np.zeros(self.num_envs, self.dtype)
            np.copyto(rewards, given, where=moved, casting="same_kind")
            if not np.isfinite(rewards).all():
                raise NotFinite(self._describe_rows("reward", np.flatnonzero(~np.isfinite(rewards))))
            return rewards
        rewards = as_type(with_rows(room_for(given, self.num_envs), moved, given), self.dtype)
        self._check_finite("reward", rewards, moved)
        return rewards

    def _check_finite(self, what: str, array: Array, rows: np.ndarray) -> None:
        """Raise where these rows, a mask, are not finite; of tensors maybe later."""
        if is_tensor(array) and self.checks is not None:
            self.checks.note(what, array, None if rows.all() else tensor_of(~rows, array.device))
        elif len(wrong := np.flatnonzero(~finite_rows(array) & rows)):
            raise NotFinite(self._describe_rows(what, wrong))

    def _prepare_actions(self, actions: Any) -> Any:
        """Actions for `_step`: right shape and kind, clipped; actions of frozen rows never matter."""
        spec = self.env_spec.action
        actions = actions if is_tensor(actions) and not spec.discrete else host(actions)
        fits = actions.ndim == 3 and actions.shape[::2] == (self.num_envs, spec.dim) and actions.shape[1] > 0
        if not fits:
            wanted = f"[{self.num_envs} envs, chunk of 1 or more, {spec.dim} dimensions]"
            raise ValueError(f"actions are {list(actions.shape)}, this env takes {wanted}")
        if is_tensor(actions):
            if self.checks is None:
                self._refuse(~finite_rows(actions), "NaN or infinite")
            else:
                self.checks.note(ACTIONS, actions)
            return actions.nan_to_num().clamp(-1.0, 1.0)
        if actions.dtype.kind not in ("iu" if spec.discrete else "f"):
            kind = f"whole numbers below {spec.num_choices}" if spec.discrete else "floating-point numbers"
            raise ValueError(f"actions are {actions.dtype}, this env takes {kind}")
        if spec.discrete:
            valid = (actions >= 0) & (actions < spec.num_choices)
            actions = actions.astype(np.int64) if valid.all() else np.where(valid, actions, 0).astype(np.int64)
        else:
            valid = np.isfinite(actions)
            clean = actions if valid.all() else np.where(valid, actions, 0.0).astype(actions.dtype)
            actions = np.clip(clean, -1.0, 1.0)
        if not valid.all():
            limits = "NaN or infinite" if spec.num_choices is None else f"outside 0..{spec.num_choices - 1}"
            self._refuse(~valid.all(axis=(1, 2)), limits)
        return actions

    def _refuse(self, wrong: np.ndarray, limits: str) -> None:
        """Raise if live rows are among those with wrong actions (bool [N])."""
        if (rows := np.flatnonzero(wrong & self._live)).size:
            raise ValueError(f"actions of env rows {rows[:8].tolist()} are {limits}")

    def _read_reset_options(self, options: dict[str, Any]) -> tuple[np.ndarray, list[EpisodeSpec]]:
        """Rows to reset and their episodes."""
        if unknown := options.keys() - {"reset_mask", "episodes", "elapsed"}:
            raise ValueError(f"reset options {sorted(unknown)} are unknown; there are reset_mask, episodes, elapsed")
        mask = options.get("reset_mask")
        mask = np.ones(self.num_envs, bool) if mask is None else np.asarray(mask)
        if mask.dtype != bool or mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask is {mask.dtype} {list(mask.shape)}, it must be bool [{self.num_envs}]")
        rows = np.flatnonzero(mask)
        episodes: Sequence[EpisodeSpec | None] | None = options.get("episodes")
        if episodes is None:
            seeds = self.np_random.integers(2**31 - 1, size=self.num_envs)
            return rows, [EpisodeSpec(self.config.task, -1, int(seeds[row]), int(row)) for row in rows]
        if len(episodes) != self.num_envs:
            raise ValueError(f"episodes has {len(episodes)} entries, one per env row is {self.num_envs}")
        if missing := [int(row) for row in rows if episodes[row] is None]:
            raise ValueError(f"env rows {missing[:8]} are to be reset but have no episode")
        return rows, [episodes[row] for row in rows]

    def _info(self) -> dict[str, Any]:
        return {"success": copy_of(self._success)} if self.env_spec.has_success else {}

    def _check(self, obs: Observation, rows: np.ndarray) -> None:
        """Refuse observations of these rows that are not finite or do not have the spec's shapes."""
        if self.env_spec.state_dim is not None:
            self._check_shape("state", obs.get("state"), (self.env_spec.state_dim,))
        if self.env_spec.privileged_dim is not None:
            self._check_shape("privileged", obs.get("privileged"), (self.env_spec.privileged_dim,))
        for camera, size in self.env_spec.images.items():
            self._check_shape(f"image {camera!r}", obs.get("images", {}).get(camera), size)
        for what in ("state", "privileged"):
            if what in obs:
                self._check_finite(what, obs[what], rows)

    def _check_shape(self, what: str, array: Any, row: tuple[int, ...]) -> None:
        wanted = [self.num_envs, *row]
        if array is None or list(array.shape) != wanted:
            actual = "missing" if array is None else f"of shape {list(array.shape)}"
            raise WrongShape(f"{self.config.name} {self.config.task}: {what} is {actual}, it must be {wanted}")

    def _describe_rows(self, what: str, rows: np.ndarray, when: str = "") -> str:
        place = f"in env rows {rows[:8].tolist()} {when or f'at steps {self._elapsed[rows[:8]].tolist()}'}"
        return f"{self.config.name} {self.config.task}: {what} is NaN or infinite {place}"


class ReplayedEnv(VectorEnv):
    """Base of plug-ins whose episodes follow, bit for bit, from their seeds and actions. These are the saved state of
    open episodes, which are played again to restore it: their env steps, without policy, observations and images.

    A physics engine remembers more than positions and velocities: contact points, friction anchors, the solver's last
    answer. PushCube-v1 put back into its positions and velocities differs by 1e-7 after one env step and by 1e-6 after
    ten.
    """

    def __init__(self, config: Any, num_envs: int, env_spec: EnvSpec, dtype: type = np.float32) -> None:
        super().__init__(config, num_envs, env_spec, dtype)
        self._episodes = [EpisodeSpec("", -1, -1, -1)] * num_envs
        self._taken = np.zeros(num_envs, np.int64)  # env steps of each row's episode
        self._actions: deque[Array] = deque(maxlen=env_spec.max_episode_steps)  # [N, A] of the last env steps

    def _begin(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> Array | None:
        for row, episode in zip(rows.tolist(), episodes, strict=True):
            self._episodes[row] = episode
        self._taken[rows] = 0
        return super()._begin(rows, episodes)

    def _advance(self, actions: Any, moved: np.ndarray, *flags: np.ndarray) -> np.ndarray:
        self._actions.append(actions)
        self._taken += moved
        return super()._advance(actions, moved, *flags)

    def _get_state(self) -> dict[str, np.ndarray]:
        steps = on_cpu(list(self._actions))
        shape = (self.num_envs, self.env_spec.max_episode_steps, self.env_spec.action.dim)
        actions = np.zeros(shape, np.result_type(np.float32, *steps))
        for back, step in enumerate(reversed(steps), 1):
            actions[:, -back] = step
        keys = {key: np.array([getattr(episode, key) for episode in self._episodes]) for key in KEYS}
        tasks = np.array([episode.task for episode in self._episodes])
        return {"actions": actions, "taken": self._taken, "task": tasks, **keys}

    def _set_state(self, state: dict[str, np.ndarray]) -> None:
        """Play the open episodes again. Rows with fewer env steps begin later, so that all end together: a row that has
        arrived would get actions that are not its own."""
        keys = (state[name].tolist() for name in ("task", *KEYS))
        self._episodes = [EpisodeSpec(*key) for key in zip(*keys, strict=True)]
        self._taken = state["taken"]
        self._actions.clear()
        left = np.where(self._live, self._taken, 0)  # a row that is done shows its initial state
        for back in range(int(left.max(initial=0)), -1, -1):
            rows = np.flatnonzero((left == back) & (state["seed"] >= 0))
            if len(rows):
                self._reset_rows(rows, [self._episodes[row] for row in rows])
            if back:
                self._actions.append(state["actions"][:, -back])
                self._step(self._actions[-1], left >= back)


def put_rows(obs: Observation, other: Observation, rows: np.ndarray) -> Observation:
    """`obs` with these rows taken from `other`."""

    def put(part: Any, others: Any) -> Any:
        mixed = part.clone() if is_tensor(part) else np.array(part)
        mixed[rows] = others[rows]
        return mixed

    return text_lists(map_obs(put, text_arrays(obs), text_arrays(other)))


def observation_space(spec: EnvSpec, dtype: np.dtype) -> spaces.Dict:
    parts: dict[str, spaces.Space] = {}
    if spec.state_dim is not None:
        parts["state"] = spaces.Box(-np.inf, np.inf, (spec.state_dim,), dtype.type)
    if spec.privileged_dim is not None:
        parts["privileged"] = spaces.Box(-np.inf, np.inf, (spec.privileged_dim,), dtype.type)
    if spec.images:
        parts["images"] = spaces.Dict(
            {camera: spaces.Box(0, 255, size, np.uint8) for camera, size in spec.images.items()}
        )
    if spec.instruction:
        parts["instruction"] = spaces.Text(max_length=4096, min_length=0, charset=TEXT)
    return spaces.Dict(parts)


def action_space(spec: EnvSpec) -> spaces.Space:
    if spec.action.num_choices is not None:
        return spaces.Discrete(spec.action.num_choices)
    return spaces.Box(-1.0, 1.0, (spec.action.dim,), np.float32)


Images = dict[str, np.ndarray]  # camera -> uint8 [rows, H, W, 3]


class Reward:
    """The reward of an env step by `env.reward`, the same for every simulator.

    own: the simulator's reward. success: 1 in the env step that solves the task for the first time, else 0. difference:
    the simulator's reward minus its previous reward (0 before the first step), so that an episode's return is its last
    reward, whatever its length. Any other name is a function, or a class with a method `__call__`, that takes the env,
    its actions [N, A] and the `StepResult` and returns [N].

    Rewards 0.2, 0.5, 0.5, 1 with success in the last step: success gives 0, 0, 0, 1, difference 0.2, 0.3, 0, 0.5.

    `env.action_cost` times the mean square of the actions is subtracted from any of them.
    """

    def __init__(self, config: Any, num_envs: int, spec: EnvSpec) -> None:
        self.name = name = config.reward
        self.memory = np.zeros(num_envs)  # per row: the last reward, or whether success was rewarded
        self.function: Any = own_reward(config) if ":" in name else None
        self.on_device = name == "own"  # whether it reads no data of a simulator on a GPU
        self.action_cost = config.action_cost
        if self.action_cost and spec.action.discrete:
            raise ConfigError(
                "env.action_cost is for continuous actions, and those of this env are discrete; leave it out"
            )
        if name == "success" and not spec.has_success:
            raise ConfigError(
                "env.reward=success, but this env does not report success; "
                "try env.reward=own, or a function of yours: env.reward=my_pkg.my_module:my_reward"
            )

    def begin(self, rows: np.ndarray) -> None:
        """New episodes on these rows."""
        self.memory[rows] = 0.0

    def of(self, env: VectorEnv, actions: Array, step: StepResult, moved: np.ndarray) -> Array:
        """[N]; only rows that moved count."""
        given = self._earned(env, actions, step, moved)
        if not self.action_cost:
            return given
        cost = self.action_cost * (actions**2).mean(1)
        return given - (tensor_of(cost, given.device) if is_tensor(given) else host(cost))

    def _earned(self, env: VectorEnv, actions: Array, step: StepResult, moved: np.ndarray) -> Array:
        if self.name == "own":
            return step.rewards
        if self.function is not None:
            return self._user_rewards(env, actions, step)
        if self.name == "success":
            given = step.success & (self.memory == 0)
            self.memory[moved & given] = 1.0
            return given.astype(env.dtype)
        given = step.rewards - self.memory
        np.copyto(self.memory, step.rewards, where=moved)
        return given.astype(env.dtype)

    def _user_rewards(self, env: VectorEnv, actions: Array, step: StepResult) -> np.ndarray:
        """The user's reward."""
        with explain_errors(f"env.reward={self.name}", "be called"):
            given = np.asarray(self.function(env, actions, step))
        if given.shape != (env.num_envs,) or given.dtype.kind not in "biuf":
            raise WrongShape(
                f"env.reward={self.name} returns {given.dtype} {list(given.shape)}, it must return a number for each "
                f"env row, [{env.num_envs}]"
            )
        return given


class ImageCache:
    """The last images of each row's cameras. Drawing is expensive, so a row is drawn again only if it has moved since
    and its images are needed: at the decision border, and where an episode ends inside a chunk."""

    def __init__(
        self, num_envs: int, sizes: dict[str, tuple[int, int, int]], paint: Callable[[np.ndarray], Images]
    ) -> None:
        """`paint(rows)` gives the images of these rows, in their order."""
        self.paint = paint
        self.last = {camera: np.zeros((num_envs, *size), np.uint8) for camera, size in sizes.items()}
        self.stale = np.zeros(num_envs, bool)

    def images(self, rows: np.ndarray | None = None) -> Images:
        """The images of all rows. The images of the given rows (default: all rows that ever began an episode) are up to
        date."""
        stale = self.stale if rows is None else self.stale & np.isin(np.arange(len(self.stale)), rows)
        rows = np.flatnonzero(stale)
        if len(rows):
            for camera, frames in self._painted(rows).items():
                self.last[camera][rows] = frames
            self.stale[rows] = False
        return {camera: frames.copy() for camera, frames in self.last.items()}

    def _painted(self, rows: np.ndarray) -> Images:
        images = self.paint(rows)
        for camera, whole in self.last.items():
            wanted, frames = (len(rows), *whole.shape[1:]), images.get(camera)
            if frames is None or frames.dtype != np.uint8 or frames.shape != wanted:
                what = "missing" if frames is None else f"{frames.dtype} {list(frames.shape)}"
                raise WrongShape(f"image {camera!r} is {what}, it must be uint8 {list(wanted)}")
        return images
