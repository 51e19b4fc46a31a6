"""One update: the same gradient steps on every rank, each over all ranks' units.

The gradient and the step's statistics are exchanged between ranks as one vector. With gradient accumulation
(pipeline.schedule=periodic), sums of gradients and statistics are divided once, by counts that are known after the last
unit. So the step equals a step with all units at once, in any order of arrival.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.config import AlgoConfig
from embodied.algorithms.losses import loss_terms
from embodied.core.arrays import flat_dict, is_tensor, leaves, map_obs
from embodied.core.errors import ConfigError, Diverged, EmbodiedError, WrongShape
from embodied.core.rng import minibatches
from embodied.core.types import BatchEnd, Trajectory
from embodied.learners.model import KEPT_BYTES, LrFactors, Model, Pass, PolicyOptimizer, scheduled
from embodied.learners.train_batch import OF_ITEMS, RankBatch, samples_per_step
from embodied.policies.base import Scores
from embodied.runtime.collective import Collective
from embodied.runtime.device_memory import take

SMALL = 10_000_000  # largest number of weights of a policy with captured steps
SIZES = 8  # most sizes of padded minibatches, each with its own graph
UNCOUNTED = ("mask", "current", "weights")  # zeros for padding items
LossOf = Callable[[Pass], tuple[Tensor, Tensor]]  # the loss of a pass, a sum, and numbers for the log
IMITATION = "imitation_loss"  # of algo.imitation
MISMATCH = ("mismatch_k3", "mismatch_error")  # log-probs compared with act time, in the first step


@dataclass(frozen=True)
class StepSums:
    """The statistics of a gradient step, for the log."""

    sums: Tensor  # float64, on the device: statistics summed over all ranks, and the gradient's norm
    epoch: int
    samples: int
    divisor: float
    more: dict[str, float]

    def numbers(self, names: Sequence[str], sums: list[float]) -> dict[str, float]:
        """The statistics by name, given the sums read from the device."""
        *totals, norm = sums
        numbers = {name: total / self.divisor for name, total in zip(names, totals, strict=True)}
        return numbers | {"grad_norm": norm} | self.more


class GradientSteps:
    """The gradient steps of one update, for any loss:

    steps.add_passes(passes, loss_of, count)     # accumulates the gradient, and numbers for the log
    steps.step(lr_factors, epoch, samples, count)  # sums both over all ranks, and changes the weights
    rows, _ = steps.read(steps.steps)            # the numbers of each step, divided by its count
    """

    def __init__(self, model: Model, optimizer: PolicyOptimizer, names: Sequence[str]) -> None:
        """`names` of the numbers."""
        self.model, self.optimizer, self.names = model, optimizer, (*names,)
        self.sums = torch.zeros(len(self.names), dtype=model.dtype, device=model.device)
        self.broken = torch.zeros((), device=model.device)  # 1 from the first step with non-finite numbers on
        self.steps: list[StepSums] = []

    def add_passes(
        self, passes: Sequence[Pass], loss_of: LossOf, divisor: float, prepare: Callable[[Pass], None] | None = None
    ) -> None:
        """Accumulate the gradient of these passes' loss, divided by `divisor`, and their numbers. `prepare` begins to
        read what a pass needs, during the pass before."""
        for number, micro_batch in enumerate(passes, 1):
            for following in passes[number : number + 1] if prepare else ():
                prepare(following)
            loss, numbers = loss_of(micro_batch)
            self.backward(loss / divisor, numbers, last=number == len(passes))

    def backward(self, loss: Tensor, numbers: Tensor, last: bool) -> None:
        """Accumulate the gradient of a pass, and its first numbers. `last`: no other pass of this step follows."""
        self.model.backward(loss, last)
        self.sums[: len(numbers)].add_(numbers)

    def step(self, lr_factors: LrFactors, epoch: int, samples: int, divisor: float, count: float | None = None) -> None:
        """Take a step with all ranks for a minibatch of so many samples. Statistics are divided by `divisor`, and the
        gradient by `count`, if given."""
        sums = self.exchange(lr_factors, count)
        more = self.model.policy.end_step(self.optimizer.collective.sum)
        self.steps.append(StepSums(sums, epoch, samples, divisor, more))

    def exchange(self, lr_factors: LrFactors, count: float | None) -> Tensor:
        """Sum over all ranks and take a step; returns `StepSums.sums`."""
        return self.take_step(*self.optimizer.exchange(self.sums, count), lr_factors)

    def take_step(self, totals: Tensor, norm: Tensor, lr_factors: LrFactors) -> Tensor:
        """Take a step with the summed gradients; returns `StepSums.sums`. The device checks that these are finite:
        otherwise this step and all later steps leave the weights unchanged."""
        sums = torch.cat([totals.double(), norm.view(1)])
        self.broken.masked_fill_((sums - sums).any(), 1.0)  # infinity minus itself is NaN, too
        self.optimizer.step(norm, lr_factors, self.broken)
        self.sums.zero_()
        return sums

    def read(self, steps: list[StepSums], *more: Tensor) -> tuple[list[dict[str, float]], list[float]]:
        """The statistics of these steps, and further numbers from the device, read in one transfer."""
        width = len(self.names) + 1
        read = torch.cat([*(step.sums for step in steps), *(tensor.double() for tensor in more)]).tolist()
        rows = [read[i * width : (i + 1) * width] for i in range(len(steps))]
        return [s.numbers(self.names, row) for s, row in zip(steps, rows, strict=True)], read[width * len(rows) :]

    def finished(self, iteration: int, *more: Tensor) -> tuple[list[dict[str, float]], np.ndarray]:
        """The statistics of all steps, and further numbers of all ranks, a row each. Raises Diverged if numbers or
        weights are not finite."""
        history, of_rank = self.read(self.steps, self.optimizer.broken().view(1), *more)
        for numbers, step in zip(history, self.steps, strict=True):
            check_finite(numbers, iteration, step.epoch)
        return history, check_weights(self.optimizer.collective, iteration, *of_rank)


class PolicySteps(GradientSteps):
    """The gradient steps of the policy's loss, and of its values'."""

    def __init__(self, model: Model, optimizer: PolicyOptimizer, config: AlgoConfig) -> None:
        imitation = [] if config.imitation is None else [IMITATION]  # the last one
        super().__init__(model, optimizer, (*loss_terms(config), *model.policy.own_losses, *MISMATCH, *imitation))
        self.config = config
        self.zero = torch.zeros((), dtype=model.dtype, device=model.device)  # of terms that the loss does not have
        self.by_own_logprobs = False  # True: log-probs of acting are replaced by those of the only step's passes
        # Largest gap and k3 of a decision, and largest error of a conversation
        self.largest = torch.full((3,), -math.inf, dtype=model.dtype, device=model.device)
        self.counts = torch.zeros(3, dtype=torch.float64, device=model.device)  # loss and statistics divisors, samples

    def add(self, batch: RankBatch, samples: Tensor, divisor: float = 1.0) -> None:
        """Add the gradient of these samples' loss, divided by `divisor`. Before the first step, log-probs are compared
        with the log-probs at act time."""
        passes = batch.passes(self.model, batch.teaching(samples))
        prepare = partial(batch.read_ahead, self.model) if "picture" in batch.obs else None
        self.add_passes(passes, partial(self.loss_of, batch), divisor, prepare)

    def loss_of(self, batch: RankBatch, micro_batch: Pass) -> tuple[Tensor, Tensor]:
        scores = self.model.score(micro_batch.inputs(batch.inputs))
        if not micro_batch.is_own:  # the owner's gradient arrives through the exchange
            return 0.0 * scores.logprobs.sum(), self.sums[:0]
        weight = float(micro_batch.counts)
        own_weight = weight * batch.weight_sum / (batch.num_samples or 1)
        return self.loss_of_scores(scores, batch.select_loss_arrays(micro_batch.items), weight, own_weight)

    def loss_of_scores(
        self, scores: Scores, items: RankBatch, weight: float, own_weight: float | Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss of these items, and its statistics. `weight` 0: all are padding."""
        check_scores(scores, items.logprobs)
        judged = replace(items, logprobs=scores.logprobs.detach()) if self.by_own_logprobs else items
        loss, stats = judged.loss_sum(scores, weight, self.config)
        numbers = [stats.get(name, self.zero) for name in loss_terms(self.config)]
        if scores.own_loss is not None:
            own_loss = scores.own_loss.sum() * own_weight
            loss = loss + own_loss
            numbers.append(own_loss.detach())
        if not self.steps:
            k3, gap, error = mismatch_of(items, scores.logprobs.detach())
            weights = weight * items.weights
            numbers += [(weights * k3).sum(), (weights * error).sum()]
            if weight:
                largest = torch.stack([gap.max(), k3.max(), sequence_errors(items, error).max()])
                torch.maximum(self.largest, largest, out=self.largest)
        return loss, torch.stack(numbers)

    def add_all(self, batch: RankBatch) -> None:
        """Add one of several batches, for one step; the divisors are summed, too."""
        self.by_own_logprobs = self.model.rescores
        self.add(batch, batch.own_samples)
        self.counts += self.counts.new_tensor([batch.loss_count, batch.weight_sum, batch.num_samples])

    def imitate(self, end: BatchEnd, divisor: float, count: float = 1.0) -> None:
        """With algo.imitation add its gradient to that of this step, whose statistics will be divided by `divisor`, and
        its gradient by `count`."""
        if self.model.imitation is not None:
            self.model.imitation(self, end.iteration, divisor, count)

    def epoch_kl(self, epoch: int) -> float:
        """The sum of `approx_kl` over the epoch's samples. Waits for the device."""
        steps = [step for step in self.steps if step.epoch == epoch]
        return sum(step.samples * row["approx_kl"] for step, row in zip(steps, self.read(steps)[0], strict=True))

    def step_once(self, end: BatchEnd) -> dict[str, float]:
        """Take the only step, after the last batch. Returns numbers for the log; {} if no rank had a sample."""
        count, counted, samples = self.optimizer.collective.sum(self.counts).tolist()
        if not samples:
            return {}
        self.imitate(end, counted or 1.0, count or 1.0)
        self.step(self.lr_factors(end), 0, int(samples), counted or 1.0, count or 1.0)
        ages = {"train/staleness": 0.0, "train/staleness_max": 0.0, "train/staleness_0": 1.0}  # `check_version`
        metrics = self.metrics(end, 1) | ages
        note_gap(self.model, self.config, metrics)
        return metrics

    def metrics(self, end: BatchEnd, epochs: int, batch: RankBatch | None = None) -> dict[str, float]:
        """Means over the steps for the log, and statistics of the batch."""
        num_masked = self.sums.new_zeros(1) if batch is None else batch.num_masked
        history, rows = self.finished(end.iteration, self.largest, num_masked)
        metrics = mismatch_numbers(*(history[0][name] for name in MISMATCH), rows[:, :3])
        metrics |= {"train/epochs": float(epochs), "train/lr": self.config.lr * self.lr_factors(end)[0]}
        if imitation := self.config.imitation:
            metrics["train/imitation_weight"] = imitation.weight_at(end.iteration)
        if batch is not None:
            metrics |= batch.metrics
            if batch.excluded is not None:
                metrics["train/masked_fraction"] = float(rows[:, 3].sum()) / batch.num_items
        names = [name for name in history[0] if name not in MISMATCH]
        return {f"train/{name}": float(np.mean([row[name] for row in history])) for name in names} | metrics

    def lr_factors(self, end: BatchEnd) -> tuple[float, float]:
        """The factors on learning rates in this iteration; the policy's is 0 while the critic warms up."""
        factor = scheduled(self.config, end.iteration, end.total)
        return 0.0 if end.iteration < self.config.critic_warmup else factor, factor


