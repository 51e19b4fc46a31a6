"""Small policies: an MLP for the action distribution and one for the value, on the state or on a trunk's features.

Where the env gives privileged numbers, the value reads these and the state instead: it is needed in training only, and
no action depends on it. Continuous actions are Gaussian with a learned, state-independent deviation per dimension;
discrete ones are categorical, sampled through Gumbel noise. Actions are stored as sampled; the env clips them.

Small convolutional trunks, one per camera, and the state: their features feed the actor's and the critic's MLP.

With `policy.estimate` the trunks learn to predict the env's privileged numbers (such as a cube's position), which the
learner knows, and the actor reads these predictions instead of features. It is trained on the predictions with which it
acted, so that a better trunk does not count as a change of policy.

With `policy.keypoints` each channel of the last convolution is reduced to the position of its maximum. Features then
contain positions from the start; a flat layer would have to learn them for every place. With `policy.encoder=colors`
fixed colors replace the channels, and the positions are known before anything has learned.

Pixels stay uint8 until they are on the policy's device; there they become numbers from -0.5 to 0.5.

Policies without weights, as baselines: uniformly random actions, and zero actions.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from embodied.core.arrays import as_asked, host, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import Array, EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Policy, Scores
from embodied.policies.config import ActorCriticConfig, CNNConfig, MLPConfig

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

    def clip_states(self, states: np.ndarray) -> np.ndarray:
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
        state_width = (spec.state_dim or 0) + (spec.privileged_dim or 0)
        self.critic = mlp(
            state_width if spec.privileged_dim else width, config.hidden, 1, config.activation, self.dtype
        )
        self.normalizer = None
        if config.normalize_observations and state_width:
            self.normalizer = ObservationNormalizer(state_width, config.normalize_floor)
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

    def best_actions(self, obs: Observation, noise: Tensor | None) -> Tensor:
        head = self._head(self.features(obs))
        return head.argmax(-1, keepdim=True) if self.spec.action.discrete else head

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
        numbers = np.concatenate([host(obs[name]) for name in ("state", "privileged") if name in obs], -1)
        return state_moments(self.normalizer.clip_states(numbers))

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
        return self.actor(features).view(features.shape[0], self.config.chunk, self.per_step).to(self.exact)

    def _value(self, obs: Observation, features: Tensor | None = None) -> Tensor:
        if self.spec.privileged_dim:
            inputs = [self.privileged(obs)] if self.spec.state_dim is None else [self.state(obs), self.privileged(obs)]
            features = torch.cat(inputs, dim=-1)
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


LEAST = 0.01  # privileged numbers with a smaller deviation (a centimetre) are not estimated
SEEN = "seen"  # features of an encoder, which is not trained


class CNNPolicy(ActorCritic):
    def __init__(self, config: CNNConfig, spec: EnvSpec) -> None:
        config.check_images(spec.images)
        if config.estimate and not spec.privileged_dim:
            raise ConfigError(
                "policy.estimate=true needs privileged numbers, but this env gives none; set env.privileged=true"
            )
        places = COLORS if config.encoder else config.channels[-1] if config.keypoints else 0
        num_features = len(spec.images) * (2 * places or config.features)
        width = (spec.privileged_dim if config.estimate else num_features) + (spec.state_dim or 0)
        super().__init__(config, spec, width)
        self.cameras = sorted(spec.images)
        self.trunks = nn.ModuleDict(
            {module_name(camera): trunk(spec.images[camera], config, self.dtype) for camera in self.cameras}
        )
        self.estimator = (
            mlp(num_features, (), spec.privileged_dim, config.activation, self.dtype) if config.estimate else None
        )
        self.own_losses = ("estimate_loss",) if config.estimate else ()

    def nets(self) -> list[tuple[nn.Sequential, float]]:
        trunks = [(trunk, math.sqrt(2)) for trunk in self.trunks.values()]
        return [*trunks, *([(self.estimator, 0.01)] if self.estimator else []), *super().nets()]

    def features(self, obs: Observation) -> Tensor:
        return self._with_state(self.encode(obs), obs)

    def encode(self, obs: Observation) -> Tensor:
        """Features of the images, or estimates of the privileged numbers."""
        images = [self._pixels(obs["images"][camera]) for camera in self.cameras]
        features = torch.cat([trunk(image) for trunk, image in zip(self.trunks.values(), images, strict=True)], dim=-1)
        return self.estimator(features) if self.estimator else features

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        features = self.encode(obs)
        output = self.decide(obs, self._with_state(features, obs), noise, temperature)
        return replace(output, replay={"estimates": as_asked(features, obs)}) if self.estimator else output

    def frozen_features(self, obs: Observation) -> dict[str, Tensor]:
        return {SEEN: self.encode(obs)} if self.config.encoder and not self.estimator else {}

    def forward(self, inputs: dict[str, Any]) -> Scores:
        if SEEN in inputs:
            return self.score(inputs, self._with_state(tensor_of(inputs[SEEN], self.device), inputs["obs"]))
        if not self.estimator:
            return super().forward(inputs)
        scores = self.score(inputs, self._with_state(tensor_of(inputs["estimates"], self.device), inputs["obs"]))
        return replace(scores, own_loss=self._estimate_loss(inputs["obs"]))

    def _with_state(self, features: Tensor, obs: Observation) -> Tensor:
        return features if self.spec.state_dim is None else torch.cat([features, self.state(obs)], dim=-1)

    def _estimate_loss(self, obs: Observation) -> Tensor:
        """Huber loss of each row, with errors in units of each number's deviation: squared up to 1, linear beyond."""
        estimates, truth = self.encode(obs), self.privileged(obs)
        if self.normalizer is not None:
            unit = self.normalizer.spread(self.spec.state_dim or 0, LEAST).to(truth.dtype)
            estimates, truth = estimates / unit, truth / unit
        return smooth_l1_loss(estimates, truth, reduction="none").mean(-1)

    def _pixels(self, frames) -> Tensor:
        """uint8 [N, H, W, 3] -> [N, 3, H, W], in the channels-last memory format, which is fast for convolutions."""
        return tensor_of(frames, self.device).permute(0, 3, 1, 2).to(self.dtype).div(255).sub(0.5)


