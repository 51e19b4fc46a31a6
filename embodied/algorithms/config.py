"""Options of the learning algorithms. Free of torch, so that `--help` stays fast."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from embodied.config_base import Strict


class PPOConfig(Strict):
    name: Literal["ppo"] = Field("ppo", description="Algorithm: ppo.")
    rollout_decisions: int = Field(64, gt=0, description="Decisions of every env per iteration.")
    epochs: int = Field(4, gt=0, description="Passes over the data of an iteration.")
    minibatch_size: int = Field(256, gt=0, description="Items (decisions) per gradient step, over all learner ranks.")

    lr: float = Field(3e-4, ge=0, description="Adam's learning rate.")
    value_lr: float | None = Field(
        None, ge=0, description="Learning rate of the value function's own weights; null: the same as lr."
    )
    lr_schedule: Literal["constant", "linear"] = Field(
        "constant", description="linear: learning rates fall in a straight line to 0 at the end of the run."
    )
    adam_eps: float = Field(1e-5, gt=0, description="Adam's epsilon.")
    max_grad_norm: float | None = Field(
        0.5, gt=0, description="Gradients with a larger global norm are scaled down to it; null: never."
    )

    gamma: float = Field(0.99, ge=0, le=1, description="Discount; of what, advantage_level says.")
    gae_lambda: float = Field(
        0.95, ge=0, le=1, description="GAE's lambda: 0 trusts the value function, 1 the rewards; like gamma, per level."
    )
    advantage_level: Literal["decision", "step"] = Field(
        "decision",
        description="Where gamma and lambda act: once per decision (on its summed reward) or once per env step.",
    )
    normalize_advantages: bool = Field(
        True, description="Shift and scale the advantages of an iteration to mean 0 and deviation 1."
    )

    logprob_level: Literal["action_dim", "action", "chunk"] = Field(
        "chunk",
        description="What gets a probability ratio of its own: each action dimension (or token), env step or decision.",
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratios below 1 - clip_low earn nothing more.")
    clip_high: float = Field(0.2, gt=0, description="Ratios above 1 + clip_high earn nothing more.")
    dual_clip: float | None = Field(
        None, gt=1, description="Negative advantages stop pushing where the ratio is above this; null: never."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus, at logprob_level.")
    target_kl: float | None = Field(
        None,
        gt=0,
        description="Skip further epochs once an epoch's mean KL, in nats per decision, is above this; null: never.",
    )

    value_coef: float = Field(0.5, ge=0, description="Weight of the value loss.")
    value_clip: float | None = Field(
        None, gt=0, description="A value earns nothing for moving further than this from the old one; null: off."
    )
    huber_delta: float | None = Field(
        None, gt=0, description="Value errors above this, in units of return, count linearly; null: all are squared."
    )

    @model_validator(mode="after")
    def _possible(self) -> PPOConfig:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.clip_high:
            raise ValueError(
                f"algo.dual_clip={self.dual_clip:g} is not above 1 + algo.clip_high = {1 + self.clip_high:g},"
                f" so it would cut where the ratio is still trusted; try algo.dual_clip={1 + 10 * self.clip_high:g}"
            )
        if self.target_kl is not None and self.epochs == 1:
            raise ValueError(
                f"algo.target_kl={self.target_kl:g} skips the epochs after the first, but algo.epochs=1; "
                "try algo.target_kl=null"
            )
        return self

    def check_num_envs(self, num_envs: int) -> None:
        """Raise ValueError when `num_envs` envs in total collect too few items for this algorithm."""
        items = num_envs * self.rollout_decisions
        have = f"env.num_envs={num_envs} * algo.rollout_decisions={self.rollout_decisions} = {items} items an iteration"
        if self.minibatch_size > items:
            raise ValueError(
                f"algo.minibatch_size={self.minibatch_size} is more than {have}; try algo.minibatch_size={items}"
            )
        if self.normalize_advantages and items == 1:
            raise ValueError(
                f"{have}, and algo.normalize_advantages makes a single advantage 0; try algo.rollout_decisions=2"
            )


AlgoConfig = PPOConfig
