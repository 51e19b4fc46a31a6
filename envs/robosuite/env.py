"""robosuite's tasks, and classes of the user's own derived from them: one simulation per env row, looped in process.

`env.task` is a class: `Lift` of robosuite's own, or `my_tasks:MyLift`. It is stepped as in robosuite's own loop, with
the class's reward, success and observations. Every reset builds the model again, since tasks draw sizes of objects
while they build. robosuite draws from the global generators, which are set by the episode's seed meanwhile. Images show
the state after an env step, one physics step (2 ms) later than robosuite's own.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import AbstractContextManager, closing
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError, WrongShape, nearest
from embodied.core.types import EpisodeSpec, Observation
from embodied.envs import own_modules
from embodied.envs.capabilities import AS_TRAINED, EvaluationProtocol
from embodied.envs.mujoco.env import Draws, MujocoEnv, in_mujoco
from embodied.envs.mujoco.loading import quiet, simulator
from embodied.envs.mujoco.rendering import Painter
from embodied.envs.robosuite.config import RobosuiteConfig
from embodied.envs.vector_env import StepResult

OURS = {  # how every task is built: it neither renders images nor keeps anything of the episode before
    "has_renderer": False,
    "has_offscreen_renderer": False,
    "use_camera_obs": False,
    "hard_reset": True,
    "ignore_done": False,
}
PROTOCOL = EvaluationProtocol(
    "robosuite-v1",
    "objects placed as the task draws them from the episode's seed, to the first success, the task's own end or the "
    "step limit",
    {"on_success": "terminate"},
)


class RobosuiteEnv(MujocoEnv):
    @classmethod
    def check(cls, config: RobosuiteConfig) -> None:
        super().check(config)
        for task in cls.tasks(config):
            find_task(task)

    @classmethod
    def protocols(cls, config: RobosuiteConfig) -> tuple[EvaluationProtocol, ...]:
        return in_mujoco(PROTOCOL), AS_TRAINED

    @classmethod
    def rehearse(cls, config: RobosuiteConfig) -> None:
        """Build one env, since only a built one knows its robots and cameras."""
        for task in cls.tasks(config):
            with cls.explain_errors(config):
                with closing(cls(config.model_copy(update={"task": task}), 1)) as made:
                    made.try_out()

    @classmethod
    def explain_errors(cls, config: RobosuiteConfig) -> AbstractContextManager[None]:
        return own_modules.explain_errors(f"env.task={config.task}")

    def __init__(self, config: RobosuiteConfig, num_envs: int) -> None:
        with self.explain_errors(config):
            self._singles = [Single(config) for _ in range(num_envs)]
            first = self._singles[0]
            first.begin(0)
            state_dim, has_success = len(first.seen), first.succeeded() is not None
        spec = self.spec_of(
            config,
            num_actions=len(first.centre),
            state_dim=state_dim,
            max_episode_steps=first.limit,
            has_success=has_success,
            control_hz=float(first.env.control_freq),
        )
        super().__init__(config, num_envs, spec)
        self._state = np.zeros((num_envs, state_dim), np.float32)

    # The contract.

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> np.ndarray:
        success = np.zeros(len(rows), bool)
        for at, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
            self._singles[row].begin(episode.seed)
            self._note(row)
            success[at] = bool(self._singles[row].succeeded())
        return success

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        rewards = np.zeros(self.num_envs)
        failed, success = np.zeros((2, self.num_envs), bool)
        for row in np.flatnonzero(active):
            single = self._singles[row]
            rewards[row], ended = single.step(np.asarray(actions[row], np.float64))
            success[row] = bool(single.succeeded())
            failed[row] = ended and not success[row]
            self._note(row)
        return StepResult(rewards, failed, success if self.env_spec.has_success else None)

    def _observe(self) -> Observation:
        return {"state": self._state.copy()}

    def _paint(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        side = self.config.image_size
        return {
            camera: np.stack([self._singles[row].picture(camera, side) for row in rows])
            for camera in self.config.cameras
        }

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        chosen = [self._singles[row] for row in rows]
        return np.stack([single.picture(single.video_camera, self.config.video_size) for single in chosen])

    def _close_painters(self) -> None:
        for single in self._singles:
            single.drop_painter()

    def close_extras(self, **_: object) -> None:
        for single in self._singles:
            single.close()

    def facts(self) -> dict[str, str]:
        first = self._singles[0]
        kind = type(first.env)
        names = list(first.cameras)
        return {
            "class": f"{kind.__name__} in {inspect.getsourcefile(kind)}",
            "robots": ", ".join(robot.name for robot in first.env.robots),
            "state": ", ".join(f"{name} {width}" for name, width in first.parts.items()),
            "cameras": f"{', '.join(names)} (env.cameras=[...]; none is observed unless named)",
        }

    def _note(self, row: int) -> None:
        seen = self._singles[row].seen
        if len(seen) != self.env_spec.state_dim:
            wanted = f"it must be [{self.env_spec.state_dim}] in every episode"
            raise WrongShape(f"env.task={self.config.task}: the state of row {row} is [{len(seen)}], {wanted}")
        self._state[row] = seen


class Single:
    """One simulation of robosuite's, which is both scene and row for the painter."""

    def __init__(self, config: RobosuiteConfig) -> None:
        self._proprio = config.state == "proprio"
        self._largest = max(config.image_size, config.video_size)
        self._painter: Painter | None = None
        with quiet(), Draws(0).used():
            self.env = build(config)
        self.limit = config.max_episode_steps or int(self.env.horizon)
        self.env.horizon = sys.maxsize  # the limit is ours, so that an end is the task's own
        low, high = self.env.action_spec
        self.centre, self._reach = (low + high) / 2, (high - low) / 2
        self.cameras = {name: name for name in self.env.sim.model.camera_names}
        for name in config.cameras:
            if name not in self.cameras:
                cameras = f"{config.task} has {', '.join(self.cameras)}{nearest(name, self.cameras)}"
                raise ConfigError(f"env.cameras={name}: {cameras}")
        self.video_camera = (
            self.env.render_camera if self.env.render_camera in self.cameras else next(iter(self.cameras))
        )

    def begin(self, seed: int) -> None:
        self.drop_painter()  # it belongs to the old model
        self._draws = Draws(seed)
        with quiet(), self._draws.used():
            self._look(self.env.reset())

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Reward, and whether the task ends the episode."""
        self.env.done = False  # some tasks set it at success, but an episode may continue
        with self._draws.used():
            seen, reward, done, _ = self.env.step(self.centre + action * self._reach)
        self._look(seen)
        return float(reward), bool(done)

    def succeeded(self) -> bool | None:
        """None if the task does not define success."""
        try:
            return bool(self.env._check_success())
        except NotImplementedError:
            return None

    def picture(self, camera: str, side: int) -> np.ndarray:
        if self._painter is None:
            self._painter = Painter(self, self._largest, fast=False, cameras=self.cameras)
        return self._painter.paint_now(self, camera, side)

    def close(self) -> None:
        self.drop_painter()
        with quiet():
            self.env.close()

    # Methods of a scene and a row for the painter.

    @property
    def model(self) -> Any:
        return self.env.sim.model._model

    @property
    def data(self) -> Any:
        return self.env.sim.data

    def attach(self, row: Single) -> None:
        """Do nothing: a separate simulation is always attached."""

    def _look(self, seen: dict[str, np.ndarray]) -> None:
        """Take robosuite's groups of numbers, the robots' first."""
        groups = [name for name in seen if name.endswith("-state")]
        robots = [name for name in groups if name.endswith("_proprio-state")]
        chosen = robots + [name for name in groups if name not in robots and not self._proprio]
        self.parts = {name: len(seen[name]) for name in chosen}
        self.seen = np.concatenate([seen[name] for name in chosen])

    def drop_painter(self) -> None:
        if self._painter is not None:
            self._painter.close()
            self._painter = None


def find_task(task: str) -> type:
    """The class that `env.task` means."""
    simulator()
    from robosuite.environments.base import REGISTERED_ENVS

    if own_modules.is_own(task):
        imported = own_modules.import_class(task, "env.task")
        its = own_modules.simulator_of(imported)
        if its == "robosuite":
            return imported
        what = f"a task of env.name={its}" if its else "no class derived from robosuite's tasks"
        raise ConfigError(f"env.task={task!r} is {what}")
    tasks = {name: kind for name, kind in REGISTERED_ENVS.items() if kind.__module__.startswith("robosuite.")}
    if task not in tasks:
        known_tasks = f"robosuite has {', '.join(tasks)}, one of your own is my_tasks:MyLift"
        raise ConfigError(f"env.task={task!r}: {known_tasks}{nearest(task, tasks)}")
    return tasks[task]


def build(config: RobosuiteConfig) -> Any:
    kind = find_task(config.task)
    takes = accepted(kind)
    if odd := [name for name in config.kwargs if name not in takes]:
        raise ConfigError(f"env.kwargs: {config.task} takes no {odd[0]}{nearest(odd[0], takes)}")
    if config.reward_mode and "reward_shaping" not in takes:
        raise ConfigError(f"env.reward_mode={config.reward_mode}: {config.task} has one reward; leave it out")
    options = {"controller_configs": controller(config.control_mode), "robots": robots(config, kind)}
    options |= {"reward_shaping": config.reward_mode != "sparse"}
    chosen = {name: value for name, value in options.items() if name in takes and name not in config.kwargs}
    return kind(**chosen, **config.kwargs, **OURS)


def accepted(kind: type) -> set[str]:
    """The options of a class: its own, and if it passes options on, its base class's."""
    names: set[str] = set()
    for base in kind.__mro__:
        if "__init__" in vars(base):
            parameters = inspect.signature(base.__init__).parameters.values()
            names |= {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
            if not any(p.kind is p.VAR_KEYWORD for p in parameters):
                break
    return names - {"self"}


def controller(name: str) -> dict[str, Any]:
    from robosuite.controllers import load_controller_config

    return load_controller_config(default_controller=name)


def robots(config: RobosuiteConfig, kind: type) -> list[str]:
    """The robots of the task; unset: the class's own choice, or Pandas."""
    from robosuite.environments.manipulation.two_arm_env import TwoArmEnv
    from robosuite.robots import ROBOT_CLASS_MAPPING

    asked = inspect.signature(kind.__init__).parameters.get("robots")
    if config.robot is None and asked is not None and asked.default is not asked.empty:
        chosen = asked.default
    else:
        chosen = config.robot or ["Panda"] * (2 if issubclass(kind, TwoArmEnv) else 1)
    names = [chosen] if isinstance(chosen, str) else list(chosen)
    for name in names:
        if name not in ROBOT_CLASS_MAPPING:
            robot_names = ", ".join(ROBOT_CLASS_MAPPING)
            raise ConfigError(f"env.robot={name}: robosuite has {robot_names}{nearest(name, ROBOT_CLASS_MAPPING)}")
    return names