def module_name(camera: str) -> str:
    """A camera's name as that of a module; torch takes none that a ModuleDict has as an attribute, such as `keys`."""
    return f"{camera}_" if hasattr(nn.ModuleDict(), camera) else camera


def trunk(size: tuple[int, int, int], config: CNNConfig, dtype: torch.dtype) -> nn.Sequential:
    """Convolutions, then the config's number of features, or each channel's keypoint."""
    layers: list[nn.Module] = []
    height, width, inputs = size
    if config.encoder:
        cells = nn.AvgPool2d(max(1, min(height, width) // CELLS))
        return nn.Sequential(cells, ColorMaps(dtype), Keypoints(FAR / 2))
    for outputs, kernel, stride in zip(config.channels, config.kernels, config.strides, strict=True):
        layers += [EmptyConv2d(inputs, outputs, kernel, stride, dtype=dtype), nn.ReLU()]
        height, width, inputs = (height - kernel) // stride + 1, (width - kernel) // stride + 1, outputs
    if config.keypoints:
        return nn.Sequential(*layers[:-1], Keypoints())
    flat = EmptyLinear(inputs * height * width, config.features, dtype=dtype)
    return nn.Sequential(*layers, nn.Flatten(), flat, nn.ReLU())


FAR = 12.0  # positions that spread over a tenth of the image become numbers with a deviation of about 1


class Keypoints(nn.Module):
    """[N, C, H, W] -> [N, 2C], from -far to far: row and column of each channel's maximum.

    The position is the mean under the softmax of the map (spatial softmax)."""

    def __init__(self, far: float = FAR) -> None:
        super().__init__()
        self.far = far

    def forward(self, maps: Tensor) -> Tensor:
        share = maps.flatten(2).softmax(-1).view(maps.shape)
        down, across = (
            torch.linspace(-self.far, self.far, n, dtype=maps.dtype, device=maps.device) for n in maps.shape[2:]
        )
        return torch.cat([share.sum(3) @ down, share.sum(2) @ across], dim=-1)


HUES = 14
COLORS = HUES + 2  # and light and dark
CELLS = 32  # along an image's shorter side
CONTRAST = 32.0  # a place that is nearer to a color by 0.1 counts 25 times as much


class ColorMaps(nn.Module):
    """[N, 3, H, W] -> [N, COLORS, H, W]: how near each place is to each color, as logits. Nothing is trained."""

    colors: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        turns = torch.arange(HUES) * (2 * math.pi / HUES)
        axes = torch.tensor([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]])  # red or green, blue or yellow
        hues = torch.stack([turns.cos(), turns.sin()], dim=1) @ nn.functional.normalize(axes)
        light = torch.full((1, 3), 3**-0.5)
        colors = CONTRAST * torch.cat([hues, light, -light]).to(dtype)
        self.register_buffer("colors", colors[:, :, None, None], persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        return nn.functional.conv2d(pixels, self.colors)


class RandomPolicy(Policy):
    def initialise(self, rng: np.random.Generator) -> None:
        """Nothing to draw."""

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform", self.spec.action.dim)

    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        actions = self._actions(noise)
        return PolicyOutput(actions[:, None, :], np.zeros((len(actions), 1, actions.shape[1])), np.zeros(len(actions)))

    def value(self, obs: Observation) -> np.ndarray:
        raise NotImplementedError("a policy without weights has no value function")

    def _actions(self, noise: np.ndarray) -> np.ndarray:
        if self.spec.action.discrete:
            return (noise * self.spec.action.num_choices).astype(np.int64)
        return (2.0 * noise - 1.0).astype(np.float32)


class ZeroPolicy(RandomPolicy):
    """Zero of every action dimension, or choice 0."""

    def _actions(self, noise: np.ndarray) -> np.ndarray:
        return super()._actions(noise) * 0
