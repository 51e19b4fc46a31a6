"""MetaWorld's tasks, one simulation per env row, and its scripted experts.

An episode's seed draws objects and goal, so that any row plays it alike, and evaluations play goals that training has
not seen. In MT10, MT25 and MT50 rows play different tasks, and the state ends with the task's number, one-hot. In the
ML benchmarks the goal is hidden: its three numbers are 0.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError, in_a_line, nearest
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec, Observation
from embodied.envs.capabilities import AS_TRAINED, EvaluationProtocol, Expert, of_version
from embodied.envs.metaworld.config import MetaWorldConfig
from embodied.envs.vector_env import StepResult, VectorEnv

VERSION = "3.1.1"  # the one that the protocol was measured with; it requires MuJoCo 3.3.0
STATE, ACTION, LIMIT, VIDEO_CAMERA = 39, 4, 500, "corner"
PROTOCOL = EvaluationProtocol(
    "metaworld-v1",
    f"objects and goal drawn from the episode's seed, to the first success or {LIMIT} env steps "
    f"(env.max_episode_steps); metaworld {VERSION}, MuJoCo 3.3.0",
    {"on_success": "terminate"},
)


class MetaWorldEnv(VectorEnv):
    mixes_tasks = True

    def __init__(self, config: MetaWorldConfig, num_envs: int) -> None:
        self._names = self.tasks(config)
        self._hidden = benchmark_of(config).startswith("ML")
        self._numbered = benchmark_of(config).startswith("MT")
        spec = EnvSpec(
            ActionSpec(ACTION),
            state_dim=STATE + self._numbered * len(self._names),
            images=dict.fromkeys(config.cameras, (*config.image_size, 3)),
            max_episode_steps=config.max_episode_steps or LIMIT,
            has_success=True,
            control_hz=80.0,
            backend=f"mujoco {version('mujoco')}",
        )
        super().__init__(config, num_envs, spec)
        self.singles: list[Any] = [None] * num_envs
        self._unused: dict[str, list[Any]] = defaultdict(list)  # by task
        self._state = np.zeros((num_envs, spec.state_dim or 0), self.dtype)
        self._renderers: dict[tuple[int, ...], Any] = {}

    @classmethod
    def tasks(cls, config: MetaWorldConfig) -> tuple[str, ...]:
        return tasks_of(config)

    @classmethod
    def check(cls, config: MetaWorldConfig) -> None:
        tasks_of(config)

    @classmethod
    def protocols(cls, config: MetaWorldConfig) -> tuple[EvaluationProtocol, ...]:
        return of_version(PROTOCOL, "metaworld", VERSION), AS_TRAINED

    @classmethod
    def longest_episode(cls, config: MetaWorldConfig) -> int:
        return config.max_episode_steps or LIMIT

    def expert(self, kind: str = "scripted", tick: Callable[[], None] = lambda: None) -> Expert:
        return Scripts(self) if kind == "scripted" else super().expert(kind, tick)

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> None:
        for row, episode in zip(rows, episodes):
            if self.singles[row] is not None:
                self._unused[self.singles[row].task].append(self.singles[row])
            single = self._unused[episode.task].pop() if self._unused[episode.task] else Single(episode.task)
            self.singles[row] = single
            single.begin(episode.seed)
            self._keep(row)

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        rewards = np.zeros(self.num_envs)
        success = np.zeros(self.num_envs, bool)
        for row in np.flatnonzero(active):
            rewards[row], success[row] = self.singles[row].step(actions[row])
            self._keep(row)
        return StepResult(rewards, np.zeros(self.num_envs, bool), success)

    def _observe(self) -> Observation:
        return {"state": self._state.copy()}

    def _paint(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        return {
            camera: np.stack([self._picture(row, camera, self.config.image_size) for row in rows])
            for camera in self.config.cameras
        }

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        side = self.config.video_size
        return np.stack([self._picture(row, VIDEO_CAMERA, (side, side)) for row in rows])

    def video_problem(self) -> str:
        try:
            mujoco().GLContext(8, 8).free()
        except Exception as err:  # MuJoCo, PyOpenGL and the driver raise anything
            return f"MuJoCo cannot draw here: {in_a_line(err)}"
        return ""

    def close_extras(self, **kwargs: Any) -> None:
        for renderer in self._renderers.values():
            renderer.close()

    def _keep(self, row: int) -> None:
        single = self.singles[row]
        self._state[row, :STATE] = single.seen
        if self._hidden:
            self._state[row, STATE - 3 : STATE] = 0
        if self._numbered:
            self._state[row, STATE:] = np.arange(len(self._names)) == self._names.index(single.task)

    def _picture(self, row: int, camera: str, size: tuple[int, int]) -> np.ndarray:
        single = self.singles[row]
        key = (id(single), *size)
        if key not in self._renderers:
            self._renderers[key] = mujoco().Renderer(single.env.model, *size)
        renderer = self._renderers[key]
        renderer.update_scene(single.env.data, camera)
        picture = renderer.render()
        return picture[::-1, ::-1] if camera.startswith("corner") else picture  # these cameras hang upside down


class Single:
    """A simulation of one task. The goal is always in what it sees: the env hides it from policies."""

    def __init__(self, task: str) -> None:
        self.task = task
        self.env = library().ALL_V3_ENVIRONMENTS[task]()
        self.env.max_path_length = sys.maxsize  # the limit is ours
        self.env._partially_observable, self.env._set_task_called = False, True
        self.env._freeze_rand_vec, self.env.seeded_rand_vec = False, True  # each reset draws from the seed
        vars(self.env).pop("sawyer_observation_space", None)  # computed with a hidden goal

    def begin(self, seed: int) -> None:
        self.env.seed(seed)
        self.seen, _ = self.env.reset()

    def step(self, action: np.ndarray) -> tuple[float, bool]:
        """Reward and success."""
        self.seen, reward, _, _, info = self.env.step(np.asarray(action, np.float32))
        return float(reward), bool(info["success"])


class Scripts:
    """MetaWorld's scripted policies, one for each row's task."""

    def __init__(self, env: MetaWorldEnv) -> None:
        self._env = env
        self._scripts: list[Any] = [None] * env.num_envs

    def begin(self, rows: np.ndarray) -> None:
        from metaworld.policies import ENV_POLICY_MAP

        for row in rows:
            self._scripts[row] = ENV_POLICY_MAP[self._env.singles[row].task]()

    def act(self) -> np.ndarray:
        actions = np.zeros((self._env.num_envs, ACTION), np.float32)
        for row, script in enumerate(self._scripts):
            if script is not None:
                actions[row] = script.get_action(self._env.singles[row].seen)
        return np.clip(actions, -1, 1)


def benchmark_of(config: MetaWorldConfig) -> str:
    """MT10, ML1/reach-v3; empty for a task alone."""
    name = config.name.partition(":")[2]
    return name if name[:2] in ("MT", "ML") else ""


def tasks_of(config: MetaWorldConfig) -> tuple[str, ...]:
    """The tasks of a name."""
    ours, name = library(), config.name.partition(":")[2]
    groups = {benchmark: getattr(ours, f"{benchmark}_V3") for benchmark in ("MT10", "MT25", "MT50")}
    for benchmark in ("ML10", "ML25", "ML45"):
        parts = getattr(ours, f"{benchmark}_V3")
        groups |= {benchmark: parts["train"], f"{benchmark}/test": parts["test"]}
    if name in groups:
        return tuple(groups[name])
    task = name[4:] if name.startswith("ML1/") else name
    if task not in ours.ALL_V3_ENVIRONMENTS:
        tasks = [*ours.ALL_V3_ENVIRONMENTS, *groups]
        raise ConfigError(f"env.name={config.name!r}: MetaWorld has no task {task!r}{nearest(task, tasks)}")
    return (task,)


def library() -> Any:
    """MetaWorld's lists of tasks."""
    os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo reads it at import
    try:
        from metaworld import env_dict
    except ImportError as err:
        raise ConfigError(
            f"env.name=metaworld needs the package metaworld ({err}), with its own MuJoCo: "
            "python -m embodied.sims metaworld makes an environment, env.python=auto takes it"
        ) from None
    return env_dict


def mujoco() -> Any:
    import mujoco

    return mujoco
