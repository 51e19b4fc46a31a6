"""Experts for three ManiSkill tasks: rules from where things are to where the hand should go, for all rows at once.

They remember nothing: what to do next follows from the state alone, so an expert recovers from whatever happened before
and a policy can imitate it. ManiSkill's own planners take longer than these tasks' step limits allow. Positions are in
metres, in the frame of the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.arrays import host
from embodied.core.errors import ConfigError
from embodied.envs.maniskill import panda

if TYPE_CHECKING:
    from embodied.envs.maniskill.env import ManiSkillEnv

BASE = np.array([-0.615, 0.0, 0.0])  # of the arm
MOST = 0.1  # radians of a joint that an action of 1 asks for
GAIN, TURN_GAIN = 2.0, 1.5  # the controller covers only part of what is asked within an env step
FASTEST = 0.12  # metres asked for at most in an env step
OPEN, CLOSE = 1.0, -1.0
HALF = 0.02  # of a cube's side
HELD = 0.024, 0.013  # a finger's opening while it holds a cube: at most, at least
ABOVE = 0.07  # the height over a cube from which the hand comes down


@dataclass(frozen=True)
class World:
    """The positions that the rules read: arrays with one row per env."""

    hand: np.ndarray  # [N, 3], the point between the fingers
    turned: np.ndarray  # [N, 3, 3], second column: the axis along which the fingers close
    jacobian: np.ndarray  # [N, 6, 7]
    finger: np.ndarray  # [N], how far a finger is open, 0 to 0.04
    place: Callable[[str], np.ndarray]  # name of a thing -> [N, 3]
    axis: Callable[[str], np.ndarray]  # name of a thing -> [N, 2], one of its horizontal axes


@dataclass(frozen=True)
class HandTarget:
    """The hand's target, the axis along which its fingers should close, and whether they should."""

    hand: np.ndarray  # [N, 3]
    closing: np.ndarray  # [N, 2]
    grip: np.ndarray  # [N], OPEN or CLOSE


class ManiSkillExpert:
    def __init__(self, env: ManiSkillEnv) -> None:
        if env.config.task not in RULES or env.config.control_mode != "pd_joint_delta_pos":
            raise ConfigError(
                f"there is no expert for env.task={env.config.task} with env.control_mode={env.config.control_mode}; "
                f"ManiSkill's experts play {', '.join(RULES)} with pd_joint_delta_pos. A policy can demonstrate, too: "
                "python -m embodied.collect checkpoint=RUN out=DEMOS, then sft.data=DEMOS"
            )
        self._env = env
        self._rule = RULES[env.config.task]

    def begin(self, rows: np.ndarray) -> None:
        """Nothing to remember."""

    def act(self) -> np.ndarray:
        world = look(self._env)
        wish = self._rule(world)
        far = GAIN * (wish.hand - world.hand)
        far *= np.minimum(1.0, FASTEST / np.maximum(np.linalg.norm(far, axis=1, keepdims=True), 1e-9))
        twist = np.concatenate([far, TURN_GAIN * turn_to(world.turned, wish.closing)], axis=1)
        joints = panda.joint_step(world.jacobian, twist) / MOST
        joints[:, :-1] /= np.maximum(1.0, np.abs(joints[:, :-1]).max(axis=1, keepdims=True))  # the last only turns
        joints = np.clip(joints, -1.0, 1.0)
        return np.concatenate([joints, wish.grip[:, None]], axis=1).astype(np.float32)


def look(env: ManiSkillEnv) -> World:
    def gather(read: Callable[[Any], Any]) -> np.ndarray:
        return np.concatenate([host(read(one)) for one in env.envs]).astype(np.float64)

    qpos = gather(lambda one: one.agent.robot.get_qpos())
    hand, turned, jacobian = panda.hand(qpos[:, : panda.JOINTS])
    return World(
        hand=hand + BASE,
        turned=turned,
        jacobian=jacobian,
        finger=qpos[:, panda.JOINTS :].mean(axis=1),
        place=lambda name: gather(lambda one: getattr(one, name).pose.p),
        axis=lambda name: horizontal_axis(gather(lambda one: getattr(one, name).pose.q)),
    )


def horizontal_axis(quaternion: np.ndarray) -> np.ndarray:
    """[N, 2]: where the x axis points, seen from above, of something turned about the vertical."""
    w, x, y, z = quaternion.T
    axis = np.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z)], axis=1)
    return axis / np.maximum(np.linalg.norm(axis, axis=1, keepdims=True), 1e-9)


def turn_to(turned: np.ndarray, closing: np.ndarray) -> np.ndarray:
    """[N, 3]: the rotation vector that makes the fingers point down and close along this axis or its opposite."""
    down = np.broadcast_to([0.0, 0.0, -1.0], (len(turned), 3))
    across = np.concatenate([closing, np.zeros((len(closing), 1))], axis=1)
    across = across * np.where((across * turned[:, :, 1]).sum(1) < 0, -1.0, 1.0)[:, None]
    wanted = np.stack([np.cross(across, down), across, down], axis=2)
    return 0.5 * np.cross(turned, wanted, axis=1).sum(axis=2)