class FixedPass:
    """The inputs of a captured pass in memory with fixed addresses, and the graph of the pass (`device_graphs.py`)."""

    def __init__(self, batch: RankBatch, size: int, dtype: torch.dtype) -> None:
        device = batch.mask.device
        self.index = torch.zeros(size, dtype=torch.int64, device=device)
        self.batch = replace(moved(batch.select(self.index), device), is_whole=False)  # padding is masked
        self.counts = torch.ones(size, dtype=dtype, device=device)  # 0 for padding items
        self.divisor, self.own_weight = (torch.ones((), dtype=dtype, device=device) for _ in range(2))
        self.graph: Any = None

    @property
    def inputs(self) -> dict[str, Any]:
        """The inputs of `Policy.forward`."""
        return {"obs": self.batch.obs, "actions": self.batch.actions} | self.batch.replay

    def fill(self, batch: RankBatch, items: Tensor, divisor: float) -> None:
        """Copy these items into the inputs, followed by padding up to the size."""
        count, buffers = len(items), tensors_of(self.batch)
        self.index[:count] = items
        self.index[count:].zero_()
        for name, tensor in tensors_of(batch).items():
            if tensor.device == self.index.device:
                torch.index_select(tensor, 0, self.index, out=buffers[name])
            else:
                buffers[name].copy_(take(tensor, self.index))
        self.counts.fill_(1.0)
        for buffer in (self.counts, *(buffers[name] for name in UNCOUNTED)):
            buffer[count:].zero_()
        self.divisor.fill_(divisor)
        self.own_weight.fill_(batch.weight_sum / (batch.num_samples or 1))


