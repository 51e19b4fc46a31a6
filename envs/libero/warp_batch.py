"""N rows of one LIBERO task in MuJoCo Warp's arrays, on a GPU or on cores.

robosuite's own env of the task (`scene.py`) begins each episode: it places objects and furniture and gives the state;
from then on the rows live in arrays here. An env step is 25 physics steps with the controller in between, on a GPU one
CUDA graph. This is another physics than the benchmark's MuJoCo 3.3.2: positions are computed in single precision by
MuJoCo 3.10's rules.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import warp as wp

from embodied.envs.libero.goals import Goal
from embodied.envs.libero.scene import SHOWN, SUBSTEPS, Scene
from embodied.envs.libero.warp_controller import JOINTS, control, find_contacts, launch

CONTACTS, CONSTRAINTS = 256, 1024  # room for each row
CARRIED = ("qpos", "qvel", "qacc_warmstart")  # of MuJoCo's data, from step to step
PLACED = ("body_pos", "body_quat")  # of MuJoCo's model, where furniture stands
READ = ("qpos", "qvel", "xpos", "xquat", "site_xpos", "site_xmat", "geom_xpos", "geom_xmat")  # by states and experts
DRAWN = ("geom_xpos", "geom_xmat", "cam_xpos", "cam_xmat", "light_xpos", "light_xdir")
ARM_ARRAYS = ("goal_pos", "goal_mat", "gripper", "posture", "seen_pos", "seen_mat", "is_fresh")  # of the controller

wp.config.quiet = True


class Batch:
    def __init__(self, scene: Scene, size: int) -> None:
        self.scene, self.size = scene, size
        model = scene.model
        robot = scene.robot
        if [*robot._ref_joint_pos_indexes] != [*range(JOINTS)] or model.nu != JOINTS + 2:
            raise AssertionError(f"{scene.files.name}: the arm's joints are not the first {JOINTS} of the model")
        self.goal = Goal(scene.env, scene.files.name)
        self.m = mjw.put_model(model, batch_sizes=dict.fromkeys(PLACED, size))
        self.m.opt.warn_overflow = False
        empty = mujoco.MjData(
            model
        )  # the scene's own may have more contacts than there is room: objects not yet placed
        self.d = mjw.put_data(model, empty, nworld=size, nconmax=CONTACTS, njmax=CONSTRAINTS)
        zeros = lambda shape, dtype: wp.zeros(shape, dtype=dtype)  # noqa: E731
        self.goal_pos, self.goal_mat = zeros(size, wp.vec3d), zeros(size, wp.mat33d)
        self.seen_pos, self.seen_mat = zeros(size, wp.vec3d), zeros(size, wp.mat33d)
        self.is_fresh = zeros(size, wp.int32)
        self.gripper, self.posture = zeros((size, 2), wp.float64), zeros((size, JOINTS), wp.float64)
        self.actions = zeros((size, JOINTS), wp.float64)
        self.touching = zeros(size, wp.int32)
        middle = model.actuator_ctrlrange.mean(axis=1)[JOINTS:]
        half = np.ptp(model.actuator_ctrlrange, axis=1)[JOINTS:] / 2
        self._grip = wp.array(np.stack([middle, half], axis=1), dtype=wp.float64)
        self._limits = wp.array(robot.torque_limits[1], dtype=wp.float64)
        self._bits = [wp.array(bits, dtype=wp.int32) for bits in self._pair_bits(model.ngeom)]
        self.shown = {name: wp.clone(getattr(self.d, name)) for name in dict.fromkeys(READ + DRAWN)}
        self._host: dict[str, np.ndarray] = {}
        self._graph: Any = None

    def _pair_bits(self, num_geoms: int) -> np.ndarray:
        """int [2, geoms]: in which parts of which pairs a geom is."""
        bits = np.zeros((2, num_geoms), np.int32)
        for at, pair in enumerate(self.goal.pairs):
            for part, geoms in enumerate(pair):
                bits[part, geoms] |= 1 << at
        return bits

    # Rows begin and move between batches as dicts of arrays.

    def _arrays(self) -> dict[str, wp.array]:
        return (
            {name: getattr(self.d, name) for name in CARRIED}
            | {name: getattr(self.m, name) for name in PLACED}
            | {name: getattr(self, name) for name in ARM_ARRAYS}
            | {f"shown_{name}": array for name, array in self.shown.items()}
        )

    def rows(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        """Everything that these rows are."""
        return {name: array.numpy()[slots].copy() for name, array in self._arrays().items()}

    def put(self, slots: np.ndarray, rows: dict[str, np.ndarray]) -> None:
        arrays = self._arrays()
        for name, values in rows.items():
            whole = arrays[name].numpy()
            whole[slots] = values.reshape(len(slots), *whole.shape[1:])
            arrays[name].assign(whole)
        self._host.clear()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One env step: success, and whether a row has overflowed or exploded, bool [size] each."""
        self.actions.assign(np.ascontiguousarray(actions, np.float64))
        self.d.overflow.zero_()
        if self._graph is not None:
            wp.capture_launch(self._graph)
        elif wp.get_device().is_cuda:
            self._advance()  # loads the kernels; the capture only records
            with wp.ScopedCapture() as capture:
                self._advance()
            self._graph = capture.graph
        else:
            self._advance()
        self._host.clear()
        qpos = self.d.qpos.numpy()
        broken = (self.d.overflow.numpy() != 0) | ~np.isfinite(qpos).all(axis=1)
        return self.success(), broken

    def success(self) -> np.ndarray:
        arrays = SimpleNamespace(
            **{name: getattr(self.d, name).numpy() for name in ("qpos", "xpos", "site_xpos", "site_xmat")},
            touching=self.touching.numpy(),
        )
        return self.goal.reached(arrays)

    def _advance(self) -> None:
        for substep in range(SUBSTEPS):
            mjw.step1(self.m, self.d)
            self.control(substep == 0)
            mjw.step2(self.m, self.d)
            if substep == SHOWN:
                for name, array in self.shown.items():
                    wp.copy(array, getattr(self.d, name))
        self.touch()

    def touch(self) -> None:
        """Find which pairs of geoms are in contact."""
        contacts = self.d.contact
        self.touching.zero_()
        arrays = self.d.nacon, contacts.geom, contacts.worldid, *self._bits, self.touching
        launch(find_contacts, self.d.naconmax, *arrays)

    def control(self, begins: bool) -> None:
        """Set the torques of the arm and the fingers' targets."""
        m, d, hand = self.m, self.d, self.scene.robot.eef_site_id
        arm = self.actions, hand, self._limits, self._grip, self.posture, self.seen_pos, self.seen_mat, self.is_fresh
        inertia = m.M_rowadr, m.M_rownnz, m.M_colind
        now = d.qpos, d.qvel, d.M, d.qfrc_bias, d.xanchor, d.xaxis, d.site_xpos, d.site_xmat
        launch(control, self.size, begins, *arm, *inertia, *now, self.goal_pos, self.goal_mat, self.gripper, d.ctrl)

    def host(self, name: str) -> np.ndarray:
        """[size, ...]: an array of the rows' last observations, read once per env step."""
        if name not in self._host:
            self._host[name] = self.shown[name].numpy().astype(np.float64)
        return self._host[name]


