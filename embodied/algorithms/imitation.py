"""Options of imitation beside RL, and of an expert that labels (DAgger). Free of torch, like `config.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from embodied.core.options import LocalPath, Strict

Beta = Annotated[float, Field(ge=0, lt=1)]


class KeptImitation(Strict):
    """algo.imitation: demonstrations, or answered prompts, that every gradient step of RL also imitates."""

    kl_coef: ClassVar[float] = 0.0

    data: LocalPath | None = Field(
        None, description="As sft.data; null: those that run.start_from imitated; a text env's own solutions."
    )
    names: dict[str, str] = Field({}, description="As sft.names.")
    episodes: int | None = Field(None, gt=0, description="As sft.episodes.")
    cache: LocalPath | None = Field(None, description="As sft.cache.")
    weight: float = Field(0.1, gt=0, description="Weight of the imitation loss in the first iteration.")
    decay: float = Field(1.0, gt=0, le=1, description="Factor on the weight after each iteration.")
    minibatch_size: int = Field(
        128, gt=0, description="Demonstrated env steps, or conversations, per gradient step, over all learners."
    )

    section = "algo.imitation."

    def describe(self, otherwise: str) -> str:
        """The line of the first screen. `otherwise`: what is imitated without data."""
        falling = f", times {self.decay:g} after each iteration" if self.decay < 1 else ""
        return f"imitates    {self.data or otherwise}, weight {self.weight:g}{falling}"

    def weight_at(self, iteration: int) -> float:
        """The weight of the loss in this iteration."""
        return self.weight * self.decay**iteration


class AdamOfImitation(Strict):
    lr: float = Field(1e-3, ge=0, description="Adam's learning rate.")
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


class DaggerConfig(AdamOfImitation):
    """The policy plays rollouts, the env's expert labels every decision, and the learner imitates all labels so far."""

    name: Literal["dagger"] = Field(description="dagger: imitate an expert's answers to what the policy itself meets.")
    rollout_decisions: int = Field(32, gt=0, description="Decisions of every env per iteration.")
    steps: int = Field(100, gt=0, description="Gradient steps per iteration, on minibatches of all labels so far.")
    minibatch_size: int = Field(256, gt=0, description="Labelled decisions per gradient step, over all learners.")
    keep: int | None = Field(
        None, gt=0, description="Learners remember only the newest labels, up to this number; null: all."
    )
    lr_schedule: Literal["constant", "linear"] = Field(
        "linear", description="linear: the learning rate falls to 0 at the end of the run."
    )
    learn_deviation: bool = Field(
        False, description="Also fit the deviation of continuous actions; false: it stays at policy.initial_log_std."
    )

    section = "algo."

    # Options of other algorithms
    whole_episodes: ClassVar[bool] = False
    kl_coef: ClassVar[float] = 0.0
    average: ClassVar[int | None] = None
    critic_warmup: ClassVar[int] = 0
    imitation: ClassVar[KeptImitation | None] = None
    group_size: ClassVar[int] = 1
    epochs: ClassVar[int] = 1
    prompts: ClassVar[str] = "drawn"
    final_lr: ClassVar[float] = 0.0
    warmup_iterations: ClassVar[int] = 0
    overlong: ClassVar[int | None] = None

    def why_not_periodic(self) -> str:
        return "every gradient step is on all labels so far; try pipeline.schedule=sync"

    def misfits(self, num_envs: int) -> Iterator[str]:
        """Any number of envs fits."""
        return iter(())
