"""Any single Gymnasium env, N of them looped in process: `gym:<id>`, or the user's own `gymnasium.Env` class.

Observations are sorted into images, one flat state and an instruction. Dict and Tuple spaces are walked; the parts of
{"arm": {"wrist": ..., "joints": ...}} are called arm_wrist and arm_joints. A Box in the shape of a picture is an image,
other numbers join the state in the order of the space (discrete ones one-hot, as Gymnasium flattens them), and texts
are the instruction.

Box actions are stretched from [-1, 1] to the
env's bounds; several discrete ones are one choice among their combinations. The step limit is applied by the base, not
by Gymnasium's wrapper.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from embodied.core.errors import ConfigError, EmbodiedError, NotFinite, WrongShape, in_a_line, nearest
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec, Observation
from embodied.envs import import_class
from embodied.envs.capabilities import AS_TRAINED, EvaluationProtocol
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.gym.config import GymConfig
from embodied.envs.own_modules import line_of
from embodied.envs.vector_env import StepResult, VectorEnv

LEAST_SIDE = 8  # pixels of an image; smaller arrays, such as a grid of 7x7 cells, are numbers
MOST_IMAGES = 16  # in a stack of images
MOST_NUMBERS = 2**20  # of a state
ALONE = "camera"  # the camera of an observation that is one image


@dataclass(frozen=True)
class Part:
    """A part of an observation that has no parts itself."""

    path: tuple[Any, ...]  # its key in every Dict or Tuple around it
    space: spaces.Space
    images: tuple[str, ...] = ()  # the cameras of its images; empty if it is none

    def __str__(self) -> str:
        return "".join(["observation", *(f"[{key!r}]" for key in self.path)])

    def of(self, seen: Any) -> Any:
        for key in self.path:
            seen = seen[key]
        return seen


class ObservationParts:
    """The parts of an env's observation, and where each goes."""

    def __init__(self, env_name: str, space: spaces.Space) -> None:
        self.env_name = env_name
        parts = [Part(path, leaf, cameras_of(name_of(path), leaf)) for path, leaf in walk(space)]
        self.images = [part for part in parts if part.images]
        self.texts = [part for part in parts if isinstance(part.space, spaces.Text)]
        self.numbers = [part for part in parts if part not in self.images and part not in self.texts]
        for part in self.numbers:
            self._refuse_unfit(part)
        self.state_dim = sum(spaces.flatdim(part.space) for part in self.numbers) or None
        self.cameras = {camera: size_of(part.space) for part in self.images for camera in part.images}
        if len(self.cameras) < sum(len(part.images) for part in self.images):
            names = ", ".join(self.cameras)
            raise ConfigError(f"env.name={env_name!r}: two images share one of the names {names}; rename a key")
        if not parts:
            raise ConfigError(f"env.name={env_name!r} observes nothing: {space}")

    def _refuse_unfit(self, part: Part) -> None:
        where = f"env.name={self.env_name!r}: {part} is {part.space!s:.200}"
        leave_out = "leave it out (gymnasium.wrappers.FilterObservation does)"
        if not isinstance(part.space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
            raise ConfigError(
                f"{where}; only Box, Discrete, MultiDiscrete, MultiBinary and Text spaces, in Dict or Tuple, can be "
                f"observed: give it a fixed size, a padded Box for example, or {leave_out}"
            )
        if part.space.dtype.kind not in "biuf":
            raise ConfigError(f"{where}; its numbers must be real: make it a Box of float32, or {leave_out}")
        if (size := spaces.flatdim(part.space)) > MOST_NUMBERS:
            raise ConfigError(f"{where}, {size:,} numbers for each env; make it a smaller Box, or {leave_out}")

    def sort(self, seen: Any) -> tuple[np.ndarray, dict[str, np.ndarray], str]:
        """The state [S], the images by camera, uint8 [H, W, 3], and the instruction of one observation. Raises
        WrongShape if it is not in the env's space."""
        state = [numbers_of(part.space, self._check_part(part, seen)) for part in self.numbers]
        images: dict[str, np.ndarray] = {}
        for part in self.images:
            pixels = self._pixels(part, self._check_part(part, seen))
            images |= zip(part.images, stack_of(pixels), strict=True)
        texts = [str(self._check_part(part, seen)) for part in self.texts]
        return np.concatenate(state) if state else np.empty(0), images, "\n".join(texts)

    def _check_part(self, part: Part, seen: Any) -> Any:
        """This part, of the shape and kind that the space has."""
        space = part.space
        try:
            value: Any = part.of(seen)
            array = np.asarray(value)
        except (LookupError, TypeError, ValueError) as err:
            raise WrongShape(f"{self.env_name}: {part} cannot be read ({in_a_line(err)})") from err
        if isinstance(space, spaces.Text):
            fits = isinstance(value, str)
        elif isinstance(space, spaces.Box):  # simulators exceed the bounds a little
            fits, value = array.shape == space.shape and array.dtype.kind in "biuf", array
        else:
            value = array.astype(space.dtype) if array.dtype.kind in "biu" else array
            fits = array.shape == space.shape and space.contains(value)
        if not fits:
            given = (
                f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) and value.ndim else repr(value)
            )
            raise WrongShape(f"{self.env_name}: {part} is {given:.200}, not in {space!s:.200}")
        return value

    def _pixels(self, part: Part, array: np.ndarray) -> np.ndarray:
        """The image or images as uint8, whatever their numbers."""
        whole = part.space.high.flat[0]
        if array.dtype == np.uint8 and whole == 255:
            return array
        if not np.isfinite(array).all():
            raise NotFinite(f"{self.env_name}: {part} is NaN or infinite")
        if array.min() < 0 or array.max() > whole:
            raise WrongShape(
                f"{self.env_name}: {part} has values from {array.min():g} to {array.max():g}, it must be "
                f"from 0 to {whole:g}"
            )
        return np.rint(array * (255 / whole)).astype(np.uint8)


