"""The policy as the learner runs it: precision, compiled or not, frozen features."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from embodied.core.errors import ConfigError
from embodied.core.types import Observation
from embodied.learners.config import LearnerConfig
from embodied.policies.base import Policy, Scores

KEPT_BYTES = 4 * 2**30  # of the host's memory, at most, for what frozen parts make of an iteration's observations


class Model:
    def __init__(self, policy: Policy, config: LearnerConfig, tick: Callable[[], None] = lambda: None) -> None:
        """`tick` says "still alive" before every pass."""
        self.policy = policy
        self.config = config
        self.tick = tick
        first = next(policy.parameters())
        self.device = first.device.type
        self.dtype = torch.promote_types(first.dtype, torch.float32)  # of losses, and of gradients on their way
        self.first_backward: float | None = None  # when it began, by time.perf_counter; of the update since it was None
        if config.checkpoint_activations:
            recompute(policy)
        if config.compile:
            compile_blocks(policy)

    def score(self, inputs: dict) -> Scores:
        self.tick()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.config.precision == "bf16"):
            scores = self.policy(inputs)
        parts = (scores.logprobs, scores.entropy, scores.values, scores.own_loss)
        return Scores(*(None if part is None else part.to(self.dtype) for part in parts))

    def backward(self, loss: Tensor, last: bool) -> None:
        """`last` of its gradient step: where weights are sharded, ranks sum their gradients only then."""
        if self.first_backward is None:
            self.first_backward = perf_counter()
        if self.config.shard:
            self.policy.set_requires_gradient_sync(last)
        loss.backward()

    @torch.no_grad()
    def features(self, obs: Observation) -> dict[str, Tensor]:
        """`Policy.frozen_features`, in the host's memory: of a whole iteration they are large."""
        self.tick()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.config.precision == "bf16"):
            return {name: tensor.cpu() for name, tensor in self.policy.frozen_features(obs).items()}

    def imitate(self, inputs: dict, noise) -> tuple[Tensor, Tensor | None]:
        """The losses of actions, and of what is learned beside them."""
        self.tick()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.config.precision == "bf16"):
            found = self.policy.imitate(inputs, noise)
        actions, beside = found if isinstance(found, tuple) else (found, None)
        return actions.to(self.dtype), None if beside is None else beside.to(self.dtype)

    def passes(self, count: int) -> int:
        """The number of times that the network runs for so many items."""
        return -(-count // (self.config.micro_batch_size or max(count, 1)))

    def micro_batches(self, items: Tensor, passes: int) -> list[tuple[Tensor, bool]]:
        """Parts of the items, and whether they count: padding, which does not, makes up for missing passes."""
        size = self.config.micro_batch_size or max(len(items), 1)
        parts = [(part, True) for part in items.split(size) if len(part)]
        return parts + [(torch.zeros(1, dtype=torch.int64), False)] * (passes - len(parts))


class FrozenFeatures:
    """Features that frozen parts of the policy compute of so many items' observations: once for all epochs of an
    update, where all of them can be kept."""

    def __init__(self, model: Model, num_items: int) -> None:
        self.model, self.num_items = model, num_items
        self.wanted = True
        self.kept: dict[str, Tensor] = {}

    def add(self, obs: Observation, items: Tensor) -> None:
        """Encode the observations of these items in one pass."""
        if not len(items):
            return
        found = self.model.features(obs)
        if not self.kept:
            each = sum(tensor[0].nbytes for tensor in found.values())
            self.wanted = 0 < each * self.num_items <= KEPT_BYTES
            if not self.wanted:
                return
            self.kept = {name: tensor.new_empty(self.num_items, *tensor.shape[1:]) for name, tensor in found.items()}
        for name, tensor in found.items():
            self.kept[name][items] = tensor


def recompute(policy: Policy) -> None:
    from torch.utils.checkpoint import checkpoint

    if not policy.blocks():
        raise ConfigError(
            f"learner.checkpoint_activations=true, but {type(policy).__name__} names no blocks to compute again; "
            "leave it out, or give the policy a method `blocks`"
        )
    for block in policy.blocks():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def compile_blocks(policy: Policy) -> None:
    """Its blocks where it names some, which a compiler swallows more easily than a whole policy."""
    if next(policy.parameters()).device.type == "cpu" and not shutil.which("g++"):
        raise ConfigError("learner.compile=true needs a C++ compiler; install g++ or leave it out")
    torch._inductor.config.compile_threads = 1  # no pool of processes beside the workers
    for part in policy.blocks() or [policy]:
        part.compile(dynamic=True)
