"""A policy that goes wrong on purpose: the MLP, with a fault of `faulty_env` planted where it acts.

`policy.name=faulty_policy:FaultyPolicy policy.kwargs={fault: hang, place: rollout, worker: policy-0, ...}`
"""

import dataclasses

import numpy as np
from faulty_env import MIDDLE, Fault

from embodied.data import Observation, PolicyOutput
from embodied.policies.config import MLPConfig
from embodied.policies.mlp import MLPPolicy


class FaultyPolicy(MLPPolicy):
    def __init__(self, config, spec) -> None:
        super().__init__(MLPConfig(hidden=(16, 16), dtype="float64"), spec)
        self.fault = Fault(**config.kwargs)
        self.fault.strike("constructor")

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
