"""The configuration of a run: recipe files, then `key=value` arguments, then validation by the model of every section.

Each section's model lives beside the code that reads it; here are those of the run as a whole and the checks that span
sections, such as whether groups fit into the envs and stages into the workers. Nothing imported from here needs torch,
Ray or a simulator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from embodied.algorithms.config import AlgoConfig, PPOConfig
from embodied.algorithms.sft_config import SFTConfig
from embodied.config.base_recipe import (
    WHICH_POLICY,
    base_recipe,
    has_options,
    own_classes,
    texts,
    usual_name,
    without_recipe,
)
from embodied.config.cli import from_python, parse
from embodied.config.commands import COMMANDS, Command
from embodied.config.key_tree import root
from embodied.config.merge import COMMAND_LINE, Source, Tree, flatten, lay, recipe_sources, with_own_task
from embodied.config.mistakes import config_error, explain
from embodied.config.recipe_files import recipe_names
from embodied.config.sections import (
    CollectSection,
    EvalSection,
    PipelineSection,
    PlacementConfig,
    RolesSection,
    RunSection,
)
from embodied.core.errors import ConfigError
from embodied.core.options import BelongsToFile, Strict
from embodied.envs.config import EnvConfig, ExternalEnvConfig
from embodied.envs.text.config import TextConfig
from embodied.learners.config import LearnerConfig
from embodied.policies.config import MLPConfig, PolicyConfig
from embodied.policies.language.config import LanguageConfig
from embodied.runtime.config import ClusterConfig, FaultsConfig


class RunConfig(Strict):
    seed: int = Field(0, ge=0, lt=2**63, description="All randomness of the run follows from it.")
    run: RunSection = Field(description="How long, and where results go.")
    env: EnvConfig = Field(description="The simulator and its task.")
    policy: PolicyConfig = Field(default_factory=MLPConfig, description="The robot policy.")
    algo: AlgoConfig = Field(default_factory=PPOConfig, description="How the policy learns.")
    sft: SFTConfig = Field(default_factory=SFTConfig, description="How the policy imitates demonstrations.")
    collect: CollectSection = Field(default_factory=CollectSection, description="How demonstrations are collected.")
    learner: LearnerConfig = Field(default_factory=LearnerConfig, description="How the learners compute.")
    roles: RolesSection = Field(
        default_factory=RolesSection, description="Roles beside simulators, policies and learners (docs/workflows.md)."
    )
    placement: PlacementConfig = Field(
        "auto", description="What runs where: auto, collocated, disaggregated, hybrid, or a map from roles to devices."
    )
    pipeline: PipelineSection = Field(default_factory=PipelineSection, description="How finely work is handed on.")
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="What the processes run on.")
    eval: EvalSection = Field(default_factory=EvalSection, description="Evaluation, during training and after.")
    faults: FaultsConfig = Field(default_factory=FaultsConfig, description="What is done when something fails.")
    resume: Literal["auto"] | Annotated[Path, BelongsToFile()] | None = Field(
        None, description="auto: the newest run of this recipe in run.dir that has a checkpoint; or a run's folder."
    )

    @model_validator(mode="after")
    def _sections_fit(self, info: ValidationInfo) -> RunConfig:
        unused = (info.context or {}).get("unused", ())
        checks = [self._stages_share_envs, self._precisions_fit]
        if "policy" not in unused and not isinstance(self.env, ExternalEnvConfig):  # which may be a text env of yours
            checks.append(lambda: self.check_speech(isinstance(self.env, TextConfig)))
        if "algo" not in unused:
            checks += [self._pieces_fit, lambda: self.algo.check_num_envs(self.env.num_envs), self._whole_episodes_fit]
            checks += [self._schedule_fits, self._answers_fit, self._interleaving_fits, self._roles_fit]
        elif "sft" not in unused:
            checks.append(self._nothing_is_collected)
        problems: list[str] = []
        for check in checks:
            try:
                check()
            except ValueError as err:
                problems.append(str(err))
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def merged_rows(self) -> int:
        """Env rows that a policy worker answers at once, at most; 1: one request after the other."""
        return self.pipeline.merge_rows or self.policy.merged_rows

    def changed(self, section: str, *keys: str) -> str:
        """`pipeline.stages=2 and ...` for those of these keys that have not their default; empty where all do."""
        chosen = getattr(self, section)
        odd = [key for key in keys if getattr(chosen, key) != type(chosen).model_fields[key].default]
        return " and ".join(f"{section}.{key}={getattr(chosen, key)}" for key in odd)

    def with_values(self, section: str, **changes: Any) -> RunConfig:
        """The same with other values in a section, which fit."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=changes)})

    # What must fit together

    def check_speech(self, text: bool, works: str = "policy.name=language") -> None:
        """Raise ValueError unless the policy speaks the language of the env, which asks in words or (`text`) does not.
        `works`: what to try with one that does."""
        if text != self.policy.speaks:
            asks, answers = ("asks in words", "answers with actions") if text else ("takes actions", "answers in words")
            raise ValueError(
                f"env.name={self.env.name} {asks}, and policy.name={self.policy.name} {answers}; "
                f"try {works if text else 'env.name=sums'}"
            )

    def _stages_share_envs(self) -> None:
        envs, stages = self.env.num_envs, self.pipeline.stages
        if envs % stages:
            fit = max(envs // stages, 1) * stages
            raise ValueError(
                f"env.num_envs={envs} is not a multiple of pipeline.stages={stages}; try env.num_envs={fit}"
            )

    def _pieces_fit(self) -> None:
        pieces = self.pipeline.granularity
        if pieces is None:
            return
        given = f"pipeline.granularity={pieces}"
        if self.algo.whole_episodes:
            raise ValueError(
                f"{given}: algo.name={self.algo.name} learns from whole groups of episodes, and which of them count is "
                "known when all are over; leave it out"
            )
        if pieces > self.algo.rollout_decisions:
            raise ValueError(
                f"{given} is more than algo.rollout_decisions={self.algo.rollout_decisions}; leave it out to hand on "
                "whole rollouts"
            )

    def _schedule_fits(self) -> None:
        schedule, level, algo = self.pipeline.schedule, self.pipeline.async_level, self.algo
        if schedule != "async" and level != 1:
            raise ValueError(
                f"pipeline.async_level={level} has no effect with pipeline.schedule={schedule}; leave it out, or set "
                "pipeline.schedule=async"
            )
        if schedule == "async" and self.pipeline.granularity:
            raise ValueError(
                f"pipeline.granularity={self.pipeline.granularity} lets learners work on a rollout still in progress, "
                "but with pipeline.schedule=async they learn from an earlier one meanwhile; leave it out"
            )
        if schedule == "async" and algo.surplus == "carry":
            raise ValueError(
                "algo.surplus=carry keeps groups for later batches, but with pipeline.schedule=async all are exactly "
                "pipeline.async_level versions old; try algo.surplus=discard"
            )
        if (most := self.changed("learner", "most_items")) and (schedule == "periodic" or not algo.whole_episodes):
            raise ValueError(
                f"{most} limits what a learner has of a batch of whole episodes; with pipeline.schedule=periodic it "
                "keeps none, and with rollouts of a fixed length all learners have equally much; leave it out"
            )
        speaks = isinstance(self.policy, LanguageConfig)
        if self.learner.graphs == "on" and (speaks or schedule == "periodic"):
            what = "conversations" if speaks else "groups of pipeline.schedule=periodic"
            raise ValueError(
                f"learner.graphs=on records passes of a few fixed sizes, but {what} have any size; "
                "try learner.graphs=auto"
            )
        if schedule == "periodic" and (reason := algo.why_not_periodic()):
            raise ValueError(f"pipeline.schedule=periodic: {reason}")

    def _answers_fit(self) -> None:
        """Refuse options of answers where no policy speaks and learns from whole groups of conversations."""
        algo, policy = self.algo, self.policy
        if not isinstance(policy, LanguageConfig):
            if packing := self.changed("learner", "pack_tokens", "share_prompts", "sequence_degree"):
                raise ValueError(
                    f"{packing} has no effect with policy.name={policy.name}: only conversations pass "
                    "through the network by their tokens; leave it out"
                )
            if given := algo.of_answers():
                raise ValueError(
                    f"{' and '.join(given)}: only a language model gives answers, and policy.name={policy.name} "
                    "takes actions; leave it out, or set policy.name=language with a text env"
                )
            return
        if not algo.whole_episodes:
            raise ValueError(
                "algo.name=ppo learns from decisions of every env unless algo.groups says how many prompts an "
                "iteration has, and a text env holds whole conversations; try algo.groups=64, or algo.name=grpo"
            )
        if policy.value_head != (algo.name == "ppo" and not self.roles.critic):
            needed = (
                "judges tokens by the values that policy.value_head=true predicts; set it"
                if algo.name == "ppo" and not self.roles.critic
                else "learns no values, so policy.value_head=true would predict nothing; leave it out"
            )
            raise ValueError(f"algo.name={algo.name} {needed}")
        if given := algo.of_actions():
            raise ValueError(
                f"{' and '.join(given)} has no effect with policy.name=language: a batch is algo.groups of "
                "conversations, and a decision is a token; leave it out"
            )
        if algo.minibatch_size and algo.minibatch_size % algo.group_size:
            fit = max(algo.minibatch_size // algo.group_size, 1) * algo.group_size
            raise ValueError(
                f"algo.minibatch_size={algo.minibatch_size} counts conversations, and would tear groups of "
                f"algo.group_size={algo.group_size}; try algo.minibatch_size={fit}"
            )
        if algo.overlong and algo.overlong > policy.max_tokens:
            raise ValueError(
                f"algo.overlong={algo.overlong} is more than policy.max_tokens={policy.max_tokens}, so every "
                f"answer would pay; try algo.overlong={max(1, policy.max_tokens // 4)}"
            )
        if idle := self.changed("pipeline", "stages", "merge_rows"):
            raise ValueError(
                f"{idle} has no effect with policy.name=language: each conversation goes on as soon as "
                "it is answered, by whichever engine has room, and policy.max_running says for how many at a time; "
                "leave it out"
            )
        if self.learner.micro_batch_size:
            raise ValueError(
                f"learner.micro_batch_size={self.learner.micro_batch_size} counts decisions, but conversations pass "
                "through the network whole; set learner.pack_tokens instead"
            )

    def _roles_fit(self) -> None:
        roles, algo = self.roles, self.algo
        if roles.reference and not algo.kl_coef:
            raise ValueError(
                "roles.reference=true: nothing is compared with it while algo.kl_coef=0; try algo.kl_coef=0.01, or "
                "leave it out"
            )
        speaks = isinstance(self.policy, LanguageConfig)
        for name in ("critic", roles.scorer):
            if name and getattr(roles, name) and not speaks:
                raise ValueError(
                    f"roles.{name} reads conversations, and policy.name={self.policy.name} takes actions; a role for "
                    "robots is a program of your own (docs/workflows.md)"
                )
        if roles.critic and algo.name != "ppo":
            raise ValueError(f"roles.critic=true: algo.name={algo.name} learns no values; try algo.name=ppo")
        if roles.critic and algo.kl_coef and algo.kl_in == "reward" and not roles.reference:
            raise ValueError(
                "algo.kl_in=reward takes a divergence off the rewards that the critic learns from; set "
                "roles.reference=true, which computes it before"
            )

    def _interleaving_fits(self) -> None:
        if not self.eval.interleave:
            return
        if self.run.eval_every is None:
            raise ValueError(
                "eval.interleave=true has no effect without run.eval_every: the only evaluation is the last, after "
                "which nothing is collected; leave it out, or set run.eval_every=50"
            )

    def _nothing_is_collected(self) -> None:
        keys = ["async_level"] if self.pipeline.schedule == "auto" else ["schedule", "async_level"]
        if given := self.changed("pipeline", *keys):
            raise ValueError(
                f"{given}: demonstrations are on disk already, so there is nothing to collect meanwhile; leave it out"
            )
        if given := self.changed("learner", "sequence_degree", "graphs"):
            raise ValueError(
                f"{given}: demonstrations pass through the network in one learner each, and no pass is recorded; "
                "leave it out"
            )

    def _whole_episodes_fit(self) -> None:
        if not self.algo.whole_episodes:
            return
        given = f"algo.name={self.algo.name} plays whole episodes"
        if self.run.env_steps is not None:
            raise ValueError(
                f"run.env_steps={self.run.env_steps}: {given}, of a length that is not known before; set run.iterations"
            )
        if self.env.stagger:
            raise ValueError(f"env.stagger=true cuts the first episodes short, but {given}; try env.stagger=false")
        if self.env.retries:
            raise ValueError(
                f"env.retries={self.env.retries} plays failed episodes again, but {given} of groups that begin alike; "
                "try env.retries=0"
            )

    def _precisions_fit(self) -> None:
        if self.learner.precision == "bf16" and self.policy.dtype == "float64":
            raise ValueError(
                "learner.precision=bf16 lowers float32 products, but policy.dtype=float64; try policy.dtype=float32"
            )
        if self.learner.shard and self.policy.mixed_precision:
            raise ValueError(
                f"learner.shard=true splits weights of one precision, but with policy.dtype={self.policy.dtype} "
                f"policy.name={self.policy.name} keeps its norms in float32; try policy.dtype=float32, with "
                "learner.precision=bf16 for speed"
            )


# Loading


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    sources: dict[str, str]  # dotted key -> where it was set; other keys have their default
    flags: frozenset[str]
    own: dict[str, tuple[str, ...]]  # the command's own arguments
    recipe: str | None = None  # its name or file
    left_out: tuple[str, ...] = ()  # lines: what the recipe sets for another task than the command line's

    @property
    def name(self) -> str:
        return self.config.run.name or "run"

    @property
    def checkpoints(self) -> tuple[str, ...]:
        if "checkpoint" not in self.own:
            raise ConfigError(WHICH_POLICY)
        return self.own["checkpoint"]

    @property
    def dry_run(self) -> bool:
        return "--dry-run" in self.flags

    @property
    def yaml(self) -> str:
        """The resolved recipe, every key spelt out; loads to the same configuration from anywhere, as a run of its
        own."""
        from embodied.config.help import config_yaml

        return config_yaml(self.config.model_copy(update={"resume": None}), {})


def load(argv: list[str], entry: str = "train") -> Loaded | None:
    """The configuration that an argument list describes; None when --help or --cfg has answered already."""
    from embodied.config.help import config_yaml, help_text

    command = COMMANDS[entry]
    arguments = parse(argv, recipe_names())
    if "checkpoint" in command.own and "--help" not in arguments.flags and has_options(arguments.values):
        command = replace(command, unused=tuple(name for name in command.unused if name != "policy"))
    if "--help" in arguments.flags:
        print(help_text(command, root(RunConfig), [word for word in argv if re.fullmatch(r"[\w.]+", word)]), flush=True)
        return None
    loaded = _load(arguments.values, arguments.problems, frozenset(arguments.flags), command)
    if "--cfg" in loaded.flags:
        print(config_yaml(loaded.config, loaded.sources, "default"), end="")
        return None
    return loaded


def load_recipe(*words: str | Mapping[str, Any]) -> RunConfig:
    """The resolved, frozen configuration: load_recipe("maniskill_ppo", "env.num_envs=32", {"algo.lr": 1e-3})."""
    loaded = load(from_python(words))
    if loaded is None:
        raise ConfigError("--help and --cfg are for the command line; print the configuration instead")
    return loaded.config


def _load(values: dict[str, Any], problems: list[str], flags: frozenset[str], command: Command) -> Loaded:
    schema, tree = root(RunConfig), Tree(problems=problems, evaluates=command.name == "evaluate")
    own = {key: texts(key, values.pop(key), problems) for key in command.own if key in values}
    recipe = base_recipe(values, own, command, schema, problems)
    sources = recipe_sources(recipe, schema, problems) if recipe else without_recipe(command, values)
    incomplete = bool(problems)  # then a missing key says nothing
    if (mine := own_classes(own.get("checkpoint"))) and any(key.startswith("policy.") for key in values):
        values.setdefault("policy.name", mine[0])
    sources.append(Source(COMMAND_LINE, Path.cwd(), flatten(schema, values, COMMAND_LINE, problems)))
    for source in sources:
        lay(tree, schema, with_own_task(source, tree))
    problems += [
        f"{key} has no effect in {command.name}; leave it out{instead(key)}"
        for key, where in tree.sources.items()
        if where == COMMAND_LINE and command.ignores(key)
    ]
    if recipe and tree.values.get("run") and tree.values["run"].get("name") is None:
        tree.put(("run", "name"), usual_name(recipe, command), "the recipe's name")
    try:
        config = RunConfig.model_validate(tree.values, context={"unused": command.unused})
    except ValidationError as err:
        problems += explain(err.errors(), schema, tree, incomplete, command)
    if problems:
        raise config_error(tree.doubts + problems)
    return Loaded(config, tree.sources, flags, own, recipe, tuple(tree.left_out))


def instead(key: str) -> str:
    """The command that a key without effect is for, where a section has one of its own."""
    section = key.partition(".")[0]
    return f", or run python -m embodied.{section}" if section in COMMANDS else ""
