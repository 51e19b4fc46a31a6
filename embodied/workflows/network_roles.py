"""Roles with networks between players and learners: the reference for the divergence, and a critic.

Both add a column to the trajectories. The reference's log-probs equal the learners' own reference. A critic predicts a
conversation's remaining return, sends these values on, and updates on the same conversations before the learners. The
values are from before its update, as PPO's advantages need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.advantages import token_gae
from embodied.algorithms.config import AlgoConfig, PPOConfig
from embodied.algorithms.groups import score_of
from embodied.algorithms.losses import value_loss_sum
from embodied.core import rng
from embodied.core.errors import Diverged
from embodied.core.types import EnvSpec, EpisodeResult, Trajectory, choose, join
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.rollout_buffer import take
from embodied.learners.train_batch import (
    REFERENCE,
    RankBatch,
    divergences,
    earned,
    items_of,
    logprobs_of,
    scores_of,
    trained_tokens,
)
from embodied.policies import make_policy
from embodied.policies.language.policy import LanguagePolicy
from embodied.policies.policy_folder import read_weights
from embodied.runtime import Needs
from embodied.runtime.device_memory import Computing, DeviceTensors, give_back_unused, num_bytes
from embodied.workflows.relay import RelayWorker

ALONE = {"shard": False, "sequence_degree": 1}  # a role's network is unsharded on its device


class NetworkWorker(RelayWorker):
    """A network on a device, offloaded when other workers need the memory."""

    def __init__(self, policy: Any, algo: AlgoConfig, learner: LearnerConfig, seed: int, device: str) -> None:
        self.config, self.algo, self.seed, self.device = policy, algo, seed, device
        self.learner = learner.model_copy(update=ALONE)
        self.computing = Computing()

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        """Build the network with the run's initial weights."""
        self.belongings = DeviceTensors(self.timers)
        policy = self.make(spec).eval()
        if start:
            policy.begin_with(read_weights(start))
        self.model = Model(policy.to(self.device), self.learner, self.tick)

    def make(self, spec: EnvSpec) -> Any:
        return make_policy(self.config, spec, self.seed)

    def tensors(self) -> list[Tensor]:
        """All tensors on the device."""
        return [*self.model.policy.parameters(), *self.model.policy.buffers()]

    def needs(self, shared: bool = False) -> Needs:
        return Needs(num_bytes(self.tensors()) + self.computing.num_bytes)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            self.belongings.offload({"network": self.tensors()})
            give_back_unused()

    def relay(self, parts: list[Trajectory]) -> tuple[list[Trajectory], dict[str, float]]:
        with self.computing.measured():
            trajectories, metrics = self.added(join(parts) if parts else None)
        return [choose(trajectories, part.ids) for part in parts] if trajectories else [], metrics

    def added(self, played: Trajectory | None) -> tuple[Trajectory | None, dict[str, float]]:
        """The trajectories with the role's column added, and metrics; None for a worker without parts."""
        raise NotImplementedError

    def items(self, played: Trajectory) -> tuple[RankBatch, np.ndarray]:
        """The trajectory's decisions as items, and a mask of counted ones, bool [K]."""
        speaks = self.model.policy.speaks
        trained = trained_tokens(played, self.algo) if speaks else np.ones(len(played.versions), bool)
        return items_of(played, self.algo, self.model, trained), trained


class ReferenceWorker(NetworkWorker):
    """Adds the log-probs of the run's initial policy."""

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        super().build(spec, start)
        self.model.policy.requires_grad_(False)

    def added(self, played: Trajectory | None) -> tuple[Trajectory | None, dict[str, float]]:
        if played is None:
            return None, {}
        batch, _ = self.items(played)
        logprobs = logprobs_of(self.model, batch, self.algo).cpu().numpy()
        return replace(played, replay=played.replay | {REFERENCE: logprobs}), {}


