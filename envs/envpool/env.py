"""EnvPool's tasks: env rows stepped in C++, in batches.

EnvPool draws every initial state from a stream that each simulation begins where it is built, and takes no seed at a
reset. An episode must not depend on the episodes before it, so a reset builds new simulations, seeded with the
episodes' seeds. Rows that are reset together share a batch until they are reset again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
from gymnasium import spaces

from embodied.core.errors import ConfigError, EmbodiedError, in_a_line, nearest
from embodied.core.types import EpisodeSpec
from embodied.envs.capabilities import AS_TRAINED, EvaluationProtocol, of_version
from embodied.envs.envpool.config import EnvPoolConfig
from embodied.envs.gym.env import ObservationParts, SpacesEnv, numbers_of, several_choices, stack_of
from embodied.envs.vector_env import StepResult

VERSION = "1.2.5"  # the one that the protocol was measured with; it contains MuJoCo 3.6.0
EGL = "libEGL.so.1"
OURS = {"num_envs", "batch_size", "num_threads", "seed", "env_seed", "max_episode_steps", "max_num_players"}
PROTOCOL = EvaluationProtocol(
    "envpool-v1",
    "a simulation built for each episode with its seed; an episode ends where the task ends it, at its first success "
    f"where it reports one, or at the step limit; EnvPool {VERSION}, with its own MuJoCo",
    {"on_success": "terminate"},
)


@dataclass
class Batch:
    """Simulations that were built together."""

    pool: Any
    rows: np.ndarray  # int [simulations]: the env row of each; -1: it has another simulation now

    def of(self, chosen: np.ndarray) -> np.ndarray:
        """The numbers of the simulations that play the chosen rows, bool [N]."""
        return np.flatnonzero((self.rows >= 0) & chosen[self.rows]).astype(np.int32)


class EnvPoolEnv(SpacesEnv):
    def __init__(self, config: EnvPoolConfig, num_envs: int) -> None:
        its = spec_of(config)
        self._action_type = np.dtype(its.action_array_spec["action"].dtype)
        super().__init__(
            config,
            num_envs,
            ObservationParts(config.name, its.gymnasium_observation_space),
            its.gymnasium_action_space,
            max_episode_steps=config.max_episode_steps or its.config.max_episode_steps,
            has_success="info:success" in its.state_array_spec,
            backend=f"envpool {version('envpool')}",
        )
        self._batches: list[Batch] = []

    @classmethod
    def check(cls, config: EnvPoolConfig) -> None:
        spec_of(config)

    @classmethod
    def protocols(cls, config: EnvPoolConfig) -> tuple[EvaluationProtocol, ...]:
        return of_version(PROTOCOL, "envpool", VERSION), AS_TRAINED

    @classmethod
    def plays_together(cls, config: EnvPoolConfig) -> bool:
        return True

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> np.ndarray:
        for batch in self._batches:
            batch.rows[np.isin(batch.rows, rows)] = -1
        self._batches = [batch for batch in self._batches if (batch.rows >= 0).any()]
        batch = Batch(self._build([episode.seed for episode in episodes]), rows.copy())
        self._batches.append(batch)
        seen, info = batch.pool.reset()
        self._keep(rows, seen)
        return succeeded(info, len(rows))

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        rewards = np.zeros(self.num_envs)
        terminated, truncated, success = np.zeros((3, self.num_envs), bool)
        native = self._native(actions)
        stepped = [(batch, simulations) for batch in self._batches if len(simulations := batch.of(active))]
        for batch, simulations in stepped:  # all of them simulate at the same time
            batch.pool.send(native[batch.rows[simulations]], simulations)
        for batch, _ in stepped:
            seen, reward, ended, cut, info = batch.pool.recv()
            rows = batch.rows[info["env_id"]]
            self._keep(rows, seen)
            rewards[rows], terminated[rows], truncated[rows] = reward, ended, cut
            success[rows] = succeeded(info, len(rows))
        return StepResult(rewards, terminated, success if self.env_spec.has_success else None, truncated)

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        check_graphics()
        frames = np.zeros((self.num_envs, self.config.video_size, self.config.video_size, 3), np.uint8)
        chosen = np.isin(np.arange(self.num_envs), rows)
        for batch in self._batches:
            if len(simulations := batch.of(chosen)):
                frames[batch.rows[simulations]] = batch.pool.render(env_ids=simulations)
        return frames[rows]

    def video_problem(self) -> str:
        """The problem that drawing a frame of a separate simulation shows."""
        if self._video_problem is None:
            try:
                check_graphics()
                pool = self._build([0])
                pool.reset()
                frame = pool.render()
                side = self.config.video_size
                wrong = frame is None or frame.shape != (1, side, side, 3)
                self._video_problem = f"{self.config.name} draws no frames of {side} x {side}" if wrong else ""
            except (EmbodiedError, RuntimeError) as err:
                self._video_problem = f"{self.config.name} cannot be recorded here: {in_a_line(err)}"
        return self._video_problem

    def close_extras(self, **kwargs: Any) -> None:
        self._batches.clear()

    def _build(self, seeds: list[int]) -> Any:
        side = self.config.video_size
        return library().make_gymnasium(
            task_of(self.config),
            num_envs=len(seeds),
            env_seed=seeds,
            num_threads=min(len(seeds), len(os.sched_getaffinity(0))),
            max_episode_steps=self.env_spec.max_episode_steps,
            **{"render_mode": "rgb_array", "render_width": side, "render_height": side, **self.config.kwargs},
        )

    def _keep(self, rows: np.ndarray, seen: Any) -> None:
        """Keep the observations of these rows."""
        if numbers := [numbers_of_rows(part.space, part.of(seen)) for part in self._parts.numbers]:
            self._state[rows] = np.concatenate(numbers, axis=1)
        for part in self._parts.images:
            for row, pixels in zip(rows, part.of(seen)):
                for camera, image in zip(part.images, stack_of(pixels)):
                    self._images[camera][row] = image

    def _native(self, actions: np.ndarray) -> np.ndarray:
        """Actions as EnvPool takes them."""
        if isinstance(self._actions, spaces.Discrete):
            native = self._actions.start + actions
        elif isinstance(self._actions, spaces.Box):
            low, high = self._actions.low.astype(np.float64), self._actions.high.astype(np.float64)
            unit = (np.asarray(actions, np.float64).reshape(-1, *low.shape) + 1) / 2
            native = np.clip(low + unit * (high - low), low, high)
        else:
            native = np.stack([several_choices(self._actions, int(number)) for number in actions])
        return native.astype(self._action_type)


def numbers_of_rows(space: spaces.Space, values: np.ndarray) -> np.ndarray:
    """The numbers of a part, [rows, numbers]."""
    if isinstance(space, spaces.Box):
        return values.reshape(len(values), -1)
    return np.stack([numbers_of(space, value) for value in values])


def succeeded(info: dict[str, Any], count: int) -> np.ndarray:
    return np.asarray(info["success"]) > 0.5 if "success" in info else np.zeros(count, bool)


def task_of(config: EnvPoolConfig) -> str:
    return config.name.partition(":")[2]


def spec_of(config: EnvPoolConfig) -> Any:
    """EnvPool's description of the task. Refuses what it does not know."""
    task, what = task_of(config), f"env.name={config.name!r}"
    config.needs.check(what)
    envpool = library()
    if task not in (tasks := envpool.list_all_envs()):
        raise ConfigError(f"{what}: EnvPool {version('envpool')} has no task {task!r}{nearest(task, tasks)}")
    if ours := sorted(OURS & config.kwargs.keys()):
        raise ConfigError(f"env.kwargs: {ours[0]} follows from other options; leave it out")
    try:
        spec = envpool.make_spec(task, **config.kwargs)
    except Exception as err:
        raise ConfigError(f"{what} does not take env.kwargs={config.kwargs}: {in_a_line(err)}") from None
    if spec.config.max_num_players > 1:
        raise ConfigError(f"{what} has {spec.config.max_num_players} players; only tasks of one player can be played")
    return spec


def library() -> Any:
    """The package. Its drawing needs EGL's library, loaded before the package, or MuJoCo ends the process."""
    with contextlib.suppress(OSError):
        ctypes.CDLL(EGL, ctypes.RTLD_GLOBAL)
    import envpool

    return envpool


def check_graphics() -> None:
    try:
        ctypes.CDLL(EGL)
    except OSError as err:
        raise EmbodiedError(f"drawing needs {EGL} (Debian: apt install libegl1): {err}") from None
