"""An expert for the bridge tasks on the table: over the object, down, close, up, over its place, down, open.

It has no memory: the next action follows from the state alone, so it recovers from disturbances and a policy can
imitate it. Positions are in metres in the world's frame, which is the arm's base frame rotated by 180 degrees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from embodied.core.arrays import host
from embodied.envs.maniskill.experts import Scenes

OPEN, CLOSE = 1.0, -1.0
FASTEST, FASTEST_TURN = 0.05, 0.35  # largest movement per env step, in metres and radians
ABOVE = 0.07  # height above an object before the hand comes down
CLEAR = 0.06  # height above its place at which an object is carried
PRESS = 0.02  # depth below its resting height to which an object is lowered, so that it touches before release
DEEP = 0.004  # depth below an object's middle at which fingers close
BASE_TURN = np.array([-1.0, -1.0, 1.0])  # from the world's axes to the arm's base axes


@dataclass(frozen=True)
class BridgeWorld:
    """The positions that the rules read: arrays with one row per env."""

    hand: np.ndarray  # [N, 3], the point between the fingertips
    asked: np.ndarray  # [N, 3], the hand's current target
    closing: np.ndarray  # [N, 2], the axis along which the fingers will close, seen from above
    thing: np.ndarray  # [N, 3]
    across: np.ndarray  # [N, 2], the horizontal axis along which the object is narrow
    height: np.ndarray  # [N], of the object
    place: np.ndarray  # [N, 3], its place: the middle of the top
    held: np.ndarray  # bool [N]


class BridgeExpert:
    def __init__(self, env: Scenes) -> None:
        self._env = env

    def begin(self, rows: np.ndarray) -> None:
        """It has no memory."""

    def act(self) -> np.ndarray:
        scene = look(self._env)
        goal, grip = hand_target(scene)
        ahead = goal - scene.asked
        ahead *= np.minimum(1.0, FASTEST / np.maximum(np.linalg.norm(ahead, axis=1, keepdims=True), 1e-9))
        turn = np.where(scene.held, 0.0, np.clip(angle_to(scene.closing, scene.across), -FASTEST_TURN, FASTEST_TURN))
        zero = np.zeros_like(turn)
        moves = np.concatenate([ahead * BASE_TURN, np.stack([zero, zero, turn, grip], axis=1)], axis=1)
        return np.clip(moves / self._env.units, -1.0, 1.0).astype(np.float32)


def look(env: Scenes) -> BridgeWorld:
    layouts = [scene.laid_out() for scene in env.envs]
    thing, place, size, top, held = (np.concatenate([host(array) for array in parts]) for parts in zip(*layouts))
    arms = [scene.agent.controller.controllers["arm"] for scene in env.envs]
    hand = np.concatenate([host(arm.ee_pose.p) for arm in arms])
    base = np.concatenate([host(arm.root_link.pose.p) for arm in arms])
    target = np.concatenate([host(arm._target_pose.raw_pose) for arm in arms])
    axes = matrices(thing[:, 3:])
    return BridgeWorld(
        hand=hand,
        asked=base + target[:, :3] * BASE_TURN,
        closing=flat(matrices(target[:, 3:])[:, :, 1]) * BASE_TURN[:2],
        thing=thing[:, :3],
        across=narrow(axes, size),
        height=(np.abs(axes[:, 2]) * size).sum(1),
        place=place[:, :3] + np.array([0, 0, 1]) * top[:, None],
        held=held,
    )


def hand_target(scene: BridgeWorld) -> tuple[np.ndarray, np.ndarray]:
    """The hand's target [N, 3], and the fingers' [N]."""
    to_thing, to_place = scene.thing - scene.hand, scene.place - scene.thing
    beside = np.linalg.norm(to_thing[:, :2], axis=1)
    skew = np.abs(angle_to(scene.closing, scene.across))
    ready = (beside < 0.012) & (skew < 0.2)
    reached = ready & (scene.hand[:, 2] - scene.thing[:, 2] < 0.012)
    over = scene.thing + np.array([0, 0, 1]) * np.where(ready, -DEEP, ABOVE)[:, None]
    off = np.linalg.norm(to_place[:, :2], axis=1)
    low = scene.place[:, 2] + scene.height / 2
    lifted = scene.thing[:, 2] > low + CLEAR / 2
    above = off < 0.02
    height = np.where(above, low - PRESS, low + CLEAR)
    sideways = to_place[:, :2] * (lifted | above)[:, None]
    upward = height - scene.thing[:, 2]
    carried = scene.hand + np.concatenate([sideways, upward[:, None]], axis=1)
    arrived = above & (scene.thing[:, 2] < low + 0.012)
    leave = scene.hand + np.array([0, 0, 0.05])
    lies = above & ~scene.held & (scene.thing[:, 2] < low + 0.03)
    goal = np.where(scene.held[:, None], carried, over)
    goal = np.where(lies[:, None], leave, goal)
    grip = np.where((scene.held & ~arrived) | (~scene.held & reached), CLOSE, OPEN)
    return goal, np.where(lies, OPEN, grip)


def angle_to(axis: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """[N], radians: the smallest rotation about the vertical that aligns two horizontal axes, in either direction."""
    cross = axis[:, 0] * wanted[:, 1] - axis[:, 1] * wanted[:, 0]
    along = (axis * wanted).sum(1)
    return np.arctan2(cross * np.sign(along + 1e-12), np.abs(along))


def narrow(axes: np.ndarray, size: np.ndarray) -> np.ndarray:
    """[N, 2]: the horizontal one of an object's axes [N, 3, 3] along which it is smaller."""
    upright = np.abs(axes[:, 2]).argmax(1)
    widths = np.array(size, np.float64)
    widths[np.arange(len(size)), upright] = np.inf
    return flat(axes[np.arange(len(size)), :, widths.argmin(1)])


def flat(axis: np.ndarray) -> np.ndarray:
    seen = axis[:, :2]
    return seen / np.maximum(np.linalg.norm(seen, axis=1, keepdims=True), 1e-9)


def matrices(quaternions: np.ndarray) -> np.ndarray:
    """[N, 4] -> rotation matrices [N, 3, 3], whose columns are the rotated axes."""
    w, x, y, z = quaternions.T.astype(np.float64)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.array(rows).transpose(2, 0, 1)