class GraphedSteps(PolicySteps):
    """Gradient steps captured once for all updates: a pass for each size of padded minibatches, and the step. Ranks sum
    their gradients in between."""

    def __init__(self, model: Model, optimizer: PolicyOptimizer, config: AlgoConfig) -> None:
        super().__init__(model, optimizer, config)
        self.sums = optimizer.fix_gradients(len(self.names))
        self.room = optimizer.summed
        self.on_gpu = model.device == "cuda"
        dtype = torch.float32 if self.on_gpu else torch.float64
        self.lr_factors_there = [torch.ones((), dtype=dtype, device=model.device) for _ in range(2)]
        self.row = torch.zeros(len(self.names) + 1, dtype=torch.float64, device=model.device)
        self.pool = torch.cuda.graph_pool_handle() if self.on_gpu else None
        self.passes: dict[tuple, FixedPass] = {}
        self.step_graph: Any = None
        self.addresses = self._addresses()

    @property
    def is_valid(self) -> bool:
        """True if all captured tensors still have their addresses."""
        return self.optimizer.summed is self.room and self._addresses() == self.addresses

    def begin(self, batch: RankBatch) -> None:
        """Begin an update with empty statistics; missing graphs are captured."""
        self.steps = []
        self.room.zero_()
        self.largest.fill_(-math.inf)
        self.broken.zero_()
        self._pass_for(batch, self._most_items(batch))
        self.step_graph = self.step_graph or self._capture(self._take_step)

    def add(self, batch: RankBatch, samples: Tensor, divisor: float = 1.0) -> None:
        for items in samples.split(self._most_items(batch)) if len(samples) else ():
            fixed = self._pass_for(batch, padded_size(len(items), self._most_items(batch)))
            fixed.fill(batch, items, divisor)
            self.model.begin_pass()
            fixed.graph.replay()

    def exchange(self, lr_factors: LrFactors, count: float | None) -> Tensor:
        assert count is None
        self.optimizer.collective.sum(self.room)  # in place
        for there, factor in zip(self.lr_factors_there, lr_factors, strict=True):
            there.fill_(factor)
        self.step_graph.replay()
        return self.row.clone()

    def _take_step(self) -> None:
        self.row.copy_(self.take_step(*self.optimizer.split(self.room), self.lr_factors_there))
        self.room.zero_()

    def _most_items(self, batch: RankBatch) -> int:
        return self.model.config.micro_batch_size or samples_per_step(self.config, batch.num_samples)

    def _pass_for(self, batch: RankBatch, size: int) -> FixedPass:
        shapes = [(name, tensor.dtype, tensor.shape[1:]) for name, tensor in tensors_of(batch).items()]
        key = (size, bool(self.steps), *shapes)
        if key not in self.passes:
            fixed = FixedPass(batch, size, self.model.dtype)
            fixed.graph = self._capture(lambda: self._learn_from(fixed))
            self.passes[key] = fixed
        return self.passes[key]

    def _learn_from(self, fixed: FixedPass) -> None:
        scores = self.model.score(fixed.inputs)
        if scores.own_loss is not None:
            scores = replace(scores, own_loss=scores.own_loss * fixed.counts)
        loss, numbers = self.loss_of_scores(scores, fixed.batch, 1.0, fixed.own_weight)
        self.backward(loss / fixed.divisor, numbers, last=True)

    def _capture(self, work: Callable[[], None]) -> Any:
        """The graph of this work. The capture changes no weights, since the update counts as broken meanwhile."""
        from embodied.runtime.device_graphs import capture

        changed = (self.room, self.largest, self.broken)
        before = [tensor.clone() for tensor in changed]
        self.broken.fill_(1.0)
        try:
            return capture(work, self.model.device, self.pool)
        finally:
            for tensor, kept in zip(changed, before, strict=True):
                tensor.copy_(kept)

    def _addresses(self) -> list[int]:
        tensors = (*self.model.policy.parameters(), *self.model.policy.buffers(), *self.optimizer.tensors())
        return [tensor.data_ptr() for tensor in tensors]


