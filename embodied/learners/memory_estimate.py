"""Counts a large policy's memory on torch's meta device, without allocating or computing.

Activations are counted while the network saves them for its backward pass, without a formula. A trained half-precision
weight takes 20 more bytes (a float32 copy, its gradient, Adam's two moments, and the vector for the all-reduce). A
learner with shards still accumulates the whole float32 gradient, or a block's gradient (learner.reduce_each_pass).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import finalize

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from embodied.core.types import ActionSpec, EnvSpec, Observation
from embodied.learners.config import LearnerConfig
from embodied.learners.model import HALVES, recompute
from embodied.policies.base import Policy
from embodied.runtime.device_memory import num_bytes

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig

EXACT = 4  # bytes of a float32
NUMBERS, FELT = 7, 8  # numbers of an arm's action and of its state
SPOKEN_TO = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, text=True)
PROMPT = 64  # tokens besides image tokens, about twice as many as in an instruction


@dataclass(frozen=True)
class Memory:
    """Bytes of one learner that holds the whole policy."""

    num_weights: int
    num_trained: int
    weights: int
    training: int  # gradients, Adam's moments, and copies in float32
    activations: int  # activations of one micro-batch
    reference: int = 0  # a copy of the trained weights, for the divergence
    averaged: int = 0  # the mean of the trained weights in float32 (algo.average)
    trained: int = 0  # of `weights`, the trained ones
    gathered: int = (
        0  # weights that a learner with shards holds unsharded: the largest block and weights outside blocks
    )
    gradient: int = 0  # in float32, that a learner with shards adds up unsharded
    gradient_of_block: int = 0  # the same if gradients are summed over the learners after each pass
    acting: int = 0  # KV cache of one env row
    deciding: int = 0  # the most memory at once of computing a decision of one env row
    products: float = 0.0  # multiplications of a forward pass of the longest conversation

    @property
    def total(self) -> int:
        return self.weights + self.training + self.activations + self.reference + self.averaged

    def sharded(self, ranks: int) -> int:
        """Bytes of each of `ranks` learners with shards: for its rows the weights (trained ones in float32), two
        moments and twice the gradient, and the unsharded part of the gradient."""
        rows = self.weights - self.trained + 5 * EXACT * self.num_trained
        rows += self.averaged
        rows += self.weights if self.reference else 0  # a reference with shards shares no weights with the policy
        return rows // ranks + self.gradient + self.gathered + self.activations

    def __str__(self) -> str:
        parts = [f"weights {self.weights / 1e9:.3g}", f"training {self.training / 1e9:.3g}"]
        parts.append(f"activations {self.activations / 1e9:.3g}")
        parts += [f"reference {self.reference / 1e9:.3g}"] if self.reference else []
        parts += [f"mean of weights {self.averaged / 1e9:.3g}"] if self.averaged else []
        counts = f"{self.num_weights / 1e9:.3g} billion weights, {self.num_trained / 1e9:.3g} of them trained"
        return f"{counts}; {' + '.join(parts)} = {self.total / 1e9:.3g} GB"


def estimate(config: RunConfig, items: int = 1) -> Memory | None:
    """Memory of a recipe's learner, counted without simulator and model folder; None for small policies. `items`: the
    items of an iteration, used if no option sets the micro-batch."""
    from embodied.envs import env_class
    from embodied.policies import policy_class

    kind = policy_class(config.policy.name)
    policy = kind.for_memory_estimate(config.policy, SPOKEN_TO if kind.speaks else spec_of_arm(config))
    if policy is None:
        return None
    rows = config.learner.micro_batch_size or config.algo.minibatch_size or items
    if config.algo.imitation and not config.learner.micro_batch_size:
        rows = max(rows, config.algo.imitation.minibatch_size)
    inputs = made_up(policy, rows) if not kind.speaks else conversations(longest_pass(policy, config.learner))
    if kind.speaks and env_class(config.env).shows_pictures(config.env):
        inputs["places"] = longest_pass(policy, config.learner)  # an upper bound, as if pictures filled the prompts
    copied = num_bytes(p for p in policy.parameters() if p.requires_grad)
    products = products_of(policy, longest_conversation(policy, config.learner)) if kind.speaks else 0.0
    memory = count(policy, config.learner, inputs)
    averaged = EXACT * memory.num_trained if config.algo.average else 0
    reference = copied if config.algo.kl_coef and not config.roles.reference else 0
    return replace(memory, reference=reference, averaged=averaged, products=products)


def products_of(policy: Policy, tokens: int) -> float:
    """The multiplications of a forward pass of a conversation of so many tokens."""
    token, pair, _ = policy.pass_cost()
    return token * tokens + pair * tokens * (tokens + 1)


def spec_of_arm(config: RunConfig) -> EnvSpec:
    """The spec of an arm that follows instructions, with the recipe's cameras."""
    seen = config.env.observed_images or {"camera": (224, 224)}
    images = {camera: (*size, 3) for camera, size in seen.items()}
    return EnvSpec(ActionSpec(NUMBERS), state_dim=FELT, images=images, instruction=True)


