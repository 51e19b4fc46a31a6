"""N PhysX CPU scenes behind the buffer interface of SAPIEN's GPU physics system.

ManiSkill's batched code reads and writes whole arrays of poses and joint positions ("cuda_rigid_body_data" and so on),
and calls the physics system to fetch them from the simulator or apply them to it. Here the arrays are ordinary memory,
and fetch and apply copy row by row. Only changed rows are applied, and after a step only moving values that are read
are fetched: see `watch`, `fetch_only_read` and `refresh`. A scene takes all physics steps of an env step in sequence,
while its data are in the core's cache: see `step`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import sapien
import torch

POSE, TWIST = slice(0, 7), slice(7, 13)


class Buffer:
    """An array with ManiSkill's accessor; `readers`, if set, collects (row read, True if also its velocity)."""

    def __init__(self, rows: int, width: int) -> None:
        self.np = np.zeros((rows, width), np.float32)
        self.applied = np.zeros_like(self.np)  # last values in common with the simulator
        self.tensor = torch.from_numpy(self.np)
        self.readers: set[tuple[int, bool]] | None = None

    def torch(self) -> torch.Tensor:
        if self.readers is None:
            return self.tensor
        return Watched.over(self)

    def changed(self) -> np.ndarray:
        """Rows that were written since the last apply or fetch."""
        rows = np.flatnonzero(self.differs().any(axis=1))
        self.applied[rows] = self.np[rows]
        return rows

    def differs(self) -> np.ndarray:
        """Compared bit by bit, so that NaN (the mark of values not fetched) equals itself."""
        return self.np.view(np.int32) != self.applied.view(np.int32)


