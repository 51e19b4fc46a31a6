"""A policy that `embodied.export` wrote, in evaluations and for robots. It never learns.

The runner beside its program acts here as well, so evaluations test what a user runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embodied.core.arrays import host, map_obs
from embodied.core.errors import ConfigError
from embodied.core.options import Requirement
from embodied.core.types import EnvSpec, NoiseSpec, Observation, PolicyOutput
from embodied.policies.base import Policy
from embodied.policies.config import ONNX, ExportedConfig
from embodied.policies.run_policy import Policy as Runner
from embodied.policies.torch_session import TorchSession


class ExportedPolicy(Policy):
    def __init__(self, config: ExportedConfig, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        folder = Path(config.pretrained)
        if is_onnx := (folder / ONNX).is_file():
            Requirement(("onnxruntime",), "onnx").check(f"{folder / ONNX}")
        self.runner = Runner(folder, None if is_onnx else TorchSession(folder))

    def initialise(self, rng: np.random.Generator) -> None:
        """Nothing to draw."""

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec(*self.config.noise)

    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        if temperature:
            raise ConfigError(f"{self.config.pretrained} plays its best actions only; set temperature=0")
        actions = self.runner.act(map_obs(_on_host, obs), noise[:, : self.runner.program["noise"]])
        return PolicyOutput(actions, np.zeros(actions.shape, np.float32), np.zeros(len(actions), np.float32))


def _on_host(array):
    return array if isinstance(array, list) else host(array)
