"""Any single Gymnasium env, N of them looped in process: `gym:<id>`, or the user's own `gymnasium.Env` class.

Observations become one flat state (or an image, where they are one); box actions are stretched from [-1, 1] to the
env's bounds. The step limit is applied by the base, not by Gymnasium's wrapper.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied.core.errors import ConfigError, EmbodiedError, WrongShape, in_a_line, nearest
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec, Observation
from embodied.envs import import_class
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.evaluation_protocols import AS_TRAINED, EvaluationProtocol
from embodied.envs.gym.config import GymConfig
from embodied.envs.vector_env import StepResult, VectorEnv

SUCCESS_KEYS = ("success", "is_success")


PROTOCOL = EvaluationProtocol(
    "gym-v1",
    "an episode ends where the env ends it, at its first success where it reports one, or at the step limit",
    {"on_success": "terminate"},
)


class GymEnv(VectorEnv):
    def __init__(self, config: GymConfig | ExternalEnvConfig, num_envs: int) -> None:
        self._envs = [make_single(config) for _ in range(num_envs)]
        first = self._envs[0]
        self._image = is_image(first.observation_space)
        self._success_key = success_key(first)
        spec = EnvSpec(
            action=action_spec(config.name, first.action_space),
            state_dim=None if self._image else state_dim(config.name, first.observation_space),
            images={"camera": (*first.observation_space.shape[:2], 3)} if self._image else {},
            max_episode_steps=config.max_episode_steps or own_limit(config, first),
            has_success=self._success_key is not None,
            control_hz=float(first.metadata.get("render_fps", 20)),
            backend="gymnasium",
        )
        super().__init__(config, num_envs, spec)
        self._space, self._actions = first.observation_space, first.action_space
        shape = spec.images["camera"] if self._image else (spec.state_dim,)
        self._seen = np.zeros((num_envs, *shape), np.uint8 if self._image else self.dtype)
        self._video_problem: str | None = None

    @classmethod
    def check(cls, config: Any) -> None:
        cls(config, 1).close()

    @classmethod
    def protocols(cls, config: Any) -> tuple[EvaluationProtocol, ...]:
        return PROTOCOL, AS_TRAINED

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> np.ndarray:
        success = np.zeros(len(rows), bool)
        for at, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
            seen, info = self._envs[row].reset(seed=episode.seed)
            self._seen[row] = self._flat(seen)
            success[at] = self._succeeded(info)
        return success

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        rewards = np.zeros(self.num_envs)
        terminated, truncated, success = np.zeros((3, self.num_envs), bool)
        for row in np.flatnonzero(active):
            seen, rewards[row], ended, cut, info = self._envs[row].step(self._native(actions[row]))
            terminated[row], truncated[row] = self._flag("terminated", ended), self._flag("truncated", cut)
            self._seen[row] = self._flat(seen)
            success[row] = self._succeeded(info)
        return StepResult(rewards, terminated, success if self.env_spec.has_success else None, truncated)

    def _observe(self) -> Observation:
        return {"images": {"camera": self._seen.copy()}} if self._image else {"state": self._seen.copy()}

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        try:
            return np.stack([np.asarray(self._envs[row].render(), np.uint8) for row in rows])
        except (gymnasium.error.Error, ImportError, TypeError) as err:
            raise EmbodiedError(f"{self.config.name} cannot be recorded here: {err}") from err

    def video_problem(self) -> str:
        """The problem that rendering once in a separate env shows; most envs import the needed package only then."""
        if self._video_problem is None:
            env = make_single(self.config)
            try:
                env.reset(seed=0)
                frame = env.render()
                good = isinstance(frame, np.ndarray) and frame.ndim == 3
                self._video_problem = "" if good else f"{self.config.name} has no render mode rgb_array"
            except NotImplementedError:
                self._video_problem = f"{self.config.name} has no method render, which draws the frames of videos"
            except (gymnasium.error.Error, ImportError) as err:
                self._video_problem = f"{self.config.name} cannot be recorded here: {err}"
            finally:
                close_quietly(env)
        return self._video_problem

    def close_extras(self, **kwargs: Any) -> None:
        for env in self._envs:
            close_quietly(env)

    def _flat(self, seen: Any) -> np.ndarray:
        return seen[..., :3] if self._image else spaces.flatten(self._space, seen)

    def _native(self, action: np.ndarray) -> Any:
        if isinstance(self._actions, spaces.Discrete):
            return int(self._actions.start + action)
        low, high = self._actions.low, self._actions.high
        unit = (np.asarray(action, np.float64).reshape(low.shape) + 1) / 2
        return np.clip(low + unit * (high - low), low, high).astype(self._actions.dtype)

    def _succeeded(self, info: dict[str, Any]) -> bool:
        return self._flag(self._success_key, info.get(self._success_key, False)) if self._success_key else False

    def _flag(self, name: str, value: Any) -> bool:
        """A flag of one env as a bool; refuses NaN, which would be true."""
        if np.size(value) != 1 or value not in (0, 1):
            raise WrongShape(f"{self.config.name}: {name} is {value!r}, it must be true or false")
        return bool(value)


def make_single(config: GymConfig | ExternalEnvConfig) -> gymnasium.Env:
    """One env without Gymnasium's time limit, in a mode that renders frames if it has one."""
    if isinstance(config, ExternalEnvConfig):
        cls = import_class(config.name)
        takes = inspect.signature(cls).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
        rendered = renders(cls) and ("render_mode" in takes or open_ended) and "render_mode" not in config.kwargs
        return cls(**config.kwargs, **({"render_mode": "rgb_array"} if rendered else {}))
    name = config.name.removeprefix("gym:")
    try:
        spec = gymnasium.spec(name)
        mode = {"render_mode": "rgb_array"} if "render_mode" not in config.kwargs and renders(creator(spec)) else {}
        return gymnasium.make(name, max_episode_steps=-1, disable_env_checker=True, **config.kwargs, **mode)
    except gymnasium.error.UnregisteredEnv:
        hint = nearest(name, gymnasium.registry)
        raise ConfigError(f"env.name={config.name!r}: Gymnasium knows no env {name!r}{hint}") from None
    except ModuleNotFoundError as err:
        raise ConfigError(f"env.name={config.name!r} cannot be made: {err}") from err
    except gymnasium.error.DependencyNotInstalled as err:
        raise ConfigError(f"env.name={config.name!r} needs a package that is not installed: {err}") from err
    except Exception as err:  # the constructor may raise anything
        fails = f"does not take env.kwargs={config.kwargs}" if config.kwargs else "cannot be made"
        raise ConfigError(f"env.name={config.name!r} {fails}: {in_a_line(err)}") from err


