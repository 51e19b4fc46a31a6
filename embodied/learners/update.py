"""One update: the same sequence of gradient steps on every rank, each rank adding the units it owns.

The gradient and the step's statistics travel between ranks as one vector. Where units are learned from as they come
(pipeline.schedule=periodic), sums of gradients and statistics are divided once, by counts that are known after the last
unit: the step is the one that the gathered units would make, whatever the order in which they came.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.config import AlgoConfig
from embodied.algorithms.losses import loss_terms
from embodied.core.errors import ConfigError, Diverged, EmbodiedError, WrongShape
from embodied.core.rng import minibatches
from embodied.core.types import BatchEnd, Trajectory
from embodied.learners.model import Model, PolicyOptimizer, lr_factor
from embodied.learners.rollout_buffer import take
from embodied.learners.train_batch import RankBatch, step_items
from embodied.policies.base import Scores

MISMATCH = ("mismatch_k3", "mismatch_error")  # of log-probs with those at act time, in the first step


class GradientSteps:
    """The gradient steps of one update: gradients and statistics are added up, and exchanged for each step."""

    def __init__(self, model: Model, optimizer: PolicyOptimizer, config: AlgoConfig) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.names = (*loss_terms(config), *model.policy.own_losses, *MISMATCH)
        self.sums = torch.zeros(len(self.names), dtype=model.dtype, device=model.device)
        # Of a decision the gap and k3, and the error of a conversation
        self.largest = torch.full((3,), -math.inf, dtype=model.dtype, device=model.device)
        self.counts = torch.zeros(3, dtype=torch.float64, device=model.device)  # of losses, statistics and units
        self.history: list[dict[str, float]] = []  # the statistics of each step

    def add(self, batch: RankBatch, units: Tensor, divisor: float = 1.0) -> None:
        """Add the gradient of these units' loss, divided by `divisor`. Before the first step, log-probs are compared
        with those at act time."""
        model = self.model
        passes = batch.passes(model, batch.teaching(units))
        for number, each in enumerate(passes, 1):
            scores, part, counts = model.score(each.inputs(batch)), each.items, each.counts
            if not each.is_own:  # its owner's gradient comes back
                model.backward(0.0 * scores.logprobs.sum(), last=number == len(passes))
                continue
            check_scores(scores, take(batch.logprobs, part))
            loss, stats = batch.loss_sum(scores, part, float(counts), self.config)
            parts = [stats[name] for name in loss_terms(self.config)]
            if scores.own_loss is not None:
                own = scores.own_loss.sum() * (float(counts) * batch.weight_sum / (batch.num_units or 1))
                loss = loss + own
                parts.append(own.detach())
            model.backward(loss / divisor, last=number == len(passes))
            if self.history:
                self.sums[: -len(MISMATCH)] += torch.stack(parts)
                continue
            k3, gap, error = mismatch_of(batch, part, scores.logprobs.detach())
            weights = float(counts) * take(batch.weights, part)
            self.sums += torch.stack([*parts, (weights * k3).sum(), (weights * error).sum()])
            if counts:
                found = torch.stack([gap.max(), k3.max(), sequence_errors(batch, part, error).max()])
                self.largest = torch.maximum(self.largest, found)

    def add_all(self, batch: RankBatch) -> None:
        """Add a batch that is one of many; what the sums are to be divided by adds up too."""
        self.add(batch, batch.own_units)
        self.counts += self.counts.new_tensor([batch.loss_count, batch.weight_sum, batch.num_units])

    def step(self, end: BatchEnd, epoch: int, divisor: float, count: float | None = None) -> dict[str, float]:
        """Take a step with all ranks; returns its statistics, divided by `divisor`. The gradient is divided by `count`,
        where that was not known before."""
        totals, norm = self.optimizer.exchange(self.sums, count)
        self.sums = torch.zeros_like(self.sums)
        numbers = {name: total / divisor for name, total in zip(self.names, totals.tolist(), strict=True)}
        self.history.append(numbers | {"grad_norm": norm})
        check_finite(self.history[-1], end.iteration, epoch)
        self.optimizer.step(norm, self.lr_factor(end))
        self.history[-1] |= self.model.policy.end_step(self.optimizer.collective.sum)
        return numbers

    def step_once(self, end: BatchEnd) -> dict[str, float]:
        """Take the only step, after the last batch. Returns numbers for the log; {} where no rank had a unit."""
        count, counted, units = self.optimizer.collective.sum(self.counts).tolist()
        if not units:
            return {}
        self.step(end, 0, counted or 1.0, count or 1.0)
        ages = {"train/staleness": 0.0, "train/staleness_max": 0.0, "train/staleness_0": 1.0}  # `check_version`
        return self.metrics(end, 1) | ages

    def metrics(self, end: BatchEnd, epochs: int, batch: RankBatch | None = None) -> dict[str, float]:
        """Means over the steps for the log, and what there is to say of a batch that was learned from."""
        num_masked = batch.num_masked if batch else 0
        rows = check_weights(self.optimizer, end.iteration, *self.largest.tolist(), num_masked)
        metrics = mismatch_numbers(*(self.history[0][name] for name in MISMATCH), rows[:, :3])
        metrics |= {"train/epochs": float(epochs), "train/lr": self.config.lr * self.lr_factor(end)}
        if batch is not None:
            metrics |= batch.metrics
            if batch.masked is not None:
                metrics["train/masked_fraction"] = float(rows[:, 3].sum()) / batch.num_items
        names = [name for name in self.history[0] if name not in MISMATCH]
        return {f"train/{name}": float(np.mean([row[name] for row in self.history])) for name in names} | metrics

    def lr_factor(self, end: BatchEnd) -> float:
        return lr_factor(self.config.lr_schedule, end.iteration / end.total)


def update_policy(
    model: Model, optimizer: PolicyOptimizer, config: AlgoConfig, batch: RankBatch, seed: int, end: BatchEnd
) -> dict[str, float]:
    """All epochs of one iteration. Returns means over the gradient steps for the log."""
    if config.decoupled or config.episode_mask != "none":  # scored before any step
        batch = batch.corrected(model, config)
    steps = GradientSteps(model, optimizer, config)
    for epoch in range(config.epochs):
        kl_sum = 0.0
        for minibatch in minibatches(batch.order(seed, end.iteration, epoch), step_items(config, batch.num_units)):
            units = len(minibatch)
            steps.add(batch, batch.owned(minibatch), batch.divisor(units))
            kl_sum += steps.step(end, epoch, batch.stats_divisor(units))["approx_kl"] * units
        if skip_remaining_epochs(kl_sum / batch.num_units, config.target_kl):
            break
    return steps.metrics(end, epoch + 1, batch)


def skip_remaining_epochs(mean_kl: float, target_kl: float | None) -> bool:
    """Given `approx_kl` of an epoch (all ranks, measured before each gradient step) divided by its number of items."""
    return target_kl is not None and mean_kl > target_kl


def check_divisor(model: Model, config: AlgoConfig) -> None:
    """Refuse losses that are not divided by a count known only at the end of a batch."""
    if (own := model.policy.own_losses) and config.weighting == "episode":
        raise ConfigError(
            f"pipeline.schedule=periodic divides all losses by one count, with algo.weighting=episode that of the "
            f"episodes, but {', '.join(own)} counts decisions; try algo.weighting=decision"
        )


def check_version(played: Trajectory, version: int) -> None:
    """Refuse episodes that were played with another version of the weights than the learner has."""
    if odd := {*played.versions[played.mask.any(axis=1)].tolist()} - {version}:
        raise EmbodiedError(
            f"episodes {played.ids[0]} to {played.ids[-1]} were played with version {min(odd)} of the weights, but "
            f"version {version} learns: pipeline.schedule=periodic learns from nothing else"
        )


def mismatch_of(batch: RankBatch, part: Tensor, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The distance of the log-probs [b, C, A] of some items from those at act time.

    k3 [b], per decision: the sum of r - 1 - log r over its numbers, whose mean is KL(acted || now). The gap [b] in nats
    is the largest difference of a number, -inf for decisions of other weights than those that the update starts from.
    The error [b] is the mean over the numbers of max(r, 1 / r), 0 for decisions without any.
    A decision of two numbers with ratios 2 and 1/2: k3 2 - 1 - 0.693 + 1/2 - 1 + 0.693 = 0.5, gap 0.693, error 2.
    """
    played = take(batch.mask, part)[:, :, None]
    apart = torch.where(played, logprobs - take(batch.logprobs, part), 0.0)
    gaps = torch.where(take(batch.current, part), apart.abs().amax((1, 2)), -math.inf)
    errors = torch.where(played, apart.abs().exp(), 0.0).sum((1, 2))
    numbers = (played.sum((1, 2)) * apart.shape[2]).clamp(min=1)
    return (apart.expm1() - apart).sum((1, 2)), gaps, errors / numbers


