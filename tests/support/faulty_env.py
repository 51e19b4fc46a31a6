"""An env that goes wrong on purpose: `env.name=faulty_env:FaultyEnv env.kwargs={fault: hang, place: rollout, ...}`.

It is the point mass, with one fault planted in one sim worker: at its construction, at the first env step, in the
middle of a rollout, at a reset in mid-run or in an evaluation. `once` faults leave a file behind and never come again,
others come in every life of the worker; with `seed`, whenever the episode of that seed is played.
"""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv
from embodied.envs.vector_env import StepResult

FAULTS = (
    *("exception", "exit", "os_exit", "nan_observation", "inf_reward", "wrong_shape", "memory_error"),
    *("out_of_memory", "sigkill", "sigsegv", "sigabrt", "sigstop", "hang", "hang_with_gil"),
)
OF_A_POLICY = tuple({"nan_observation": "nan_action"}.get(fault, fault) for fault in FAULTS if fault != "inf_reward")
PLACES = ("constructor", "first_step", "rollout", "reset", "evaluation", "frames")
LEARNING = ("update", "weights")  # places of a policy: in a learner's gradient, and while new weights are on their way
MIDDLE = 5  # env steps (or resets) before a fault in the middle


class Fault:
    """What goes wrong, and when."""

    def __init__(
        self, fault: str, place: str, worker: str, once: str | None = None, until: str | None = None, after: int = 0
    ) -> None:
        """`once` is a file that does not exist yet; once the file `until` exists nothing goes wrong any more. `after`:
        the number of times that this place is passed first, where it should be another than usual."""
        assert fault in (*FAULTS, *OF_A_POLICY) and place in (*PLACES, *LEARNING), (fault, place)
        self.fault, self.place, self.worker = fault, place, worker
        self.once = Path(once) if once else None
        self.until = Path(until) if until else None
        self.after = after
        self.count = 0
        self.broken = ""  # the fault that is not an event but shows in what is returned

    def strike(self, place: str, after: int = 0) -> None:
        """Do it now, if this is the place, the time and the worker."""
        if place != self.place or threading.current_thread().name != self.worker:
            return
        self.count += 1
        files = [file for file in (self.once, self.until) if file]
        if self.count <= (self.after or after) or any(file.exists() for file in files):
            return
        if self.once is not None:
            self.once.write_text(str(os.getpid()))
        self.broken = commit(self.fault)


def commit(fault: str) -> str:
    """Do it; returns the fault that is not an event but shows in what comes next."""
    if fault == "exception":
        raise RuntimeError("the gripper fell off")
    elif fault == "exit":
        sys.exit(0)
    elif fault == "os_exit":
        os._exit(0)
    elif fault == "memory_error":
        raise MemoryError("no room for another mesh")
    elif fault == "out_of_memory":
        _run_out_of_memory()
    elif fault in ("sigkill", "sigsegv", "sigabrt", "sigstop"):
        os.kill(os.getpid(), getattr(signal, fault.upper()))
        time.sleep(60)
    elif fault == "hang":
        time.sleep(3600)
    elif fault == "hang_with_gil":
        ctypes.PyDLL(None).sleep(3600)
    return fault


def _run_out_of_memory() -> None:
    """Takes all that this process may have, and keeps it until the error is told."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**27, used + 2**27))
    taken = []
    while True:
        taken.append(np.ones(2**17))


class FaultyEnv(PointMassEnv):
    def __init__(self, config, num_envs: int) -> None:
        plan = dict(config.kwargs)
        dtype, self.seed = plan.pop("dtype", "float32"), plan.pop("seed", None)
        self.seeds = np.full(num_envs, -1)
        self.fault = Fault(**plan)
        self.fault.strike("constructor")
        common = {name: getattr(config, name) for name in ("num_envs", "max_episode_steps", "on_success")}
        super().__init__(PointMassConfig(name="pointmass", dtype=dtype, **common), num_envs)

    def _reset_rows(self, rows: np.ndarray, episodes: list) -> np.ndarray:
        self.fault.strike("reset", 2)
        self.seeds[rows] = [episode.seed for episode in episodes]
        return super()._reset_rows(rows, episodes)

    def step_chunk(self, actions: np.ndarray, on_frame=None):
        if on_frame is not None:  # only evaluations film
            self._strike("evaluation", MIDDLE)
        return super().step_chunk(actions, on_frame)

    def render_rows(self, rows: np.ndarray) -> np.ndarray:
        self.fault.strike("frames", MIDDLE)
        return super().render_rows(rows)

    def _step(self, actions: np.ndarray, active: np.ndarray) -> StepResult:
        self._strike("first_step")
        self._strike("rollout", MIDDLE)
        result = super()._step(actions, active)
        if self.fault.broken == "inf_reward":
            result.rewards[:] = np.inf
        return result

    def _observe(self) -> dict:
        obs = super()._observe()
        if self.fault.broken == "nan_observation":
            obs["state"][:, 0] = np.nan
        elif self.fault.broken == "wrong_shape":
            obs["state"] = obs["state"][:, :-1]
        return obs

    def _strike(self, place: str, after: int = 0) -> None:
        if self.seed is None or self.seed in self.seeds[self._live]:
            self.fault.strike(place, after)
