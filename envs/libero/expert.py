"""Experts for LIBERO's pick-and-place tasks: scripts that know all positions and move the arm by its controller.

A plan is a generator that yields one action per env step: hover, descend, close, lift, carry, lower, open; if the
object is not in the hand after lifting, it begins again with the next best grasp. Experts use only the env's own
actions, so policies can imitate them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.envs.libero.scene import SceneRow

# Where things are in a scene, as the expert measures it.

COLLISION = 0  # MuJoCo's group of collision shapes
CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)


class Geometry:
    """One row of a scene."""

    def __init__(self, row: SceneRow) -> None:
        scene = row.scene
        self._model, self._data = scene.model, row.data._data
        self._env = scene.env
        self._fingers = scene.robot._ref_gripper_joint_pos_indexes
        self._hand = scene.robot.eef_site_id
        self._centres, self._sizes = np.split(scene.model.geom_aabb, 2, axis=1)
        self._geoms = {name: self._geoms_of(body) for name, body in scene.env.obj_body_id.items()}

    @property
    def hand(self) -> np.ndarray:
        """The point between the fingers."""
        return self._data.site_xpos[self._hand].copy()

    @property
    def turned(self) -> np.ndarray:
        """[3, 3]: the first column is the axis along which the fingers close, the last where they point."""
        return self._data.site_xmat[self._hand].reshape(3, 3).copy()

    @property
    def opening(self) -> float:
        """The gap between the fingers, in metres."""
        return float(np.abs(self._data.qpos[self._fingers]).sum())

    def position(self, name: str) -> np.ndarray:
        return self._data.xpos[self._env.obj_body_id[name]].copy()

    def corners(self, name: str) -> np.ndarray:
        """[n, 3]: corners of all boxes of an object."""
        geoms = self._geoms[name]
        local = self._centres[geoms, None] + CORNERS[None] * self._sizes[geoms, None]
        turned = self._data.geom_xmat[geoms].reshape(-1, 3, 3)
        return (np.einsum("gij,gcj->gci", turned, local) + self._data.geom_xpos[geoms, None]).reshape(-1, 3)

    def bounds(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        corners = self.corners(name)
        return corners.min(axis=0), corners.max(axis=0)

    def region(self, name: str) -> np.ndarray:
        """The place of a goal region."""
        return self._data.site_xpos[self._env.sim.model.site_name2id(name)].copy()

    def clearance(self, points: np.ndarray, without: str) -> float:
        """The smallest distance of these points [n, 3] from anything but one object; negative values do not occur."""
        others = np.concatenate([geoms for name, geoms in self._geoms.items() if name != without])
        turned = self._data.geom_xmat[others].reshape(-1, 3, 3)
        away = np.asarray(points)[:, None] - self._data.geom_xpos[others][None]
        local = np.einsum("gji,ngj->ngi", turned, away) - self._centres[others]
        outside = np.maximum(np.abs(local) - self._sizes[others], 0)
        return float(np.linalg.norm(outside, axis=2).min())

    def top_between(self, start: np.ndarray, end: np.ndarray, width: float, without: str) -> float:
        """The height of the highest thing within `width` of the way from start to end, seen from above."""
        way, highest = end[:2] - start[:2], -np.inf
        for name in self._geoms:
            if name == without:
                continue
            corners = self.corners(name)
            along = np.clip((corners[:, :2] - start[:2]) @ way / max(way @ way, 1e-9), 0, 1)
            near = np.linalg.norm(corners[:, :2] - (start[:2] + along[:, None] * way), axis=1) < width
            highest = max(highest, corners[near, 2].max(initial=-np.inf))
        return float(highest)

    def _geoms_of(self, body: int) -> np.ndarray:
        model = self._model
        below = {body}
        for child in range(body + 1, model.nbody):  # a parent's number is smaller than its children's
            if model.body_parentid[child] in below:
                below.add(child)
        return np.array(
            [g for g in range(model.ngeom) if model.geom_bodyid[g] in below and model.geom_group[g] == COLLISION], int
        )


OPEN, CLOSE = -1.0, 1.0
REACH, TURN = 0.05, 0.5  # movement of an action of 1: metres, radians
GAIN = 2.5  # the controller covers only part of the requested movement within an env step
NEAR, LEVEL = 0.008, 0.006  # metres: arrived, in the plane and in height
CENTRED = 0.03  # largest distance from the middle that LIBERO's goals allow
SETTLED = 0.0005  # metres in an env step
FINGER_REACH = 0.045  # of an open finger from the hand's centre
WIDEST = 0.072  # widest object between the fingers, in metres
PALM = 0.030  # the palm is this far above the point between the fingers, with a little room
TIP = 0.016  # the finger tips are this far below it, with a little room


@dataclass(frozen=True)
class Grasp:
    point: np.ndarray  # of the hand
    closing: np.ndarray  # [2], the direction along which the fingers close


class LiberoExpert:
    """Plays the rows of an env whose tasks are to pick something up and put it in or on something."""

    def __init__(self, env: Any) -> None:
        """`env` is a `LiberoEnv`."""
        self._env = env
        self._plans: list[Iterator[np.ndarray] | None] = [None] * env.num_envs

    def begin(self, rows: np.ndarray) -> None:
        """These rows were just reset."""
        for row in rows:
            scene = self._env.row(row)
            what, where, inside = goal_of(scene.scene.env.parsed_problem["goal_state"], scene.scene.files.name)
            self._plans[row] = pick_and_place(Geometry(scene), what, where, inside)

    def act(self) -> np.ndarray:
        """float32 [N, 7]: the next action of every row; rows whose plan is over stand still."""
        actions = [next(plan, keep_position(CLOSE)) if plan else keep_position(OPEN) for plan in self._plans]
        return np.array(actions, np.float32)


def goal_of(goal: list[list[str]], task: str) -> tuple[str, str, bool]:
    """The object to move, its destination, and whether it goes into it."""
    if len(goal) == 1 and goal[0][0] in ("in", "on") and len(goal[0]) == 3:
        relation, what, where = goal[0]
        return what, where, relation == "in"
    raise ConfigError(f"{task}: the expert picks one thing up and puts it in or on another; this task is {goal}")


def keep_position(grip: float) -> np.ndarray:
    return np.array([0, 0, 0, 0, 0, 0, grip])


def pick_and_place(at: Geometry, what: str, where: str, inside: bool) -> Iterator[np.ndarray]:
    for attempt in range(4):
        yield from wait_until_still(at, what)
        grasps = ranked_grasps(at, what)
        grasp = grasps[min(attempt, len(grasps) - 1)]
        height = at.position(what)[2]
        yield from pick(at, what, grasp)
        if at.position(what)[2] > height + 0.03:
            yield from place(at, what, where, inside, grasp.closing)
            if inside or distance_from_goal(at, what, where) < CENTRED:
                return


def distance_from_goal(at: Geometry, what: str, where: str) -> float:
    """The horizontal distance of an object from the middle of its goal."""
    return float(np.linalg.norm((at.position(what) - at.position(where))[:2]))


def wait_until_still(at: Geometry, what: str) -> Iterator[np.ndarray]:
    """Waits until the object lies still: at the beginning of an episode it may sink in or slip."""
    for _ in range(20):
        before = at.position(what)
        yield keep_position(OPEN)
        if np.linalg.norm(at.position(what) - before) < SETTLED:
            return


def pick(at: Geometry, what: str, grasp: Grasp) -> Iterator[np.ndarray]:
    point = grasp.point
    above = point[2] + 0.10
    over = max(at.top_between(at.hand, point, 0.10, what) + 0.06, above, at.hand[2])
    yield from move(at, [*at.hand[:2], over], grasp.closing, OPEN, steps=25)
    yield from move(at, [*point[:2], over], grasp.closing, OPEN)
    yield from move(at, [*point[:2], above], grasp.closing, OPEN)
    yield from move(at, point, grasp.closing, OPEN, steps=30)
    yield from close(at, point, grasp.closing)
    yield from move(at, [*point[:2], above], grasp.closing, CLOSE, steps=20)


def close(at: Geometry, point: np.ndarray, closing: np.ndarray) -> Iterator[np.ndarray]:
    """Closes the fingers until they stand still."""
    for step in range(20):
        before = at.opening
        yield step_toward(at, point, closing, CLOSE)
        if step > 3 and before - at.opening < 0.001:
            return


def place(at: Geometry, what: str, where: str, inside: bool, closing: np.ndarray) -> Iterator[np.ndarray]:
    target = at.region(where) if inside else at.position(where)
    host = where.removesuffix("_contain_region") if inside else where
    low, high = at.bounds(host)
    hanging = at.hand[2] - at.bounds(what)[0][2]  # the held object's extent below the hand
    over = max(at.top_between(at.hand, target, 0.12, what), high[2]) + hanging + 0.03
    yield from move(at, [*at.hand[:2], over], closing, CLOSE, steps=40)
    yield from carry(at, what, target[:2], over, closing)
    lowest = low[2] + 0.02 + hanging
    yield from carry(at, what, target[:2], max(lowest, high[2] + 0.03) if inside else lowest, closing)
    for _ in range(6):
        yield step_toward(at, at.hand, closing, OPEN)
    yield from move(at, [*at.hand[:2], over + 0.05], closing, OPEN)


def move(at: Geometry, target, closing: np.ndarray, grip: float, steps: int = 60) -> Iterator[np.ndarray]:
    """Moves the hand to the target, for at most so many steps."""
    target = np.asarray(target)
    for _ in range(steps):
        error = target - at.hand
        if np.linalg.norm(error[:2]) < NEAR and abs(error[2]) < LEVEL:
            return
        yield step_toward(at, target, closing, grip)


def carry(at: Geometry, what: str, target: np.ndarray, height: float, closing: np.ndarray) -> Iterator[np.ndarray]:
    """The same for the position of the held object, which LIBERO's goals check."""
    for _ in range(60):
        hand = at.hand
        error = np.array([*(target - at.position(what)[:2]), height - hand[2]])
        if np.linalg.norm(error[:2]) < NEAR and abs(error[2]) < LEVEL:
            return
        yield step_toward(at, hand + error, closing, CLOSE)


