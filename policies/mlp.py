"""Two small MLPs on the state: one for the action distribution, one for the value.

Continuous actions are Gaussian with a learned, state-independent deviation per dimension; discrete ones are
categorical, sampled through Gumbel noise. Actions are stored as sampled; the env clips them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import skip_init

from embodied.data import EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.errors import ConfigError
from embodied.policies.base import Policy, Scores
from embodied.policies.config import MLPConfig
from embodied.policies.normalizer import ObservationNormalizer, state_moments

ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class MLPPolicy(Policy):
    def __init__(self, config: MLPConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        if spec.state_dim is None:
            raise ConfigError("policy.name=mlp needs state observations, but this env offers none")
        self.dtype = getattr(torch, config.dtype)
        self.exact = torch.promote_types(self.dtype, torch.float32)  # what distributions and values are computed in
        self.per_step = spec.action.num_choices if spec.action.discrete else spec.action.dim
        self.shape = (config.chunk, spec.action.dim)
        self.actor = mlp(spec.state_dim, config.hidden, config.chunk * self.per_step, config.activation, self.dtype)
        self.critic = mlp(spec.state_dim, config.hidden, 1, config.activation, self.dtype)
        self.normalizer = None
        if config.normalize_observations:
            self.normalizer = ObservationNormalizer(spec.state_dim, config.normalize_floor)
        if not spec.action.discrete:
            self.log_std = nn.Parameter(torch.empty(spec.action.dim, dtype=self.dtype))

    def initialise(self, rng: np.random.Generator) -> None:
        draw = torch.Generator().manual_seed(int(rng.integers(2**62)))

        @torch.no_grad()
        def orthogonal(weight: Tensor, gain: float) -> None:
            weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, dtype=self.exact), gain, generator=draw))

        for net, last_gain in ((self.actor, 0.01), (self.critic, 1.0)):
            layers = [layer for layer in net if isinstance(layer, nn.Linear)]
            for layer in layers:
                gain = last_gain if layer is layers[-1] else math.sqrt(2)
                orthogonal(layer.weight, gain)
                nn.init.zeros_(layer.bias)
        if not self.spec.action.discrete:
            nn.init.constant_(self.log_std, self.config.initial_log_std)

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform" if self.spec.action.discrete else "normal", self.config.chunk * self.per_step)

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, greedy: bool = False) -> PolicyOutput:
        state = self._state(obs)
        head = self._head(state)
        noise_t = torch.as_tensor(noise).to(self.exact).view_as(head)
        if self.spec.action.discrete:
            scores = head if greedy else head - torch.log(-torch.log(noise_t))
            actions = scores.argmax(-1, keepdim=True)
        else:
            actions = head if greedy else head + self.log_std.to(self.exact).exp() * noise_t
        logprobs, _ = self._distribution(head, actions)
        return PolicyOutput(actions.numpy(), logprobs.numpy(), self._value(state).numpy())

    @torch.inference_mode()
    def value(self, obs: Observation) -> np.ndarray:
        return self._value(self._state(obs)).numpy()

    def forward(self, inputs: dict[str, Any]) -> Scores:
        state = self._state(inputs["obs"])
        logprobs, entropy = self._distribution(self._head(state), torch.as_tensor(inputs["actions"]))
        return Scores(logprobs, entropy, self._value(state))

    def blocks(self) -> list[nn.Module]:
        return [self.actor, self.critic]

    def parameter_groups(self) -> dict[str, list[nn.Parameter]]:
        value = list(self.critic.parameters())
        mine = {id(p) for p in value}
        return {"policy": [p for p in self.parameters() if id(p) not in mine], "value": value}

    def observation_moments(self, obs: Observation) -> np.ndarray | None:
        return None if self.normalizer is None else state_moments(obs["state"])

    def merge_observation_moments(self, rows: np.ndarray) -> None:
        self.normalizer.merge(rows)

    def _state(self, obs: Observation) -> Tensor:
        state = torch.as_tensor(obs["state"]).to(self.dtype)
        return state if self.normalizer is None else self.normalizer(state)

    def _head(self, state: Tensor) -> Tensor:
        return self.actor(state).view(len(state), self.config.chunk, self.per_step).to(self.exact)

    def _value(self, state: Tensor) -> Tensor:
        return self.critic(state).squeeze(-1).to(self.exact)

    def _distribution(self, head: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B, C, A] of actions under the distribution that `head` parametrises."""
        if self.spec.action.discrete:
            log_p = head.log_softmax(-1)
            return log_p.gather(-1, actions), -(log_p.exp() * log_p).sum(-1, keepdim=True)
        log_std = self.log_std.to(self.exact)
        z = (actions - head) * (-log_std).exp()
        logprobs = -0.5 * z * z - (log_std + HALF_LOG_2PI)
        return logprobs, (log_std + (0.5 + HALF_LOG_2PI)).expand_as(head)


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int, activation: str, dtype: torch.dtype) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [skip_init(nn.Linear, inputs, width, dtype=dtype), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers, skip_init(nn.Linear, inputs, outputs, dtype=dtype))
