"""Experts for ManiSkill tasks: rules that map positions of objects to a target of the hand, for all rows at once, and
the arm's kinematics.

Rules have no memory: the next action follows from the state alone, so an expert recovers from disturbances and a policy
can imitate it. ManiSkill's own planners exceed these tasks' step limits. Positions are in metres, relative to the base
of the moved arm, x pointing ahead. Batched simulations give joint positions but not the poses of all links, so the
Franka Panda's hand pose and its Jacobian are computed here, for many arms at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from embodied.core.arrays import host
from embodied.core.errors import ConfigError
from embodied.envs.maniskill.config import ManiSkillConfig

MOST = 0.1  # radians of a joint for an action of 1
GAIN, TURN_GAIN = 2.0, 1.5  # the controller covers only part of the requested movement within an env step
FASTEST = 0.12  # largest movement per env step, in metres
OPEN, CLOSE = 1.0, -1.0
Width = "tuple[float | np.ndarray, float | np.ndarray]"  # a finger's opening: (largest, smallest)
DOWN = (0.0, 0.0, -1.0)
HALF = 0.02  # half of a cube's side
MIDDLE = 0.75  # the table's middle, from the base of each of two arms
HELD = 0.024, 0.013  # a finger's opening while it holds a cube: largest, smallest
HANDLE, TOOL_HALF = (0.029, 0.02), 0.025  # the same for the L or a peg; half of their height
PEG_HALF, PEG_GRIP = 0.12, 0.09  # half of its length; distance from its middle to the grip
SOFTLY = 0.24  # grip of fingers that let a peg turn between them
ABOVE = 0.07  # the height over a cube from which the hand comes down


@dataclass(frozen=True)
class World:
    """The positions that rules read: arrays with one row per env."""

    hand: np.ndarray  # [N, 3], the point between the fingers
    turned: np.ndarray  # [N, 3, 3], second column: the axis along which the fingers close
    jacobian: np.ndarray  # [N, 6, 7]
    finger: np.ndarray  # [N], opening of a finger, 0 to 0.04
    place: Callable[[str], np.ndarray]  # name of an object or pose -> [N, 3]
    axis: Callable[[str], np.ndarray]  # the same -> [N, 2], one of its horizontal axes
    along: Callable[[str], np.ndarray]  # the same -> [N, 3], its x axis
    numbers: Callable[[str], np.ndarray]  # name of a drawn property, such as sizes -> [N, ...]


@dataclass(frozen=True)
class HandTarget:
    """The hand's target: its position, the axis along which the fingers close, whether they close, and their
    direction."""

    hand: np.ndarray  # [N, 3]
    closing: np.ndarray  # [N, 2]
    grip: np.ndarray  # [N], OPEN or CLOSE
    pointing: np.ndarray | tuple[float, ...] = DOWN  # [N, 3]


class Scenes(Protocol):
    """What experts need of a `ManiSkillEnv`."""

    config: ManiSkillConfig
    envs: list[Any]  # ManiSkill's own
    units: np.ndarray  # of a bridge task: what an action of 1 moves

    def make_single(self, changes: dict[str, Any]) -> Any:
        """Another env of the task, with these changes of its options."""


class ManiSkillExpert:
    def __init__(self, env: Scenes) -> None:
        self.check(env.config)
        self._env = env
        self._rules = RULES[env.config.task]

    @staticmethod
    def check(config: ManiSkillConfig) -> None:
        played = "pd_joint_delta_pos" if config.task in (*RULES, ROLLING) else SMALL_ARM.get(config.task)
        if played is None or config.control_mode != played:
            raise ConfigError(
                f"there is no expert for env.task={config.task} with env.control_mode={config.control_mode}; "
                f"ManiSkill's experts play {', '.join((*RULES, ROLLING))} with pd_joint_delta_pos, and "
                f"{', '.join(f'{task} with {mode}' for task, mode in SMALL_ARM.items())}. A policy can demonstrate, "
                "too: python -m embodied.collect checkpoint=RUN out=DEMOS, then sft.data=DEMOS"
            )

    def begin(self, rows: np.ndarray) -> None:
        """Rules have no memory."""

    def act(self) -> np.ndarray:
        """[N, A]: the actions of all arms, one after the other."""
        return np.concatenate([move(look(self._env, arm), rule) for arm, rule in enumerate(self._rules)], axis=1)


def move(world: World, rule: Callable[[World], HandTarget]) -> np.ndarray:
    """[N, 8]: the action that moves one arm towards the rule's target."""
    wish = rule(world)
    far = GAIN * (wish.hand - world.hand)
    far *= np.minimum(1.0, FASTEST / np.maximum(np.linalg.norm(far, axis=1, keepdims=True), 1e-9))
    twist = np.concatenate([far, TURN_GAIN * turn_to(world.turned, wish.closing, wish.pointing)], axis=1)
    joints = joint_step(world.jacobian, twist) / MOST
    joints[:, :-1] /= np.maximum(1.0, np.abs(joints[:, :-1]).max(axis=1, keepdims=True))  # the last joint only turns
    joints = np.clip(joints, -1.0, 1.0)
    return np.concatenate([joints, wish.grip[:, None]], axis=1).astype(np.float32)