def steps_of(
    model: Model, optimizer: PolicyOptimizer, config: AlgoConfig, batch: RankBatch
) -> tuple[PolicySteps, RankBatch]:
    """Gradient steps for this batch (captured if learner.graphs allows it), and the batch in the form for them."""
    reason = why_not_graphs(model, config, batch)
    if reason and model.config.graphs == "on":
        raise ConfigError(f"learner.graphs=on: {reason}; try learner.graphs=auto")
    if reason:
        if optimizer.fixed:  # an earlier batch's steps were captured
            optimizer.forget_gradients()
        return PolicySteps(model, optimizer, config), batch
    if model.policy.reads_words:
        batch = replace(batch, obs=model.policy.as_tensors(batch.obs, "cpu"))
    if sum(tensor.nbytes for tensor in tensors_of(batch).values()) <= KEPT_BYTES:  # else passes send their items
        batch = moved(batch, model.device)
    try:
        if model.graphed is None or not model.graphed.is_valid:
            model.graphed = GraphedSteps(model, optimizer, config)
        model.graphed.begin(batch)
    except RuntimeError as err:
        optimizer.forget_gradients()
        model.graphed = False
        if model.config.graphs == "on":
            raise ConfigError(
                f"learner.graphs=on: a step of {type(model.policy).__name__} cannot be captured ({err}); "
                "try learner.graphs=off"
            ) from err
        print(f"learner.graphs=auto: steps are not captured: {err}", flush=True)
        return PolicySteps(model, optimizer, config), batch
    return model.graphed, batch


