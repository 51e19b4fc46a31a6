"""Options of imitation from demonstrations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from pydantic import Field

from embodied.algorithms.config import Beta
from embodied.core.errors import ConfigError
from embodied.core.options import LocalPath, Strict, only_with


class SFTConfig(Strict):
    kl_coef: ClassVar[float] = 0.0  # demonstrations are imitated without a reference policy

    data: LocalPath | None = Field(
        None,
        description="The demonstrations, a folder in LeRobot's layout 3.0, 2.1 or 2.0. For text envs JSONL with lines "
        "{prompt or messages, answer}. null: the env's expert demonstrates first; a text env uses its "
        "solutions.",
    )
    names: dict[str, str] = Field(
        {},
        description="The data set's names for action, state and the env's cameras, if not LeRobot's, such as {action: "
        "actions, state: state, agentview: image}.",
    )
    episodes: int | None = Field(
        None,
        gt=0,
        description="Use only the first ones, up to this number; null: all. Without sft.data: the number of a text "
        "env's prompts.",
    )
    cache: LocalPath | None = Field(
        None,
        description="Folder for decoded images during the run (in an unnamed file); null: the system's temporary "
        "folder, which on some machines is in memory.",
    )
    epochs: int = Field(50, gt=0, description="Passes over the demonstrations.")
    steps: int | None = Field(
        None,
        gt=0,
        description="Gradient steps of an iteration, the unit of run.eval_every and run.save_every; null: a whole "
        "pass over the data.",
    )
    minibatch_size: int = Field(
        256, gt=0, description="Demonstrated env steps, or conversations, per gradient step, over all learners."
    )
    lr: float = Field(1e-3, ge=0, description="Adam's learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear",
        description="linear: the learning rate falls linearly to 0 at the end of the run; cosine: along a cosine to "
        "final_lr.",
    )
    final_lr: float = Field(0.0, ge=0, description="Where lr_schedule=cosine ends.")
    warmup_steps: int = Field(0, ge=0, description="Gradient steps in which the learning rate climbs to lr.")
    adam_eps: float = Field(1e-8, gt=0, description="Adam's epsilon.")
    adam_betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999),
        description="Adam's decay rates of the averages of gradients and their squares; openpi takes [0.9, 0.95].",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Weights shrink by this times the learning rate every step (AdamW); 0: never."
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Gradients with a larger global norm are scaled down to it; null: never."
    )
    learn_deviation: bool = Field(
        True,
        description="Also fit the standard deviation of continuous actions (maximum likelihood); false: it stays at "
        "policy.initial_log_std, and the mean is fitted by least squares.",
    )

    def minibatches(self, items: int, iteration: int) -> tuple[int, range]:
        """The pass over `items` items of an iteration, and the iteration's minibatches of this pass."""
        every = -(-items // self.minibatch_size)
        epoch, part = divmod(iteration, self.iterations(items) // self.epochs)
        steps = self.steps or every
        return epoch, range(part * steps, min(every, (part + 1) * steps))

    def iterations(self, items: int) -> int:
        """The iterations of a run over `items` items."""
        every = -(-items // self.minibatch_size)
        return self.epochs * -(-every // (self.steps or every))

    def check_warmup(self, items: int, described: str) -> None:
        """Raise ConfigError if the warmup is not shorter than the run over `items` items."""
        steps = -(-items // self.minibatch_size) * self.epochs
        if self.warmup_steps >= steps:
            raise ConfigError(
                f"sft.warmup_steps={self.warmup_steps} is not less than the {steps} gradient steps of "
                f"sft.epochs={self.epochs} over {items:,} {described}; try sft.warmup_steps={steps // 10}"
            )

    section = "sft."
    rules = (only_with("final_lr", {"lr_schedule": "cosine"}),)

    def conflicts(self) -> Iterator[str]:
        if self.final_lr > self.lr:
            yield f"sft.final_lr={self.final_lr:g} is above sft.lr={self.lr:g}; swap them"