def look(env: Scenes, arm: int) -> World:
    def gather(read: Callable[[Any], Any]) -> np.ndarray:
        return np.concatenate([host(read(single)) for single in env.envs]).astype(np.float64)

    def robot(single: Any) -> Any:
        return getattr(single.agent, "agents", [single.agent])[arm].robot

    def pose(single: Any, name: str) -> Any:
        thing = getattr(single, name)
        return getattr(thing, "pose", thing)

    qpos, base = gather(lambda single: robot(single).get_qpos()), gather(lambda single: robot(single).pose.p)
    hand, turned, jacobian = hand_pose(qpos[:, :JOINTS])
    ahead = horizontal_axis(gather(lambda single: robot(single).pose.q))
    return World(
        hand=hand,
        turned=turned,
        jacobian=jacobian,
        finger=qpos[:, JOINTS:].mean(axis=1),
        place=lambda name: in_arm_frame(gather(lambda single: pose(single, name).p) - base, ahead),
        axis=lambda name: in_arm_frame(horizontal_axis(gather(lambda single: pose(single, name).q)), ahead),
        along=lambda name: in_arm_frame(x_axis(gather(lambda single: pose(single, name).q)), ahead),
        numbers=lambda name: gather(lambda single: getattr(single, name)),
    )


# Geometry


def in_arm_frame(vectors: np.ndarray, ahead: np.ndarray) -> np.ndarray:
    """Rotates vectors [N, 2 or 3] into the frame of an arm that looks `ahead` [N, 2]."""
    x = (vectors[:, :2] * ahead).sum(1)
    y = vectors[:, 1] * ahead[:, 0] - vectors[:, 0] * ahead[:, 1]
    return np.column_stack([x, y, vectors[:, 2:]])


def horizontal_axis(quaternion: np.ndarray) -> np.ndarray:
    """[N, 2]: the horizontal direction of the x axis of an object rotated about the vertical."""
    axis = x_axis(quaternion)[:, :2]
    return axis / np.maximum(np.linalg.norm(axis, axis=1, keepdims=True), 1e-9)


def x_axis(quaternion: np.ndarray) -> np.ndarray:
    """[N, 3]: the direction of the x axis of a rotated object."""
    w, x, y, z = quaternion.T
    return np.stack([1 - 2 * (y * y + z * z), 2 * (x * y + w * z), 2 * (x * z - w * y)], axis=1)