def sequence_errors(batch: RankBatch, part: Tensor, errors: Tensor) -> Tensor:
    """The mean error of each conversation's tokens that count, 0 of those without any; of robots -inf, whose episodes
    no pass holds whole."""
    if batch.groups is None:
        return errors.new_full((1,), -math.inf)
    of, counts = take(batch.of, part), (take(batch.weights, part) > 0).to(errors.dtype)
    none = errors.new_zeros(int(of.max()) + 1)
    return none.index_add(0, of, errors * counts) / none.index_add(0, of, counts).clamp(min=1)


def mismatch_numbers(k3: float, error: float, largest: np.ndarray) -> dict[str, float]:
    """The log's numbers of a mean k3 and error and the largest gaps, k3s and errors of conversations [ranks, 3]; no gap
    where no decision was taken with the weights that the update started from."""
    gap, k3_max, of_sequence = largest.max(axis=0).tolist()
    metrics = {"train/mismatch_k3": k3, "train/mismatch_k3_max": k3_max, "train/mismatch_error": error}
    metrics |= {"train/mismatch_sequence_max": of_sequence} if of_sequence >= 0 else {}
    return metrics | ({"train/logprob_gap": gap} if gap >= 0 else {})


def check_scores(scores: Scores, acted: Tensor) -> None:
    """Refuse scores that would broadcast against what was stored at act time."""
    wanted, found = list(acted.shape), [list(each.shape) for each in (scores.logprobs, scores.entropy, scores.values)]
    if found != [wanted, wanted, wanted[:1]]:
        raise WrongShape(
            f"the policy's forward returned logprobs {found[0]}, entropy {found[1]}, values {found[2]}; "
            f"act's logprobs ask for {wanted}, {wanted} and {wanted[:1]}"
        )


def check_finite(numbers: dict[str, float], iteration: int, epoch: int) -> None:
    """Stop before a loss that is not finite becomes weights."""
    if odd := [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]:
        raise Diverged(
            f"{', '.join(odd)} in iteration {iteration + 1}, epoch {epoch + 1}; try a lower algo.lr, and look for "
            "very large rewards or observations (policy.normalize_observations=true scales the latter)"
        )


def check_weights(optimizer: PolicyOptimizer, iteration: int, *numbers: float) -> np.ndarray:
    """A step may be finite and still too large: what is published or saved must be usable. Returns these numbers of
    all ranks, a row each."""
    rows = np.array([[0.0 if optimizer.finite() else 1.0, *numbers]])
    rows = np.concatenate(optimizer.collective.gather(rows))
    if rows[:, 0].any():
        raise Diverged(f"weights are NaN or infinite after iteration {iteration + 1}; try a lower algo.lr")
    return rows[:, 1:]