class CriticPolicy(LanguagePolicy):
    """Predicts values and generates nothing: its log-probs and entropies are zeros."""

    def words(self, hidden: Tensor, takes: np.ndarray, chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        nothing = hidden.new_zeros(len(takes), dtype=self.exact)
        return nothing, nothing


class CriticWorker(NetworkWorker):
    """Adds values of conversations, token by token, and learns from their returns."""

    algo: PPOConfig

    def __init__(
        self, policy: Any, algo: PPOConfig, learner: LearnerConfig, seed: int, device: str, lr: float | None
    ) -> None:
        rate = next(each for each in (lr, algo.value_lr, algo.lr) if each is not None)
        algo = algo.model_copy(update={"lr": rate, "value_lr": rate})
        super().__init__(policy.model_copy(update={"value_head": True}), algo, learner, seed, device)
        self.updates = 0

    def make(self, spec: EnvSpec) -> Any:
        policy = CriticPolicy(self.config, spec)
        policy.initialise(rng.generator(self.seed, "critic", "initial weights"))
        return policy

    def build(self, spec: EnvSpec, start: Path | None = None) -> None:
        super().build(spec, start)
        self.optimizer = PolicyOptimizer(self.model.policy, self.algo, OfRole(self))

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.optimizer.tensors()]

    def added(self, played: Trajectory | None) -> tuple[Trajectory | None, dict[str, float]]:
        if played is None:
            return None, self.learn(None, *[np.zeros(0)] * 3)
        batch, trained = self.items(played)
        values = scores_of(self.model, batch, 1, lambda scores: scores.values).double().cpu().numpy()
        algo, rewards = (
            self.algo,
            earned(played, scores_of_episodes(played, self.algo, self.config.max_tokens), trained),
        )
        if algo.kl_coef and algo.kl_in == "reward":
            reference = torch.as_tensor(np.array(played.replay[REFERENCE]), device=self.device)
            rewards[:, 0] -= algo.kl_coef * divergences(batch, reference)
        _, returns = token_gae(rewards[:, 0], values, trained, played.lengths, algo.gamma, algo.gae_lambda)
        numbers = self.learn(batch, values, returns, trained)
        return replace(played, values=values), numbers

    def learn(
        self, batch: RankBatch | None, values: np.ndarray, returns: np.ndarray, trained: np.ndarray
    ) -> dict[str, float]:
        """Gradient steps towards the returns, together with the other critic ranks; a minibatch consists of
        conversations."""
        algo, count = self.algo, 0 if batch is None else len(batch.numbers)
        total, tokens = self.summed(np.array([count, trained.sum()], np.float64)).tolist()
        size = algo.minibatch_size or max(total, 1)
        steps = max(1, round(total / size))
        losses, self.updates = [], self.updates + 1
        known = [
            torch.as_tensor(each, device=self.device, dtype=self.model.dtype) for each in (values, returns, trained)
        ]
        for epoch in range(algo.epochs):
            order = rng.permutation(self.seed, self.updates, epoch, count)
            for units in np.array_split(order, steps):
                losses.append(self.step(batch, torch.from_numpy(np.sort(units)), known, tokens / steps))
        if not np.isfinite(losses).all():
            raise Diverged("the critic's loss is not finite; try a lower roles.critic_lr")
        errors, moments = np.square(returns - values)[trained > 0], returns[trained > 0]
        sums = self.summed(np.array([errors.sum(), moments.sum(), np.square(moments).sum()]))
        spread = sums[2] - sums[1] ** 2 / max(tokens, 1)
        explained = 1 - sums[0] / spread if spread > 0 else 0.0
        return {"critic/value_loss": float(np.mean(losses)), "critic/explained_variance": float(explained)}

    def step(self, batch: RankBatch | None, units: Tensor, known: list[Tensor], count: float) -> float:
        loss_sum = torch.zeros(1, dtype=self.model.dtype, device=self.device)
        passes = batch.passes(self.model, units) if batch is not None and len(units) else []
        for number, each in enumerate(passes, 1):
            assert batch is not None
            scores = self.model.score(each.inputs(batch))
            old, returns, weights = (take(part, each.items) for part in known)
            bounds = {"value_clip": self.algo.value_clip, "huber_delta": self.algo.huber_delta}
            loss, _ = value_loss_sum(scores.values, old, returns, weights, **bounds)
            self.model.backward(loss / count, last=number == len(passes))
            loss_sum += loss.detach()
        totals, norm = self.optimizer.exchange(loss_sum)
        self.optimizer.step(norm, 1.0)
        return float(totals) / count

    def summed(self, numbers: np.ndarray) -> np.ndarray:
        return self.all_reduce(numbers) if self.world_size > 1 else numbers

    # Checkpoints

    def get_state(self) -> dict[str, np.ndarray]:
        arrays = {f"net.{name}": tensor for name, tensor in self.model.policy.state_dict().items()}
        arrays |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.state_tensors()}
        known = {
            name: tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
            for name, tensor in arrays.items()
        }
        return {name: tensor.cpu().numpy().copy() for name, tensor in known.items()} | {
            "updates": np.array(self.updates)
        }

    def set_state(self, arrays: dict[str, np.ndarray]) -> None:
        self.updates = int(arrays["updates"])
        with torch.no_grad():
            for name, tensor in self.model.policy.state_dict(keep_vars=True).items():
                tensor.copy_(torch.from_numpy(arrays[f"net.{name}"].copy()))
            for name, tensor in self.optimizer.state_tensors():
                tensor.copy_(torch.from_numpy(arrays[f"optimizer.{name}"].copy()))


class OfRole:
    """A role's workers as ranks that sum tensors."""

    def __init__(self, worker: CriticWorker) -> None:
        self.worker = worker

    def sum(self, values: Tensor) -> Tensor:
        if self.worker.world_size == 1:
            return values
        return torch.as_tensor(self.worker.all_reduce(values.cpu().numpy()), device=values.device)

    def gather(self, rows: np.ndarray) -> list[np.ndarray]:
        raise NotImplementedError("unsharded networks only exchange sums")


def scores_of_episodes(played: Trajectory, algo: PPOConfig, max_tokens: int) -> np.ndarray:
    """The scores [R] of conversations, as the driver counts them: `score_of`."""
    starts = np.cumsum(played.lengths) - played.lengths

    def per_conversation(column: np.ndarray, how: Callable = np.add) -> list:
        return how.reduceat(np.asarray(column)[:, 0], starts).tolist()

    rewards = per_conversation(np.where(played.mask, played.rewards, 0.0))
    cut, tokens = per_conversation(played.truncated, np.logical_or), per_conversation(played.mask.astype(np.int64))
    return np.array(
        [
            score_of(EpisodeResult(0, "", 0, 0, 1, reward, None, None, truncated=bool(c), tokens=n), algo, max_tokens)
            for reward, c, n in zip(rewards, cut, tokens, strict=True)
        ]
    )
