"""N rows of one LIBERO task in MuJoCo Warp's arrays, on a GPU all at once, on cores in turns.

robosuite's own env of the task (`scene.py`) begins each episode: it places objects and furniture and gives the state;
from then on the rows live in arrays here. An env step is 25 physics steps with the controller in between, recorded as
one graph. This is another physics than the benchmark's MuJoCo 3.3.2: positions are computed in single precision by
MuJoCo 3.10's rules.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mujoco
import mujoco_warp as mjw
import numpy as np
import warp as wp
from mujoco_warp._src import collision_driver
from mujoco_warp._src.types import OverflowType

from embodied.envs.libero.goals import Goal
from embodied.envs.libero.scene import SHOWN, SUBSTEPS, Scene
from embodied.envs.libero.warp_controller import JOINTS, launch, move_fingers, set_goals, set_torques
from embodied.envs.mujoco.rendering import ARRAYS as DRAWN

CONTACTS, CONSTRAINTS = 256, 1024  # room for each row
NOT_FINITE = -1
# Of MuJoCo's data, from step to step. MuJoCo Warp never computes where furniture is, which is fixed to the world.
CARRIED = ("qpos", "qvel", "qacc_warmstart", "geom_xpos", "geom_xmat")
PLACED = ("body_pos", "body_quat")  # of MuJoCo's model, where furniture stands
READ = dict.fromkeys(("qpos", "qvel", "xpos", "xquat", "site_xpos", *DRAWN))  # by states, experts and pictures
ARM = ("goal_pos", "goal_mat", "gripper", "posture", "seen_pos", "seen_mat", "is_fresh")  # the controller's arrays

BROADPHASE = wp.constant(int(OverflowType.BROADPHASE))
wp.config.log_level = wp.LOG_ERROR


@wp.kernel(enable_backward=False)
def find_contacts(
    num_contacts: wp.array1d[int],
    geoms: wp.array1d[wp.vec2i],
    worlds: wp.array1d[int],
    firsts: wp.array1d[int],  # of each geom: the pairs of which it is in the first part, as bits
    seconds: wp.array1d[int],
    touching: wp.array1d[int],
):
    at = wp.tid()
    if at < num_contacts[0]:
        a = geoms[at][0]
        b = geoms[at][1]
        if a >= 0 and b >= 0:
            wp.atomic_or(touching, worlds[at], (firsts[a] & seconds[b]) | (firsts[b] & seconds[a]))


@wp.kernel(enable_backward=False)
def note_overflow(room: int, num_pairs: wp.array1d[int], overflow: wp.array1d[int]):
    if num_pairs[0] > room:
        overflow[wp.tid()] = BROADPHASE


@wp.kernel(enable_backward=False)
def stay_in_room(room: int, num_pairs: wp.array1d[int]):
    num_pairs[0] = wp.min(num_pairs[0], room)


def narrowphase_in_room(m: Any, d: Any, context: Any) -> None:
    """mujoco-warp 3.10.0.3 reads beyond its arrays of pairs where more pairs may touch than there is room."""
    launch(note_overflow, d.nworld, d.naconmax, d.ncollision, d.overflow)
    launch(stay_in_room, 1, d.naconmax, d.ncollision)
    narrowphase(m, d, context)


narrowphase, collision_driver._narrowphase = collision_driver._narrowphase, narrowphase_in_room


def model_of(model: mujoco.MjModel, size: int) -> mjw.Model:
    try:
        return mjw.put_model(model, batch_sizes=dict.fromkeys(PLACED, size))
    except NotImplementedError:  # two boxes with a margin, as the microwave's: only MuJoCo's older detection takes them
        model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_NATIVECCD | mujoco.mjtDisableBit.mjDSBL_MULTICCD)
        return mjw.put_model(model, batch_sizes=dict.fromkeys(PLACED, size))


class Batch:
    def __init__(self, scene: Scene, size: int, device: str) -> None:
        self.scene, self.size = scene, size
        model, robot = scene.model, scene.robot
        if [*robot._ref_joint_pos_indexes] != [*range(JOINTS)] or model.nu != JOINTS + 2:
            raise AssertionError(f"{scene.files.name}: the arm's joints are not the first {JOINTS} of the model")
        self.goal = Goal(scene.env, scene.files.name)
        self.device = wp.get_device(device)
        with wp.ScopedDevice(self.device):
            self.m = model_of(model, size)
            self.m.opt.warn_overflow = False  # `step` looks
            nothing = mujoco.MjData(model)  # in the scene's own, objects without a place may touch in too many points
            self.d = mjw.put_data(model, nothing, nworld=size, nconmax=CONTACTS, njmax=CONSTRAINTS)
            self.goal_pos, self.seen_pos = wp.zeros(size, dtype=wp.vec3d), wp.zeros(size, dtype=wp.vec3d)
            self.goal_mat, self.seen_mat = wp.zeros(size, dtype=wp.mat33d), wp.zeros(size, dtype=wp.mat33d)
            self.is_fresh, self.touching = wp.zeros(size, dtype=int), wp.zeros(size, dtype=int)
            self.posture, self.actions, self.gripper = (
                wp.zeros((size, width), dtype=wp.float64) for width in (JOINTS, JOINTS, 2)
            )
            low, high = model.actuator_ctrlrange[JOINTS:].T
            self._range = wp.array(np.stack([low + high, high - low], axis=1) / 2, dtype=wp.float64)
            self._limits = wp.array(robot.torque_limits[1], dtype=wp.float64)
            self._bits = [wp.array(bits, dtype=int) for bits in self.goal.bits(model.ngeom)]
            self.shown = {name: wp.clone(getattr(self.d, name)) for name in READ}
            self._before = {name: wp.clone(array) for name, array in self._arrays().items() if name not in PLACED}
            if self.device.is_cuda:
                self._advance()  # loads the kernels
            with wp.ScopedCapture() as capture:
                self._advance()  # recorded
        self._graph = capture.graph
        self._host: dict[str, np.ndarray] = {}

    # Rows begin and move between batches as dicts of arrays.

    def _arrays(self) -> dict[str, wp.array]:
        return (
            {name: getattr(self.d, name) for name in CARRIED}
            | {name: getattr(self.m, name) for name in PLACED}
            | {name: getattr(self, name) for name in ARM}
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

    def step(self, slots: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """One env step of these rows: success, and what is wrong (`in_words`; 0: nothing). A row whose contacts or
        constraints have no room, or whose numbers are not finite, stays where it was. Other rows may move, too."""
        whole = np.zeros((self.size, JOINTS))
        whole[slots] = actions
        self.actions.assign(whole)
        with wp.ScopedDevice(self.device):
            wp.capture_launch(self._graph)
        self._host.clear()
        finite = np.isfinite(self.d.qpos.numpy()).all(axis=1) & np.isfinite(self.d.qvel.numpy()).all(axis=1)
        wrong = np.where(finite, self.d.overflow.numpy(), NOT_FINITE)
        success = self.success() & (wrong == 0)
        if wrong.any():
            back = np.flatnonzero(wrong)
            self.put(back, {name: array.numpy()[back] for name, array in self._before.items()})
        return success[slots], wrong[slots]

    def success(self) -> np.ndarray:
        arrays = SimpleNamespace(
            **{name: getattr(self.d, name).numpy() for name in ("qpos", "xpos", "site_xpos", "site_xmat")},
            touching=self.touching.numpy(),
        )
        return self.goal.reached(arrays)

    def _advance(self) -> None:
        d, arrays = self.d, self._arrays()
        for name, array in self._before.items():
            wp.copy(array, arrays[name])
        d.overflow.zero_()
        for substep in range(SUBSTEPS):
            mjw.step1(self.m, d)
            self.control(substep == 0)
            mjw.step2(self.m, d)
            if substep == SHOWN:
                for name, array in self.shown.items():
                    wp.copy(array, getattr(d, name))
        self.touching.zero_()
        contacts = d.nacon, d.contact.geom, d.contact.worldid
        launch(find_contacts, d.naconmax, *contacts, *self._bits, self.touching)

    def control(self, begins: bool) -> None:
        """Set the torques of the arm and the fingers' targets."""
        m, d, hand = self.m, self.d, self.scene.robot.eef_site_id
        goals, place = (self.goal_pos, self.goal_mat), (d.site_xpos, d.site_xmat)
        if begins:
            seen = self.seen_pos, self.seen_mat
            launch(set_goals, self.size, self.actions, hand, *place, self.is_fresh, *goals, *seen)
        inertia = m.M_rowadr, m.M_rownnz, m.M_colind, d.qpos, d.qvel, d.M, d.qfrc_bias
        arm = hand, self._limits, self.posture
        launch(set_torques, self.size, *arm, *inertia, d.xanchor, d.xaxis, *place, *goals, d.ctrl)
        launch(move_fingers, (self.size, 2), self.actions, self._range, self.gripper, d.ctrl)

    def __getitem__(self, name: str) -> np.ndarray:
        """[size, ...]: an array of the rows' last observations, read once per env step."""
        if name not in self._host:
            self._host[name] = self.shown[name].numpy().astype(np.float64)
        return self._host[name]


