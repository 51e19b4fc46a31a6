"""LIBERO's numbers: what the arm feels, and where everything is.

`proprio` is what published policies take: hand position, hand orientation as a rotation vector, two finger positions.
`full` adds joints, and for every object its position, its position seen from the hand, and its orientation, those the
task is about first. Several tasks share one layout, with zeros where a task has fewer objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from embodied.envs.libero.scene import Scene, SceneRow
from embodied.envs.libero.tasks import TaskFiles, thing_names

SHOWN = ("qpos", "qvel", "xpos", "xquat", "site_xpos")  # arrays of MuJoCo's data that are read here
PROPRIO = 8
HAND, PLACE = 25, 10  # numbers of the arm in `full`; of each object or piece of furniture
ARM_QPOS, ARM_QVEL = 9, 9  # 7 joints and 2 fingers, first in MuJoCo's arrays
FREE_QPOS, FREE_QVEL = 7, 6


@dataclass(frozen=True)
class StateLayout:
    """How many places `full` has for movable objects, furniture, and joints of furniture."""

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
    """The layout that fits all these tasks; of the user's own ones the scenes are asked."""
    counts = [count_built(each) if isinstance(each, Scene) else count_things(each) for each in tasks]
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
    """Movable objects and fixtures that have a body; a room that a class of the user's built may have none."""
    return tuple(
        [name for name in names if name in scene.env.obj_body_id] for names in thing_names(scene.files.bddl.read_text())
    )


class StateReader:
    """Reads the rows of one scene in a layout."""

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

    def proprio(self, row: SceneRow) -> np.ndarray:
        shown = row.shown
        turned = rotation_vector(shown["xquat"][self._hand_body])
        return np.concatenate([shown["site_xpos"][self._hand_site], turned, shown["qpos"][self._fingers]])

    def full(self, row: SceneRow) -> np.ndarray:
        shown, layout = row.shown, self._layout
        qpos, qvel, hand = shown["qpos"], shown["qvel"], shown["site_xpos"][self._hand_site]
        state = np.zeros(layout.size)
        state[:HAND] = np.concatenate(
            [
                hand,
                xyzw(shown["xquat"][self._hand_body]),
                qpos[self._fingers],
                qvel[self._fingers_moving],
                qpos[self._joints],
                qvel[self._joints_moving],
            ]
        )
        position = shown["xpos"][self._bodies]
        places = state[HAND : layout.size - layout.joints].reshape(-1, PLACE)
        places[self._slots] = np.concatenate([position, position - hand, xyzw(shown["xquat"][self._bodies])], axis=1)
        first = layout.size - layout.joints
        state[first : first + len(self._furniture_joints)] = qpos[self._furniture_joints]
        return state


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
    """Axis times angle in [0, 2 pi) of one quaternion with w first, as published policies compute it."""
    w, axis = np.clip(quaternion[0], -1.0, 1.0), quaternion[1:]
    sine = np.sqrt(1.0 - w * w)
    return np.zeros(3) if np.isclose(sine, 0.0) else axis * (2.0 * np.arccos(w) / sine)
