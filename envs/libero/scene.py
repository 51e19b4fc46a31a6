"""One LIBERO task's simulation, shared by all env rows of a process that play this task.

MuJoCo's model (meshes, textures: hundreds of megabytes) and robosuite's objects exist once per task; a row owns only
what differs between rows: MuJoCo's data, the state of the arm controller and of the gripper, and the positions of
furniture. `attach` swaps these in. Steps are bitwise equal to LIBERO's own, in less time: positions and velocities are
evaluated once per physics step instead of three times, and observations only when they are needed.
"""

from __future__ import annotations

import traceback
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError, EmbodiedError, in_a_line
from embodied.envs.libero.config import SETTLING_STEPS
from embodied.envs.libero.tasks import TaskFiles, check_buildable
from embodied.envs.mujoco.env import Draws
from embodied.envs.mujoco.loading import RESET_DEPENDENT, quiet, simulator

SUBSTEPS = 25  # physics steps of 2 ms per env step
SHOWN = 23  # LIBERO's observations show the state after this physics step of the env step (counted from 0)
ATTEMPTS = 200  # to place all objects without overlap
NO_OP = np.array([0, 0, 0, 0, 0, 0, -1.0])  # stand still, gripper open
STILL = np.zeros(7)  # neither arm nor gripper moves


class SceneRow:
    """The part of a scene that belongs to one env row."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        scene.rows.add(self)
        self.data = scene.new_data()
        self.robot = dict(scene.robot.__dict__)
        self.gripper = np.zeros(scene.robot.gripper.dof)
        self.model = {name: array.copy() for name, array in scene.pristine.items()}
        self.shown: dict[str, np.ndarray] = {}  # the arrays an observation is made of


class Scene:
    def __init__(self, files: TaskFiles, shown: tuple[str, ...], keep_files: bool = True) -> None:
        """`shown` names the arrays of MuJoCo's data (or model) to keep for observations. `keep_files`: MuJoCo may cache
        meshes and textures for the next model."""
        self.files = files
        self.shown = shown
        self._mujoco, new_env = simulator()
        self.env = build(files, partial(new_env, keep_files=keep_files))
        self.env.hard_reset = False
        self.sim, self.robot = self.env.sim, self.env.robots[0]
        self.model = self.sim.model._model
        self.pristine = self.sim.pristine
        self.rows: weakref.WeakSet[SceneRow] = weakref.WeakSet()
        self._attached: weakref.ref[SceneRow] | None = None

    def new_data(self) -> Any:
        from robosuite.utils.binding_utils import MjData

        return MjData(self.sim.model)

    def attach(self, row: SceneRow) -> None:
        """Switch robosuite's objects to this row's."""
        before = self._attached() if self._attached else None
        if before is row:
            return
        if before is not None:
            before.robot = dict(self.robot.__dict__)
            before.gripper = self.robot.gripper.current_action
            before.model = {name: getattr(self.model, name).copy() for name in RESET_DEPENDENT}
        self.sim.data = row.data
        self.robot.__dict__.update(row.robot)
        self.robot.gripper.current_action = row.gripper
        for name, array in row.model.items():
            getattr(self.model, name)[:] = array
        self._attached = weakref.ref(row)

    def begin(
        self,
        row: SceneRow,
        seed: int,
        state: np.ndarray | None,
        settling_steps: int = SETTLING_STEPS,
        gripper: str = "open",
    ) -> bool:
        """Start an episode from a stored state, or from a placement drawn from `seed`, and let things settle; returns
        whether it is a success.

        Furniture is always placed from `seed`: stored states do not hold it. What follows is LIBERO's hard reset
        (forward passes included: they leave traces in the solver) without building the model anew.
        """
        self.attach(row)
        for name, array in self.pristine.items():
            getattr(self.model, name)[:] = array
        self.robot.gripper.current_action = np.zeros(self.robot.gripper.dof)
        self.sim.reset()
        self.sim.forward()
        self.sim.forward()  # the benchmark's, when it makes its renderer
        with Draws(seed).used():
            self._place()
        self.sim.forward()
        self.env.visualize(vis_settings=dict.fromkeys(self.env._visualizations, False))
        if state is not None:
            self._check_width(state)
            self.sim.set_state_from_flattened(state)
            self.sim.forward()
            self.env._post_process()
        success = False
        self._show(row)
        for _ in range(settling_steps):
            success = self.step(row, NO_OP if gripper == "open" else STILL)
        return success

    def step(self, row: SceneRow, action: np.ndarray) -> bool:
        """One env step; returns whether the task is solved now. Bitwise equal to LIBERO's own."""
        self.attach(row)
        mujoco, model, data = self._mujoco, self.model, row.data._data
        after_velocity = int(mujoco.mjtStage.mjSTAGE_VEL)
        self.sim.forward = lambda: mujoco.mj_forwardSkip(model, data, after_velocity, 0)  # the controller asks again
        try:
            for substep in range(SUBSTEPS):
                mujoco.mj_forward(model, data)
                self.env._pre_action(action, substep == 0)
                mujoco.mj_step2(model, data)
                if substep == SHOWN:
                    self._show(row)
        finally:
            del self.sim.forward
        self.env._post_process()
        return bool(self.env._check_success())

    def close(self) -> None:
        self._attached = None
        with quiet():
            self.env.close()

    def _place(self) -> None:
        from robosuite.utils.errors import RandomizationError

        for _ in range(ATTEMPTS):
            try:
                self.env._reset_internal()
                return
            except RandomizationError:
                continue
        raise EmbodiedError(f"{self.files.name}: no placement without overlap found in {ATTEMPTS} attempts")

    def _check_width(self, state: np.ndarray) -> None:
        wanted = 1 + self.model.nq + self.model.nv
        if state.shape != (wanted,):
            raise EmbodiedError(
                f"{self.files.name}: its stored states have {state.size} numbers, the simulation {wanted}; "
                "the installed LIBERO's task files and states do not belong together"
            )

    def _show(self, row: SceneRow) -> None:
        data, model = row.data._data, self.model
        row.shown = {name: np.array(getattr(model if name == "site_rgba" else data, name)) for name in self.shown}


def build(files: TaskFiles, new_env: Any) -> Any:
    """robosuite's env of a task; a mistake in the user's own task becomes an error of one line."""
    if files.states is not None:
        with quiet():
            return new_env(str(files.bddl))
    with quiet():
        check_buildable(files)
        try:
            env = new_env(str(files.bddl))
            env._check_success()  # finds names in the goal that nothing has
            return env
        except Exception as err:
            last = traceback.extract_tb(err.__traceback__)[-1]
            where = f"{Path(last.filename).name}, line {last.lineno}"
            raise ConfigError(f"{files.name}: LIBERO cannot build {files.bddl}: {in_a_line(err)} ({where})") from err
