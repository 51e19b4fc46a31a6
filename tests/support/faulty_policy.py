"""A policy that goes wrong on purpose: the MLP, with a fault of `faulty_env` planted where it acts or learns.

`policy.name=faulty_policy:FaultyPolicy policy.kwargs={fault: hang, place: rollout, worker: policy-0, ...}`, or
`{..., place: update, worker: learner-1}`. Weights are on their way when a policy worker takes them the second time, and
when a learner is asked for them after its first gradient.
"""

import dataclasses

import numpy as np
from faulty_env import MIDDLE, Fault

from embodied.core.types import Observation, PolicyOutput
from embodied.policies.base import Scores
from embodied.policies.config import MLPConfig
from embodied.policies.networks import MLPPolicy


class FaultyPolicy(MLPPolicy):
    def __init__(self, config, spec) -> None:
        super().__init__(MLPConfig(hidden=(16, 16), dtype="float64"), spec)
        self.fault = Fault(**config.kwargs)
        self.learned = False
        self.fault.strike("constructor")

    def forward(self, inputs: dict) -> Scores:
        self.learned = True
        self.fault.strike("update", MIDDLE)
        return super().forward(inputs)

    def state_dict(self, *args, **kwargs) -> dict:
        if self.learned:
            self.fault.strike("weights")
        return super().state_dict(*args, **kwargs)

    def use_weights(self, weights: dict) -> None:
        self.fault.strike("weights", 1)
        super().use_weights(weights)

    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        if temperature == 1:
            self.fault.strike("first_step")
        self.fault.strike("evaluation" if temperature < 1 else "rollout", MIDDLE)
        output = super().act(obs, noise, temperature)
        if self.fault.broken == "nan_action":
            return dataclasses.replace(output, actions=output.actions * np.nan)
        if self.fault.broken == "wrong_shape":
            return dataclasses.replace(output, actions=output.actions[..., :-1])
        return output