def begun(scene: Scene, row: Any) -> dict[str, np.ndarray]:
    """A row as robosuite's env has just begun it, for `Batch.put`."""
    data, arm = row.data._data, scene.robot.controller
    read = {f"shown_{name}": getattr(data, name) for name in dict.fromkeys(READ + DRAWN)}
    carried = {name: getattr(data, name) for name in CARRIED}
    placed = {name: getattr(scene.model, name) for name in PLACED}
    hands = {
        "goal_pos": arm.goal_pos,
        "goal_mat": arm.goal_ori,
        "gripper": np.broadcast_to(scene.robot.gripper.current_action, 2),
        "posture": arm.initial_joint,
        "seen_pos": arm.ee_pos,
        "seen_mat": arm.ee_ori_mat,
        "is_fresh": np.int32(not arm.new_update),
    }
    rows = carried | placed | hands | read
    return {name: np.array(value)[None] for name, value in rows.items()}


class Row:
    """An env row in a batch, as readers of states and experts see it (`scene.SceneRow`)."""

    def __init__(self, batch: Batch, slot: int) -> None:
        self.batch, self.slot, self.scene = batch, slot, batch.scene
        self.data = SimpleNamespace(_data=View(self))

    @property
    def shown(self) -> View:
        return self.data._data


class View:
    """The arrays of one row by name, as attributes or items."""

    def __init__(self, row: Row) -> None:
        self._row = row

    def __getattr__(self, name: str) -> np.ndarray:
        return self._row.batch.host(name)[self._row.slot]

    __getitem__ = __getattr__