def name_of(path: tuple[Any, ...]) -> str:
    """The name of a part: ("arm", "wrist") is arm_wrist."""
    return re.sub(r"\W", "_", "_".join(map(str, path))) or ALONE


def walk(space: spaces.Space, path: tuple[Any, ...] = ()) -> list[tuple[tuple[Any, ...], spaces.Space]]:
    """The parts of a space without parts of their own, in its order."""
    if isinstance(space, spaces.Dict):
        inner = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        inner = list(enumerate(space.spaces))
    else:
        return [(path, space)]
    return [part for key, value in inner for part in walk(value, (*path, key))]


def numbers_of(space: spaces.Space, value: Any) -> np.ndarray:
    """The numbers of a part in one row; discrete ones are one-hot."""
    return value.ravel() if isinstance(space, spaces.Box) else spaces.flatten(space, value)


# Images


def cameras_of(name: str, space: spaces.Space) -> tuple[str, ...]:
    """The cameras that this space shows: one, several for a stack of images, none if it is no image."""
    if not isinstance(space, spaces.Box) or not shows_pixels(space):
        return ()
    if is_image(space.shape):
        return (name,)
    stacked = len(space.shape) > 2 and 1 < space.shape[0] <= MOST_IMAGES and is_image(space.shape[1:])
    return tuple(f"{name}_{i}" for i in range(space.shape[0])) if stacked else ()


def shows_pixels(space: spaces.Box) -> bool:
    """True for values from 0 to 255, or fractions from 0 to 1."""
    low, high = float(space.low.flat[0]), float(space.high.flat[0])
    alike = (space.low == low).all() and (space.high == high).all()
    return alike and low == 0 and (high == 255 or (high == 1 and space.dtype.kind == "f"))


def is_image(shape: tuple[int, ...]) -> bool:
    """True for [H, W], [H, W, C] and [C, H, W]: in grey, in three colours, or with opacity behind them."""
    if len(shape) == 3:
        shape = shape[:2] if shape[2] in (1, 3, 4) else shape[1:] if shape[0] in (1, 3) else ()
    return len(shape) == 2 and min(shape) >= LEAST_SIDE


