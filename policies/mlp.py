"""Two small MLPs on the state: one for the action distribution, one for the value."""

from __future__ import annotations

from torch import Tensor

from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, Observation
from embodied.policies.actor_critic import ActorCritic
from embodied.policies.config import MLPConfig


class MLPPolicy(ActorCritic):
    def __init__(self, config: MLPConfig, spec: EnvSpec) -> None:
        if spec.state_dim is None:
            raise ConfigError(
                "policy.name=mlp needs state observations, but this env offers none; for images try policy.name=cnn"
            )
        super().__init__(config, spec, spec.state_dim)

    def features(self, obs: Observation) -> Tensor:
        return self.state(obs)
