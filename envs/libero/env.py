"""LIBERO's 130 tasks: state or camera observations, the benchmark's stored initial states or drawn placements.

Rows of one task share its model, so a row costs megabytes and a task hundreds; unused tasks are dropped when
`env.tasks_in_memory` of them are loaded. Numbers and pixels equal LIBERO's own env after its hard reset; that env
observes before the end of an env step. Actions move the hand by up to 5 cm and 0.5 rad per env step relative to its
current pose; the last number opens (-1) or closes (1) the gripper.

`env.state=proprio` has the numbers of published policies: hand position, hand orientation as a rotation vector, two
finger positions. `full` adds joints, and for every object its position, its position relative to the hand, and its
orientation, objects of the task first. Several tasks share one layout, with zeros where a task has fewer objects.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np

from embodied.core.types import EpisodeSpec, Observation
from embodied.envs.capabilities import AS_TRAINED, EvaluationProtocol, Expert
from embodied.envs.libero import drawing
from embodied.envs.libero.config import (
    BENCHMARK,
    SETTLING_STEPS,
    LiberoConfig,
    is_own,
    max_steps,
    num_states,
    suite_of,
    tasks_of,
)
from embodied.envs.libero.scene import Scene, SceneRow
from embodied.envs.libero.tasks import TaskFiles, check_own, check_width, files_of, limit_of, read_states, thing_names
from embodied.envs.mujoco.env import MujocoEnv, in_mujoco
from embodied.envs.mujoco.rendering import SHOWN as DRAWN
from embodied.envs.mujoco.rendering import Painter, current
from embodied.envs.vector_env import StepResult

CAMERAS = {"agentview": "agentview", "wrist": "robot0_eye_in_hand"}  # our names of MuJoCo's cameras
CONTROL_HZ = 20.0
SETTLING = {"settling_steps": SETTLING_STEPS, "settling_gripper": "open"}  # in every evaluation
SHOWN = ("qpos", "qvel", "xpos", "xquat", "site_xpos")  # arrays of MuJoCo's data that states are made of
PROPRIO = 8
HAND, PLACE = 25, 10  # numbers of the arm in `full`; of each object or piece of furniture
ARM_QPOS, ARM_QVEL = 9, 9  # 7 joints and 2 fingers, first in MuJoCo's arrays
FREE_QPOS, FREE_QVEL = 7, 6


def own_protocol(config: LiberoConfig) -> EvaluationProtocol:
    """The protocol of a user's own tasks: stored states, or placements drawn by the episodes' seeds."""
    number = 0 if config.states_file is None else len(read_states(config.states_file))
    begin = f"from the {number} stored states of env.states_file in their order" if number else "from drawn placements"
    rules = (
        f"a task of one's own {begin}, after {SETTLING_STEPS} settling steps, to the first success or the step limit"
    )
    return EvaluationProtocol("libero-own-v1", rules, {"on_success": "terminate"} | SETTLING, number)


class LiberoEnv(MujocoEnv):
    mixes_tasks = True

    @classmethod
    def longest_episode(cls, config: LiberoConfig) -> int | None:
        return config.max_episode_steps or max_steps(tasks_of(config.task))

    @classmethod
    def protocols(cls, config: LiberoConfig) -> tuple[EvaluationProtocol, ...]:
        if is_own(tasks_of(config.task)[0]):
            return drawing.named(in_mujoco(own_protocol(config)), config), AS_TRAINED
        trained = {
            "drawn": "training with env.initial_states=drawn never begins in one of these",
            "stored": "training with env.initial_states=stored begins in the same states",
        }
        tasks = tasks_of(config.task)
        number = num_states(tasks)
        name = "libero-v1" if {suite_of(task) for task in tasks} <= {*BENCHMARK} else "libero-pro-v1"
        rules = (
            f"each task from the benchmark's {number} stored initial states in their order, after {SETTLING_STEPS} "
            f"settling steps, to the first success or the step limit of its suite; {trained[config.initial_states]}"
        )
        options = {"on_success": "terminate", "max_episode_steps": None} | SETTLING
        protocol = in_mujoco(EvaluationProtocol(name, rules, options, number))
        return drawing.named(protocol, config), AS_TRAINED

    @classmethod
    def check(cls, config: LiberoConfig) -> None:
        super().check(config)
        if config.renderer == "warp":
            drawing.check()
        check_own(config)

    @classmethod
    def tasks(cls, config: LiberoConfig) -> tuple[str, ...]:
        return tasks_of(config.task)

    def __init__(self, config: LiberoConfig, num_envs: int) -> None:
        self.all_tasks = tasks_of(config.task)
        self._stored: dict[str, np.ndarray] = {}
        self._readers: WeakKeyDictionary[Scene, StateReader] = WeakKeyDictionary()
        self.config = config
        self._layout = state_layout([self._scene(t) if is_own(t) else files_of(t) for t in self.all_tasks])
        spec = self.spec_of(
            config,
            num_actions=7,
            state_dim=PROPRIO if config.state == "proprio" else self._layout.size,
            instruction=True,
            max_episode_steps=max(self._steps_of(task) for task in self.all_tasks),
            has_success=True,
            control_hz=CONTROL_HZ,
        )
        super().__init__(config, num_envs, spec)
        if config.states_file is not None:  # a file that does not fit is refused now
            self._stored[self.all_tasks[0]] = self._states_of(self.all_tasks[0])
        self._rows: list[SceneRow | None] = [None] * num_envs
        self._task: list[str] = [""] * num_envs
        self._limit = np.full(num_envs, spec.max_episode_steps)
        self._state = np.zeros((num_envs, spec.state_dim), np.float32)
        self._stale = np.zeros(num_envs, bool)  # rows that moved since they were last observed

    # The contract.

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> np.ndarray:
        for row, episode in zip(rows, episodes, strict=True):
            if self._task[row] != (task := self.task_of(episode)):
                self._rows[row], self._task[row] = None, task
            self._limit[row] = self._steps_of(task)
        success = np.zeros(len(rows), bool)
        for at, (row, episode) in enumerate(zip(rows, episodes, strict=True)):
            scene = self._scene(self._task[row])
            if self._rows[row] is None:
                self._rows[row] = SceneRow(scene)
            settling = self.config.settling_steps, self.config.settling_gripper
            success[at] = scene.begin(self._rows[row], episode.seed, self._initial_state(episode), *settling)
        self._stale[rows] = True
        return success

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        success = np.zeros(self.num_envs, bool)
        for row in np.flatnonzero(active):
            scene = self._rows[row]
            success[row] = scene.scene.step(scene, np.asarray(actions[row], np.float64))
        self._stale |= active
        late = self._elapsed + 1 >= self._limit
        return StepResult(success.astype(np.float32), np.zeros(self.num_envs, bool), success, truncated=late)

    def _observe(self) -> Observation:
        self._read_rows(np.flatnonzero(self._stale))
        self._stale[:] = False
        instructions = [files_of(task).instruction if task else "" for task in self._task]
        return {"state": self._state.copy(), "instruction": instructions}

    def _paint(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        if self.config.renderer == "warp":
            frames = self._drawn(
                rows, [self._rows[row].shown for row in rows], self.config.cameras, self.config.image_size
            )
            frames = frames[:, :, :, ::-1] if self.config.mirrored else frames
            return {camera: frames[:, at] for at, camera in enumerate(self.config.cameras)}
        scenes = [self._rows[row] for row in rows]
        return {camera: np.stack([self._painted(row, camera) for row in scenes]) for camera in self.config.cameras}

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        side = self.config.video_size
        chosen = [self._rows[row] for row in rows]
        if self.config.renderer == "warp":
            return self._drawn(rows, [current(row.scene, row) for row in chosen], ["agentview"], side)[:, 0]
        return np.stack([self._painter(row).paint_now(row, "agentview", side) for row in chosen])

    def video_problem(self) -> str:
        return "" if self.config.renderer == "warp" else super().video_problem()

    def drawn_by(self) -> str:
        return "Warp" if self.config.renderer == "warp" else super().drawn_by()

    def free_gpu_memory(self) -> bool:
        return self.config.backend == "mujoco" and self.config.renderer != "warp" and super().free_gpu_memory()

    def _close_painters(self) -> None:
        SCENES.close_painters()

    def facts(self) -> dict[str, str]:
        return {"state": self._layout.describe(self.config.state == "proprio")}

    def close_extras(self, **_: object) -> None:
        self._rows = [None] * self.num_envs
        SCENES.drop_idle()

    def expert(self, kind: str = "scripted", tick: Callable[[], None] = lambda: None) -> Expert:
        if kind != "scripted":
            return super().expert(kind, tick)
        from embodied.envs.libero.expert import LiberoExpert

        return LiberoExpert(self)

    # How it is done.

    def task_of(self, episode: EpisodeSpec) -> str:
        """The task of an episode; the tasks of a suite or a list take turns."""
        tasks = tasks_of(episode.task)
        assert {*tasks} <= {*self.all_tasks}, episode
        return tasks[episode.index % len(tasks)]

    def row(self, row: int) -> SceneRow:
        """The part of a simulation that belongs to a row, for experts."""
        return self._rows[row]

    def _steps_of(self, task: str) -> int:
        return self.config.max_episode_steps or limit_of(task) or max_steps([task])

    def _initial_state(self, episode: EpisodeSpec) -> np.ndarray | None:
        """The stored state an episode starts from; None: a placement of its own."""
        number = episode.init_state_id
        if number < 0 and self.config.initial_states == "drawn":
            return None
        task = self.task_of(episode)
        if task not in self._stored:
            self._stored[task] = self._states_of(task)
        states = self._stored[task]
        if number >= len(states):
            raise ValueError(f"{task} has the stored initial states 0 to {len(states) - 1}, not {number}")
        return states[number if number >= 0 else episode.seed % len(states)]

    def _states_of(self, task: str) -> np.ndarray:
        if not is_own(task):
            return files_of(task).initial_states()
        states, model = read_states(self.config.states_file), self._scene(task).model
        check_width(self.config.states_file, task, states, 1 + model.nq + model.nv)
        return states

    def _read_rows(self, rows: np.ndarray) -> None:
        """Observe the states of these rows."""
        for row in rows:
            self._state[row] = self._read(self._rows[row].scene, self._rows[row].shown)

    def _read(self, scene: Scene, shown: Mapping[str, np.ndarray]) -> np.ndarray:
        if scene not in self._readers:
            self._readers[scene] = StateReader(scene, self._layout)
        reader = self._readers[scene]
        return reader.proprio(shown) if self.config.state == "proprio" else reader.full(shown)

    def _painted(self, scene: SceneRow, camera: str) -> np.ndarray:
        frame = self._painter(scene).paint(scene, camera, self.config.image_size)
        return frame[:, ::-1] if self.config.mirrored else frame

    def _drawn(self, rows: np.ndarray, shown: list, cameras: Sequence[str], side: int) -> np.ndarray:
        """Pictures by Warp, uint8 [rows, cameras, side, side, 3]; rows of one scene are drawn together."""
        frames = np.empty((len(rows), len(cameras), side, side, 3), np.uint8)
        for scene in dict.fromkeys(self._rows[row].scene for row in rows):
            chosen = [at for at, row in enumerate(rows) if self._rows[row].scene is scene]
            numbers = [scene.sim.model.camera_name2id(CAMERAS[camera]) for camera in cameras]
            frames[chosen] = SCENES.drawer(self.config).draw(scene, [shown[at] for at in chosen], numbers, side)
        return frames

    def _scene(self, task: str) -> Scene:
        shown = SHOWN + (DRAWN if self.config.cameras else ())
        most = min(self.config.tasks_in_memory, len(self.all_tasks))
        return SCENES.scene(task, shown, self.config.fast_images, most)

    def _painter(self, row: SceneRow) -> Painter:
        largest = max(self.config.image_size, self.config.video_size)
        return SCENES.painter(row.scene, largest, self.config.fast_images)


class SceneCache(threading.local):
    """The scenes of a worker, loaded once for all of its envs (training and evaluation play the same tasks).

    Scenes in use stay; an unused scene is dropped when a new one is needed and the limit is reached. Workers of one
    process have separate caches, since MuJoCo's data and OpenGL's contexts belong to one thread.
    """

    def __init__(self) -> None:
        self.scenes: dict[tuple[str, tuple[str, ...], bool], Scene] = {}
        self.painters: dict[Scene, Painter] = {}
        self._drawer: drawing.Drawer | None = None

    def scene(self, task: str, shown: tuple[str, ...], fast_images: bool, most: int) -> Scene:
        """The scene of a task, loaded if necessary; idle scenes are dropped until at most `most` are loaded."""
        key = (task, shown, fast_images)
        if key not in self.scenes:
            for other in list(self.scenes):
                if len(self.scenes) >= most:
                    self._drop_if_idle(other)
            self.scenes[key] = Scene(files_of(task), shown, keep_files=most > 1)
            if most == 1:
                free_unused_memory()
        return self.scenes[key]

    def painter(self, scene: Scene, largest: int, fast: bool) -> Painter:
        """Draws images of up to `largest` pixels a side."""
        before = self.painters.get(scene)
        if before is None or before.largest < largest:
            if before is not None:
                before.close()
            self.painters[scene] = Painter(scene, largest, fast, CAMERAS)
        return self.painters[scene]

    def drawer(self, config: LiberoConfig) -> drawing.Drawer:
        """What draws with Warp."""
        self._drawer = self._drawer or drawing.Drawer(config)
        return self._drawer

    def close_painters(self) -> None:
        while self.painters:
            self.painters.popitem()[1].close()

    def drop_idle(self) -> None:
        """Unload all scenes that no row plays."""
        for key in list(self.scenes):
            self._drop_if_idle(key)

    def _drop_if_idle(self, key: tuple[str, tuple[str, ...], bool]) -> None:
        idle = self.scenes[key]
        if len(idle.rows):
            return
        if idle in self.painters:
            self.painters.pop(idle).close()
        self.scenes.pop(key).close()


SCENES = SceneCache()


def free_unused_memory() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not glibc: the memory stays with this process
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@dataclass(frozen=True)
class StateLayout:
    """The number of places in `full` for movable objects, furniture, and joints of furniture."""

    movable: int
    fixtures: int
    joints: int

    @property
    def size(self) -> int:
        return HAND + PLACE * (self.movable + self.fixtures) + self.joints

    def describe(self, proprio: bool) -> str:
        """The numbers in their order, with how many there are of each."""
        if proprio:
            return "hand position 3, hand rotation vector 3, fingers 2"
        arm = "hand position 3, hand quaternion 4, fingers 2, their speeds 2, joints 7, their speeds 7"
        places = (
            f"for each of {self.movable} objects and {self.fixtures} pieces of furniture: position 3, position from"
        )
        return f"{arm}; {places} the hand 3, quaternion 4; furniture's joints {self.joints}"


def state_layout(tasks: Sequence[TaskFiles | Scene]) -> StateLayout:
    """The layout that fits all these tasks; for the user's own tasks it is read from their scenes."""
    counts = [count_built(task) if isinstance(task, Scene) else count_things(task) for task in tasks]
    return StateLayout(*(max(count) for count in zip(*counts, strict=True)))


