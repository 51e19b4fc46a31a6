"""An env that goes wrong on purpose: `env.name=faulty_env:FaultyEnv env.kwargs={fault: hang, place: step, ...}`.

It is the point mass, with one fault planted in one sim worker: at its construction, at the first env step, in the
middle of a rollout, at a reset in mid-run or in an evaluation. `once` faults leave a file behind and never come again,
others come in every life of the worker; with `seed`, whenever the episode of that seed is played.
"""

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from embodied.envs.base import StepResult
from embodied.envs.config import PointMassConfig
from embodied.envs.pointmass import PointMassEnv

FAULTS = (
    *("exception", "exit", "os_exit", "nan_observation", "inf_reward", "wrong_shape"),
    *("memory_error", "sigkill", "sigsegv", "hang", "hang_with_gil"),
)
PLACES = ("constructor", "first_step", "rollout", "reset", "evaluation")
MIDDLE = 5  # env steps (or resets) before a fault in the middle


class FaultyEnv(PointMassEnv):
    def __init__(self, config, num_envs: int) -> None:
        plan = config.kwargs
        self.fault, self.place, self.worker = plan["fault"], plan["place"], plan.get("worker", "sim-0")
        self.once = Path(plan["once"]) if "once" in plan else None  # a file that does not exist yet
        self.seed = plan.get("seed")
        self.seeds = np.full(num_envs, -1)
        assert self.fault in FAULTS and self.place in PLACES, plan
        self.count, self.broken = 0, ""
        if self.place == "constructor":
            self._strike()
        common = {name: getattr(config, name) for name in ("max_episode_steps", "on_success")}
        dtype = plan.get("dtype", "float32")
        super().__init__(PointMassConfig(name="pointmass", num_envs=config.num_envs, dtype=dtype, **common), num_envs)

    def _reset_rows(self, rows: np.ndarray, episodes: list) -> np.ndarray:
        if self.place == "reset":
            self._strike(after=MIDDLE)
        self.seeds[rows] = [episode.seed for episode in episodes]
        return super()._reset_rows(rows, episodes)

    def step_chunk(self, actions: np.ndarray, on_frame=None):
        if self.place == "evaluation" and on_frame is not None:  # only evaluations film
            self._strike(after=MIDDLE)
        return super().step_chunk(actions, on_frame)

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        if self.place in ("first_step", "rollout"):
            self._strike(after=0 if self.place == "first_step" else MIDDLE)
        result = super()._step(actions, active)
        if self.broken == "inf_reward":
            result.rewards[:] = np.inf
        return result

    def _observe(self) -> dict:
        obs = super()._observe()
        if self.broken == "nan_observation":
            obs["state"][:, 0] = np.nan
        elif self.broken == "wrong_shape":
            obs["state"] = obs["state"][:, :-1]
        return obs

    def _strike(self, after: int = 0) -> None:
        """Do it now, if it is time and this is the worker."""
        if threading.current_thread().name != self.worker:
            return
        if self.seed is not None and self.seed not in self.seeds[self._live]:
            return
        self.count += 1
        if self.count <= after:
            return
        if self.once is not None:
            if self.once.exists():
                return
            self.once.write_text(str(os.getpid()))
        self._break()

    def _break(self) -> None:
        if self.fault == "exception":
            raise RuntimeError("the gripper fell off")
        elif self.fault == "exit":
            sys.exit(0)
        elif self.fault == "os_exit":
            os._exit(0)
        elif self.fault == "memory_error":
            raise MemoryError("no room for another mesh")
        elif self.fault in ("sigkill", "sigsegv"):
            os.kill(os.getpid(), getattr(signal, self.fault.upper()))
            time.sleep(60)
        elif self.fault == "hang":
            time.sleep(3600)
        elif self.fault == "hang_with_gil":
            ctypes.PyDLL(None).sleep(3600)
        else:
            self.broken = self.fault
