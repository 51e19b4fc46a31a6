"""Point masses in torch: an almost free simulator with rows on a device, so a run shows the toolkit's own cost.
Observations and actions have the sizes of ManiSkill's PickCube.

    env={name: "benchmarks.gpu_points:GpuPoints", num_envs: 1024, on_success: continue}

`env.kwargs` may have `device` ("cuda") and `tensors` (true; false returns numpy arrays).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from embodied.core.arrays import host, tensor_of
from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec, Observation
from embodied.envs.vector_env import StepResult, VectorEnv
from embodied.policies.policy_worker import uniform

STEPS, STATE, ACTIONS = 50, 42, 8
REACH = 0.2


class GpuPoints(VectorEnv):
    def __init__(self, config: Any, num_envs: int) -> None:
        self.device = config.kwargs.get("device", "cuda")
        self.given = (lambda tensor: tensor) if config.kwargs.get("tensors", True) else host
        limit = config.max_episode_steps or STEPS
        spec = EnvSpec(ActionSpec(ACTIONS), state_dim=STATE, max_episode_steps=limit, has_success=True)
        super().__init__(config, num_envs, spec)
        self._place, self._speed, self._target = torch.zeros(3, num_envs, ACTIONS, device=self.device)
        self._rest = torch.zeros(num_envs, STATE - 3 * ACTIONS, device=self.device)

    def _reset_rows(self, rows: np.ndarray, episodes: list[EpisodeSpec]) -> Any:
        seeds = tensor_of(np.array([[episode.seed for episode in episodes], rows]), self.device)
        begun = uniform(0, "points", seeds[0], torch.zeros_like(seeds[0]), 2 * ACTIONS).float() * 2 - 1
        self._place = self._place.index_copy(0, seeds[1], begun[:, :ACTIONS])
        self._target = self._target.index_copy(0, seeds[1], begun[:, ACTIONS:])
        self._speed = self._speed.index_fill(0, seeds[1], 0.0)
        success = self._distance() < REACH
        return self.given(success) if self.config.kwargs.get("tensors", True) else host(success)[rows]

    def _step(self, actions: Any, active: np.ndarray) -> StepResult:
        before = self._distance()
        self._speed = 0.7 * self._speed + 0.03 * tensor_of(actions, self.device).float()
        self._place = (self._place + self._speed).clamp(-1, 1)
        after = self._distance()
        success = after < REACH
        ends = np.zeros(self.num_envs, bool)
        return StepResult(self.given(before - after + success), ends, self.given(success))

    def _observe(self) -> Observation:
        seen = [self._place, self._speed, self._target - self._place, self._rest]
        return {"state": self.given(torch.cat(seen, dim=1))}

    def _distance(self) -> torch.Tensor:
        return torch.linalg.vector_norm(self._target - self._place, dim=1)
