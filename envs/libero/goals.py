"""LIBERO's goals for many rows at once: the predicates of one task on arrays of positions, joints and contacts.

LIBERO's own predicates ask one simulation. These ask arrays with one row per env row, with the same comparisons in the
same order, so both agree on equal numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError

Arrays = Any
"""What is known of N rows: `xpos` [N, bodies, 3], `site_xpos` [N, sites, 3], `site_xmat` [N, sites, 3, 3], `qpos`
[N, positions], and `touching` [N], whose bit `i` says that the `i`-th pair of `Goal.pairs` is in contact."""
Term = Callable[[Arrays], np.ndarray]

NEAR = 0.03  # metres between the centres of two objects of which one lies on the other
HEIGHT, SLACK = 0.10, 0.005  # metres above a region's top that count as on it, and below
FLOOR = 0.01  # metres below a region that count as in it
UP = 1.0  # metres
ANY, ALL = ("open", "turnon"), ("close", "turnoff")  # of the joints of a piece of furniture
QUESTIONS = {"open": "is_open", "close": "is_close", "turnon": "turn_on", "turnoff": "turn_off"}


class Goal:
    def __init__(self, env: Any, task: str) -> None:
        """`env`: robosuite's env of the task."""
        self._env, self._model = env, env.sim.model
        self.pairs: list[tuple[list[int], list[int]]] = []  # geoms that are in contact or not
        self._terms: list[Term] = []
        for name, *things in env.parsed_problem["goal_state"]:
            if not hasattr(self, f"_{name.lower()}") and name.lower() not in QUESTIONS:
                raise ConfigError(
                    f"{task}: env.backend=warp does not know the predicate {name}; try env.backend=mujoco"
                )
            self._terms.append(self._term(name.lower(), *(env.object_states_dict[thing] for thing in things)))

    def reached(self, arrays: Arrays) -> np.ndarray:
        """bool [N]"""
        return np.logical_and.reduce([term(arrays) for term in self._terms])

    def bits(self, num_geoms: int) -> np.ndarray:
        """int [2, geoms]: in the first and in the second part of which pairs a geom is."""
        bits = np.zeros((2, num_geoms), np.int32)
        for at, pair in enumerate(self.pairs):
            for side, geoms in enumerate(pair):
                bits[side, geoms] |= 1 << at
        return bits

    def _term(self, name: str, *states: Any) -> Term:
        return self._joints(name, *states) if name in QUESTIONS else getattr(self, f"_{name}")(*states)

    def _on(self, what: Any, where: Any) -> Term:
        if where.object_state_type == "object":
            upper, lower, touching = self._body(what), self._body(where), self._contact(where, what)

            def lies_on(arrays: Arrays) -> np.ndarray:
                above, below = arrays.xpos[:, upper], arrays.xpos[:, lower]
                near = np.linalg.norm(below[:, :2] - above[:, :2], axis=1) < NEAR
                return (below[:, 2] <= above[:, 2]) & touching(arrays) & near

            return lies_on
        region, size, place = self._region(where)
        body, parent = self._body(what), self._env.get_object(where.parent_name)
        touching = self._touching(parent, self._object(what)) if parent is not None else everywhere

        def lies_in_region(arrays: Arrays) -> np.ndarray:
            away = np.einsum("nij,nj->ni", arrays.site_xmat[:, region], arrays.xpos[:, body] - place(arrays))
            high = (size[2] - SLACK < away[:, 2]) & (away[:, 2] < size[2] + HEIGHT)
            return high & (np.abs(away[:, :2]) < size[:2]).all(axis=1) & touching(arrays)

        return lies_in_region

    def _in(self, what: Any, where: Any) -> Term:
        if where.object_state_type == "object":
            raise ConfigError(f"env.backend=warp knows `In` for regions, and {where.object_name} is an object")
        region, size, place = self._region(where)
        body = self._body(what)

        def lies_inside(arrays: Arrays) -> np.ndarray:
            half = np.abs(np.einsum("nij,j->ni", arrays.site_xmat[:, region], size))
            low, high = place(arrays) - half, place(arrays) + half
            low[:, 2] -= FLOOR
            return ((arrays.xpos[:, body] > low) & (arrays.xpos[:, body] < high)).all(axis=1)

        return lies_inside

    def _up(self, what: Any) -> Term:
        body = self._body(what)
        return lambda arrays: arrays.xpos[:, body, 2] >= UP

    def _true(self, *_: Any) -> Term:
        return everywhere

    def _joints(self, name: str, what: Any) -> Term:
        """Whether one, or every, joint of a piece of furniture is where its class says."""
        is_region = what.object_state_type == "site"
        furniture = self._env.get_object(what.parent_name if is_region else what.object_name)
        joints = self._env.object_sites_dict[what.object_name].joints if is_region else furniture.joints
        places = [self._model.get_joint_qpos_addr(joint) for joint in joints]
        ask, combine = getattr(furniture, QUESTIONS[name]), np.any if name in ANY else np.all
        return lambda arrays: combine([[ask(each) for each in arrays.qpos[:, at]] for at in places], axis=0)

    def _contact(self, *states: Any) -> Term:
        return self._touching(*(self._object(state) for state in states))

    def _touching(self, *things: Any) -> Term:
        names = [getattr(thing, "contact_geoms", thing) for thing in things]
        first, second = ([self._model.geom_name2id(name) for name in geoms] for geoms in names)
        bit = 1 << len(self.pairs)
        self.pairs.append((first, second))
        return lambda arrays: (arrays.touching & bit) > 0

    def _region(self, where: Any) -> tuple[int, np.ndarray, Term]:
        """A region's site, half its size, and where it is."""
        site = self._model.site_name2id(where.object_name)
        return site, self._env.object_sites_dict[where.object_name].size, lambda arrays: arrays.site_xpos[:, site]

    def _object(self, state: Any) -> Any:
        return self._env.get_object(state.object_name)

    def _body(self, state: Any) -> int:
        return self._env.obj_body_id[state.object_name]


def everywhere(arrays: Arrays) -> np.ndarray:
    return np.ones(len(arrays.qpos), bool)