def size_of(space: spaces.Space) -> tuple[int, int, int]:
    """Height, width and 3 of the space's images."""
    height, width, _ = stack_of(np.broadcast_to(np.uint8(0), space.shape))[0].shape
    return height, width, 3


def stack_of(pixels: np.ndarray) -> list[np.ndarray]:
    """The image, or the images of a stack, each [H, W, 3]."""
    if not is_image(pixels.shape):
        return [image for frame in pixels for image in stack_of(frame)]
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif pixels.shape[2] not in (1, 3, 4):
        pixels = pixels.transpose(1, 2, 0)
    return [np.repeat(pixels, 3, 2) if pixels.shape[2] == 1 else pixels[..., :3]]


MOST_CHOICES = 4096  # combinations of several discrete actions
SUCCESS_KEYS = ("success", "is_success")
RETURNED = {
    "reset": ("observation", "info"),
    "step": ("observation", "reward", "terminated", "truncated", "info"),
}


PROTOCOL = EvaluationProtocol(
    "gym-v1",
    "an episode ends where the env ends it, at its first success where it reports one, or at the step limit",
    {"on_success": "terminate"},
)


class SpacesEnv(VectorEnv):
    """An env with Gymnasium's spaces, which keeps the newest observation of every row."""

    def __init__(self, config: Any, num_envs: int, seen: ObservationParts, actions: spaces.Space, **spec: Any) -> None:
        """`spec`: what the spaces do not say."""
        of_spaces = {"state_dim": seen.state_dim, "images": seen.cameras, "instruction": bool(seen.texts)}
        super().__init__(config, num_envs, EnvSpec(action=action_spec(config.name, actions), **of_spaces, **spec))
        self._parts, self._actions = seen, actions
        self._state = np.zeros((num_envs, seen.state_dim or 0), self.dtype)
        self._images = {camera: np.zeros((num_envs, *size), np.uint8) for camera, size in seen.cameras.items()}
        self._instructions = [""] * num_envs
        self._video_problem: str | None = None

    def _observe(self) -> Observation:
        spec, obs = self.env_spec, Observation()
        if spec.state_dim:
            obs["state"] = self._state.copy()
        if spec.images:
            obs["images"] = {camera: images.copy() for camera, images in self._images.items()}
        if spec.instruction:
            obs["instruction"] = list(self._instructions)
        return obs


