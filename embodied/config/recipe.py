"""The configuration of a run: recipe files, then `key=value` arguments, then validation by the model of every section.

Each section's model is beside the code that reads it. This module has the options of the whole run and the checks
across sections, such as multiples of env rows and stages. Nothing imported here needs torch, Ray or a simulator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidationInfo, model_validator

from embodied.algorithms.config import PRESETS, AlgoConfig, PPOConfig, SFTConfig
from embodied.config.command_line import (
    COMMANDS,
    WHICH_POLICY,
    base_recipe,
    from_python,
    has_options,
    name_server,
    own_classes,
    parse,
    texts,
    usual_name,
    without_recipe,
)
from embodied.config.read import (
    COMMAND_LINE,
    Command,
    Source,
    Tree,
    config_yaml,
    drop_training_only,
    flatten,
    merge_source,
    recipe_sources,
    root,
    with_own_task,
)
from embodied.config.sections import (
    ClusterConfig,
    CollectSection,
    EvalSection,
    FaultsConfig,
    PipelineSection,
    PlacementConfig,
    RolesSection,
    RunSection,
)
from embodied.core.errors import ConfigError
from embodied.core.options import BelongsToFile, Strict, broken_rules, never_with, only_with
from embodied.envs.config import EnvConfig, ExternalEnvConfig
from embodied.learners.config import LearnerConfig
from embodied.policies.config import MLPConfig, PolicyConfig


class RunConfig(Strict):
    seed: int = Field(0, ge=0, lt=2**63, description="All randomness of the run follows from it.")
    run: RunSection = Field(description="Length of the run, and folder of its results.")
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
    pipeline: PipelineSection = Field(
        default_factory=PipelineSection, description="Overlap and division of an iteration's work."
    )
    cluster: ClusterConfig = Field(default_factory=ClusterConfig, description="Machines and devices of the processes.")
    eval: EvalSection = Field(default_factory=EvalSection, description="Evaluation, during training and after.")
    faults: FaultsConfig = Field(default_factory=FaultsConfig, description="Restarts and time limits after failures.")
    resume: Literal["auto"] | Annotated[Path, BelongsToFile()] | None = Field(
        None, description="auto: the newest run of this recipe in run.dir that has a checkpoint; or a run's folder."
    )

    @model_validator(mode="after")
    def _sections_fit(self, info: ValidationInfo) -> RunConfig:
        unused = (info.context or {}).get("unused", ())
        problems = [*broken_rules(ALWAYS, self), *self._uneven_stages()]
        if "policy" not in unused and self.policy.name != "remote":  # a server says later how long its chunks are
            problems += self._too_late()
        if "policy" not in unused and not isinstance(self.env, ExternalEnvConfig):  # an external env may be a text env
            problems += self.language_gap(self.env.speaks)
        if "algo" not in unused:
            odd = [*broken_rules(OF_ANSWERS, self)]
            rest = self.with_values("algo", groups=None) if odd else self  # without consequences of this mistake
            problems += [*odd, *broken_rules(TRAINING, rest), *rest.algo.misfits(self.env.num_envs), *rest._too_much()]
        elif "sft" not in unused:
            problems += broken_rules(IMITATION, self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @property
    def merged_rows(self) -> int:
        """Env rows that a policy worker answers at once, at most; 1: one request after the other."""
        return self.pipeline.merge_rows or self.policy.merged_rows

    @property
    def total_iterations(self) -> int | None:
        """`run.iterations`, or `run.env_steps` in whole iterations (with action chunks slightly fewer steps may be
        executed); None where neither says it."""
        run = self.run
        if run.iterations is not None or run.env_steps is None or self.algo.whole_episodes:
            return run.iterations
        return max(1, run.env_steps // (self.env.num_envs * self.algo.rollout_decisions * self.policy.chunk))

    def with_values(self, section: str, **changes: Any) -> RunConfig:
        """The config with other values in a section."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=changes)})

    def shards_role(self, role: str, hosts: Iterable[Sequence[str]]) -> bool:
        """True if this role's workers hold shards of its network: several, in processes of their own. `hosts`: the
        roles of every process."""
        its = [roles for roles in hosts if role in roles]
        alone = len(its) > 1 and all(len(roles) == 1 for roles in its)
        return alone and self.learner.shard and self.policy.speaks

    # Checks across sections

    def language_gap(self, text: bool, works: str = "policy.name=language") -> list[str]:
        """The mistake if only one of policy and env uses text. `works` is the advice for text envs."""
        if text == self.policy.speaks:
            return []
        asks, answers = ("asks in words", "answers with actions") if text else ("takes actions", "answers in words")
        given = f"env.name={self.env.name} {asks}, and policy.name={self.policy.name} {answers}"
        return [f"{given}; try {works if text else 'env.name=sums'}"]

    def _uneven_stages(self) -> Iterator[str]:
        envs, stages = self.env.num_envs, self.pipeline.stages
        if envs % stages:
            fit = max(envs // stages, 1) * stages
            yield f"env.num_envs={envs} is not a multiple of pipeline.stages={stages}; try env.num_envs={fit}"

    def _too_late(self) -> Iterator[str]:
        try:
            self.policy.chunk_rule(self.eval.delay)
        except ConfigError as err:
            yield str(err)

    def _too_much(self) -> Iterator[str]:
        algo, policy, pieces = self.algo, self.policy, self.pipeline.granularity
        if pieces and not algo.whole_episodes and pieces > algo.rollout_decisions:
            yield (
                f"pipeline.granularity={pieces} is more than algo.rollout_decisions={algo.rollout_decisions}; leave it "
                "out to hand on whole rollouts"
            )
        iterations = self.total_iterations
        told = f"run.iterations={iterations}"
        if self.run.iterations is None:
            told = f"the {iterations} iterations of run.env_steps={self.run.env_steps}"
        if iterations and algo.warmup_iterations >= iterations:
            yield (
                f"algo.warmup_iterations={algo.warmup_iterations} leaves none of {told} at algo.lr; try "
                f"algo.warmup_iterations={iterations // 10}"
            )
        if iterations and algo.critic_warmup >= iterations:
            yield (
                f"algo.critic_warmup={algo.critic_warmup} leaves the policy none of {told}; try "
                f"algo.critic_warmup={iterations // 10}"
            )
        if self.pipeline.schedule == "periodic" and (reason := algo.why_not_periodic()):
            yield f"pipeline.schedule=periodic: {reason}"
        if not (policy.speaks and algo.whole_episodes):
            return
        if algo.minibatch_size and algo.minibatch_size % algo.group_size:
            fit = max(algo.minibatch_size // algo.group_size, 1) * algo.group_size
            yield (
                f"algo.minibatch_size={algo.minibatch_size} counts conversations, and would tear groups of "
                f"algo.group_size={algo.group_size}; try algo.minibatch_size={fit}"
            )
        if algo.overlong and algo.overlong > policy.max_tokens:
            yield (
                f"algo.overlong={algo.overlong} is more than policy.max_tokens={policy.max_tokens}, so every "
                f"answer would pay; try algo.overlong={max(1, policy.max_tokens // 4)}"
            )


# Rules between sections


LANGUAGE, ACTIONS, EPISODES = {"policy.speaks": True}, {"policy.speaks": False}, {"algo.whole_episodes": True}
NO_ANSWERS = "only a language model gives answers; leave it out, or set policy.name=language with a text env"
ALWAYS = (
    never_with(
        {"learner.precision": "bf16"},
        {"policy.dtype": "float64"},
        "bf16 lowers the products of float32; try policy.dtype=float32",
    ),
    never_with(
        "learner.shard",
        {"policy.mixed_precision": True},
        "its norms are float32; try policy.dtype=float32, with learner.precision=bf16 for speed",
    ),
)
OF_ANSWERS = (
    never_with(
        "algo.groups algo.group_size",
        {"algo.name": "ppo", **ACTIONS},
        "a robot's PPO learns from rollouts of algo.rollout_decisions, not from groups; leave it out, or try "
        "algo.name=grpo",
    ),
)
LABELLED = never_with(
    {"policy.chunk": lambda chunk: chunk > 1},
    {"algo.name": "dagger"},
    "an expert labels one action of a decision; try policy.chunk=1",
)
ONLY_ACTS = never_with(
    {"policy.name": ("remote", "exported")}, {}, "it learns nothing here; python -m embodied.evaluate plays it"
)
NO_CHUNKS = never_with(
    "policy.chunks",
    {},
    "only evaluations join chunks: training scores the actions that the policy itself has drawn; leave it out",
)
TRAINING = (
    ONLY_ACTS,
    LABELLED,
    NO_CHUNKS,
    never_with(
        "pipeline.granularity",
        {"pipeline.schedule": "async"},
        "learners work on an earlier rollout meanwhile; leave it out",
    ),
    only_with("pipeline.async_level", {"pipeline.schedule": "async"}),
    never_with(
        {"algo.surplus": "carry"},
        {"pipeline.schedule": "async"},
        "all groups are exactly pipeline.async_level versions old; try algo.surplus=discard",
    ),
    never_with({"learner.graphs": "on"}, LANGUAGE, "conversations have any size; try learner.graphs=auto"),
    never_with(
        {"learner.graphs": "on"},
        {"pipeline.schedule": "periodic"},
        "groups of pipeline.schedule=periodic have any size; try learner.graphs=auto",
    ),
    never_with("learner.most_items", {"pipeline.schedule": "periodic"}, "learners keep no batch there; leave it out"),
    never_with(
        "learner.most_items",
        {"pipeline.granularity": bool},
        "learners get groups before the lengths of all groups are known; leave it out",
    ),
    only_with(
        "learner.most_items", EPISODES, "in rollouts of a fixed length all learners have equally much; leave it out"
    ),
    never_with("run.env_steps", EPISODES, "how long these are is not known before; set run.iterations"),
    never_with("env.stagger", EPISODES, "it cuts the first episodes short; try env.stagger=false"),
    never_with("env.retries", EPISODES, "all episodes of a group begin alike; try env.retries=0"),
    # Options of actions, and of conversations.
    only_with("algo.truncated algo.overlong algo.pools algo.prompts", LANGUAGE, NO_ANSWERS),
    never_with({"algo.logprob_level": "episode", "algo.weighting": "constant"}, ACTIONS, NO_ANSWERS),
    only_with(
        "learner.pack_tokens learner.share_prompts learner.sequence_degree",
        LANGUAGE,
        "only conversations pass through the network by their tokens; leave it out",
    ),
    never_with(
        {"learner.micro_batch_size": bool}, LANGUAGE, "it counts decisions, not conversations; set learner.pack_tokens"
    ),
    never_with(
        "algo.rollout_decisions algo.advantage_level",
        LANGUAGE,
        "a decision is a token, and algo.groups counts conversations; leave it out",
    ),
    never_with(
        "pipeline.stages pipeline.merge_rows",
        LANGUAGE,
        "each conversation continues when it is answered, and policy.max_running limits their number; leave it out",
    ),
    never_with(
        {"algo.whole_episodes": False},
        LANGUAGE,
        "a text env holds whole conversations; try algo.groups=64 prompts an iteration, or algo.name=grpo",
    ),
    never_with(
        {"policy.value_head": False},
        {"algo.name": "ppo", "roles.critic": False},
        "it needs predicted values; set policy.value_head=true",
    ),
    never_with({"policy.value_head": True}, {"algo.name": (*PRESETS,)}, "no values are learned; leave it out"),
    never_with({"policy.value_head": True}, {"roles.critic": True}, "the critic predicts values; leave it out"),
    only_with(
        "eval.interleave",
        {"run.eval_every": bool},
        "the only evaluation is the last; leave it out, or set run.eval_every=5",
    ),
    never_with(
        "algo.average", {"eval.interleave": True}, "evaluations beside a rollout play the weights that act in it"
    ),
    never_with(
        "learner.sequence_degree",
        {"algo.imitation": bool},
        "RL and imitation divide no passes in one gradient step; leave it out",
    ),
    # Roles.
    only_with("roles.reference", {"algo.kl_coef": bool}, "try algo.kl_coef=0.01, or leave it out"),
    only_with("roles.critic", {"algo.name": "ppo"}, "no other algorithm learns values; try algo.name=ppo"),
    only_with(
        "roles.critic roles.verifier roles.reward_model roles.judge",
        LANGUAGE,
        "it reads conversations; leave it out, or write a program of your own (docs/workflows.md)",
    ),
    never_with(
        {"roles.judge": "start"},
        {"run.start_from": None},
        "it is the policy that the run starts from; set run.start_from, or name a folder",
    ),
    never_with(
        {"algo.kl_in": "reward"},
        {"roles.critic": True, "algo.kl_coef": bool, "roles.reference": False},
        "the critic's rewards need the divergence before; set roles.reference=true",
    ),
)
IMITATION = (
    ONLY_ACTS,
    NO_CHUNKS,
    never_with({"pipeline.schedule": ("periodic", "async")}, {}, "nothing is collected in the meantime; leave it out"),
    never_with("pipeline.async_level pipeline.granularity", {}, "nothing is collected in the meantime; leave it out"),
    never_with("learner.graphs", {}, "imitation captures no steps; leave it out"),
    only_with(
        "learner.sequence_degree",
        LANGUAGE,
        "only conversations pass through the network by their tokens; leave it out",
    ),
)


# Loading


@dataclass(frozen=True)
class Loaded:
    config: RunConfig
    sources: dict[str, str]  # dotted key -> source; other keys have their default
    flags: frozenset[str]
    arguments: dict[str, tuple[str, ...]]  # the command's own arguments
    recipe: str | None = None  # name or file
    left_out: tuple[str, ...] = ()  # lines on dropped settings for another variant, task or engine

    @property
    def name(self) -> str:
        return self.config.run.name or "run"

    @property
    def checkpoints(self) -> tuple[str, ...]:
        if "checkpoint" not in self.arguments:
            raise ConfigError(WHICH_POLICY)
        return self.arguments["checkpoint"]

    @property
    def asked(self) -> list[str]:
        """The keys of the command line."""
        return [key for key, where in self.sources.items() if where == COMMAND_LINE]

    @property
    def dry_run(self) -> bool:
        return "--dry-run" in self.flags

    @property
    def yaml(self) -> str:
        """The resolved recipe with every key. It loads to the same configuration from any folder, as a new run."""
        return config_yaml(self.config.model_copy(update={"resume": None}), {})


def load(argv: list[str], entry: str = "train") -> Loaded | None:
    """The configuration of an argument list; None if --help or --cfg was answered."""
    command = COMMANDS[entry]
    flags, values, problems = parse(argv, "checkpoint" if "checkpoint" in command.arguments else "resume")
    if "--help" in flags:
        from embodied.config.answers import help_text

        print(help_text(command, root(RunConfig), [word for word in argv if re.fullmatch(r"[\w.]+", word)]), flush=True)
        return None
    if "checkpoint" in command.arguments:
        name_server(values)
    if "checkpoint" in command.arguments and has_options(values):
        command = replace(command, unused=tuple(name for name in command.unused if name != "policy"))
    loaded = _load(values, problems, frozenset(flags), command)
    if "--cfg" in loaded.flags:
        print(config_yaml(loaded.config, loaded.sources, "default"), end="")
        return None
    return loaded


def load_recipe(*words: str | Mapping[str, Any]) -> RunConfig:
    """The resolved, frozen configuration: load_recipe("maniskill_ppo", "env.num_envs=32", {"algo.lr": 1e-3})."""
    loaded = load(from_python(words))
    assert loaded is not None, "it was asked for no help"
    return loaded.config


def _load(values: dict[str, Any], problems: list[str], flags: frozenset[str], command: Command) -> Loaded:
    schema = root(RunConfig)
    tree = Tree(problems=problems, evaluates=command.name == "evaluate", unused=command.unused)
    arguments = {key: texts(key, values.pop(key), problems) for key in command.arguments if key in values}
    recipe = base_recipe(values, arguments, command, schema, problems)
    sources = recipe_sources(recipe, schema, problems) if recipe else without_recipe(command, values, arguments)
    incomplete = bool(problems)  # then missing keys are not reported
    if (mine := own_classes(arguments.get("checkpoint"))) and any(key.startswith("policy.") for key in values):
        values.setdefault("policy.name", mine[0])
    sources.append(Source(COMMAND_LINE, Path.cwd(), flatten(schema, values, COMMAND_LINE, problems)))
    for source in sources:
        if tree.evaluates and source.name == COMMAND_LINE:
            drop_training_only(tree, schema, source)
        merge_source(tree, schema, with_own_task(source, tree))
    problems += [
        f"{key} has no effect in {command.name}; leave it out{effective_alternative(key, command)}"
        for key, where in tree.sources.items()
        if where == COMMAND_LINE and command.ignores(key)
    ]
    if recipe and tree.values.get("run") and tree.values["run"].get("name") is None:
        tree.put(("run", "name"), usual_name(recipe, command), "the recipe's name")
    try:
        config = RunConfig.model_validate(tree.values, context={"unused": command.unused})
    except ValidationError as err:
        from embodied.config.answers import explain

        problems += explain(err.errors(), schema, tree, incomplete, command)
    if tree.sources.get("eval.episodes") == COMMAND_LINE and (tree.values.get("eval") or {}).get("sets"):
        problems.append(
            f"eval.episodes={tree.values['eval']['episodes']} has no effect with eval.sets: all of their questions are "
            "asked; leave it out, limit a set's questions, or set eval.sets={} for the env's held-out prompts"
        )
    if problems:
        from embodied.config.answers import config_error

        raise config_error(tree.doubts + problems)
    return Loaded(config, tree.sources, flags, arguments, recipe, tuple(tree.left_out))


def effective_alternative(key: str, command: Command) -> str:
    """What does have the effect of a key that has none: the command of its section, or the checkpoint."""
    section = key.partition(".")[0]
    if section == "policy" and "checkpoint" in command.arguments:
        return ": checkpoint=FOLDER names the policy"
    return f", or run python -m embodied.{section}" if section in COMMANDS else ""


def commands_of_recipe(recipe: str) -> list[str]:
    """The commands of a recipe, sft first: decided by the nearest file, among the recipe and its bases, that sets keys
    of `sft` or `algo`."""
    problems: list[str] = []
    for source in reversed(recipe_sources(recipe, root(RunConfig), problems)):
        sections = {key[0] for key, _ in source.values}
        if commands := [name for name, section in (("sft", "sft"), ("train", "algo")) if section in sections]:
            return commands
    return ["train"]
