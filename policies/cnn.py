"""Small convolutional trunks, one per camera, and the state: their features feed the actor's and the critic's MLP.

With `policy.estimate` the trunks learn to predict the env's privileged numbers (such as a cube's position), which the
learner knows, and the actor reads these predictions instead of features. It is trained on the predictions with which it
acted, so that a better trunk does not count as a change of policy.

With `policy.keypoints` each channel of the last convolution is reduced to the position of its maximum. Features then
contain positions from the start; a flat layer would have to learn them for every place.

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

LEAST = 0.01  # privileged numbers with a smaller deviation (a centimetre) are not estimated


class CNNPolicy(ActorCritic):
    def __init__(self, config: CNNConfig, spec: EnvSpec) -> None:
        config.check_images(spec.images)
        if config.estimate and not spec.privileged_dim:
            raise ConfigError(
                "policy.estimate=true needs privileged numbers, but this env gives none; set env.privileged=true"
            )
        num_features = len(spec.images) * (2 * config.channels[-1] if config.keypoints else config.features)
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
        own = [(trunk, math.sqrt(2)) for trunk in self.trunks.values()]
        return [*own, *([(self.estimator, 0.01)] if self.estimator else []), *super().nets()]

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

    def forward(self, inputs: dict[str, Any]) -> Scores:
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
    for outputs, kernel, stride in zip(config.channels, config.kernels, config.strides, strict=True):
        layers += [EmptyConv2d(inputs, outputs, kernel, stride, dtype=dtype), nn.ReLU()]
        height, width, inputs = (height - kernel) // stride + 1, (width - kernel) // stride + 1, outputs
    if config.keypoints:
        return nn.Sequential(*layers[:-1], Keypoints())
    flat = EmptyLinear(inputs * height * width, config.features, dtype=dtype)
    return nn.Sequential(*layers, nn.Flatten(), flat, nn.ReLU())


FAR = 12.0  # positions that spread over a tenth of the image become numbers with a deviation of about 1


class Keypoints(nn.Module):
    """[N, C, H, W] -> [N, 2C], from -FAR to FAR: row and column of each channel's maximum.

    The position is the mean under the softmax of the map (spatial softmax)."""

    def forward(self, maps: Tensor) -> Tensor:
        share = maps.flatten(2).softmax(-1).view(maps.shape)
        down, across = (torch.linspace(-FAR, FAR, n, dtype=maps.dtype, device=maps.device) for n in maps.shape[2:])
        return torch.cat([share.sum(3) @ down, share.sum(2) @ across], dim=-1)
