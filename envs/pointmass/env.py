"""A toy env: push a point with inertia to a target in a square. Exact, instant, and its state can be saved.

Every row is computed by elementwise arithmetic only, so its numbers do not depend on other rows. The reward is the
progress towards the target plus 1 at the target.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from embodied.core.rng import generator
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec, Observation
from embodied.envs.capabilities import AS_TRAINED, EvaluationProtocol, Expert
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.vector_env import StepResult, VectorEnv

STEPS = 50
DRAG, PUSH = 0.7, 0.03  # per env step, in world sizes: top speed 0.1, so the longest way takes about 30 steps
REACH = 0.1  # a success within this distance, in world sizes
DIRECTIONS = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])
INSTRUCTION = "move the red point to the green target"
VIDEO_SIZE = (192, 192)
NEAR = 0.4  # range of the camera beside the point, in world sizes
WHITE, GREEN, RED = (245, 245, 245), (60, 180, 75), (220, 40, 40)


PROTOCOL = EvaluationProtocol(
    "pointmass-v1",
    "an episode ends at its first success or at the step limit",
    {"on_success": "truncate", "after_success": 0},
)


class PointMassEnv(VectorEnv):
    @classmethod
    def plays_together(cls, config: PointMassConfig) -> bool:
        return True

    @classmethod
    def protocols(cls, config: PointMassConfig) -> tuple[EvaluationProtocol, ...]:
        return PROTOCOL, AS_TRAINED

    def __init__(self, config: PointMassConfig, num_envs: int) -> None:
        spec = EnvSpec(
            action=ActionSpec(1, len(DIRECTIONS)) if config.discrete else ActionSpec(2),
            state_dim=6 if config.state == "full" else 4,
            privileged_dim=2 if config.privileged else None,
            images=dict.fromkeys(config.cameras, (*config.image_size, 3)),
            instruction=config.instruction,
            max_episode_steps=config.max_episode_steps or STEPS,
            has_success=True,
            control_hz=10.0,
            backend="numpy",
        )
        super().__init__(config, num_envs, spec, np.dtype(config.dtype).type)
        self._position, self._velocity, self._target = np.zeros((3, num_envs, 2), self.dtype)

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> np.ndarray:
        places = np.array([generator(episode.seed, "pointmass").uniform(-1, 1, (2, 2)) for episode in episodes])
        self._position[rows], self._target[rows] = np.moveaxis(places * self.config.size, 1, 0)
        self._velocity[rows] = 0
        return self._distance()[rows] < REACH * self.config.size

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        size = self.config.size
        force = (DIRECTIONS[actions] if self.env_spec.action.discrete else actions).astype(self.dtype)
        before = self._distance()
        self._velocity = DRAG * self._velocity + (PUSH * size) * force
        moved = self._position + self._velocity
        self._position = np.clip(moved, -size, size)
        self._velocity[self._position != moved] = 0
        after = self._distance()
        success = after < REACH * size
        return StepResult((before - after) / size + success, np.zeros(self.num_envs, bool), success)

    def _observe(self) -> Observation:
        parts = [self._position, self._velocity]
        if self.config.state == "full":
            parts.append(self._target - self._position)
        obs: Observation = {"state": np.concatenate(parts, axis=1) / self.dtype.type(self.config.size)}
        if self.config.privileged:
            obs["privileged"] = (self._target - self._position) / self.dtype.type(self.config.size)
        if self.config.instruction:
            obs["instruction"] = [INSTRUCTION] * self.num_envs
        return obs

    def facts(self) -> dict[str, str]:
        seen = "position 2, velocity 2" + ", target - position 2" * (self.config.state == "full")
        return {"state": f"{seen}; in world sizes"}

    def _paint(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        views = {"top": lambda: self._draw(rows, self.config.image_size), "near": lambda: self._draw_near(rows)}
        return {camera: views[camera]() for camera in self.config.cameras}

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        return self._draw(rows, VIDEO_SIZE)

    def _get_state(self) -> dict[str, np.ndarray]:
        return {"position": self._position, "velocity": self._velocity, "target": self._target}

    def _set_state(self, state: dict[str, np.ndarray]) -> None:
        self._position, self._velocity, self._target = state["position"], state["velocity"], state["target"]

    def _distance(self) -> np.ndarray:
        x, y = (self._target - self._position).T
        return np.sqrt(x * x + y * y)

    def _draw_near(self, rows: np.ndarray) -> np.ndarray:
        return self._draw(rows, self.config.image_size, self._position[rows] / self.config.size, NEAR)

    def _draw(self, rows: np.ndarray, size: tuple[int, int], middle: float | np.ndarray = 0.0, reach: float = 1.0):
        """The target and on it the point, seen from above, within `reach` of the middle; y points up."""
        height, width = size
        frames = np.full((len(rows), height, width, 3), WHITE, np.uint8)
        right, up = ((np.arange(side) + 0.5) / side * 2 - 1 for side in (width, height))
        for centre, radius, colour in ((self._target, REACH, GREEN), (self._position, 0.06, RED)):
            x, y = ((centre[rows] / self.config.size - middle) / reach).T
            across = (right[None, None, :] - x[:, None, None]) ** 2
            down = (-up[None, :, None] - y[:, None, None]) ** 2
            frames[across + down < (radius / reach) ** 2] = colour
        return frames

    def expert(self, kind: str = "scripted", tick: Callable[[], None] = lambda: None) -> Expert:
        return PointMassExpert(self) if kind == "scripted" else super().expert(kind, tick)


TOWARDS, BRAKE = 6.0, 10.0  # force per distance, and per distance moved in an env step, in world sizes


class PointMassExpert:
    """Pushes towards the target, with less force the faster the point is."""

    def __init__(self, env: PointMassEnv) -> None:
        self._env = env

    def begin(self, rows: np.ndarray) -> None:
        """Do nothing: the expert has no memory."""

    def act(self) -> np.ndarray:
        env = self._env
        state = env.get_state()
        away = (state["target"] - state["position"]) / env.config.size
        force = np.clip(TOWARDS * away - BRAKE * state["velocity"] / env.config.size, -1, 1)
        if env.env_spec.action.discrete:
            return (force @ DIRECTIONS.T).argmax(axis=1)[:, None]
        return force.astype(np.float32)
