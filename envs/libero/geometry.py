"""Where things are in a LIBERO scene, for experts: every object as the boxes it collides with.

Positions are read from MuJoCo's data after its last physics step, so they lag by 2 ms.
"""

from __future__ import annotations

import numpy as np

from embodied.envs.libero.scene import Row

COLLISION = 0  # MuJoCo's group of collision shapes
CORNERS = np.array([[x, y, z] for x in (-1, 1) for y in (-1, 1) for z in (-1, 1)], float)


class Geometry:
    """One row of a scene."""

    def __init__(self, row: Row) -> None:
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
        """Between the fingers, in metres."""
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
        """Where a goal region is."""
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