def why_not_graphs(model: Model, config: AlgoConfig, batch: RankBatch) -> str:
    """The reason why gradient steps for this batch are not captured; "" if they are."""
    options, policy = model.config, model.policy
    if options.graphs == "off" or model.graphed is False:
        return "they are off"
    if options.graphs == "auto":
        large = sum(p.numel() for p in policy.parameters()) > SMALL or options.checkpoint_activations
        if model.device != "cuda" or options.shard or (large and not policy.reads_words):
            return "they are for small policies on GPUs, and for policies that read instructions there"
    if policy.speaks or not (policy.reads_words or all(map(is_tensor, leaves(batch.obs)))):
        return f"{type(policy).__name__} takes texts, which no graph reads"
    if config.logprob_level == "episode":
        return "algo.logprob_level=episode counts answers, whose number no graph knows"
    return "learner.compile=true hides its operations on a CPU" if options.compile and model.device == "cpu" else ""


def update_policy(
    model: Model, optimizer: PolicyOptimizer, config: AlgoConfig, batch: RankBatch, seed: int, end: BatchEnd
) -> dict[str, float]:
    """All epochs of one iteration. Returns means over the gradient steps for the log."""
    if config.decoupled or config.episode_mask != "none":  # scored before any step
        batch = batch.corrected(model, config)
    elif model.rescores:
        batch = batch.rescored(model, config, optimizer.collective)
    steps, batch = steps_of(model, optimizer, config, batch)
    for epoch in range(config.epochs):
        of_epoch = minibatches(batch.order(seed, end.iteration, epoch), samples_per_step(config, batch.num_samples))
        for minibatch, owned in zip(of_epoch, batch.split_own_samples(of_epoch), strict=True):
            samples = len(minibatch)
            steps.add(batch, owned, batch.divisor(samples))
            steps.imitate(end, batch.stats_divisor(samples))
            steps.step(steps.lr_factors(end), epoch, samples, batch.stats_divisor(samples))
        # The mean KL over all ranks, measured before each gradient step.
        if config.target_kl is not None and steps.epoch_kl(epoch) / batch.num_samples > config.target_kl:
            break
    metrics = steps.metrics(end, epoch + 1, batch)
    note_gap(model, config, metrics)
    return metrics


