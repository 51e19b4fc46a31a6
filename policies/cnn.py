"""Small convolutional trunks, one per camera, and the state: their features feed the actor's and the critic's MLP.

With `policy.estimate` the trunks learn to predict the env's privileged numbers (where a cube is, say), which the
learner knows, and the actor sees these predictions instead of features. It is trained on the predictions that it acted
on, so that a better trunk is not mistaken for a change of policy.

With `policy.keypoints` an image becomes places in it: for each channel of the last convolution, where it is strongest.
Where things are is then in the features before anything was learned; a flat layer learns it for every place anew.

Pixels stay uint8 until they are on the policy's device; there they become numbers from -0.5 to 0.5.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from embodied.core.arrays import as_asked, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, Observation, PolicyOutput
from embodied.policies.base import Scores
from embodied.policies.config import CNNConfig
from embodied.policies.mlp import ActorCritic, EmptyConv2d, EmptyLinear, mlp

LEAST = 0.01  # a privileged number that varies less, a centimetre say, need not be estimated


class CNNPolicy(ActorCritic):
    def __init__(self, config: CNNConfig, spec: EnvSpec) -> None:
        config.check_images(spec.images)
        if config.estimate and not spec.privileged_dim:
            raise ConfigError(
                "policy.estimate=true needs privileged numbers, but this env gives none; set env.privileged=true"
            )
        found = len(spec.images) * (2 * config.channels[-1] if config.keypoints else config.features)
        width = (spec.privileged_dim if config.estimate else found) + (spec.state_dim or 0)
        super().__init__(config, spec, width)
        self.trunks = nn.ModuleDict(
            {camera: trunk(size, config, self.dtype) for camera, size in sorted(spec.images.items())}
        )
        self.estimator = mlp(found, (), spec.privileged_dim, config.activation, self.dtype) if config.estimate else None
        self.own_losses = ("estimate_loss",) if config.estimate else ()

    def nets(self) -> list[tuple[nn.Sequential, float]]:
        own = [(trunk, math.sqrt(2)) for trunk in self.trunks.values()]
        return [*own, *([(self.estimator, 0.01)] if self.estimator else []), *super().nets()]

    def features(self, obs: Observation) -> Tensor:
        return self._with_state(self.encode(obs), obs)

    def encode(self, obs: Observation) -> Tensor:
        """Features of the images, or estimates of the privileged numbers."""
        found = torch.cat([trunk(self._pixels(obs["images"][camera])) for camera, trunk in self.trunks.items()], dim=-1)
        return self.estimator(found) if self.estimator else found

    @torch.inference_mode()
    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        found = self.encode(obs)
        output = self.decide(obs, self._with_state(found, obs), noise, temperature)
        return replace(output, replay={"estimates": as_asked(found, obs)}) if self.estimator else output

    def forward(self, inputs: dict[str, Any]) -> Scores:
        if not self.estimator:
            return super().forward(inputs)
        scores = self.score(inputs, self._with_state(tensor_of(inputs["estimates"], self.device), inputs["obs"]))
        return replace(scores, own_loss=self._estimate_loss(inputs["obs"]))

    def _with_state(self, found: Tensor, obs: Observation) -> Tensor:
        return found if self.spec.state_dim is None else torch.cat([found, self.state(obs)], dim=-1)

    def _estimate_loss(self, obs: Observation) -> Tensor:
        """Huber loss of each row: the errors in deviations of each number, squared up to 1, linear beyond."""
        found, truth = self.encode(obs), self.privileged(obs)
        if self.normalizer is not None:
            unit = self.normalizer.spread(self.spec.state_dim or 0, LEAST).to(truth.dtype)
            found, truth = found / unit, truth / unit
        return smooth_l1_loss(found, truth, reduction="none").mean(-1)

    def _pixels(self, frames) -> Tensor:
        """uint8 [N, H, W, 3] -> [N, 3, H, W]; the strides stay as they are, which convolutions like best."""
        return tensor_of(frames, self.device).permute(0, 3, 1, 2).to(self.dtype).div(255).sub(0.5)


def trunk(size: tuple[int, int, int], config: CNNConfig, dtype: torch.dtype) -> nn.Sequential:
    """Convolutions, then as many features as the config says, or the place of each channel."""
    layers: list[nn.Module] = []
    height, width, inputs = size
    for outputs, kernel, stride in zip(config.channels, config.kernels, config.strides, strict=True):
        layers += [EmptyConv2d(inputs, outputs, kernel, stride, dtype=dtype), nn.ReLU()]
        height, width, inputs = (height - kernel) // stride + 1, (width - kernel) // stride + 1, outputs
    if config.keypoints:
        return nn.Sequential(*layers[:-1], Keypoints())
    flat = EmptyLinear(inputs * height * width, config.features, dtype=dtype)
    return nn.Sequential(*layers, nn.Flatten(), flat, nn.ReLU())


FAR = 12.0  # a thing's place spreads over a tenth of the image, say: a number that spreads by about 1


class Keypoints(nn.Module):
    """Maps [N, C, H, W] -> [N, 2C], from -FAR to FAR: how far down, then how far across, each channel is strongest.

    The place is the mean by the softmax of the map (spatial softmax)."""

    def forward(self, maps: Tensor) -> Tensor:
        share = maps.flatten(2).softmax(-1).view(maps.shape)
        down, across = (torch.linspace(-FAR, FAR, n, dtype=maps.dtype, device=maps.device) for n in maps.shape[2:])
        return torch.cat([share.sum(3) @ down, share.sum(2) @ across], dim=-1)