def creator(spec: Any) -> Any:
    from gymnasium.envs.registration import load_env_creator

    return spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)


def renders(cls: Any) -> bool:
    metadata = getattr(cls, "metadata", None)
    return isinstance(metadata, dict) and "rgb_array" in metadata.get("render_modes", ())


def success_key(env: gymnasium.Env) -> str | None:
    """The key of `info` that reports success, found by resetting and stepping once."""
    env.action_space.seed(0)
    _, at_reset = env.reset(seed=0)
    info = at_reset | env.step(env.action_space.sample())[4]
    return next((key for key in SUCCESS_KEYS if key in info), None)


def action_spec(name: str, space: spaces.Space) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return ActionSpec(1, int(space.n))
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        raise ConfigError(f"env.name={name!r} has actions {space}; one Discrete or one floating-point Box is supported")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ConfigError(f"env.name={name!r} has unbounded actions {space}; give them bounds (RescaleAction does)")
    return ActionSpec(int(np.prod(space.shape)))


def state_dim(name: str, space: spaces.Space) -> int:
    if not space.is_np_flattenable:
        raise ConfigError(f"env.name={name!r} has observations {space}, which cannot be made one flat vector")
    return spaces.flatdim(space)


def is_image(space: spaces.Space) -> bool:
    """The image in three colours, without opacity."""
    return isinstance(space, spaces.Box) and space.dtype == np.uint8 and space.shape[2:] in ((3,), (4,))


def own_limit(config: GymConfig | ExternalEnvConfig, env: gymnasium.Env) -> int:
    """The step limit the env was registered with."""
    spec = gymnasium.spec(config.name.removeprefix("gym:")) if isinstance(config, GymConfig) else env.spec
    if spec is None or spec.max_episode_steps is None:
        raise ConfigError(f"{config.name} has no step limit of its own; set env.max_episode_steps=...")
    return int(spec.max_episode_steps)


def close_quietly(env: gymnasium.Env) -> None:
    with contextlib.suppress(gymnasium.error.Error, ImportError):
        env.close()