class GymEnv(SpacesEnv):
    def __init__(self, config: GymConfig | ExternalEnvConfig, num_envs: int) -> None:
        self._envs = [make_single(config) for _ in range(num_envs)]
        first = self._envs[0]
        seen = ObservationParts(config.name, first.observation_space)
        self._success_key = success_key(config.name, first)
        super().__init__(
            config,
            num_envs,
            seen,
            first.action_space,
            max_episode_steps=config.max_episode_steps or own_limit(config, first),
            has_success=self._success_key is not None,
            control_hz=float((first.metadata or {}).get("render_fps", 20)),
            backend="gymnasium",
        )

    @classmethod
    def check(cls, config: Any) -> None:
        """Find the env's class. Making an env may crash, so workers do it, and the child process of a dry run."""
        if isinstance(config, GymConfig):
            with explained_names(config):
                creator(gymnasium.spec(config.name.removeprefix("gym:")))

    @classmethod
    def protocols(cls, config: Any) -> tuple[EvaluationProtocol, ...]:
        return PROTOCOL, AS_TRAINED

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> np.ndarray:
        success, name = np.zeros(len(rows), bool), self.config.name
        for at, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
            seen, info = unpack_returned(name, "reset", self._envs[row].reset(seed=episode.seed))
            self._keep_row(row, seen)
            success[at] = self._succeeded(info)
        return success

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        rewards = np.zeros(self.num_envs)
        terminated, truncated, success = np.zeros((3, self.num_envs), bool)
        for row in np.flatnonzero(active):
            played = self._envs[row].step(self._native(actions[row]))
            seen, reward, ended, cut, info = unpack_returned(self.config.name, "step", played)
            rewards[row] = self._reward_of(reward)
            terminated[row], truncated[row] = self._flag("terminated", ended), self._flag("truncated", cut)
            self._keep_row(row, seen)
            success[row] = self._succeeded(info)
        return StepResult(rewards, terminated, success if self.env_spec.has_success else None, truncated)

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        try:
            return np.stack([frame_of(self._envs[row]) for row in rows])
        except Exception as err:  # the method of the user's env may raise anything
            raise EmbodiedError(f"{self.config.name} cannot be recorded here: {in_a_line(err)}{line_of(err)}") from err

    def video_problem(self) -> str:
        """The problem that rendering once in a separate env shows; most envs import the needed package only then."""
        if self._video_problem is None:
            env = make_single(self.config)
            try:
                env.reset(seed=0)
                frame_of(env)
                self._video_problem = ""
            except NotImplementedError:
                self._video_problem = f"{self.config.name} has no method render, which draws the frames of videos"
            except WrongShape as err:
                self._video_problem = f"{self.config.name}: {err}"
            except Exception as err:
                self._video_problem = f"{self.config.name} cannot be recorded here: {in_a_line(err)}{line_of(err)}"
            finally:
                close_quietly(env)
        return self._video_problem

    def close_extras(self, **kwargs: Any) -> None:
        for env in self._envs:
            close_quietly(env)

    def _keep_row(self, row: int, seen: Any) -> None:
        self._state[row], images, self._instructions[row] = self._parts.sort(seen)
        for camera, image in images.items():
            self._images[camera][row] = image

    def _native(self, action: np.ndarray) -> Any:
        if isinstance(self._actions, spaces.Discrete):
            return int(self._actions.start + action)
        if not isinstance(self._actions, spaces.Box):
            return several_choices(self._actions, int(action))
        low, high = self._actions.low, self._actions.high
        unit = (np.asarray(action, np.float64).reshape(low.shape) + 1) / 2
        return np.clip(low + unit * (high - low), low, high).astype(self._actions.dtype)

    def _reward_of(self, value: Any) -> float:
        if np.size(value) != 1 or np.asarray(value).dtype.kind not in "biuf":
            raise WrongShape(f"{self.config.name}: the reward of a step is {value!r:.100}, it must be one number")
        return np.asarray(value).item()

    def _succeeded(self, info: dict[str, Any]) -> bool:
        if self._success_key:
            return self._flag(self._success_key, info.get(self._success_key, False))
        if late := next((key for key in SUCCESS_KEYS if key in info), None):
            raise WrongShape(
                f"{self.config.name}: info has {late!r} in some steps only; give it in every step, False before a "
                "success, for it is missing after the first step"
            )
        return False

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
    with explained_names(config):
        spec = gymnasium.spec(name)
        mode = {"render_mode": "rgb_array"} if "render_mode" not in config.kwargs and renders(creator(spec)) else {}
        return gymnasium.make(name, max_episode_steps=-1, disable_env_checker=True, **config.kwargs, **mode)


@contextlib.contextmanager
def explained_names(config: GymConfig) -> Iterator[None]:
    """Turns what Gymnasium raises while an env is looked up and made into one line."""
    name = config.name.removeprefix("gym:")
    try:
        yield
    except gymnasium.error.UnregisteredEnv:
        namesakes = [
            registered for registered in gymnasium.registry if registered.endswith(f"/{name}")
        ]  # with their package's name
        hint = nearest(name, namesakes, cutoff=0) or nearest(name, gymnasium.registry)
        raise ConfigError(f"env.name={config.name!r}: Gymnasium knows no env {name!r}{hint}") from None
    except Exception as err:  # a package is missing, or the constructor raises anything
        given = f" with env.kwargs={config.kwargs}" if config.kwargs else ""
        raise ConfigError(f"env.name={config.name!r} cannot be made{given}: {in_a_line(err)}") from err