def count(policy: Policy, config: LearnerConfig, inputs: dict[str, Any]) -> Memory:
    """Memory of training a policy on a micro-batch of these inputs; the policy loses its weights."""
    parameters = list(policy.parameters())
    trained = [p for p in parameters if p.requires_grad]
    weights, blocks = num_bytes(parameters), [num_bytes(block.parameters()) for block in policy.blocks()]
    return Memory(
        num_weights=sum(p.numel() for p in parameters),
        num_trained=sum(p.numel() for p in trained),
        weights=weights,
        training=sum(p.numel() * training_bytes(p) for p in trained),
        trained=num_bytes(trained),
        gathered=weights - sum(blocks) + max(blocks, default=0),
        gradient=unsharded_gradient(policy, False),
        gradient_of_block=unsharded_gradient(policy, True),
        acting=acting_bytes(policy, config),
        activations=saved_bytes(policy, config, inputs),
        deciding=0 if policy.speaks else deciding_bytes(policy.to("meta")),
    )


def unsharded_gradient(policy: Policy, each_pass: bool) -> int:
    """Bytes of gradients that a learner with shards holds unsharded at a time. `each_pass`: gradients are summed over
    the learners after each pass, block by block."""
    every, *blocks = (
        EXACT * sum(p.numel() for p in module.parameters() if p.requires_grad) for module in (policy, *policy.blocks())
    )
    return every - sum(blocks) + max(blocks, default=0) if each_pass else every


def acting_bytes(policy: Policy, config: LearnerConfig) -> int:
    """Bytes of the KV cache of one env row, or of the longest conversation."""
    if policy.speaks:
        return longest_conversation(policy, config) * policy.token_bytes
    return policy.row_bytes(PROMPT)


def deciding_bytes(policy: Any) -> int:
    """The most bytes that exist at once while a policy reads one observation, besides its weights."""
    obs = policy.as_tensors(made_up(policy, 1)["obs"])
    with torch.inference_mode(), MostBytes() as memory:
        policy.judge(obs)
    return memory.most


