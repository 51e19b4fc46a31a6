"""Runs that stand still while a file exists, so that a test decides what happens meanwhile.

`env.name=held:HeldPoint` and `env.name=held:HeldDigits` with `env.kwargs={hold: file}` stop before a step of training,
`policy.name=held:HeldPolicy policy.kwargs={hold: file}` stops before a gradient. They leave a file `<file>.waits`.
"""

import time
from pathlib import Path

from talking_env import Digits

from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv
from embodied.policies.config import MLPConfig
from embodied.policies.networks import MLPPolicy

PATIENCE_S = 500.0


def wait_while(held: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while held.exists():
        held.with_suffix(".waits").touch()
        assert time.monotonic() < until, f"{held} stays"
        time.sleep(0.005)


class HeldPoint(PointMassEnv):
    def __init__(self, config, num_envs: int) -> None:
        common = {name: getattr(config, name) for name in ("num_envs", "max_episode_steps", "on_success")}
        super().__init__(PointMassConfig(name="pointmass", dtype="float64", **common), num_envs)
        self.hold = Path(config.kwargs["hold"])

    def _step(self, actions, active):
        wait_while(self.hold)
        return super()._step(actions, active)


class HeldDigits(Digits):
    def step(self, answer):
        if self.training:
            wait_while(Path(self.config.kwargs["hold"]))
        return super().step(answer)


class HeldPolicy(MLPPolicy):
    def __init__(self, config, spec) -> None:
        super().__init__(MLPConfig(hidden=(16, 16), dtype="float64"), spec)
        self.options = config
        self.hold = Path(config.kwargs["hold"])

    def description(self):
        return super().description() | {"policy": self.options.model_dump(mode="json")}

    def forward(self, inputs):
        wait_while(self.hold)
        return super().forward(inputs)