def turn_to(turned: np.ndarray, closing: np.ndarray, pointing: np.ndarray | tuple[float, ...] = DOWN) -> np.ndarray:
    """[N, 3]: the rotation vector that makes the fingers point there and close along this axis or its opposite."""
    pointing = np.broadcast_to(pointing, (len(turned), 3))
    across = np.concatenate([closing, np.zeros((len(closing), 1))], axis=1)
    across = across * np.where((across * turned[:, :, 1]).sum(1) < 0, -1.0, 1.0)[:, None]
    wanted = np.stack([np.cross(across, pointing), across, pointing], axis=2)
    return 0.5 * np.cross(turned, wanted, axis=1).sum(axis=2)


def level_across(axis: np.ndarray) -> np.ndarray:
    """[N, 2]: the horizontal direction perpendicular to an axis [N, 3]."""
    across = np.column_stack([-axis[:, 1], axis[:, 0]])
    return across / np.maximum(np.linalg.norm(across, axis=1, keepdims=True), 1e-9)


def nearest_side(world: World, axis: np.ndarray, avoid: np.ndarray | None = None) -> np.ndarray:
    """[N, 2]: the pair of a cube's sides to grasp: the pair that needs less turning, unless the fingers would come near
    `avoid` [N, 2] (a vector from the cube to another object)."""
    other = np.stack([-axis[:, 1], axis[:, 0]], axis=1)
    now = world.turned[:, :2, 1]
    cost = [-np.abs((side * now).sum(1)) for side in (axis, other)]
    if avoid is not None:
        distance = np.maximum(np.linalg.norm(avoid, axis=1), 1e-9)
        near = np.clip((0.12 - distance) / 0.04, 0, 1)
        for at, side in enumerate((axis, other)):
            cost[at] = cost[at] + near * np.abs((side * avoid).sum(1)) / distance
    return np.where((cost[0] <= cost[1])[:, None], axis, other)


# Rules: a hand's target by task


def pick(
    world: World, cube: np.ndarray, side: np.ndarray, width: Width = HELD, above: float = ABOVE
) -> tuple[np.ndarray, HandTarget]:
    """Returns True for rows that hold the cube, and the target for grasping it: over the cube, down, close."""
    away = cube - world.hand
    beside = np.linalg.norm(away[:, :2], axis=1)
    reached = (beside < 0.012) & (np.abs(away[:, 2]) < 0.012)
    holds_it = reached & (world.finger < width[0]) & (world.finger > width[1])
    skew = np.abs(side[:, 0] * world.turned[:, 1, 1] - side[:, 1] * world.turned[:, 0, 1])
    astray = np.maximum(np.maximum(beside - 0.008, 0) / 0.02, np.maximum(skew - 0.1, 0) / 0.2)
    height = cube[:, 2] + above * np.minimum(astray, 1)
    grip = np.where(reached & (world.finger > width[1]), CLOSE, OPEN)
    return holds_it, HandTarget(np.concatenate([cube[:, :2], height[:, None]], axis=1), side, grip)


def holds(world: World, gripped: np.ndarray, width: Width, within: float) -> np.ndarray:
    """bool [N]: True if the fingers are closed on an object of this width, this near to its grip."""
    near = np.linalg.norm(gripped - world.hand, axis=1) < within
    return near & (world.finger < width[0]) & (world.finger > width[1])


def carry(
    world: World, holds_it: np.ndarray, thing: np.ndarray, target: np.ndarray, otherwise: HandTarget
) -> HandTarget:
    """Rows that hold `thing` move it to the target; other rows follow `otherwise`."""
    hand = np.where(holds_it[:, None], world.hand + target - thing, otherwise.hand)
    closing = np.where(holds_it[:, None], world.turned[:, :2, 1], otherwise.closing)
    return HandTarget(hand, closing, np.where(holds_it, CLOSE, otherwise.grip))


def pick_cube(world: World) -> HandTarget:
    cube, goal = world.place("cube"), world.place("goal_site")
    holds_it, wish = pick(world, cube, nearest_side(world, world.axis("cube")))
    return carry(world, holds_it, cube, goal, wish)