def creator(spec: Any) -> Any:
    from gymnasium.envs.registration import load_env_creator

    return spec.entry_point if callable(spec.entry_point) else load_env_creator(spec.entry_point)


def renders(cls: Any) -> bool:
    metadata = getattr(cls, "metadata", None)
    return isinstance(metadata, dict) and "rgb_array" in metadata.get("render_modes", ())


def success_key(name: str, env: gymnasium.Env) -> str | None:
    """The key of `info` that reports success, found by resetting and stepping once."""
    env.action_space.seed(0)
    at_reset = unpack_returned(name, "reset", env.reset(seed=0))[1]
    info = {**at_reset, **unpack_returned(name, "step", env.step(env.action_space.sample()))[4]}
    return next((key for key in SUCCESS_KEYS if key in info), None)


def unpack_returned(name: str, method: str, values: Any) -> tuple[Any, ...]:
    """The values of the env's method, as many as it must return, with a dict at the end."""
    named = RETURNED[method]
    if not isinstance(values, tuple) or len(values) != len(named):
        given = f"{len(values)} values" if isinstance(values, tuple) else f"a {type(values).__name__}"
        raise WrongShape(f"{name}: {method} returned {given}, it must return {', '.join(named)}")
    if not isinstance(values[-1], dict):
        raise WrongShape(f"{name}: info of {method} is {values[-1]!r:.100}, it must be a dict")
    return values


def action_spec(name: str, space: spaces.Space) -> ActionSpec:
    if isinstance(space, spaces.Discrete):
        return ActionSpec(1, int(space.n))
    if isinstance(space, (spaces.MultiDiscrete, spaces.MultiBinary)):
        if (combinations := math.prod(map(int, np.ravel(choices_of(space))))) > MOST_CHOICES:
            raise ConfigError(
                f"env.name={name!r} has actions {space}, which have {combinations:,} combinations; at most "
                f"{MOST_CHOICES:,} are supported: allow fewer choices, or make it a Box"
            )
        return ActionSpec(1, combinations)
    if not isinstance(space, spaces.Box) or space.dtype.kind != "f":
        raise ConfigError(
            f"env.name={name!r} has actions {space}; one Discrete, MultiDiscrete or MultiBinary, or one floating-point "
            "Box is supported"
        )
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise ConfigError(f"env.name={name!r} has unbounded actions {space}; give them bounds (RescaleAction does)")
    return ActionSpec(int(np.prod(space.shape)))


def choices_of(space: spaces.MultiDiscrete | spaces.MultiBinary) -> np.ndarray:
    """The number of choices of each action."""
    return space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2)


def several_choices(space: spaces.MultiDiscrete | spaces.MultiBinary, number: int) -> np.ndarray:
    """The actions of a combination, the last one changing fastest: number 5 of MultiDiscrete([3, 4]) is [1, 1]."""
    choices = choices_of(space)
    chosen = np.reshape(np.unravel_index(number, choices.ravel()), choices.shape)
    return (chosen + getattr(space, "start", 0)).astype(space.dtype)


def frame_of(env: gymnasium.Env) -> np.ndarray:
    """A frame of a video, without opacity."""
    frame = env.render()
    if not isinstance(frame, np.ndarray) or frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] not in (3, 4):
        given = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise WrongShape(f"render returns {given}, it must be uint8 [H, W, 3] with render_mode='rgb_array'")
    return frame[..., :3]


def own_limit(config: GymConfig | ExternalEnvConfig, env: gymnasium.Env) -> int:
    """The step limit the env was registered with."""
    spec = gymnasium.spec(config.name.removeprefix("gym:")) if isinstance(config, GymConfig) else env.spec
    if spec is None or spec.max_episode_steps is None:
        raise ConfigError(f"{config.name} has no step limit of its own; set env.max_episode_steps=...")
    return int(spec.max_episode_steps)


def close_quietly(env: gymnasium.Env) -> None:
    with contextlib.suppress(gymnasium.error.Error, ImportError):
        env.close()
