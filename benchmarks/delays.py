"""Parts with known times: is a plan's prediction right if its costs are, and which mode wins when?

    python -m embodied.benchmark recipe=benchmarks/delays.yaml          # collocated: simulators divide among cores
    python -m embodied.benchmark recipe=benchmarks/delays_weights.yaml  # hybrid: weights are dear to hand over
    python -m embodied.benchmark recipe=benchmarks/delays_frozen.yaml   # learners apart: look at rollouts in pieces
    python -m embodied.benchmark recipe=benchmarks/delays_schedules.yaml   # async: updates as long as rollouts
    python -m embodied.benchmark recipe=benchmarks/delays_groups.yaml      # periodic: a group after the other

`benchmarks.turns` compares `Together` and `OneByOne`, which have a scoring role that sleeps for each episode
(benchmarks/delays_roles.yaml): the groups of a round pass through it together, or each as soon as it has ended.
`ThreeTogether` and `ThreeOneByOne` have three such roles (benchmarks/delays_many_roles.yaml).

Every step sleeps `fixed_s`, and `row_s` for each of its rows, so that other programs hardly matter. The policy sleeps
in the same way: `load_s` to load weights of another process, like a large policy, and `look_row_s` for its frozen
parts' pass over an observation.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.types import ActionSpec, EnvSpec, Observation
from embodied.envs.vector_env import StepResult, VectorEnv
from embodied.policies.base import Scores
from embodied.policies.config import MLPConfig
from embodied.policies.networks import MLPPolicy
from embodied.workflows import Role
from embodied.workflows.relay import RelayWorker
from embodied.workflows.rl_loop import EmbodiedLoop

STEPS = 8
EPISODE_S = 0.075  # of the scoring role


class Delayed(VectorEnv):
    """The reward is the action; episodes end after eight steps."""

    def __init__(self, config, num_envs: int) -> None:
        steps = config.max_episode_steps or STEPS
        super().__init__(config, num_envs, EnvSpec(ActionSpec(1), state_dim=1, max_episode_steps=steps))
        self.steps = np.zeros((num_envs, 1), np.float32)
        self.delay_s = config.kwargs["fixed_s"] + config.kwargs["row_s"] * num_envs

    def _reset_rows(self, rows, episodes):
        self.steps[rows] = 0

    def _step(self, actions, active):
        time.sleep(self.delay_s)
        self.steps = self.steps + active[:, None]
        return StepResult(actions[:, 0], np.zeros(self.num_envs, bool), None)

    def _observe(self):
        return {"state": self.steps.copy()}


class DelayedPolicy(MLPPolicy):
    """A small network with the delays of a large one."""

    def __init__(self, config, spec: EnvSpec) -> None:
        super().__init__(MLPConfig(hidden=(8,)), spec)
        self.load_s, self.learn_row_s = config.kwargs["load_s"], config.kwargs["learn_row_s"]
        self.look_row_s = config.kwargs.get("look_row_s", 0.0)

    def use_weights(self, tensors: dict[str, Tensor]) -> None:
        if not all(tensor.untyped_storage().resizable() for tensor in tensors.values()):  # else the learner's own
            time.sleep(self.load_s)
        super().use_weights(tensors)

    def frozen_features(self, obs: Observation) -> dict[str, Tensor]:
        if not self.look_row_s:
            return {}
        time.sleep(self.look_row_s * len(obs["state"]))
        return {"seen": torch.zeros(len(obs["state"]), 1)}

    def forward(self, inputs: dict[str, Any]) -> Scores:
        if self.look_row_s and "seen" not in inputs:
            self.frozen_features(inputs["obs"])
        time.sleep(self.learn_row_s * len(inputs["actions"]))
        return super().forward(inputs)


class Scorer(RelayWorker):
    """Changes nothing."""

    episode_s = EPISODE_S

    def add(self, parts):
        for part in parts:
            time.sleep(self.episode_s * len(part.ids))
        return parts


class QuickScorer(Scorer):
    episode_s = EPISODE_S / 3


class OneByOne(EmbodiedLoop):
    roles = (*EmbodiedLoop.roles, Role("scorer", "benchmarks.delays:Scorer", relays=True, streams=True))


class Together(EmbodiedLoop):
    roles = (*EmbodiedLoop.roles, Role("scorer", "benchmarks.delays:Scorer", relays=True))


THREE = ("reference", "critic", "judge")


class ThreeOneByOne(EmbodiedLoop):
    roles = (
        *EmbodiedLoop.roles,
        *(Role(name, "benchmarks.delays:QuickScorer", relays=True, streams=True) for name in THREE),
    )


class ThreeTogether(EmbodiedLoop):
    roles = (*EmbodiedLoop.roles, *(Role(name, "benchmarks.delays:QuickScorer", relays=True) for name in THREE))