def note_gap(model: Model, config: AlgoConfig, metrics: dict[str, float]) -> None:
    """From the next update on the model computes log-probs of acting again, if they differ too much."""
    is_half = model.config.precision == "bf16" or getattr(model.policy.config, "dtype", "") == "bfloat16"
    limit = model.policy.gap_limits[is_half]
    if (gap := metrics.get("train/logprob_gap", 0.0)) > limit and not (model.rescores or config.decoupled):
        model.rescores = True
        print(
            f"log-probs of acting differ by {gap:.3g} nats, more than {limit:g}: from now on the learner computes them "
            "again before its steps",
            flush=True,
        )


def check_divisor(model: Model, config: AlgoConfig) -> None:
    """Refuse losses whose divisor is not a count over the whole batch."""
    if (own_losses := model.policy.own_losses) and config.weighting == "episode":
        raise ConfigError(
            f"pipeline.schedule=periodic divides all losses by one count, with algo.weighting=episode that of the "
            f"episodes, but {', '.join(own_losses)} counts decisions; try algo.weighting=decision"
        )


def check_version(played: Trajectory, version: int) -> None:
    """Refuse episodes played with another version of the weights than the learner's."""
    if odd := {*played.versions[played.mask.any(axis=1)].tolist()} - {version}:
        raise EmbodiedError(
            f"episodes {played.ids[0]} to {played.ids[-1]} were played with version {min(odd)} of the weights, but "
            f"version {version} learns: pipeline.schedule=periodic learns from nothing else"
        )


