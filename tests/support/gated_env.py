"""A point mass that stops on the way until the test lets it go on: `env.name=gated_env:GatedEnv`.

`env.kwargs={gates: folder, every: 8}`: before every eighth step an env writes the file `<stop>-<its worker>` there, the
stops counted from 0, and goes on when there is one that is called `<stop>`.
"""

import threading
import time
from pathlib import Path

from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv

PATIENCE_S = 60.0


class GatedEnv(PointMassEnv):
    def __init__(self, config, num_envs: int) -> None:
        common = {name: getattr(config, name) for name in ("num_envs", "max_episode_steps", "on_success")}
        super().__init__(PointMassConfig(name="pointmass", dtype="float64", **common), num_envs)
        self.gates, self.every, self.steps = Path(config.kwargs["gates"]), config.kwargs["every"], 0

    def _step(self, actions, active):
        self.steps += 1
        stop, rest = divmod(self.steps, self.every)
        if not rest:
            (self.gates / f"{stop - 1}-{threading.current_thread().name}").touch()
            wait_until((self.gates / str(stop - 1)).exists)
        return super()._step(actions, active)


def wait_until(true) -> None:
    """A file is all that the processes share: it is looked for every few milliseconds."""
    until = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < until, "it does not become true"
        time.sleep(0.002)
