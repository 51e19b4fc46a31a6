"""Options of the learning algorithms. Free of torch, so that `--help` stays fast.

Options of imitation from demonstrations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from embodied.algorithms.imitation import AdamOfImitation, Beta, DaggerConfig, KeptImitation
from embodied.core.errors import ConfigError
from embodied.core.options import ChosenByName, LocalPath, Rule, Strict, broken_rules, never_with, only_with

Weight = Annotated[float, Field(ge=0)]


class PolicyGradientConfig(Strict):
    """The options of all algorithms: gradient steps on the clipped policy loss."""

    name: str = Field(description="Set by each algorithm.")
    epochs: int = Field(4, gt=0, description="Passes over the data of an iteration.")
    minibatch_size: int | None = Field(
        256,
        gt=0,
        description="Decisions (of a text env: conversations) per gradient step, over all learner ranks; null: one "
        "step for the whole iteration.",
    )

    lr: float = Field(3e-4, ge=0, description="Adam's learning rate.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="linear, cosine: learning rates fall so to final_lr at the end of the run."
    )
    final_lr: float = Field(
        0.0, ge=0, description="Where lr_schedule=linear and cosine end; value_lr, roles.critic_lr in proportion."
    )
    warmup_iterations: int = Field(0, ge=0, description="Iterations in which learning rates climb to lr.")
    adam_eps: float = Field(
        1e-5,
        gt=0,
        description="Adam's epsilon. It halves the steps of gradients as small as itself, such as the gradient of 7 "
        "billion weights clipped to norm 1; take 1e-8 for such models.",
    )
    adam_betas: tuple[Beta, Beta] = Field(
        (0.9, 0.999),
        description="Adam's decay rates of the averages of gradients and their squares; openpi takes [0.9, 0.95].",
    )
    weight_decay: float = Field(
        0.0, ge=0, description="Weights shrink by this times the learning rate every step (AdamW); 0: never."
    )
    max_grad_norm: float | None = Field(
        0.5, gt=0, description="Gradients with a larger global norm are scaled down to it; null: never."
    )

    average: int | None = Field(
        None,
        gt=1,
        description="Evaluations play, and checkpoints also hold, the exponential mean of the weights after each "
        "iteration, over about so many iterations; training goes on with the weights themselves; null: no mean.",
    )

    imitation: KeptImitation | None = Field(
        None,
        description="Every gradient step also imitates demonstrations: {data: FOLDER, weight: 0.1, decay: 0.98, "
        "minibatch_size: 128}, and names, episodes, cache as in sft; weight times decay^iteration multiplies the loss "
        "of embodied.sft; the deviation of continuous actions stays RL's. null: RL alone.",
    )

    logprob_level: Literal["action_dim", "action", "chunk", "episode"] = Field(
        "chunk",
        description="What has a probability ratio of its own: each action dimension (or token), env step or decision; "
        "episode: the geometric mean over an answer of a text env (GSPO).",
    )
    clip: Literal["two_sided", "aipo", "tis"] = Field(
        "two_sided",
        description="two_sided: the ratio stays within clip_low and clip_high, as in PPO; aipo: min(ratio, ratio_cap) "
        "times the advantage, without gradient above the cap; tis: the same, but the capped ratio is a constant weight "
        "of the log-prob's gradient.",
    )
    ratio_cap: float = Field(
        8.0, gt=1, description="With clip=aipo or tis, larger ratios count as this, for advantages of both signs."
    )
    clip_low: float = Field(
        0.2, gt=0, lt=1, description="Ratios below 1 - clip_low have no gradient if the advantage is negative."
    )
    clip_high: float = Field(
        0.2, gt=0, description="Ratios above 1 + clip_high have no gradient if the advantage is positive."
    )
    dual_clip: float | None = Field(
        None, gt=1, description="Ratios above this have no gradient if the advantage is negative; null: no such bound."
    )
    decoupled: bool = Field(
        False,
        description="true: ratios are relative to the weights at the start of the update, and the policy loss is "
        "multiplied by the ratio of these weights' probability to the acting weights' (decoupled PPO).",
    )
    importance_cap: float | None = Field(
        None,
        ge=1,
        description="With decoupled=true: the largest such factor of the policy loss (truncated importance sampling; "
        "2 is usual); null: no bound.",
    )
    episode_mask: Literal["none", "mean", "product", "error"] = Field(
        "none",
        description="Leave whole episodes (with ppo, their part in the rollout) out of the policy's loss if their "
        "probability changed too much between the acting weights and the start of the update: by the "
        "geometric mean of the ratios at logprob_level, their product, or the mean of max(r, 1 / r) "
        "(error).",
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
        0.0, ge=0, description="Weight of the divergence from the reference, a frozen copy of the initial weights."
    )
    kl_estimator: Literal["k1", "k2", "k3"] = Field(
        "k3",
        description="How the loss estimates the divergence, from the taken actions, at logprob_level; rewards use k1.",
    )
    kl_in: Literal["loss", "reward"] = Field(
        "loss",
        description="Where the divergence counts: in the loss, or subtracted from rewards. With ppo each decision's "
        "divergence is subtracted from its reward; with groups a decision's return loses the divergences "
        "from it to the episode's end.",
    )

    truncated: Literal["as_is", "mask", "punish"] = Field(
        "as_is",
        description="Cut-off answers of a text env are scored as they are, left out of the loss (they still count in "
        "the comparison), or get a reward of 0.",
    )
    overlong: int | None = Field(
        None,
        gt=0,
        description="DAPO's length penalty: over this many last tokens before policy.max_tokens an answer's reward "
        "falls linearly by up to 1; null: none.",
    )
    pools: tuple[Weight, Weight, Weight] | None = Field(
        None,
        description="Repeat prompts of a text env: weights of prompts that were last solved rarely (at most 25%), at "
        "times, or often (above 75%), against 1 for a new prompt; null: always new prompts.",
    )
    prompts: Literal["drawn", "epochs"] = Field(
        "drawn",
        description="Order of a text env's prompts: drawn at random with replacement, or in epochs, each with every "
        "question once in a new order.",
    )
    weighting: Literal["decision", "episode", "constant"] = Field(
        "decision",
        description="The loss is a mean over decisions, or over episodes (with ppo, their part in the rollout); "
        "constant: the sum over decisions divided by the number of episodes times policy.max_tokens (Dr. "
        "GRPO), for text envs.",
    )

    section = "algo."
    rules = (
        only_with("final_lr", {"lr_schedule": ("linear", "cosine")}, "set algo.final_lr=0, or algo.lr_schedule=linear"),
        never_with("target_kl", {"epochs": 1}, "it skips the epochs after the first; try algo.target_kl=null"),
        never_with("pools", {"prompts": "epochs"}, "it repeats some prompts; leave one of them out"),
        only_with("ratio_cap", {"clip": ("aipo", "tis")}),
        only_with(
            "clip_low clip_high dual_clip", {"clip": "two_sided"}, "algo.ratio_cap is the only bound; leave it out"
        ),
        never_with(
            "decoupled",
            {"clip": ("aipo", "tis")},
            "it splits the ratio that this bounds; try algo.clip=two_sided with algo.importance_cap=2",
        ),
        only_with(
            "importance_cap",
            {"decoupled": True},
            "the ratio would count twice; try algo.decoupled=true, or algo.clip=tis with algo.ratio_cap",
        ),
        only_with("episode_mask_low episode_mask_high", {"episode_mask": ("mean", "product", "error")}),
        never_with("episode_mask_low", {"episode_mask": "error"}, "that is at least 1; take algo.episode_mask_high"),
        never_with(
            "episode_mask",
            {"episode_mask_low": None, "episode_mask_high": None},
            "it needs a bound; try algo.episode_mask_low=0.5 algo.episode_mask_high=2",
        ),
    )
    not_periodic: ClassVar[tuple[Rule, ...]] = (
        never_with("decoupled episode_mask", {}, "acting and learning weights are the same; leave it out"),
        never_with({"epochs": lambda epochs: epochs > 1}, {}, "groups are forgotten at once; try algo.epochs=1"),
        never_with({"minibatch_size": bool}, {}, "there is one gradient step; try algo.minibatch_size=null"),
    )
    """Options that are refused with gradient accumulation during the rollout (schedule=periodic)."""

    def why_not_periodic(self) -> str:
        """All reasons against gradient accumulation during the rollout; empty if there are none."""
        shared = PolicyGradientConfig.not_periodic if self.whole_episodes else ()
        return "; and ".join(broken_rules((*shared, *self.not_periodic), self, self.section))

    def conflicts(self) -> Iterator[str]:
        if self.final_lr > self.lr:
            yield f"algo.final_lr={self.final_lr:g} is above algo.lr={self.lr:g}; try algo.final_lr=0"
        most = 1 + self.clip_high
        if self.dual_clip is not None and self.dual_clip <= most:
            yield (
                f"algo.dual_clip={self.dual_clip:g} is not above 1 + algo.clip_high = {most:g}, so it would cut where "
                f"the ratio is still trusted; try algo.dual_clip={1 + 10 * self.clip_high:g}"
            )

    def misfits(self, num_envs: int) -> Iterator[str]:
        """Yields problems with `num_envs` envs in total, if a batch is a number of episodes."""
        episodes = self.groups * self.group_size
        if num_envs > episodes:
            yield (
                f"env.num_envs={num_envs} is more than algo.groups={self.groups} * algo.group_size={self.group_size} "
                f"= {episodes} episodes an iteration, so some would never play; try env.num_envs={episodes}"
            )


class PPOConfig(PolicyGradientConfig):
    name: Literal["ppo"] = Field("ppo", description="Algorithm: ppo, grpo, dapo, rloo, reinforce++ or dagger.")
    rollout_decisions: int = Field(
        64, gt=0, description="Decisions of every env per iteration; for conversations see algo.groups."
    )
    groups: int | None = Field(
        None,
        gt=0,
        description="Text envs: prompts of an iteration, each with group_size conversations; null: envs that take "
        "actions.",
    )
    group_size: int = Field(1, gt=0, description="Conversations that begin with the same prompt.")

    value_lr: float | None = Field(
        None, ge=0, description="Learning rate of the value function's own weights; null: the same as lr."
    )
    critic_warmup: int = Field(
        0, ge=0, description="Iterations at the start in which the values alone learn, for a policy that has imitated."
    )

    gamma: float = Field(0.99, ge=0, le=1, description="Discount, per decision or env step (advantage_level).")
    gae_lambda: float = Field(
        0.95,
        ge=0,
        le=1,
        description="GAE's lambda: 0 trusts the value function, 1 the rewards; per decision or env step "
        "(advantage_level).",
    )
    advantage_level: Literal["decision", "step"] = Field(
        "decision",
        description="Gamma and lambda apply once per decision (to its summed reward) or once per env step.",
    )
    normalize_advantages: bool = Field(
        True, description="Shift and scale the advantages of an iteration to mean 0 and standard deviation 1."
    )

    value_coef: float = Field(0.5, ge=0, description="Weight of the value loss.")
    value_clip: float | None = Field(
        None, gt=0, description="Clip the value loss where a value moves further than this from the old one; null: off."
    )
    huber_delta: float | None = Field(
        None, gt=0, description="Value errors above this, in units of return, count linearly; null: all are squared."
    )

    rules = (
        only_with("kl_in kl_estimator", {"kl_coef": bool}, "try algo.kl_coef=0.01"),
        never_with("kl_estimator", {"kl_in": "reward"}, "rewards take the divergence as it is (k1); leave it out"),
    )
    not_periodic = (
        never_with(
            {"name": "ppo"}, {"groups": None}, "all env rows end a rollout together; try pipeline.schedule=async"
        ),
        never_with(
            {"normalize_advantages": True},
            {"groups": bool},
            "their mean is known at the end of the batch; try algo.normalize_advantages=false",
        ),
    )

    # Options of groups for whole conversations. With values every conversation has an advantage, so no group is
    # dropped.
    filter: ClassVar[str] = "none"
    filter_metric: ClassVar[str] = "return"
    surplus: ClassVar[str | None] = None
    max_rounds: ClassVar[int] = 4
    max_empty: ClassVar[int] = 5

    @property
    def whole_episodes(self) -> bool:
        """True if a batch is a number of whole episodes, not of decisions of every env."""
        return self.groups is not None

    def misfits(self, num_envs: int) -> Iterator[str]:
        """Yields problems with `num_envs` envs in total: too few items for this algorithm, or too many envs."""
        if self.whole_episodes:
            yield from super().misfits(num_envs)
            return
        items = num_envs * self.rollout_decisions
        have = f"env.num_envs={num_envs} * algo.rollout_decisions={self.rollout_decisions} = {items} items an iteration"
        if self.minibatch_size and self.minibatch_size > items:
            yield f"algo.minibatch_size={self.minibatch_size} is more than {have}; try algo.minibatch_size={items}"
        if self.normalize_advantages and items == 1:
            yield f"{have}, and algo.normalize_advantages makes a single advantage 0; try algo.rollout_decisions=2"


PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo": {"clip_high": 0.28, "filter": "resample"},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "reinforce++": {"baseline": "batch", "scale": "batch", "filter": "none", "kl_in": "reward"},
}


class GRPOConfig(PolicyGradientConfig):
    """Whole episodes in groups with a common task and initial state; an episode is compared with its group."""

    name: Literal["grpo", "dapo", "rloo", "reinforce++"] = Field(
        description="grpo, or one of its relatives, which differ in baseline, scale, filter, clip_high and kl_in."
    )
    groups: int = Field(8, gt=0, description="Groups that an iteration learns from.")
    group_size: int = Field(8, gt=0, description="Episodes of a group: same task, same initial state, own noise.")

    baseline: Literal["group", "leave_one_out", "batch"] = Field(
        "group",
        description="An episode's return is compared with the mean of its group, of the other episodes in its group, "
        "or of all episodes.",
    )
    scale: Literal["group", "batch", "none"] = Field(
        "group",
        description="The difference is divided by the deviation of returns in its group, in all, or not at all.",
    )
    deviation: Literal["population", "sample"] = Field(
        "population",
        description="That deviation divides the sum of squares of n returns by n, or by n - 1 as RLinf does.",
    )

    filter: Literal["none", "drop", "resample"] = Field(
        "drop",
        description="Groups with equal returns have no gradient: keep them, drop them, or drop them and play new "
        "groups.",
    )
    filter_metric: Literal["return", "success"] = Field(
        "return", description="filter_low and filter_high bound a group's mean return, or its rate of success."
    )
    filter_low: float | None = Field(None, description="The filter also drops groups whose mean is below this.")
    filter_high: float | None = Field(None, description="The filter also drops groups whose mean is above this.")
    surplus: Literal["carry", "discard"] | None = Field(
        None,
        description="Groups of filter=resample that an iteration does not need are used by the next one, although "
        "older weights played them, or dropped; null: carry with pipeline.schedule=sync, else discard.",
    )
    max_rounds: int = Field(
        4, gt=0, description="Most rounds of episodes per iteration, for filter=resample and after faults."
    )
    max_empty: int = Field(
        5,
        gt=0,
        description="The run stops after this many iterations in a row with nothing to learn from, and says why.",
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

    rules = (
        never_with(
            {"group_size": 1},
            {"baseline": ("group", "leave_one_out")},
            "there is no other episode to compare with; try algo.group_size=8, or algo.baseline=batch",
        ),
        never_with({"group_size": 1}, {"scale": "group"}, "one return has no deviation; try algo.group_size=8"),
        never_with(
            {"group_size": 1},
            {"filter": ("drop", "resample")},
            "the returns of one episode are always equal; try algo.filter=none",
        ),
        only_with("deviation", {"scale": ("group", "batch")}, "nothing is divided by it; leave it out"),
        never_with("deviation", {"kl_in": "reward", "kl_coef": bool}, "which takes the population's; leave it out"),
        only_with("filter_low filter_high", {"filter": ("drop", "resample")}),
        never_with(
            "filter_metric",
            {"filter_low": None, "filter_high": None},
            "it needs a bound; try algo.filter_low=0.1 algo.filter_high=0.9",
        ),
        only_with("surplus", {"filter": "resample"}),
        *(
            never_with(
                {"kl_in": "reward"},
                {"kl_coef": bool, key: values},
                "every decision gets its own return; try algo.kl_in=loss",
            )
            for key, values in {"baseline": ("group", "leave_one_out"), "scale": ("group", "none")}.items()
        ),
    )
    not_periodic = (
        never_with(
            {"baseline": "batch", "scale": "batch"},
            {},
            "all returns are known at the end; try algo.baseline=group algo.scale=group",
        ),
        never_with({"surplus": "carry"}, {}, "groups of older weights would be learned from; try algo.surplus=discard"),
    )
    whole_episodes: ClassVar[Literal[True]] = True
    critic_warmup: ClassVar[int] = 0  # no values are learned

    def default_of(self, key: str) -> Any:
        return PRESETS[self.name].get(key, super().default_of(key))

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        low, high = self.filter_low, self.filter_high
        bounds = f"algo.filter_low={low} and algo.filter_high={high}"
        if self.filter_metric == "success" and not all(bound is None or 0 <= bound <= 1 for bound in (low, high)):
            yield f"{bounds} bound a rate of success (algo.filter_metric), which is from 0 to 1; try 0.1 and 0.9"
        if None not in (low, high) and low > high:
            yield f"algo.filter_low={low:g} is above algo.filter_high={high:g}: no group would be kept; swap them"


def algorithm(value: Any) -> str:
    """The config class of an algo section."""
    name = str(value.get("name", "ppo") if isinstance(value, dict) else getattr(value, "name", "ppo"))
    return "grpo" if name in PRESETS else name if name == "dagger" else "ppo"  # PPOConfig refuses unknown names


AlgoConfig = Annotated[
    PPOConfig | GRPOConfig | DaggerConfig,
    ChosenByName({"ppo": PPOConfig, "grpo": GRPOConfig, "dagger": DaggerConfig}, algorithm),
]


class SFTConfig(AdamOfImitation):
    kl_coef: ClassVar[float] = 0.0  # demonstrations are imitated without a reference policy

    data: LocalPath | None = Field(
        None,
        description="The demonstrations, a folder in LeRobot's layout 3.0, 2.1 or 2.0. For text envs JSONL with lines "
        "{prompt or messages, answer}, parquet, or hf:ORG/NAME:CONFIG:SPLIT of the hub. null: the env's expert "
        "demonstrates first; a text env uses its solutions.",
    )
    names: dict[str, str] = Field(
        {},
        description="The data set's names for action, state and the env's cameras, if not LeRobot's, such as {action: "
        "actions, state: state, agentview: image}; for text envs as in env.columns.",
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
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "linear",
        description="linear: the learning rate falls linearly to 0 at the end of the run; cosine: along a cosine to "
        "final_lr.",
    )
    final_lr: float = Field(0.0, ge=0, description="Where lr_schedule=cosine ends.")
    warmup_steps: int = Field(0, ge=0, description="Gradient steps in which the learning rate climbs to lr.")
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