def in_words(wrong: int) -> str:
    """Why a row could not go on."""
    if wrong == NOT_FINITE:
        return "MuJoCo Warp computed numbers that are not finite"
    return f"MuJoCo Warp had no room: {OverflowType(wrong).name or wrong}"


class InTurns:
    """Rows that pass through a batch of one row in turns. On cores this is faster than all at once, and no row depends
    on how many there are."""

    def __init__(self, one: Batch, size: int) -> None:
        self.one, self.scene, self.size = one, one.scene, size
        self._rows = {name: values.repeat(size, 0) for name, values in one.rows(np.zeros(1, int)).items()}

    def rows(self, slots: np.ndarray) -> dict[str, np.ndarray]:
        return {name: values[slots] for name, values in self._rows.items()}

    def put(self, slots: np.ndarray, rows: dict[str, np.ndarray]) -> None:
        for name, values in rows.items():
            self._rows[name][slots] = values.reshape(len(slots), *self._rows[name].shape[1:])

    def step(self, slots: np.ndarray, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        first, success, wrong = np.zeros(1, int), np.zeros(len(slots), bool), np.zeros(len(slots), int)
        for at, slot in enumerate(slots[:, None]):
            self.one.put(first, self.rows(slot))
            success[at : at + 1], wrong[at : at + 1] = self.one.step(first, actions[at])
            self.put(slot, self.one.rows(first))
        return success, wrong

    def __getitem__(self, name: str) -> np.ndarray:
        return self._rows[f"shown_{name}"].astype(np.float64)


def begun(scene: Scene, row: Any) -> dict[str, np.ndarray]:
    """A row as robosuite's env has just begun it, for `Batch.put`."""
    data, arm = row.data._data, scene.robot.controller
    hands = {
        "goal_pos": arm.goal_pos,
        "goal_mat": arm.goal_ori,
        "gripper": np.broadcast_to(scene.robot.gripper.current_action, 2),
        "posture": arm.initial_joint,
        "seen_pos": arm.ee_pos,
        "seen_mat": arm.ee_ori_mat,
        "is_fresh": np.int32(not arm.new_update),
    }
    placed = {name: getattr(scene.model, name) for name in PLACED}
    read = {f"shown_{name}": getattr(data, name) for name in READ}
    rows = {name: getattr(data, name) for name in CARRIED} | placed | hands | read
    return {name: np.array(value)[None] for name, value in rows.items()}


class Row:
    """An env row in a batch, as experts and painters see it (`scene.SceneRow`)."""

    def __init__(self, batch: Batch | InTurns, slot: int) -> None:
        self.batch, self.slot, self.scene = batch, slot, batch.scene
        self.data = SimpleNamespace(_data=self)

    @property
    def shown(self) -> Row:
        return self

    def __getitem__(self, name: str) -> np.ndarray:
        if name == "site_rgba":
            return self.scene.model.site_rgba
        array = self.batch[name][self.slot]
        return array.reshape(len(array), 9) if name.endswith("xmat") else array  # as MuJoCo has it

    def __getattr__(self, name: str) -> np.ndarray:
        if name in READ:
            return self[name]
        raise AttributeError(name)