def mismatch_of(batch: RankBatch, logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The difference of the log-probs [b, C, A] of these items from the log-probs at act time.

    k3 [b], per decision: the sum of r - 1 - log r over its numbers, whose mean is KL(acted || now). The gap [b] in nats
    is the largest difference of a number, -inf for decisions of older weights than the update's first ones. The error
    [b] is the mean over the numbers of max(r, 1 / r), 0 for decisions without any. A decision of two numbers with
    ratios 2 and 1/2: k3 2 - 1 - 0.693 + 1/2 - 1 + 0.693 = 0.5, gap 0.693, error 2.
    """
    played = batch.mask[:, :, None]
    apart = torch.where(played, logprobs - batch.logprobs, 0.0)
    gaps = torch.where(batch.current, apart.abs().amax((1, 2)), -math.inf)
    errors = torch.where(played, apart.abs().exp(), 0.0).sum((1, 2))
    numbers = (played.sum((1, 2)) * apart.shape[2]).clamp(min=1)
    return (apart.expm1() - apart).sum((1, 2)), gaps, errors / numbers


def sequence_errors(batch: RankBatch, errors: Tensor) -> Tensor:
    """The mean error over each conversation's trained tokens, 0 without any; -inf for robot policies, since no pass has
    whole episodes."""
    if batch.groups is None:
        return errors.new_full((1,), -math.inf)
    of, counts = batch.sequences, (batch.weights > 0).to(errors.dtype)
    none = errors.new_zeros(int(of.max()) + 1)
    return none.index_add(0, of, errors * counts) / none.index_add(0, of, counts).clamp(min=1)


def mismatch_numbers(k3: float, error: float, largest: np.ndarray) -> dict[str, float]:
    """Numbers for the log, from the mean k3 and error, and the largest gap, k3 and error of a conversation [ranks, 3].
    No gap if no decision was sampled with the weights at the start of the update."""
    gap, k3_max, of_sequence = largest.max(axis=0).tolist()
    metrics = {"train/mismatch_k3": k3, "train/mismatch_k3_max": k3_max, "train/mismatch_error": error}
    metrics |= {"train/mismatch_sequence_max": of_sequence} if of_sequence >= 0 else {}
    return metrics | ({"train/logprob_gap": gap} if gap >= 0 else {})


def check_scores(scores: Scores, acted: Tensor) -> None:
    """Refuse scores with another shape than the log-probs stored at act time, since they would broadcast."""
    wanted = list(acted.shape)
    shapes = [list(tensor.shape) for tensor in (scores.logprobs, scores.entropy, scores.values)]
    if shapes != [wanted, wanted, wanted[:1]]:
        raise WrongShape(
            f"the policy's forward returned logprobs {shapes[0]}, entropy {shapes[1]}, values {shapes[2]}; "
            f"act's logprobs ask for {wanted}, {wanted} and {wanted[:1]}"
        )


def check_finite(numbers: dict[str, float], iteration: int, epoch: int) -> None:
    """Raise Diverged if a step's loss or gradient was not finite; `take_step` has left the weights unchanged."""
    if odd := [f"{name} is {value}" for name, value in numbers.items() if not math.isfinite(value)]:
        raise Diverged(
            f"{', '.join(odd)} in iteration {iteration + 1}, epoch {epoch + 1}; try a lower algo.lr, and look for "
            "very large rewards or observations (policy.normalize_observations=true scales the latter)"
        )


def check_weights(collective: Collective, iteration: int, broken: float, *numbers: float) -> np.ndarray:
    """Refuse non-finite weights, since a finite step may be too large. `broken`: 1 if some of this rank's weights are
    not finite. Returns the numbers of all ranks, a row each."""
    rows = np.concatenate(collective.gather(np.array([[float(broken), *numbers]])))
    if rows[:, 0].any():
        raise Diverged(f"weights are NaN or infinite after iteration {iteration + 1}; try a lower algo.lr")
    return rows[:, 1:]


def tensors_of(batch: RankBatch) -> dict[str, Tensor]:
    """All tensors of a batch with a row per item, by name."""
    columns = {"obs": batch.obs, "replay": batch.replay, "actions": batch.actions}
    columns |= {name: getattr(batch, name) for name in OF_ITEMS}
    return {name: tensor for name, tensor in flat_dict(columns).items() if tensor is not None}


def moved(batch: RankBatch, device: torch.device | str) -> RankBatch:
    """The same batch, with the network's inputs on this device."""

    def move(array: Tensor) -> Tensor:
        return array.to(device, non_blocking=True)

    return replace(batch, obs=map_obs(move, batch.obs), replay=map_obs(move, batch.replay))


def padded_size(count: int, most: int) -> int:
    """The size to which `count` items are padded, one of a few sizes up to `most`."""
    step = -(-most // SIZES)
    return min(most, -(-count // step) * step)
