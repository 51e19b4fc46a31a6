"""Options of the learning algorithms. Free of torch, so that `--help` stays fast."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from embodied.core.options import Strict

Beta = Annotated[float, Field(ge=0, lt=1)]
Weight = Annotated[float, Field(ge=0)]


class PolicyGradientConfig(Strict):
    """The options that all algorithms share: gradient steps on the clipped policy loss."""

    name: str = Field(description="Set by each algorithm.")
    epochs: int = Field(4, gt=0, description="Passes over the data of an iteration.")
    minibatch_size: int | None = Field(
        256,
        gt=0,
        description="Items (decisions; conversations of a text env) per gradient step, over all learner ranks; null: "
        "all of an iteration in one.",
    )

    lr: float = Field(3e-4, ge=0, description="Adam's learning rate.")
    lr_schedule: Literal["constant", "linear"] = Field(
        "constant", description="linear: learning rates fall in a straight line to 0 at the end of the run."
    )
    adam_eps: float = Field(
        1e-5,
        gt=0,
        description="Adam's epsilon. It halves the steps of gradients as small as itself, such as those of 7 billion "
        "weights clipped to norm 1; take 1e-8 for such models.",
    )
    adam_betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999), description="How long Adam remembers gradients and their squares; openpi takes [0.9, 0.95]."
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Weights shrink by this times the learning rate every step (AdamW); 0: never."
    )
    max_grad_norm: float | None = Field(
        0.5, gt=0, description="Gradients with a larger global norm are scaled down to it; null: never."
    )

    logprob_level: Literal["action_dim", "action", "chunk", "episode"] = Field(
        "chunk",
        description="What gets a probability ratio of its own: each action dimension (or token), env step or decision; "
        "episode: the geometric mean over an answer of a text env (GSPO).",
    )
    clip: Literal["two_sided", "aipo", "tis"] = Field(
        "two_sided",
        description="two_sided: the ratio stays within clip_low and clip_high, as in PPO; aipo: min(ratio, ratio_cap) "
        "times the advantage, without gradient above the cap; tis: the same, but the capped ratio is a constant weight "
        "of the log-prob's gradient.",
    )
    ratio_cap: float = Field(
        8.0, gt=1, description="With clip=aipo or tis, ratios above this count as this, whatever the advantage's sign."
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="Ratios below 1 - clip_low earn nothing more.")
    clip_high: float = Field(0.2, gt=0, description="Ratios above 1 + clip_high earn nothing more.")
    dual_clip: float | None = Field(
        None, gt=1, description="Negative advantages stop pushing where the ratio is above this; null: never."
    )
    decoupled: bool = Field(
        False,
        description="true: ratios are taken and clipped against log-probs of the weights an update starts from, and "
        "how much likelier these made an action than the weights that acted multiplies its policy loss.",
    )
    importance_cap: float | None = Field(
        None,
        ge=1,
        description="With decoupled=true, what multiplies the policy loss is at most this (truncated importance "
        "sampling; 2 is usual); null: no bound.",
    )
    episode_mask: Literal["none", "mean", "product", "error"] = Field(
        "none",
        description="Leave whole episodes (with ppo, what a rollout holds of them) out of the policy's loss where the "
        "weights that an update starts from made them too much likelier or rarer than those that acted: by the "
        "geometric mean of the ratios at logprob_level, by their product, or by the mean of max(r, 1 / r), error.",
    )
    episode_mask_low: float | None = Field(None, gt=0, lt=1, description="Episodes below this are left out.")
    episode_mask_high: float | None = Field(None, gt=1, description="Episodes above this are left out.")
    entropy_coef: float = Field(0.0, ge=0, description="Weight of the entropy bonus, at logprob_level.")
    target_kl: float | None = Field(
        None,
        gt=0,
        description="Skip further epochs once an epoch's mean KL, in nats per decision, is above this; null: never.",
    )

    kl_coef: float = Field(
        0.0, ge=0, description="Weight of the divergence from the reference, a frozen copy of the first weights."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="How the loss estimates it, from the actions taken, at logprob_level; the reward does by k1.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the divergence counts: in the loss, or off the rewards: with ppo a decision's off its own, "
        "before advantages; with groups off those up to the episode's end, before returns are compared.",
    )

    truncated: Literal["as_is", "mask", "punish"] = Field(
        "as_is",
        description="Answers of a text env that were cut off: scored as they are, left out of the loss (they count in "
        "the comparison), or given a reward of 0.",
    )
    overlong: int | None = Field(
        None,
        gt=0,
        description="DAPO's length penalty: over the last so many tokens before policy.max_tokens an answer's reward "
        "falls in a straight line by up to 1; null: none.",
    )
    pools: tuple[Weight, Weight, Weight] | None = Field(
        None,
        description="Try prompts of a text env again: a group's prompt comes from one of the pools of those that were "
        "solved rarely (at most 25%), at times, or often (above 75%) when last tried, with odds of these weights "
        "against 1 for a new one; null: always new ones.",
    )
    prompts: Literal["drawn", "epochs"] = Field(
        "drawn",
        description="How prompts of a text env come: drawn one by one, so that some come twice before others come at "
        "all, or epochs: every question once, then all again in another order.",
    )
    weighting: Literal["decision", "episode", "constant"] = Field(
        "decision",
        description="What counts alike in the loss: every decision, or every episode however long (with ppo, what a "
        "rollout holds of it); constant: every decision, and the sum is divided by the number of episodes times "
        "policy.max_tokens (Dr. GRPO), for text envs.",
    )

    def of_answers(self) -> list[str]:
        """Options that are set here and mean something for a policy that speaks alone."""
        idle = {"truncated": "as_is", "overlong": None, "pools": None, "prompts": "drawn"}
        given = [f"algo.{name}={getattr(self, name)}" for name in idle if getattr(self, name) != idle[name]]
        level = ["algo.logprob_level=episode"] if self.logprob_level == "episode" else []
        return [*level, *given, *(["algo.weighting=constant"] if self.weighting == "constant" else [])]

    def many_steps(self) -> list[str]:
        """Why the episodes of an iteration are not learned from in one step, by the weights that played them."""
        reasons = {
            "a batch is learned from with the weights that acted, so algo.decoupled=true and algo.episode_mask have "
            "nothing to correct; leave them out": self.decoupled or self.episode_mask != "none",
            f"a group is learned from as it comes and then forgotten, but algo.epochs={self.epochs}; try 1": (
                self.epochs > 1
            ),
            "there is one gradient step, after the last group, but algo.minibatch_size="
            f"{self.minibatch_size} makes several; try algo.minibatch_size=null": self.minibatch_size is not None,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def check_episodes(self, num_envs: int, groups: int, group_size: int) -> None:
        """Raise ValueError when some of `num_envs` envs would never play in so many groups."""
        episodes = groups * group_size
        if num_envs > episodes:
            raise ValueError(
                f"env.num_envs={num_envs} is more than algo.groups={groups} * algo.group_size={group_size} "
                f"= {episodes} episodes an iteration, so some would never play; try env.num_envs={episodes}"
            )

    @model_validator(mode="after")
    def _possible(self) -> PolicyGradientConfig:
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

    @model_validator(mode="after")
    def _prompts_come_one_way(self) -> PolicyGradientConfig:
        if self.prompts == "epochs" and self.pools:
            raise ValueError(
                f"algo.pools={list(self.pools)} asks some prompts again and algo.prompts=epochs every one once; leave "
                "one of them out"
            )
        return self

    @model_validator(mode="after")
    def _staleness_is_corrected_once(self) -> PolicyGradientConfig:
        if self.clip == "two_sided" and self.ratio_cap != 8.0:
            raise ValueError(
                f"algo.ratio_cap={self.ratio_cap:g} does nothing with algo.clip=two_sided; try algo.clip=aipo"
            )
        if self.clip != "two_sided":
            usual = {"clip_low": 0.2, "clip_high": PRESETS.get(self.name, {}).get("clip_high", 0.2), "dual_clip": None}
            if idle := [f"algo.{name}={getattr(self, name):g}" for name in usual if getattr(self, name) != usual[name]]:
                raise ValueError(
                    f"{' and '.join(idle)} does nothing with algo.clip={self.clip}, whose only bound is "
                    "algo.ratio_cap; leave it out"
                )
            if self.decoupled:
                raise ValueError(
                    f"algo.clip={self.clip} bounds the ratio to the weights that acted, which algo.decoupled=true "
                    "splits in two; try algo.clip=two_sided with algo.importance_cap=2, or algo.decoupled=false"
                )
        if self.importance_cap is not None and not self.decoupled:
            raise ValueError(
                f"algo.importance_cap={self.importance_cap:g} bounds what algo.decoupled=true multiplies the loss by; "
                "without it the ratio is to the weights that acted already, and a weight would count that twice; "
                "try algo.decoupled=true, or algo.clip=tis with algo.ratio_cap"
            )
        bounds = self.episode_mask_low, self.episode_mask_high
        if self.episode_mask == "none" and bounds != (None, None):
            raise ValueError(
                "algo.episode_mask_low and algo.episode_mask_high do nothing with algo.episode_mask=none; "
                "try algo.episode_mask=mean"
            )
        if self.episode_mask == "error" and self.episode_mask_low is not None:
            raise ValueError(
                "algo.episode_mask=error is 1 where log-probs agree and larger elsewhere, so "
                "algo.episode_mask_low does nothing; try algo.episode_mask_high=1.5"
            )
        if self.episode_mask != "none" and bounds == (None, None):
            raise ValueError(
                f"algo.episode_mask={self.episode_mask} bounds the ratio of an episode, but no bound is given; "
                "try algo.episode_mask_low=0.5 algo.episode_mask_high=2"
            )
        return self


class PPOConfig(PolicyGradientConfig):
    name: Literal["ppo"] = Field("ppo", description="Algorithm: ppo, grpo, dapo, rloo or reinforce++.")
    rollout_decisions: int = Field(
        64, gt=0, description="Decisions of every env per iteration; conversations are counted by groups."
    )
    groups: int | None = Field(
        None,
        gt=0,
        description="Text envs: prompts of an iteration, each with group_size conversations, held to their ends; null: "
        "envs that take actions.",
    )
    group_size: int = Field(1, gt=0, description="Conversations that begin with the same prompt.")

    value_lr: float | None = Field(
        None, ge=0, description="Learning rate of the value function's own weights; null: the same as lr."
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
        True, description="Shift and scale the advantages of an iteration to mean 0 and standard deviation 1."
    )

    value_coef: float = Field(0.5, ge=0, description="Weight of the value loss.")
    value_clip: float | None = Field(
        None, gt=0, description="A value earns nothing for moving further than this from the old one; null: off."
    )
    huber_delta: float | None = Field(
        None, gt=0, description="Value errors above this, in units of return, count linearly; null: all are squared."
    )

    @model_validator(mode="after")
    def _reference_is_asked(self) -> PPOConfig:
        if not self.kl_coef and (self.kl_in, self.kl_estimator) != ("loss", "k3"):
            raise ValueError("algo.kl_in and algo.kl_estimator do nothing with algo.kl_coef=0; try algo.kl_coef=0.01")
        if self.kl_in == "reward" and self.kl_estimator != "k3":
            raise ValueError("algo.kl_in=reward takes the divergence as it is (k1); leave out algo.kl_estimator")
        return self

    # Whole conversations, as the options of groups call that: values judge each of them, so that none is dropped.
    filter: ClassVar[str] = "none"
    filter_metric: ClassVar[str] = "return"
    surplus: ClassVar[str | None] = None
    max_rounds: ClassVar[int] = 4
    max_empty: ClassVar[int] = 5

    @property
    def whole_episodes(self) -> bool:
        """True if a batch is so many episodes, and not so many decisions of every env."""
        return self.groups is not None

    def of_answers(self) -> list[str]:
        idle = {"groups": None, "group_size": 1}
        given = [f"algo.{name}={getattr(self, name)}" for name in idle if getattr(self, name) != idle[name]]
        return [*given, *super().of_answers()]

    def of_actions(self) -> list[str]:
        """Options that are set here and mean nothing for a policy that speaks."""
        usual = {"rollout_decisions": 64, "advantage_level": "decision"}
        return [f"algo.{name}={getattr(self, name)}" for name in usual if getattr(self, name) != usual[name]]

    def why_not_periodic(self) -> str:
        """Why gradients cannot be summed up while a batch is collected, all reasons; empty where they can."""
        if not self.whole_episodes:
            return (
                "all env rows of PPO reach the end of a rollout together, and advantages are estimated and normalised "
                "over all of it, so nothing could begin earlier; try pipeline.schedule=async"
            )
        normalised = [
            "advantages are normalised over the whole batch, which is known at its end; try "
            "algo.normalize_advantages=false"
        ]
        return "; and ".join([*self.many_steps(), *(normalised if self.normalize_advantages else [])])

    def check_num_envs(self, num_envs: int) -> None:
        """Raise ValueError when `num_envs` envs in total collect too few items for this algorithm, or too many play."""
        if self.whole_episodes:
            return self.check_episodes(num_envs, self.groups, self.group_size)
        items = num_envs * self.rollout_decisions
        have = f"env.num_envs={num_envs} * algo.rollout_decisions={self.rollout_decisions} = {items} items an iteration"
        if self.minibatch_size and self.minibatch_size > items:
            raise ValueError(
                f"algo.minibatch_size={self.minibatch_size} is more than {have}; try algo.minibatch_size={items}"
            )
        if self.normalize_advantages and items == 1:
            raise ValueError(
                f"{have}, and algo.normalize_advantages makes a single advantage 0; try algo.rollout_decisions=2"
            )


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"clip_high": 0.28, "filter": "resample"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "reinforce++": {"baseline": "batch", "scale": "batch", "filter": "none", "kl_in": "reward"},
}


class GRPOConfig(PolicyGradientConfig):
    """Whole episodes in groups that share task and initial state; an episode is judged by the others of its group."""

    name: Literal["grpo", "dapo", "rloo", "reinforce++"] = Field(
        description="grpo, or one of its relatives, which differ in baseline, scale, filter, clip_high and kl_in."
    )
    groups: int = Field(8, gt=0, description="Groups that an iteration learns from.")
    group_size: int = Field(8, gt=0, description="Episodes of a group: same task, same initial state, own noise.")

    baseline: Literal["group", "leave_one_out", "batch"] = Field(
        "group",
        description="An episode's return is compared with the mean of its group, of the others in it, or of all.",
    )
    scale: Literal["group", "batch", "none"] = Field(
        "group",
        description="The difference is divided by the deviation of returns in its group, in all, or not at all.",
    )
    deviation: Literal["population", "sample"] = Field(
        "population",
        description="Which deviation that is: of n returns the squares are divided by n, or by n - 1 as RLinf does.",
    )

    filter: Literal["none", "drop", "resample"] = Field(
        "drop",
        description="Groups with equal returns teach nothing: keep them, drop them, or drop them and play others.",
    )
    filter_metric: Literal["return", "success"] = Field(
        "return", description="What filter_low and filter_high bound: a group's mean return, or its rate of success."
    )
    filter_low: float | None = Field(None, description="The filter also drops groups whose mean is below this.")
    filter_high: float | None = Field(None, description="The filter also drops groups whose mean is above this.")
    surplus: Literal["carry", "discard"] | None = Field(
        None,
        description="What becomes of groups that filter=resample kept and an iteration did not need: the next learns "
        "from them, though older weights played them, or they are dropped; null: carry with pipeline.schedule=sync.",
    )
    max_rounds: int = Field(
        4, gt=0, description="Rounds of episodes per iteration, at most, for filter=resample and after faults."
    )
    max_empty: int = Field(
        5, gt=0, description="Iterations in a row with nothing to learn from after which the run stops, saying why."
    )

    @field_validator("pools", mode="before")
    @classmethod
    def _three_weights(cls, pools: Any) -> Any:
        if isinstance(pools, list | tuple) and len(pools) != 3:
            raise ValueError(
                "takes three weights, for prompts that were solved rarely, at times and often; try [0.1,0.3,0.1]"
            )
        return pools

    @model_validator(mode="before")
    @classmethod
    def _relatives_differ_in_defaults(cls, values: Any) -> Any:
        return {**PRESETS.get(str(values.get("name")), {}), **values} if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _groups_are_compared(self) -> GRPOConfig:
        if self.group_size == 1 and (self.baseline != "batch" or self.scale == "group"):
            raise ValueError(
                f"algo.group_size=1 leaves nobody to compare with (algo.baseline={self.baseline}, "
                f"algo.scale={self.scale}); try algo.group_size=8, or algo.baseline=batch with algo.scale=batch"
            )
        if self.group_size == 1 and self.filter != "none":
            raise ValueError("algo.group_size=1: the returns of one episode are always equal; try algo.filter=none")
        if self.deviation == "sample" and (self.scale == "none" or (self.kl_coef and self.kl_in == "reward")):
            why = (
                "algo.scale=none divides by none"
                if self.scale == "none"
                else "algo.kl_in=reward takes the population's"
            )
            raise ValueError(f"algo.deviation=sample has no effect, since {why}; leave it out")
        if self.kl_coef and self.kl_in == "reward" and (self.baseline, self.scale) != ("batch", "batch"):
            raise ValueError(
                f"algo.kl_in=reward gives every decision a return of its own, which only algo.baseline=batch with "
                f"algo.scale=batch compares, not {self.baseline} with {self.scale}; try algo.kl_in=loss"
            )
        bounds = self.filter_low, self.filter_high
        if self.filter == "none" and bounds != (None, None):
            raise ValueError(
                "algo.filter_low and algo.filter_high do nothing with algo.filter=none; try algo.filter=drop"
            )
        if self.filter_metric == "success" and bounds == (None, None):
            raise ValueError(
                "algo.filter_metric=success bounds the rate of success, but no bound is given; "
                "try algo.filter_low=0.1 algo.filter_high=0.9"
            )
        if self.filter_metric == "success" and not all(bound is None or 0 <= bound <= 1 for bound in bounds):
            raise ValueError(
                f"algo.filter_low={self.filter_low} and algo.filter_high={self.filter_high} bound a rate of success "
                "(algo.filter_metric), which is from 0 to 1; try 0.1 and 0.9"
            )
        if self.surplus and self.filter != "resample":
            raise ValueError(
                f"algo.surplus={self.surplus} has no effect with algo.filter={self.filter}, which plays no more groups "
                "than are needed; leave it out, or try algo.filter=resample"
            )
        if None not in bounds and self.filter_low > self.filter_high:
            raise ValueError(
                f"algo.filter_low={self.filter_low:g} is above algo.filter_high={self.filter_high:g}: "
                "no group would be kept; swap them"
            )
        return self

    whole_episodes: ClassVar[Literal[True]] = True

    def of_actions(self) -> list[str]:
        """Options that are set here and mean nothing for a policy that speaks."""
        return []

    def why_not_periodic(self) -> str:
        """Why gradients cannot be summed up while groups come, all reasons; empty where they can."""
        reasons = {
            f"algo.baseline={self.baseline} and algo.scale={self.scale} compare a return with those of the whole "
            "batch, which are known at its end; try algo.baseline=group with algo.scale=group or none": (
                "batch" in (self.baseline, self.scale)
            ),
            "all groups are to be of the weights that learn from them, but algo.surplus=carry keeps some of older "
            "ones; try algo.surplus=discard": self.surplus == "carry",
        }
        return "; and ".join([*self.many_steps(), *(reason for reason, holds in reasons.items() if holds)])

    def check_num_envs(self, num_envs: int) -> None:
        """Raise ValueError when some of `num_envs` envs would never play."""
        self.check_episodes(num_envs, self.groups, self.group_size)


def algorithm(value: Any) -> str:
    """The model that an algo section belongs to."""
    name = str(value.get("name", "ppo") if isinstance(value, dict) else getattr(value, "name", "ppo"))
    return "grpo" if name in PRESETS else "ppo"  # which refuses names that nobody has


AlgoConfig = Annotated[
    Annotated[PPOConfig, Tag("ppo")] | Annotated[GRPOConfig, Tag("grpo")],
    Discriminator(algorithm),
]