def push(world: World, cube: np.ndarray, onward: np.ndarray | float) -> HandTarget:
    """Push the cube straight ahead from the side near the arm; the hand's target is `onward` ahead."""
    offset = world.hand - cube
    start = cube - np.array([0.05, 0.0, 0.0])
    behind = (offset[:, 0] < -HALF - 0.005) & (np.abs(offset[:, 1]) < 0.02)
    ready = behind & (world.hand[:, 2] < 0.045)
    astray = np.linalg.norm((world.hand - start)[:, :2], axis=1)
    height = np.where(behind, HALF, HALF + ABOVE * np.clip((astray - 0.015) / 0.02, 0, 1))
    ahead = np.column_stack([world.hand[:, 0] + onward, cube[:, 1], np.full(len(cube), HALF)])
    hand = np.where(ready[:, None], ahead, np.column_stack([start[:, :2], height]))
    return HandTarget(hand, np.broadcast_to([0.0, 1.0], (len(cube), 2)), np.full(len(cube), CLOSE))


def push_cube(world: World) -> HandTarget:
    """Push the cube until it lies in the middle of the goal."""
    cube, goal = world.place("obj"), world.place("goal_region")
    return push(world, cube, np.clip(goal[:, 0] - cube[:, 0] - 0.02, 0, 0.05))


def stack_cube(world: World) -> HandTarget:
    cube, base = world.place("cubeA"), world.place("cubeB")
    between = (base - cube)[:, :2]
    side = nearest_side(world, world.axis("cubeA"), avoid=between)
    holds_it, wish = pick(world, cube, side)
    apart = np.linalg.norm(between, axis=1)
    over = np.maximum(apart - 0.005, 0) / 0.02
    target = base + np.array([0, 0, 2 * HALF])
    target[:, 2] += 0.002 + 0.05 * np.minimum(over, 1)
    wish = carry(world, holds_it, cube, target, wish)
    placed = (apart < 0.015) & (np.abs(cube[:, 2] - base[:, 2] - 2 * HALF) < 0.006)
    leave = world.hand + np.array([0, 0, 0.05]) * (world.finger > 0.032)[:, None]
    hand = np.where(placed[:, None], leave, wish.hand)
    closing = np.where(placed[:, None], world.turned[:, :2, 1], wish.closing)
    return HandTarget(hand, closing, np.where(placed, OPEN, wish.grip))


def place_sphere(world: World) -> HandTarget:
    """Grasp the ball in the hand's current rotation, and release it on the bottom of the bin."""
    ball = world.place("obj")
    holds_it, wish = pick(world, ball, world.turned[:, :2, 1])
    resting = world.place("bin") + np.array([0, 0, HALF + 0.005])
    apart = np.linalg.norm((resting - ball)[:, :2], axis=1)
    target = resting + 0.07 * np.minimum(np.maximum(apart - 0.004, 0) / 0.02, 1)[:, None] * np.array([0, 0, 1])
    wish = carry(world, holds_it, ball, target, wish)
    placed = (apart < 0.005) & (np.abs(ball[:, 2] - resting[:, 2]) < 0.005)
    leave = world.hand + np.array([0, 0, 0.05]) * (world.finger > 0.032)[:, None]
    hand = np.where(placed[:, None], leave, wish.hand)
    return HandTarget(hand, wish.closing, np.where(placed, OPEN, wish.grip))


