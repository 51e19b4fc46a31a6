"""The expert of the SO100, lerobot's small arm: five joints, and a gripper whose one jaw turns.

It plays with joint targets (`pd_joint_target_delta_pos`), in which the gripper keeps its target. With
`pd_joint_delta_pos` every action counts from the measured joints: a gripper that goes on closing pushes the cube out,
and the arm sinks under its weight.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.core.arrays import host
from embodied.envs.maniskill import experts

JOINTS = (  # by ManiSkill's so100.urdf: offset from the joint before, rotation (roll, pitch, yaw), axis
    ((0.0, -0.0452, 0.0165), (np.pi / 2, 0.0, 0.0), (0, -1, 0)),
    ((0.0, 0.1025, 0.0306), (0.0, 0.0, 0.0), (1, 0, 0)),
    ((0.0, 0.11257, 0.028), (0.0, 0.0, 0.0), (1, 0, 0)),
    ((0.0, 0.0052, 0.1349), (-np.pi / 2, 0.0, 0.0), (1, 0, 0)),
    ((0.0, -0.0601, 0.0), (0.0, np.pi / 2, 0.0), (0, 1, 0)),
)
GRIP = (-0.01, -0.097, 0.0)  # the cube's place in the open gripper, 2 cm from the fixed jaw's tip
STEPS = np.array([0.05, 0.05, 0.05, 0.05, 0.05, 0.2])  # radians for an action of 1
REACH = np.array([2.0, 1.57, 1.57, 1.8, 3.14])  # radians to both sides
OPENED, CLOSED = 0.0, -0.785  # the gripper's targets; at -0.83 its squeeze shakes the arm, which has to rest
HELD = -0.76, -0.85  # the gripper's angle while it holds the cube: largest, smallest
ABOVE = 0.03  # the height over the cube from which the gripper comes down
TURNED = 0.02  # metres that count as a radian while the arm carries the cube: its wrist reaches little
STILL = 0.013  # the cube's distance from the goal at which the arm stops: a success is an arm at rest
HIGHER = np.array([0.0, 0.0, 0.008])  # the tips from the cube's middle, so that they do not touch the table


class SmallArmExpert:
    def __init__(self, env: experts.Scenes) -> None:
        experts.ManiSkillExpert.check(env.config)
        self._env = env

    def begin(self, rows: np.ndarray) -> None:
        """Rules have no memory."""

    def act(self) -> np.ndarray:
        """[N, 6]: grasps the cube from above and brings it to the goal, both by the joints' targets."""

        def gather(read: Any) -> np.ndarray:
            return np.concatenate([host(read(scene)) for scene in self._env.envs]).astype(np.float64)

        targets = gather(lambda scene: scene.agent.controller._target_qpos)
        base = gather(lambda scene: scene.agent.robot.pose.p)
        ahead = experts.horizontal_axis(gather(lambda scene: scene.agent.robot.pose.q))
        cube, goal = (
            experts.in_arm_frame(gather(lambda scene, name=name: getattr(scene, name).pose.p) - base, ahead)
            for name in ("cube", "goal_site")
        )
        side = experts.in_arm_frame(experts.horizontal_axis(gather(lambda scene: scene.cube.pose.q)), ahead)[:, :2]
        joints = gather(lambda scene: scene.agent.robot.get_qpos())
        world = experts.World(*hand_pose(joints[:, :-1]), joints[:, -1], *[unread] * 4)
        arm = np.clip(targets[:, :-1], -REACH, REACH)
        hand, turned, jacobian = hand_pose(arm)
        holds_it, wish = experts.pick(world, cube + HIGHER, experts.nearest_side(world, side), HELD, ABOVE)
        wish = experts.carry(world, holds_it, cube, goal, wish)
        twist = np.concatenate([wish.hand - hand, experts.turn_to(turned, wish.closing, wish.pointing)], axis=1)
        weights = np.where(holds_it[:, None] & (np.arange(6) > 2), TURNED, 1.0)
        jacobian = jacobian * (np.abs(arm) < REACH - 0.005)[:, None] * weights[:, :, None]
        moves = experts.joint_step(jacobian, weights * twist) / STEPS[:-1]
        placed = holds_it & (np.linalg.norm(goal - cube, axis=1) < STILL)
        moves /= np.maximum(1.0, np.abs(moves).max(axis=1, keepdims=True))
        moves[placed] = 0.0
        moves = np.clip(moves + (arm - targets[:, :-1]) / STEPS[:-1], -1, 1)  # no target beyond a joint's reach
        grip = (np.where(wish.grip > 0, OPENED, CLOSED) - targets[:, -1]) / STEPS[-1]
        return np.column_stack([moves, np.clip(grip, -1, 1)]).astype(np.float32)


def unread(name: str) -> np.ndarray:
    raise KeyError(name)


def hand_pose(joints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From joints [N, 5], relative to the arm's base: the place of a cube in the gripper [N, 3], the gripper's
    orientation [N, 3, 3] and the Jacobian [N, 6, 5], both as of the Panda's hand."""
    from scipy.spatial.transform import Rotation

    turned, at = Rotation.identity(len(joints)), np.zeros((len(joints), 3))
    axes, places = [], []
    for (offset, angles, axis), angle in zip(JOINTS, joints.T, strict=True):
        at = at + turned.apply(offset)
        turned = turned * Rotation.from_euler("xyz", angles)
        axes.append(turned.apply(axis))
        places.append(at)
        turned = turned * Rotation.from_rotvec(angle[:, None] * np.array(axis))
    hand, closing, pointing = at + turned.apply(GRIP), turned.apply((1, 0, 0)), turned.apply((0, -1, 0))
    jacobian = np.concatenate([np.cross(np.stack(axes), hand - np.stack(places)), np.stack(axes)], axis=2)
    return hand, np.stack([np.cross(closing, pointing), closing, pointing], axis=2), jacobian.transpose(1, 2, 0)
