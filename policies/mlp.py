"""Small policies: an MLP for the action distribution and one for the value, on the state or on a trunk's features.

Where the env gives privileged numbers, the value reads these and the state instead: it is needed in training only, and
no action depends on it. Continuous actions are Gaussian with a learned, state-independent deviation per dimension;
discrete ones are categorical, sampled through Gumbel noise. Actions are stored as sampled; the env clips them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from embodied.core.arrays import as_asked, host, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import Array, EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Policy, Scores
from embodied.policies.config import ActorCriticConfig, MLPConfig

CLIP = 10.0


class ObservationNormalizer(nn.Module):
    """(x - mean) / sqrt(variance + floor^2), clipped to +-10; the identity before the first count."""

    count: Tensor
    mean: Tensor
    m2: Tensor

    def __init__(self, dim: int, floor: float = 1e-3) -> None:
        super().__init__()
        self.floor = floor
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(dim, dtype=torch.float64))
        self.register_buffer("m2", torch.zeros(dim, dtype=torch.float64))

    def forward(self, state: Tensor, first: int = 0) -> Tensor:
        """Moments of the numbers from `first` on."""
        columns = slice(first, first + state.shape[-1])
        std, mean = self._deviation(self.floor)[columns], self.mean[columns]
        normal = ((state - mean.to(state.dtype)) / std.to(state.dtype)).clamp(-CLIP, CLIP)
        return torch.where(self.count < 2, state, normal)  # decided on the device, so the host does not wait

    def spread(self, first: int, least: float) -> Tensor:
        """The deviation of `forward`'s numbers from `first` on. Numbers that vary by less than `least`, in units of the
        state, have the deviation that `least` corresponds to."""
        deviations = (self._deviation(least) / self._deviation(self.floor))[first:]
        return torch.where(self.count < 2, torch.ones_like(deviations), deviations)

    def within(self, states: np.ndarray) -> np.ndarray:
        """Numbers [..., D] to count, clipped like in `forward`: otherwise a cube that flies off the table would shrink
        all other positions to a point."""
        if self.count < 2:
            return states
        mean, reach = self.mean.cpu().numpy(), CLIP * self._deviation(self.floor).cpu().numpy()
        return np.clip(states.astype(np.float64), mean - reach, mean + reach)

    def _deviation(self, floor: float) -> Tensor:
        return (self.m2 / self.count + floor**2).sqrt()

    def merge(self, moments: np.ndarray) -> None:
        """Merge rows of (count, mean[D], M2[D]), one per env, in the order given (Chan's parallel formula)."""
        count, mean, m2 = float(self.count), self.mean.cpu().numpy().copy(), self.m2.cpu().numpy().copy()
        dim = len(mean)
        for row in moments:
            n, row_mean, row_m2 = row[0], row[1 : 1 + dim], row[1 + dim :]
            if n == 0:
                continue
            delta, total = row_mean - mean, count + n
            mean = mean + delta * (n / total)
            m2 = m2 + row_m2 + delta * delta * (count * n / total)
            count = total
        self.count.fill_(count)
        self.mean.copy_(torch.from_numpy(mean))
        self.m2.copy_(torch.from_numpy(m2))


def state_moments(state: np.ndarray) -> np.ndarray:
    """(count, mean, M2) per env of states [T, N, D], as float64 [N, 1 + 2D]."""
    x = state.astype(np.float64, copy=False)
    mean = x.mean(axis=0)
    m2 = ((x - mean) ** 2).sum(axis=0)
    return np.concatenate([np.full((x.shape[1], 1), float(len(x))), mean, m2], axis=1)


ACTIVATIONS = {"tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}
HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


class ActorCritic(Policy):
    """A family sets `features`: `width` numbers for each row of an observation, without its privileged numbers."""

    takes_device_noise = is_recordable = True
    value_names = ("critic.",)

    def __init__(self, config: ActorCriticConfig, spec: EnvSpec, width: int) -> None:
        super().__init__(config, spec)
        self.dtype = getattr(torch, config.dtype)
        self.exact = torch.promote_types(self.dtype, torch.float32)  # dtype of distributions and values
        self.per_step = spec.action.num_choices if spec.action.discrete else spec.action.dim
        self.actor = mlp(width, config.hidden, config.chunk * self.per_step, config.activation, self.dtype)
        known = (spec.state_dim or 0) + (spec.privileged_dim or 0)
        self.critic = mlp(known if spec.privileged_dim else width, config.hidden, 1, config.activation, self.dtype)
        self.normalizer = None
        if config.normalize_observations and known:
            self.normalizer = ObservationNormalizer(known, config.normalize_floor)
        if not spec.action.discrete:
            self.log_std = nn.Parameter(torch.empty(spec.action.dim, dtype=self.dtype))

    def features(self, obs: Observation) -> Tensor:
        raise NotImplementedError

    def initialise(self, rng: np.random.Generator) -> None:
        draw = torch.Generator().manual_seed(int(rng.integers(2**62)))

        @torch.no_grad()
        def orthogonal(weight: Tensor, gain: float) -> None:
            weight.copy_(nn.init.orthogonal_(torch.empty_like(weight, dtype=self.exact), gain, generator=draw))

        for net, last_gain in self.nets():
            layers = [layer for layer in net if isinstance(layer, nn.Linear | nn.Conv2d)]
            for layer in layers:
                gain = last_gain if layer is layers[-1] else math.sqrt(2)
                orthogonal(layer.weight, gain)
                nn.init.zeros_(layer.bias)
        if not self.spec.action.discrete:
            nn.init.constant_(self.log_std, self.config.initial_log_std)

    def nets(self) -> list[tuple[nn.Sequential, float]]:
        """All networks in a fixed order, with the gain of the last layer's initial weights."""
        return [(self.actor, 0.01), (self.critic, 1.0)]

    @property
    def device(self) -> torch.device:
        """Its device, found without a walk through all modules, since every call needs it."""
        return self.critic[0].weight.device

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform" if self.spec.action.discrete else "normal", self.config.chunk * self.per_step)

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        return self.decide(obs, self.features(obs), noise, temperature)

    def decide(self, obs: Observation, features: Tensor, noise: np.ndarray, temperature: float) -> PolicyOutput:
        """Act on these features. Outside of training privileged numbers are unknown, and the values are 0."""
        head = self._head(features)
        noise_t = tensor_of(noise, self.device).to(self.exact).view_as(head)
        if self.spec.action.discrete:
            scores = head - temperature * torch.log(-torch.log(noise_t))
            actions = scores.argmax(-1, keepdim=True)
        else:
            actions = head + temperature * self.log_std.to(self.exact).exp() * noise_t
        logprobs, _ = self._distribution(head, actions)
        unknown = self.spec.privileged_dim and "privileged" not in obs
        values = np.zeros(len(head), np.float32) if unknown else as_asked(self._value(obs, features), obs)
        return PolicyOutput(as_asked(actions, obs), as_asked(logprobs, obs), values)

    @torch.inference_mode()
    def value(self, obs: Observation) -> Array:
        return as_asked(self._value(obs), obs)

    def forward(self, inputs: dict[str, Any]) -> Scores:
        return self.score(inputs, self.features(inputs["obs"]))

    def score(self, inputs: dict[str, Any], features: Tensor) -> Scores:
        logprobs, entropy = self._distribution(self._head(features), tensor_of(inputs["actions"], self.device))
        return Scores(logprobs, entropy, self._value(inputs["obs"], features))

    def blocks(self) -> list[nn.Module]:
        return [net for net, _ in self.nets()]

    def deviations(self) -> list[nn.Parameter]:
        return [] if self.spec.action.discrete else [self.log_std]

    def observation_moments(self, obs: Observation) -> np.ndarray | None:
        if self.normalizer is None:
            return None
        known = np.concatenate([host(obs[name]) for name in ("state", "privileged") if name in obs], -1)
        return state_moments(self.normalizer.within(known))

    def merge_observation_moments(self, rows: np.ndarray) -> None:
        self.normalizer.merge(rows)

    def state(self, obs: Observation) -> Tensor:
        """The observed numbers in the policy's precision, normalised if the option is set."""
        return self._normal(obs["state"], 0)

    def privileged(self, obs: Observation) -> Tensor:
        """The privileged numbers, like `state`."""
        return self._normal(obs["privileged"], self.spec.state_dim or 0)

    def _normal(self, numbers: Any, first: int) -> Tensor:
        """Normalises numbers whose statistics begin at number `first`."""
        numbers = tensor_of(numbers, self.device).to(self.dtype)
        return numbers if self.normalizer is None else self.normalizer(numbers, first)

    def _head(self, features: Tensor) -> Tensor:
        return self.actor(features).view(len(features), self.config.chunk, self.per_step).to(self.exact)

    def _value(self, obs: Observation, features: Tensor | None = None) -> Tensor:
        if self.spec.privileged_dim:
            known = [self.privileged(obs)] if self.spec.state_dim is None else [self.state(obs), self.privileged(obs)]
            features = torch.cat(known, dim=-1)
        elif features is None:
            features = self.features(obs)
        return self.critic(features).squeeze(-1).to(self.exact)

    def _distribution(self, head: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B, C, A] of actions under the distribution that `head` parametrises."""
        if self.spec.action.discrete:
            log_p = head.log_softmax(-1)
            return log_p.gather(-1, actions), -(log_p.exp() * log_p).sum(-1, keepdim=True)
        log_std = self.log_std.to(self.exact)
        z = (actions - head) * (-log_std).exp()
        logprobs = -0.5 * z * z - (log_std + HALF_LOG_2PI)
        return logprobs, (log_std + (0.5 + HALF_LOG_2PI)).expand_as(head)


class EmptyLinear(nn.Linear):
    """A layer whose weights are drawn by the run's seed, or loaded. (`torch.nn.utils.skip_init` would import
    half a second of symbolic mathematics into every process.)"""

    def reset_parameters(self) -> None: ...


class EmptyConv2d(nn.Conv2d):
    def reset_parameters(self) -> None: ...


def mlp(inputs: int, hidden: tuple[int, ...], outputs: int, activation: str, dtype: torch.dtype) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [EmptyLinear(inputs, width, dtype=dtype), ACTIVATIONS[activation]()]
        inputs = width
    return nn.Sequential(*layers, EmptyLinear(inputs, outputs, dtype=dtype))


class MLPPolicy(ActorCritic):
    def __init__(self, config: MLPConfig, spec: EnvSpec) -> None:
        if spec.state_dim is None:
            raise ConfigError(
                "policy.name=mlp needs state observations, but this env offers none; for images try policy.name=cnn"
            )
        super().__init__(config, spec, spec.state_dim)

    def features(self, obs: Observation) -> Tensor:
        return self.state(obs)