def pull_cube_tool(world: World) -> HandTarget:
    """Grasp the L by its handle, lift it over the cube, put it down with the cube in its hook, pull. The hook hangs
    lower than the hand, so the tool is carried high."""
    cube, tool = world.place("cube"), world.place("l_shape_tool")
    side = np.broadcast_to([0.0, 1.0], (len(cube), 2))
    holds_it, wish = pick(world, tool + np.array([0.05, 0, 0]), side, HANDLE)
    inside = cube - tool
    hooked = (np.abs(inside[:, 0] - 0.08) < 0.06) & (np.abs(inside[:, 1] - 0.067) < 0.03) & (tool[:, 2] < 0.04)
    over = (cube - tool)[:, :2] - np.array([0.1, 0.067])  # from the tool to the cube's place in its hook
    away = np.linalg.norm(over, axis=1)
    lifted = np.where(away > 0.02, np.clip((tool[:, 2] - 0.03) / 0.1, 0, 1), 1.0)  # first up, then across
    height = TOOL_HALF + 0.14 * np.clip((away - 0.01) / 0.03, 0, 1)
    carried = np.column_stack([tool[:, :2] + lifted[:, None] * over, height])
    home = np.column_stack([tool[:, 0] - 0.15 * (cube[:, 0] > 0.5), tool[:, 1], np.full(len(tool), TOOL_HALF)])
    wish = carry(world, holds_it, tool, np.where(hooked[:, None], home, carried), wish)
    return HandTarget(wish.hand, side, wish.grip)


def poke_cube(world: World) -> HandTarget:
    """Grasp the peg near its end (the upright hand reaches no further), put its head before the cube, and poke."""
    cube, peg, goal = world.place("cube"), world.place("peg"), world.place("goal_region")
    side = np.broadcast_to([0.0, 1.0], (len(cube), 2))
    holds_it, wish = pick(world, peg - np.array([PEG_GRIP, 0, 0]), side, HANDLE)
    before = np.minimum(peg[:, 0], cube[:, 0] - HALF - PEG_HALF - 0.03)
    poked = goal[:, 0] - HALF - PEG_HALF - 0.015
    ahead = np.where(np.abs(cube[:, 1] - peg[:, 1]) < 0.01, poked, before)
    target = np.column_stack([ahead, cube[:, 1], np.full(len(peg), TOOL_HALF)])
    wish = carry(world, holds_it, peg, target, wish)
    return HandTarget(wish.hand, side, wish.grip)


def lift_peg(world: World) -> HandTarget:
    """Grasp the peg's near end softly: the peg turns between the fingers while they circle its other end, which stays
    on the table. If the arm does not reach over that end, the fingers go up and the peg follows."""
    peg, along = world.place("peg"), world.along("peg")
    lying = np.abs(along[:, 2]) < 0.1
    end = along * np.where(lying, -np.sign(along[:, 0]), np.sign(along[:, 2]))[:, None]
    gripped, foot = peg + PEG_GRIP * end, peg - PEG_HALF * end
    _, wish = pick(world, gripped, np.broadcast_to([0.0, 1.0], (len(peg), 2)), HANDLE)
    holds_it = holds(world, gripped, HANDLE, 0.03)
    angle = np.arctan2(end[:, 2], -end[:, 0])  # a right one when it is upright
    upright, radius = np.pi / 2, PEG_HALF + PEG_GRIP
    onward = np.where(angle < upright - 0.05, np.minimum(angle + 0.15, upright + 0.12), upright)
    ahead = np.minimum(foot[:, 0] - radius * np.cos(onward), 0.74)
    height = radius * np.minimum(np.sin(onward), 1) + TOOL_HALF * np.maximum(np.cos(onward), 0)
    height += 0.02 * ((ahead > 0.71) & (angle < upright - 0.1))
    hand = world.hand + np.column_stack([ahead, foot[:, 1], height]) - gripped
    return HandTarget(np.where(holds_it[:, None], hand, wish.hand), wish.closing, np.where(holds_it, SOFTLY, wish.grip))