class Watched(torch.Tensor):
    """A view of the body buffer that records the rows that are read, and whether velocities are read."""

    buffer: Buffer

    @classmethod
    def over(cls, buffer: Buffer) -> Watched:
        view = buffer.tensor.as_subclass(cls)
        view.buffer = buffer
        return view

    def __getitem__(self, index: Any) -> torch.Tensor:
        rows, columns = index if isinstance(index, tuple) else (index, slice(None))
        only_pose = isinstance(columns, slice) and columns.stop is not None and columns.stop <= POSE.stop
        if isinstance(rows, torch.Tensor):
            self.buffer.readers.update((row, not only_pose) for row in rows.reshape(-1).tolist())
        return self.as_subclass(torch.Tensor)[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.as_subclass(torch.Tensor)[index] = value


class BatchedCpuPhysics:
    """Has the interface of `sapien.physx.PhysxGpuSystem`; `scenes[i]` is env i with its own PhysxCpuSystem."""

    def __init__(self, scenes: list[sapien.Scene]) -> None:
        self.scenes = scenes
        self.systems = [scene.physx_system for scene in scenes]
        self.owed = 0  # postponed steps of the active envs
        self.puts_off = True  # False: take every step at once, for tasks with code between steps

    @property
    def timestep(self) -> float:
        return self.systems[0].timestep

    @timestep.setter
    def timestep(self, value: float) -> None:
        self.catch_up()
        for system in self.systems:
            system.timestep = value

    def get_scene_offset(self, scene: sapien.Scene) -> np.ndarray:
        return np.zeros(3, np.float32)

    def gpu_init(self) -> None:
        """Number all bodies: free ones of all envs first, then links."""
        self.bodies = [body for system in self.systems for body in system.rigid_dynamic_components]
        self.num_free = len(self.bodies)
        self.articulations: list[Any] = []
        self.env_of: list[int] = [i for i, system in enumerate(self.systems) for _ in system.rigid_dynamic_components]
        seen: dict[int, int] = {}
        self.articulation_env: list[int] = []
        for env, system in enumerate(self.systems):
            for link in system.articulation_link_components:
                self.bodies.append(link)
                self.env_of.append(env)
                if id(link.articulation) not in seen:
                    seen[id(link.articulation)] = len(self.articulations)
                    self.articulations.append(link.articulation)
                    self.articulation_env.append(env)
        self.body_index = {id(body): row for row, body in enumerate(self.bodies)}
        self.articulation_index = seen
        self.roots = [self.body_index[id(articulation.root)] for articulation in self.articulations]
        self.entities = [body.entity for body in self.bodies]
        self.dof = [articulation.dof for articulation in self.articulations]
        joints = [articulation.active_joints for articulation in self.articulations]
        self.position_setters, self.velocity_setters = (
            [[getattr(joint, f"set_drive_{name}") for joint in of_row] for of_row in joints]
            for name in ("target", "velocity_target")
        )
        width = max([1, *self.dof])
        self.cuda_rigid_body_data = Buffer(len(self.bodies), 13)
        for name in ("qpos", "qvel", "qacc", "qf", "target_qpos", "target_qvel"):
            setattr(self, f"cuda_articulation_{name}", Buffer(len(self.articulations), width))
        for name in ("target_qpos", "target_qvel"):
            self._buffer(name).applied[:] = np.nan  # the simulator's drive targets are unknown
        self.is_kinematic = [bool(body.kinematic) for body in self.bodies[: self.num_free]]
        self.rows_of: list[list[int]] = [[] for _ in self.systems]  # body rows of each env
        for row, env in enumerate(self.env_of):
            self.rows_of[env].append(row)
        data = self.cuda_rigid_body_data.np
        self.velocities = [(data[row, 7:10], data[row, 10:]) for row in range(len(data))]
        self.posed = self.moving = self.all_rows = list(range(len(self.bodies)))
        self.unread = np.zeros_like(data, bool)
        self._contacts: dict[int, list] = {}
        self._advance_all()
        self.refresh(range(len(self.systems)))

    def advance_only(self, envs: list[int]) -> None:
        """From now on `step` advances only these envs; other envs stand still, and their values are not fetched."""
        if envs == self.active:
            return
        self.catch_up()
        self.active, chosen = envs, set(envs)
        self._posed_now, self._moving_now = (
            [row for row in rows if self.env_of[row] in chosen] for rows in (self.posed, self.moving)
        )
        self._articulations_now = [row for row, env in enumerate(self.articulation_env) if env in chosen]

    def _advance_all(self) -> None:
        self.catch_up()
        self.active: list[int] = []
        self.advance_only(list(range(len(self.systems))))

    def watch(self) -> None:
        """Begin to record reads."""
        self.cuda_rigid_body_data.readers = set()

    def fetch_only_read(self) -> None:
        """From now on a step fetches only moving values that were read before. Other values are NaN, so that later
        reads are noticed."""
        noted = self.cuda_rigid_body_data.readers or set()
        self.cuda_rigid_body_data.readers = None
        still = {row for row in range(self.num_free) if self.is_kinematic[row]}
        still |= {
            root for root, one in zip(self.roots, self.articulations, strict=True) if one.joints[0].type == "fixed"
        }
        posed = {row for row, _ in noted} | set(self.roots) | set(range(self.num_free))
        moving = {row for row, velocity in noted if velocity}
        self.unread[:] = True
        self.unread[sorted(posed), POSE] = False
        self.unread[sorted(moving | still), TWIST] = False
        self.posed, self.moving = sorted(posed - still), sorted(moving - still)
        self._advance_all()
        self._hide(self.all_rows)

    def refresh(self, envs: Iterable[int]) -> None:
        """Fetch all values of these envs, also values that steps omit: before and after writes."""
        chosen = set(envs)
        rows = [row for env in chosen for row in self.rows_of[env]]
        self._fetch_poses(rows, chosen)
        self._fetch_velocities(rows)
        articulations = [row for row, env in enumerate(self.articulation_env) if env in chosen]
        self._fetch_joints("qpos", articulations)
        self._fetch_joints("qvel", articulations)

    def hide_unread(self, envs: Iterable[int]) -> None:
        """Set values that steps do not fetch to NaN again."""
        self._hide([row for env in envs for row in self.rows_of[env]])

    def _hide(self, rows: list[int]) -> None:
        for array in (self.cuda_rigid_body_data.np, self.cuda_rigid_body_data.applied):
            array[rows] = np.where(self.unread[rows], np.nan, array[rows])

    # fetch: simulator -> arrays

    def gpu_fetch_rigid_dynamic_data(self) -> None:
        """Poses of all bodies, links as well."""
        self._fetch_poses(self._posed_now, self.active)
        self._fetch_velocities(self._moving_now)

    def gpu_fetch_articulation_link_pose(self) -> None:
        """Fetched with the bodies; if all bodies are links, ManiSkill does not request those."""
        if not self.num_free:
            self.gpu_fetch_rigid_dynamic_data()

    def gpu_fetch_articulation_link_velocity(self) -> None:
        """Fetched with the bodies."""

    def gpu_update_articulation_kinematics(self) -> None:
        """The CPU's articulations follow their joints at once."""

    def gpu_fetch_articulation_qpos(self) -> None:
        self._fetch_joints("qpos", self._articulations_now)

    def gpu_fetch_articulation_qvel(self) -> None:
        self._fetch_joints("qvel", self._articulations_now)

    def gpu_fetch_articulation_qacc(self) -> None:
        """Nothing in the allowed tasks reads accelerations."""

    def gpu_fetch_articulation_target_qpos(self) -> None:
        """Nothing else writes targets."""

    def gpu_fetch_articulation_target_qvel(self) -> None:
        """Nothing else writes targets."""

    def _fetch_joints(self, name: str, rows: list[int]) -> None:
        self.catch_up()
        buffer = self._buffer(name)
        for row in rows:
            buffer.np[row, : self.dof[row]] = getattr(self.articulations[row], name)
        buffer.applied[rows] = buffer.np[rows]

    def _fetch_poses(self, rows: list[int], envs: Iterable[int]) -> None:
        self.catch_up()
        if rows:
            # A pose's state is its seven numbers, in one call; `p` and `q` make an array each.
            poses = np.array([self.entities[row].pose.__getstate__() for row in rows], np.float32)
            for array in (self.cuda_rigid_body_data.np, self.cuda_rigid_body_data.applied):
                array[rows, POSE] = poses
        for env in envs:
            self._contacts.pop(env, None)

    def _fetch_velocities(self, rows: list[int]) -> None:
        self.catch_up()
        for row in rows:
            body, (linear, angular) = self.bodies[row], self.velocities[row]
            linear[:] = body.linear_velocity
            angular[:] = body.angular_velocity
        self.cuda_rigid_body_data.applied[rows, TWIST] = self.cuda_rigid_body_data.np[rows, TWIST]

    # apply: arrays -> simulator

    def gpu_apply_rigid_dynamic_data(self) -> None:
        self.catch_up()
        buffer = self.cuda_rigid_body_data
        for row in np.flatnonzero(buffer.differs()[: self.num_free].any(axis=1)):
            values, body = buffer.np[row], self.bodies[row]
            self.entities[row].set_pose(sapien.Pose(values[:3], values[3:7]))
            if not self.is_kinematic[row]:
                body.set_linear_velocity(values[7:10])
                body.set_angular_velocity(values[10:])
            buffer.applied[row] = values

    def gpu_apply_articulation_root_pose(self) -> None:
        self.catch_up()
        buffer = self.cuda_rigid_body_data
        changed = buffer.differs()[self.roots, POSE].any(axis=1)
        for articulation, row, is_changed in zip(self.articulations, self.roots, changed.tolist(), strict=True):
            if is_changed:
                articulation.set_root_pose(sapien.Pose(buffer.np[row, :3], buffer.np[row, 3:7]))
                buffer.applied[row, POSE] = buffer.np[row, POSE]

    def gpu_apply_articulation_root_velocity(self) -> None:
        self.catch_up()
        buffer = self.cuda_rigid_body_data
        changed = buffer.differs()[self.roots, TWIST].any(axis=1)
        for articulation, row, is_changed in zip(self.articulations, self.roots, changed.tolist(), strict=True):
            if is_changed:
                articulation.set_root_linear_velocity(buffer.np[row, 7:10])
                articulation.set_root_angular_velocity(buffer.np[row, 10:])
                buffer.applied[row, TWIST] = buffer.np[row, TWIST]

    def gpu_apply_articulation_qpos(self) -> None:
        self.catch_up()
        for row in self.cuda_articulation_qpos.changed():
            self.articulations[row].set_qpos(self.cuda_articulation_qpos.np[row, : self.dof[row]])

    def gpu_apply_articulation_qvel(self) -> None:
        self.catch_up()
        for row in self.cuda_articulation_qvel.changed():
            self.articulations[row].set_qvel(self.cuda_articulation_qvel.np[row, : self.dof[row]])

    def gpu_apply_articulation_qf(self) -> None:
        self.catch_up()
        for row in self.cuda_articulation_qf.changed():
            self.articulations[row].set_qf(self.cuda_articulation_qf.np[row, : self.dof[row]])

    def gpu_apply_articulation_target_position(self) -> None:
        self._apply_targets(self.cuda_articulation_target_qpos, self.position_setters)

    def gpu_apply_articulation_target_velocity(self) -> None:
        self._apply_targets(self.cuda_articulation_target_qvel, self.velocity_setters)

    def _apply_targets(self, buffer: Buffer, setters: list[list[Callable[[float], None]]]) -> None:
        changed = buffer.differs()
        if not changed.any():
            return
        self.catch_up()
        values = buffer.np.tolist()
        for row, joint in zip(*map(np.ndarray.tolist, np.nonzero(changed)), strict=True):
            if joint < self.dof[row]:
                setters[row][joint](values[row][joint])
        buffer.applied[:] = buffer.np

    # stepping and contacts

    def step(self) -> None:
        """Postpone a step until the simulator's state is next read or written."""
        self.gpu_apply_articulation_target_position()
        self.gpu_apply_articulation_target_velocity()
        self.owed += 1
        if not self.puts_off:
            self.catch_up()

    def catch_up(self) -> None:
        """Take the postponed steps, env by env."""
        steps, self.owed = range(self.owed), 0
        if steps:
            for env in self.active:
                step = self.systems[env].step
                for _ in steps:
                    step()

    def get_contacts(self) -> list:
        self.catch_up()
        return [contact for system in self.systems for contact in system.get_contacts()]

    def gpu_create_contact_pair_impulse_query(self, pairs: list[tuple[Any, Any]]) -> PairImpulses:
        return PairImpulses(pairs, [self.env_of[self.body_index[id(a)]] for a, _ in pairs])

    def gpu_query_contact_pair_impulses(self, query: PairImpulses) -> None:
        self.catch_up()
        query.cuda_impulses.np[:] = 0
        for i, ((a, b), env) in enumerate(zip(query.pairs, query.envs, strict=True)):
            if env not in self._contacts:
                self._contacts[env] = self.systems[env].get_contacts()
            query.cuda_impulses.np[i] = impulse_between(self._contacts[env], a, b)

    def gpu_create_contact_body_impulse_query(self, bodies: list[Any]) -> None:
        raise NotImplementedError("net contact forces are not offered by the batched CPU physics; use env.backend=cpu")

    def _buffer(self, name: str) -> Buffer:
        return getattr(self, f"cuda_articulation_{name}")


class PairImpulses:
    """ManiSkill's query for the impulse between two bodies in every env."""

    def __init__(self, pairs: list[tuple[Any, Any]], envs: list[int]) -> None:
        self.pairs, self.envs = pairs, envs
        self.cuda_impulses = Buffer(len(pairs), 3)


def impulse_between(contacts: list, a: Any, b: Any) -> np.ndarray:
    """The summed impulse of b on a over all contact points."""
    total = np.zeros(3, np.float32)
    for contact in contacts:
        first, second = contact.bodies
        if first == a and second == b:
            total += sum((point.impulse for point in contact.points), np.zeros(3, np.float32))
        elif first == b and second == a:
            total -= sum((point.impulse for point in contact.points), np.zeros(3, np.float32))
    return total


class Rows(torch.Tensor):
    """The rows to reset, as an index, in place of ManiSkill's mask: an index that is a mask makes the host wait for the
    GPU, which counts its rows."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    rows: np.ndarray
    end: float

    @classmethod
    def of(cls, rows: np.ndarray, device: torch.device) -> Rows:
        index = torch.as_tensor(rows, device=device).as_subclass(cls)
        index.rows = rows
        index.end = rows[-1] + 1 if len(rows) and (np.diff(rows) > 0).all() else math.inf  # of rows in order
        return index

    def __getitem__(self, scenes: Any) -> torch.Tensor:
        """The places of the rows in a list of scenes, such as an object's."""
        if not hasattr(scenes, "on_cpu"):
            scenes.on_cpu = scenes.cpu().numpy()
            scenes.in_order = np.array_equal(scenes.on_cpu, np.arange(scenes.on_cpu.size))
        if scenes.in_order and self.end <= scenes.on_cpu.size:  # one in each scene: most objects
            return self.as_subclass(torch.Tensor)
        return torch.as_tensor(np.flatnonzero(np.isin(scenes.on_cpu, self.rows)), device=self.device)

    def __setitem__(self, *_: Any) -> None:
        raise NotImplementedError("rows that are drawn together cannot be chosen again")