def step_toward(at: Geometry, target: np.ndarray, closing: np.ndarray, grip: float) -> np.ndarray:
    """One action towards the target, which turns the closing axis to `closing` and the fingers down."""
    turned = at.turned
    across = np.array([*closing, 0.0])
    across *= np.sign(across @ turned[:, 0]) or 1.0  # the nearer of two equivalent orientations
    down = np.array([0.0, 0.0, -1.0])
    wanted = np.stack([across, np.cross(down, across), down], axis=1)
    action = np.concatenate([GAIN * (target - at.hand) / REACH, rotation_between(turned, wanted) / TURN, [grip]])
    return np.clip(action, -1, 1)


def rotation_between(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Axis times angle, in the world, of the turn from one orientation to another."""
    turn = end @ start.T
    angle = np.arccos(np.clip((np.trace(turn) - 1) / 2, -1, 1))
    axis = np.array([turn[2, 1] - turn[1, 2], turn[0, 2] - turn[2, 0], turn[1, 0] - turn[0, 1]])
    return axis * (angle / (2 * np.sin(angle)) if 1e-6 < angle < np.pi - 1e-6 else 0.5)


def ranked_grasps(at: Geometry, what: str) -> list[Grasp]:
    """Grasps of an object, the best first: around it if it is narrow enough, else at its rim."""
    low, high = at.bounds(what)
    corners = at.corners(what)
    height = max(low[2] + TIP, high[2] - PALM)
    angles = np.arange(0, np.pi, np.pi / 18)
    candidates = [grasp_around(corners, height, angle) for angle in angles]
    grasps = [grasp for grasp in candidates if grasp]
    if not grasps:
        grasps = grasps_at_rim(corners, (low + high) / 2)
    return sorted(grasps, key=lambda grasp: -grasp_score(at, what, grasp))


def grasp_around(corners: np.ndarray, height: float, angle: float) -> Grasp | None:
    closing = np.array([np.cos(angle), np.sin(angle)])
    beside = np.array([-closing[1], closing[0]])
    across, along = corners[:, :2] @ closing, corners[:, :2] @ beside
    if np.ptp(across) > WIDEST:
        return None
    centre = closing * (across.min() + across.max()) / 2 + beside * (along.min() + along.max()) / 2
    return Grasp(np.array([*centre, height]), closing)


def grasps_at_rim(corners: np.ndarray, centre: np.ndarray) -> list[Grasp]:
    """Grasps of a round object's wall, with one finger inside; if the object leans, the wall is higher on one side."""
    away = corners[:, :2] - centre[:2]
    distance = np.linalg.norm(away, axis=1)
    grasps = []
    for angle in np.arange(0, 2 * np.pi, np.pi / 12):
        outward = np.array([np.cos(angle), np.sin(angle)])
        there = away @ outward > 0.9 * distance
        top = corners[there, 2].max()
        radius = np.median(distance[there & (corners[:, 2] > top - 0.01)])
        grasps.append(Grasp(np.array([*(centre[:2] + radius * outward), top - 0.014]), outward))
    return grasps


def grasp_score(at: Geometry, what: str, grasp: Grasp) -> float:
    """Room for the fingers and the palm (metres, up to 2 cm), minus a cost of turning the hand; higher is better."""
    across = np.array([*grasp.closing, 0.0])
    fingers = [
        grasp.point + side * FINGER_REACH * across + np.array([0, 0, up])
        for side in (-1, 1)
        for up in (-0.01, 0.02, 0.05)
    ]
    palm = [grasp.point + side * 0.09 * across + np.array([0, 0, 0.08]) for side in (-1, 0, 1)]
    room = min(at.clearance(np.array([*fingers, *palm]), what), 0.02)
    turn = np.arccos(np.clip(abs(across @ at.turned[:, 0]), 0, 1))
    return room - 0.004 * turn + 0.5 * grasp.point[2]
