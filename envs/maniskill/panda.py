"""Kinematics of the Franka Panda in numpy, for many arms at once: the hand's pose and its Jacobian.

Batched simulations give joint positions but not the poses of all links, so these are computed here.
"""

from __future__ import annotations

import numpy as np

# For each joint: length and twist of the previous link, and the offset along the joint's axis.
LINKS = (
    (0.0, 0.0, 0.333),
    (0.0, -np.pi / 2, 0.0),
    (0.0, np.pi / 2, 0.316),
    (0.0825, np.pi / 2, 0.0),
    (-0.0825, -np.pi / 2, 0.384),
    (0.0, np.pi / 2, 0.0),
    (0.088, np.pi / 2, 0.0),
)
JOINTS = len(LINKS)
TOOL = 0.107 + 0.1034  # distance from the last joint to the point between the finger tips
DAMPING = 0.02  # keeps joint movements small where the arm is nearly singular


def hand(joints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """From joints [N, 7] returns, relative to the arm's base: the point between the fingers [N, 3]; its orientation [N,
    3, 3] (second column: the axis along which the fingers close; third: their direction); the Jacobian [N, 6, 7]
    (translation, then rotation)."""
    count = len(joints)
    turned, at = np.broadcast_to(np.eye(3), (count, 3, 3)), np.zeros((count, 3))
    axes, places = [], []
    for (length, twist, offset), angle in zip(LINKS, joints.T, strict=True):
        turned, at = turned @ about_x(twist), at + length * turned[:, :, 0]
        at = at + offset * turned[:, :, 2]
        axes.append(turned[:, :, 2])
        places.append(at)
        turned = turned @ about_z(angle)
    at = at + TOOL * turned[:, :, 2]
    turned = turned @ about_z(np.full(count, -np.pi / 4))
    arms = at - np.stack(places)
    jacobian = np.concatenate([np.cross(np.stack(axes), arms), np.stack(axes)], axis=2)
    return at, turned, jacobian.transpose(1, 2, 0)


def joint_step(jacobian: np.ndarray, twist: np.ndarray) -> np.ndarray:
    """[N, 7]: the small change of the joints that moves the hand by `twist` [N, 6]."""
    transposed = jacobian.transpose(0, 2, 1)
    damped = jacobian @ transposed + DAMPING**2 * np.eye(6)
    return (transposed @ np.linalg.solve(damped, twist[:, :, None]))[:, :, 0]


def about_x(angle: float) -> np.ndarray:
    c, s = np.cos(angle), np.sin(angle)
    return np.array([[1, 0, 0], [0, c, -s], [0, s, c]])


def about_z(angles: np.ndarray) -> np.ndarray:
    """[N, 3, 3]"""
    c, s, zero, one = np.cos(angles), np.sin(angles), np.zeros_like(angles), np.ones_like(angles)
    return np.stack([c, -s, zero, s, c, zero, zero, zero, one], axis=1).reshape(-1, 3, 3)