class MostBytes(TorchDispatchMode):
    """Finds the most bytes of the tensors made inside that exist at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {
            tensor.untyped_storage()._cdata for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and (storage := tensor.untyped_storage())._cdata not in known:
                self.now += storage.nbytes()
                finalize(storage, self._free, storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _free(self, size: int) -> None:
        self.now -= size


def training_bytes(p: Tensor) -> int:
    """Bytes per trained weight: gradient, two moments, the vector for the all-reduce, and for half precision a float32
    copy."""
    size = EXACT if p.dtype in HALVES else p.element_size()
    return size * (5 if p.dtype in HALVES else 4)


def saved_bytes(policy: Policy, config: LearnerConfig, inputs: dict[str, Any]) -> int:
    """The bytes that the forward pass keeps for the backward pass, in the policy's precision, without weights. If
    activations are recomputed, the backward pass holds one block's activations at a time. "places" of the inputs are
    picture tokens, which also pass through the vision tower."""
    policy, inputs = policy.to("meta"), {**inputs}
    places = inputs.pop("places", 0)
    kept, largest_block = kept_by_pass(policy, inputs, places)
    if config.checkpoint_activations:
        recompute(policy, config.checkpoint_activations)
        kept = kept_by_pass(policy, inputs, places)[0] + largest_block
    return kept


def kept_by_pass(policy: Policy, inputs: dict[str, Any], places: int) -> tuple[int, int]:
    """The bytes that a forward pass keeps, and the bytes of its largest block. Two blocks of a kind are computed: the
    first also keeps tensors that all blocks share, and every other block keeps as many bytes as the second."""
    weights = {p.untyped_storage()._cdata for p in policy.parameters()}
    seen: dict[int, Tensor] = {}
    passed: dict[Any, list[tuple[int, Any]]] = {}  # kind of block -> bytes kept and output of its first two passes
    kept_by_blocks: list[int] = []
    skipped = 0

    def keep(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()  # else an output and the graph, which keeps it, would keep each other for ever
        if tensor.untyped_storage()._cdata not in weights:
            seen[tensor.untyped_storage()._cdata] = tensor
        return tensor

    def total() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in seen.values())

    def counting(block: torch.nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        kind = type(block), isinstance(forward, partial), *(properties_of(p) for p in block.parameters())

        def run(*args: Any, **named: Any) -> Any:
            nonlocal skipped
            alike = passed.setdefault((kind, *map(properties_of, (*args, *named.values()))), [])
            if len(alike) == 2:
                skipped += alike[1][0]
                return tree_map_only(Tensor, Tensor.clone, alike[1][1])
            before, output = total(), forward(*args, **named)
            alike.append((total() - before, output))
            kept_by_blocks.append(alike[-1][0])
            return output

        return run

    blocks = [(block, block.forward) for block in policy.blocks()]
    for block, forward in blocks:
        block.forward = counting(block, forward)  # type: ignore[method-assign]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = policy(inputs)
        loss = scores.logprobs.sum() + scores.values.sum()
        if places:
            loss = loss + policy.counted_features(places).sum()
    for block, forward in blocks:
        block.forward = forward  # type: ignore[method-assign]
    return total() + skipped, max(kept_by_blocks, default=0)


def properties_of(value: Any) -> Any:
    """The properties of an argument or a weight that decide how many bytes a block keeps."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    return tuple(map(properties_of, value)) if isinstance(value, tuple | list) else type(value)


def longest_conversation(policy: Policy, config: LearnerConfig) -> int:
    """The largest number of tokens of a conversation: `policy.max_length`. If that is unset: the size of a pack, or all
    positions of the model if the engine reserves room for them."""
    if policy.config.max_length or policy.config.engine == "vllm":
        return policy.max_length
    return min(policy.max_length, config.pack_tokens)


def longest_pass(policy: Policy, config: LearnerConfig) -> int:
    """The largest number of tokens of a learner's pass: a pack, or its part of a longer conversation."""
    degree = 1 if config.sequence_degree == "auto" else config.sequence_degree
    return max(config.pack_tokens, -(-longest_conversation(policy, config) // degree))


def conversations(tokens: int) -> dict[str, Any]:
    """Inputs of `tokens` tokens for a language policy: one conversation, all sampled except a short prompt."""
    is_answer = np.arange(tokens)[:, None] >= min(PROMPT, tokens // 2)
    zero = np.zeros(1, np.int64)
    return {"actions": np.zeros((tokens, 1, 1), np.int32), "mask": is_answer, "lengths": zero + tokens, "groups": zero}


def made_up(policy: Policy, rows: int) -> dict[str, Any]:
    """Inputs with the right shapes for a policy with images and an instruction."""
    spec, chunk = policy.spec, policy.config.chunk
    obs: Observation = {"images": {name: np.zeros((rows, *size), np.uint8) for name, size in spec.images.items()}}
    obs["instruction"] = ["put the black bowl on the plate"] * rows
    if spec.state_dim:
        obs["state"] = np.zeros((rows, spec.state_dim), np.float32)
    return {"obs": obs, "actions": np.zeros((rows, chunk, spec.action.dim), np.float32)}