def nearest_side(world: World, axis: np.ndarray, avoid: np.ndarray | None = None) -> np.ndarray:
    """[N, 2]: which of a cube's two pairs of sides to grasp: the one that needs less turning, unless the fingers would
    come near `avoid` [N, 2] (from the cube to something else)."""
    other = np.stack([-axis[:, 1], axis[:, 0]], axis=1)
    now = world.turned[:, :2, 1]
    cost = [-np.abs((side * now).sum(1)) for side in (axis, other)]
    if avoid is not None:
        distance = np.maximum(np.linalg.norm(avoid, axis=1), 1e-9)
        near = np.clip((0.12 - distance) / 0.04, 0, 1)
        for at, side in enumerate((axis, other)):
            cost[at] = cost[at] + near * np.abs((side * avoid).sum(1)) / distance
    return np.where((cost[0] <= cost[1])[:, None], axis, other)


def pick(world: World, cube: np.ndarray, side: np.ndarray) -> tuple[np.ndarray, HandTarget]:
    """-> whether each row holds the cube, and how to come to hold it: over it, down, close."""
    away = cube - world.hand
    beside = np.linalg.norm(away[:, :2], axis=1)
    reached = (beside < 0.012) & (np.abs(away[:, 2]) < 0.012)
    held = reached & (world.finger < HELD[0]) & (world.finger > HELD[1])
    skew = np.abs(side[:, 0] * world.turned[:, 1, 1] - side[:, 1] * world.turned[:, 0, 1])
    astray = np.maximum(np.maximum(beside - 0.008, 0) / 0.02, np.maximum(skew - 0.1, 0) / 0.2)
    height = cube[:, 2] + ABOVE * np.minimum(astray, 1)
    grip = np.where(reached & (world.finger > HELD[1]), CLOSE, OPEN)
    return held, HandTarget(np.concatenate([cube[:, :2], height[:, None]], axis=1), side, grip)


def carry(world: World, held: np.ndarray, thing: np.ndarray, target: np.ndarray, otherwise: HandTarget) -> HandTarget:
    """Rows that hold something move it to the target; others do what else is wished."""
    hand = np.where(held[:, None], world.hand + target - thing, otherwise.hand)
    closing = np.where(held[:, None], world.turned[:, :2, 1], otherwise.closing)
    return HandTarget(hand, closing, np.where(held, CLOSE, otherwise.grip))


def pick_cube(world: World) -> HandTarget:
    cube, goal = world.place("cube"), world.place("goal_site")
    held, wish = pick(world, cube, nearest_side(world, world.axis("cube")))
    return carry(world, held, cube, goal, wish)


def push_cube(world: World) -> HandTarget:
    """Push from behind the cube (its side towards the arm) straight on, until it lies in the middle of the goal."""
    cube, goal = world.place("obj"), world.place("goal_region")
    offset = world.hand - cube
    start = cube - np.array([0.05, 0.0, 0.0])
    behind = (offset[:, 0] < -HALF - 0.005) & (np.abs(offset[:, 1]) < 0.02)
    low = world.hand[:, 2] < 0.045
    ready = behind & low
    astray = np.linalg.norm((world.hand - start)[:, :2], axis=1)
    height = np.where(behind, HALF, HALF + ABOVE * np.clip((astray - 0.015) / 0.02, 0, 1))
    left = goal[:, 0] - cube[:, 0]
    onward = np.stack([world.hand[:, 0] + np.clip(left - 0.02, 0, 0.05), cube[:, 1], np.full(len(cube), HALF)], axis=1)
    hand = np.where(ready[:, None], onward, np.stack([start[:, 0], start[:, 1], height], axis=1))
    side = np.broadcast_to([0.0, 1.0], (len(cube), 2))
    return HandTarget(hand, side, np.full(len(cube), CLOSE))


def stack_cube(world: World) -> HandTarget:
    cube, base = world.place("cubeA"), world.place("cubeB")
    between = (base - cube)[:, :2]
    side = nearest_side(world, world.axis("cubeA"), avoid=between)
    held, wish = pick(world, cube, side)
    apart = np.linalg.norm(between, axis=1)
    over = np.maximum(apart - 0.005, 0) / 0.02
    target = base + np.array([0, 0, 2 * HALF])
    target[:, 2] += 0.002 + 0.05 * np.minimum(over, 1)
    wish = carry(world, held, cube, target, wish)
    placed = (apart < 0.015) & (np.abs(cube[:, 2] - base[:, 2] - 2 * HALF) < 0.006)
    leave = world.hand + np.array([0, 0, 0.05]) * (world.finger > 0.032)[:, None]
    hand = np.where(placed[:, None], leave, wish.hand)
    closing = np.where(placed[:, None], world.turned[:, :2, 1], wish.closing)
    return HandTarget(hand, closing, np.where(placed, OPEN, wish.grip))


RULES: dict[str, Callable[[World], HandTarget]] = {
    "PushCube-v1": push_cube,
    "PickCube-v1": pick_cube,
    "StackCube-v1": stack_cube,
}