def insert_peg(world: World) -> HandTarget:
    """Grasp the peg behind its middle, align it with the hole, and push it in as far as it is aligned. A hanging peg is
    straightened by tilting the hand."""
    peg, along = world.place("peg"), world.along("peg")
    hole, into = world.place("box_hole_pose"), world.along("box_hole_pose")
    length, radius = world.numbers("peg_half_sizes")[:, :2].T
    behind = np.maximum(0.05, length / 2 + 0.01)
    gripped = peg - behind[:, None] * along
    lying = gripped - np.maximum(0.02 - radius, 0)[:, None] * DOWN
    width = radius + 0.004, radius - 0.007
    _, wish = pick(world, lying, level_across(along), width)
    holds_it = holds(world, lying, width, 0.025)  # it slips a little when its head touches the box
    # The head's distance before the hole, its offset from the axis, and its rotation
    head = peg + length[:, None] * along
    before = ((head - hole) * into).sum(1)
    astray = np.linalg.norm(head - hole - before[:, None] * into, axis=1)
    turn = np.cross(along, into)
    in_line = np.clip((0.005 - astray) / 0.002, 0, 1) * np.clip((0.06 - np.linalg.norm(turn, axis=1)) / 0.03, 0, 1)
    waiting = np.where(before < 0.01 - length, -length - 0.02, before)
    reach = np.minimum(waiting + in_line * (before + 0.03 - waiting), 0.01)
    wish = carry(world, holds_it, gripped, hole + (reach - length - behind)[:, None] * into, wish)
    # The fingers close across the hole's axis; the hand tilts back by the angle at which the peg hangs
    now, axis = world.turned[:, :, 2], np.column_stack([level_across(into), np.zeros(len(into))])
    lean = now + np.cross((turn * axis).sum(1, keepdims=True) * axis, now)
    lean /= np.linalg.norm(lean, axis=1, keepdims=True)
    pointing = np.where((holds_it & (np.abs(turn[:, 2]) < 0.3))[:, None], lean, DOWN)
    closing = world.turned[:, :2, 1] + turn[:, 2:] * np.column_stack([-world.turned[:, 1, 1], world.turned[:, 0, 1]])
    closing /= np.linalg.norm(closing, axis=1, keepdims=True)
    return HandTarget(wish.hand, np.where(holds_it[:, None], closing, wish.closing), wish.grip, pointing)


def push_over(world: World) -> HandTarget:
    """The first arm of two pushes the cube to the other one, and goes back."""
    cube = world.place("cube")
    wish = push(world, cube, 0.08)
    over = cube[:, 0] > MIDDLE + 0.05
    hand = np.where(over[:, None], np.array([0.55, 0.0, 0.15]), wish.hand)
    return HandTarget(hand, wish.closing, wish.grip)


def take_over(world: World) -> HandTarget:
    """The second arm of two waits until the cube is on its side, and brings it to the goal."""
    cube, goal = world.place("cube"), world.place("goal_site")
    holds_it, wish = pick(world, cube, nearest_side(world, world.axis("cube")))
    waits = cube[:, 0] > MIDDLE - 0.045
    hand = np.where(waits[:, None], np.array([0.55, 0, 0.2]), wish.hand)
    wish = HandTarget(hand, wish.closing, np.where(waits, OPEN, wish.grip))
    return carry(world, holds_it, cube, goal, wish)


RULES: dict[str, tuple[Callable[[World], HandTarget], ...]] = {
    "PushCube-v1": (push_cube,),
    "PickCube-v1": (pick_cube,),
    "StackCube-v1": (stack_cube,),
    "PlaceSphere-v1": (place_sphere,),
    "PullCubeTool-v1": (pull_cube_tool,),
    "PokeCube-v1": (poke_cube,),
    "LiftPegUpright-v1": (lift_peg,),
    "PegInsertionSide-v1": (insert_peg,),
    "TwoRobotPickCube-v1": (push_over, take_over),  # one for each arm
}


SMALL_ARM = {"PickCubeSO100-v1": "pd_joint_target_delta_pos"}  # played by small_arm.py
ROLLING = "RollBall-v1"  # played by `RollBallExpert`

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


