"""The learner: one replica of the policy, its optimizer, and PPO on its block of env rows.

Ranks see different items and take the same steps: gradients are sums over items divided by a count known before the step, and
everything that is normalised (advantages, observations, gradient norm) is normalised over all ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from embodied.algorithms.ppo import PPO
from embodied.data import EnvSpec, Trajectory, Weights
from embodied.learners.batch import flatten, merge
from embodied.learners.collective import Alone, Collective, join
from embodied.learners.optimizer import Optimizer
from embodied.learners.update import Share, update_policy
from embodied.policies import make_policy
from embodied.policies.base import read_weights
from embodied.policies.normalizer import state_moments
from embodied.runtime import Channel, Worker


class LearnerWorker(Worker):
    def __init__(self, policy, algo, seed: int, meeting) -> None:
        self.policy_config = policy
        self.algo = algo
        self.seed = seed
        self.meeting = meeting
        self.collective: Collective = Alone()

    def build(self, spec: EnvSpec, num_envs: int) -> None:
        """The policy with its initial weights (the same on every rank) and a fresh optimizer."""
        self.num_envs = num_envs
        self.policy = make_policy(self.policy_config, spec, self.seed).eval()
        self.optimizer = Optimizer(self.policy, self.algo)
        self.collective = join(self.meeting, self.rank, self.world_size)

    def update(self, trajectories: Channel, num_trajectories: int, iteration: int, total: int) -> dict[str, float]:
        """Receive this rank's trajectories of one rollout and do one PPO update with all ranks."""
        whole = merge([trajectories.get() for _ in range(num_trajectories)])
        share = Share(
            flatten(whole), *self._advantages(whole), num_items=self.num_envs * len(whole.rewards), iteration=iteration
        )
        numbers = update_policy(self.policy, self.optimizer, self.collective, self.algo, share, self.seed, total)
        self._update_normalizer(whole)
        return numbers

    def publish(self, version: int, channels: tuple[Channel, ...]) -> None:
        """Hand the current weights to every policy worker as this version."""
        tensors = {name: tensor.detach().numpy().copy() for name, tensor in self.policy.state_dict().items()}
        for channel in channels:
            channel.put(Weights(version, tensors))

    def save(self, folder: Path) -> None:
        """The policy folder and the optimizer, into a checkpoint that is being written."""
        self.policy.save_pretrained(folder / "policy")
        self.optimizer.save(folder / "learner")

    def load(self, checkpoint: Path) -> None:
        self.policy.load_weights(read_weights(checkpoint / "policy"))
        self.optimizer.load(checkpoint / "learner")