def count_things(files: TaskFiles) -> tuple[int, int, int]:
    movable, fixtures = thing_names(files.bddl.read_text())
    numbers = files.initial_states().shape[1] - 1 - ARM_QPOS - ARM_QVEL
    joints = (numbers - len(movable) * (FREE_QPOS + FREE_QVEL)) // 2
    return len(movable), len(fixtures), joints


def count_built(scene: Scene) -> tuple[int, int, int]:
    movable, fixtures = things_in(scene)
    return len(movable), len(fixtures), len(furniture_joints(scene))


def things_in(scene: Scene) -> tuple[list[str], list[str]]:
    """Movable objects and fixtures that have a body; a room built by a user's class may have none."""
    return tuple(
        [name for name in names if name in scene.env.obj_body_id] for names in thing_names(scene.files.bddl.read_text())
    )


class StateReader:
    """Reads rows of one scene in a layout: a row's arrays, or those of many rows."""

    def __init__(self, scene: Scene, layout: StateLayout) -> None:
        env, robot = scene.env, scene.robot
        movable, fixtures = things_in(scene)
        self._hand_site = robot.eef_site_id
        self._hand_body = env.sim.model.body_name2id(robot.robot_model.eef_name)
        self._joints, self._fingers = robot._ref_joint_pos_indexes, robot._ref_gripper_joint_pos_indexes
        self._joints_moving = robot._ref_joint_vel_indexes
        self._fingers_moving = robot._ref_gripper_joint_vel_indexes
        places = [*movable, *fixtures]
        self._bodies = np.array([env.obj_body_id[name] for name in places], int)
        slots = [*range(len(movable)), *(layout.movable + at for at in range(len(fixtures)))]
        self._slots = np.array(slots, int)
        self._furniture_joints = furniture_joints(scene)
        self._layout = layout

    def proprio(self, shown: Mapping[str, np.ndarray]) -> np.ndarray:
        hand = shown["site_xpos"][..., self._hand_site, :]
        turned = rotation_vector(shown["xquat"][..., self._hand_body, :])
        return np.concatenate([hand, turned, shown["qpos"][..., self._fingers]], axis=-1)

    def full(self, shown: Mapping[str, np.ndarray]) -> np.ndarray:
        layout, qpos, qvel = self._layout, shown["qpos"], shown["qvel"]
        hand, lead = shown["site_xpos"][..., self._hand_site, :], qpos.shape[:-1]
        arm = [
            hand,
            xyzw(shown["xquat"][..., self._hand_body, :]),
            qpos[..., self._fingers],
            qvel[..., self._fingers_moving],
            qpos[..., self._joints],
            qvel[..., self._joints_moving],
        ]
        position = shown["xpos"][..., self._bodies, :]
        turned = xyzw(shown["xquat"][..., self._bodies, :])
        places = np.zeros((*lead, layout.movable + layout.fixtures, PLACE))
        places[..., self._slots, :] = np.concatenate([position, position - hand[..., None, :], turned], axis=-1)
        joints = np.zeros((*lead, layout.joints))
        joints[..., : len(self._furniture_joints)] = qpos[..., self._furniture_joints]
        return np.concatenate([*arm, places.reshape(*lead, -1), joints], axis=-1)


def furniture_joints(scene: Scene) -> np.ndarray:
    """Positions in qpos of drawers, doors and knobs: joints that are neither the arm's nor of free objects."""
    import mujoco

    model, robot = scene.model, scene.robot
    arm = {*robot._ref_joint_pos_indexes, *robot._ref_gripper_joint_pos_indexes}
    free = int(mujoco.mjtJoint.mjJNT_FREE)
    kinds, at = model.jnt_type, model.jnt_qposadr
    return np.array([at[j] for j in range(model.njnt) if kinds[j] != free and at[j] not in arm], int)


def xyzw(quaternion: np.ndarray) -> np.ndarray:
    """A quaternion in MuJoCo's order (w first), with w last."""
    return np.roll(quaternion, -1, axis=-1)


def rotation_vector(quaternion: np.ndarray) -> np.ndarray:
    """Axis times angle in [0, 2 pi) of quaternions with w first, as published policies compute it."""
    w, axis = np.clip(quaternion[..., :1], -1.0, 1.0), quaternion[..., 1:]
    sine = np.sqrt(1.0 - w * w)
    turns = ~np.isclose(sine, 0.0)
    return np.where(turns, axis * (2.0 * np.arccos(w) / np.where(turns, sine, 1.0)), 0.0)
