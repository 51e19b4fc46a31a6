"""Options of the learner that change its speed and memory, not the result. Imports no torch.

Minibatches, epochs and learning rates are in `algorithms/config.py`, with checks of divisibility; checks of several
sections are in `config/recipe.py`, shares of workers in `placement/placement_plan.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from embodied.core.options import Strict

DEGREES = (1, 2, 4, 8)  # numbers of learners that may compute a pass together


class LearnerConfig(Strict):
    micro_batch_size: int | None = Field(
        None,
        gt=0,
        description="Micro-batch size: items that a learner passes through the network at once; gradients accumulate "
        "over the minibatch. null: all its items of a minibatch.",
    )
    pack_tokens: int = Field(
        4096,
        gt=0,
        description="Micro-batch size of a language model's learner in tokens, whole groups together; gradients "
        "accumulate over the minibatch.",
    )
    most_items: int | None = Field(
        None,
        gt=0,
        description="Most decisions, or tokens of conversations, of a batch of whole episodes on one learner. null: "
        "no limit.",
    )
    share_prompts: bool = Field(
        True,
        description="Compute the prompt of a group's conversations once for all of them.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device of learners and policies; auto: GPUs if there are any, except for small MLPs beside "
        "simulators on cores. A map in placement overrides it.",
    )
    precision: Literal["full", "bf16"] = Field(
        "full", description="bf16: matrix products in bfloat16 (autocast), also in acting; weights keep policy.dtype."
    )
    compile: bool = Field(False, description="Compile the network (torch.compile); the first iteration takes longer.")
    graphs: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Capture gradient steps as CUDA graphs and repeat them; minibatches are padded to few sizes. auto: "
        "on GPUs, for policies that read instructions and for others of up to 10 million weights. Weights "
        "are equal up to rounding. Acting is captured, too, unless off: of policies that read instructions, "
        "and of small ones on observations that a simulator keeps on the GPU.",
    )
    checkpoint_activations: bool | Literal["half", "language", "auto"] = Field(
        False,
        description="Compute activations again in the backward pass instead of keeping them, block by block. half: of "
        "every second block; language: of all but vision towers; auto: of as few as the plan's memory "
        "allows.",
    )
    shard: bool = Field(
        False,
        description="Split weights, gradients and optimizer state over the learners (FSDP2) instead of repeating them.",
    )
    reduce_each_pass: bool | None = Field(
        None,
        description="With learner.shard: sum gradients over the learners after each pass, not once a step. Then no "
        "learner holds a whole float32 gradient, but each pass needs an exchange. null: only if the plan does not fit "
        "without it.",
    )
    sequence_degree: Literal["auto", 1, 2, 4, 8] = Field(
        1,
        description="Learners that compute a language model's pass together, each a part of its tokens. auto: chosen "
        "for each pass, so that the busiest learner has least to do and no learner more than "
        "learner.pack_tokens.",
    )

    @model_validator(mode="after")
    def check_combinations(self) -> Self:
        if self.reduce_each_pass and not self.shard:
            raise ValueError(
                "learner.reduce_each_pass=true sums gradients of learners that hold shards; leave it out, or set "
                "learner.shard=true"
            )
        slow = {"shard": self.shard, "sequence_degree": self.sequence_degree != 1}
        if self.graphs == "on" and (given := [f"learner.{name}" for name, on in slow.items() if on]):
            raise ValueError(
                f"learner.graphs=on captures steps that one learner computes as a whole, but {given[0]} is set; "
                "try learner.graphs=auto"
            )
        return self

    def degrees(self, ranks: int, heads: Sequence[int]) -> list[int]:
        """The numbers of learners, out of `ranks`, that may compute a pass together if attention has these numbers of
        heads."""
        if self.sequence_degree != "auto":
            return [self.sequence_degree]
        return [degree for degree in DEGREES if not any(count % degree for count in (ranks, *heads))]

    def check_ranks(self, ranks: int, backend: str, works: str) -> None:
        """Raise ValueError if the plan's learners cannot work like this. `works`: a placement with several learners."""
        if self.shard and ranks == 1:
            raise ValueError(
                "learner.shard=true splits the weights over several learners, but this placement has 1; "
                f"try learner.shard=false, or {works}"
            )
        if self.shard and backend == "inline":
            raise ValueError(
                "learner.shard=true needs learners in processes of their own, but cluster.backend=inline has one; "
                "try cluster.backend=local"
            )

    @property
    def in_step(self) -> bool:
        """True if all learners must run their passes together: none has all weights, or some divide a pass."""
        return self.shard or self.sequence_degree != 1

    def check_degree(self, ranks: int, backend: str, heads: Sequence[int]) -> None:
        """Raise ValueError when the plan's learners cannot divide passes of a model with these numbers of heads, and of
        heads of keys and values."""
        given = f"learner.sequence_degree={self.sequence_degree}"
        if backend == "inline":
            raise ValueError(
                f"{given} needs learners in processes of their own, but cluster.backend=inline has one; "
                "try cluster.backend=local"
            )
        if self.compile:
            raise ValueError(f"{given}: learners cannot exchange inside compiled layers; try learner.compile=false")
        if self.sequence_degree == "auto":
            return
        counts = {"learners of this placement": ranks, "heads": heads[0], "key-value heads": heads[1]}
        if odd := [f"{count} {what}" for what, count in counts.items() if count % self.sequence_degree]:
            works = max(degree for degree in DEGREES if not any(count % degree for count in counts.values()))
            raise ValueError(
                f"{given} does not divide the {' and the '.join(odd)}; try learner.sequence_degree={works}"
            )