def hand_pose(joints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
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
    """[N, J]: the small change of the joints that moves the hand by `twist` [N, 6], for Jacobians [N, 6, J]."""
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


# RollBall-v1


BEHIND, LOW, ROOM = 0.055, 0.035, 0.021  # the hand before the push: distance from the ball, height, room above it
OVER = 0.08  # additional height of the hand while it is not yet behind the ball
RISE = 0.22  # metres up for a metre ahead while the hand pushes
STRAIGHT = 2.5  # how strongly the push returns the hand to the line from the ball to the goal
LAST = 0.55  # distance from the arm's base at which the hand stops and the ball rolls on
GAP = -0.55  # the action of the fingers
TURN = 0.064  # metres that count as a radian of the hand's roll and yaw


class RollBallExpert:
    """Of RollBall-v1: the hand goes behind the ball and throws it towards the goal, 1.3 m ahead.

    The ball has to leave at 0.5 m/s, more than a hand reaches that holds its orientation. So the hand may pitch, it
    rises while it pushes, and its movement is shared among the joints so that none is much faster than the others. The
    fingers stay a little open: the ball lies between their tips and keeps its direction.
    """

    def __init__(self, env: Scenes) -> None:
        ManiSkillExpert.check(env.config)
        self._env = env

    def begin(self, rows: np.ndarray) -> None:
        """The rule has no memory."""

    def act(self) -> np.ndarray:
        """[N, 8]: the action that goes behind the ball, or throws it."""
        world = look(self._env, 0)
        ball, goal = world.place("ball"), world.place("goal_region")
        onward = (goal - ball)[:, :2]
        onward /= np.maximum(np.linalg.norm(onward, axis=1, keepdims=True), 1e-9)
        across = np.column_stack([-onward[:, 1], onward[:, 0]])
        offset = world.hand[:, :2] - ball[:, :2]
        ahead, beside = (offset * onward).sum(1), (offset * across).sum(1)
        behind = (ahead < -0.03) & (np.abs(beside) < 0.012 + 0.15 * np.maximum(-ahead - 0.05, 0))
        ready = behind & (world.hand[:, 2] < LOW + ROOM)
        start = -BEHIND * onward - offset
        astray = np.linalg.norm(start, axis=1)
        height = LOW + np.where(behind, 0, OVER * np.clip((astray - 0.02) / 0.03, 0, 1))
        push = 0.3 * np.column_stack([onward, np.full(len(ball), RISE)])
        push[:, :2] -= STRAIGHT * beside[:, None] * across
        move = np.where(ready[:, None], push, np.column_stack([start, height - world.hand[:, 2]]))
        turn = TURN_GAIN * turn_to(world.turned, across)
        roll = np.concatenate([onward, np.zeros((len(ball), 1))], axis=1)[:, None]  # [N, 1, 3], the axis
        wanted = np.column_stack([GAIN * move, TURN * (turn * roll[:, 0]).sum(1), TURN * turn[:, 2]])
        jacobian = np.concatenate(
            [world.jacobian[:, :3], TURN * roll @ world.jacobian[:, 3:], TURN * world.jacobian[:, 5:]], axis=1
        )
        joints = share_among_joints(jacobian, wanted) / (0.4 * MOST)
        joints /= np.maximum(1.0, np.abs(joints).max(axis=1, keepdims=True))
        joints[(ball[:, 0] > LAST + 0.03) | ready & (world.hand[:, 0] > LAST)] = 0.0
        return np.column_stack([joints, np.full(len(ball), GAP)]).astype(np.float32)


def share_among_joints(jacobian: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """[N, J]: a joint step with jacobian [N, M, J] @ step near wanted [N, M], whose largest entry is small: joints that
    do much get less weight, five times."""
    weights = np.ones((len(wanted), jacobian.shape[2]))
    for _ in range(5):
        weighted = jacobian * weights[:, None]
        square = weighted @ jacobian.transpose(0, 2, 1) + 1e-5 * np.eye(jacobian.shape[1])
        step = (weighted.transpose(0, 2, 1) @ np.linalg.solve(square, wanted[:, :, None]))[:, :, 0]
        shares = np.abs(step) / np.maximum(np.abs(step).max(axis=1, keepdims=True), 1e-9)
        weights *= (shares + 0.1) ** -0.7
        weights = np.maximum(weights / weights.max(axis=1, keepdims=True), 1e-3)
    return step
