"""What every command does around its story: plan, cluster, signals, errors as a few lines.

Nothing here imports torch or a simulator, so that the first screen and mistakes come at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError

from embodied.config.command_line import parse
from embodied.config.read import Tree, recipe_of_task, root
from embodied.config.recipe import Loaded, RunConfig, load
from embodied.core.errors import ConfigError, EmbodiedError, MissingAsset, stop_at_once
from embodied.core.files import show
from embodied.core.options import DATASETS, Strict, broken_rules
from embodied.envs import env_class, import_class
from embodied.envs.capabilities import choose_protocol
from embodied.envs.config import CommonEnvConfig, played_task
from embodied.envs.own_modules import own_modules, reward_class
from embodied.placement import PlacedRole, PlacementError, PlacementPlan, Topology, make_plan, named_nodes, roles_of
from embodied.placement.grammar import EMBODIED, is_loop
from embodied.placement.placement_plan import ENVS_PER_SIM
from embodied.policies import check_package, policy_class, slow_imports
from embodied.records.loggers import check_log
from embodied.run import devices, memory_check
from embodied.run.devices import (
    check_devices,
    check_memory,
    check_simulator,
    draws_on_gpus,
    host_plans,
    machines,
    networks_on,
)
from embodied.run.ending import Interrupted
from embodied.runtime import Cluster, choose_backend, describe_backend

if TYPE_CHECKING:
    from embodied.system import drawing
    from embodied.workflows.rl_loop import EmbodiedLoop

OwnOptions = TypeVar("OwnOptions", bound=Strict)
WIDTH = 118
LONGER = 4  # factor for the advised length of a run without success

NO_SPACE = "; free some space or choose another run.dir"
UNSAVED = "; the training after the last checkpoint is lost"


def run(body: Callable[[list[str]], Any], argv: list[str] | None = None, usage: str | None = "", lost: str = "") -> int:
    """Run a command with its arguments, and return its exit code, an int if its body returns one; user errors become a
    few lines and exit code 1 or 2. `usage` answers --help, unless the recipe's keys do; `lost` names the cost of
    stopping at once."""
    arguments = sys.argv[1:] if argv is None else argv
    if signal.getsignal(signal.SIGINT) is stop_at_once:  # from now on Ctrl-C must close the run
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if usage and {"-h", "--help"} & {*arguments}:
            say(usage.strip())
            return 0
        result = body(arguments)
        return result if isinstance(result, int) else 0
    except EmbodiedError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt as err:
        print(f"stopped at once{lost}", file=sys.stderr)
        return err.exit_code if isinstance(err, Interrupted) else 130
    except BrokenPipeError:  # the reader of the output, `head` for example, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError as err:
        print(f"error: not enough memory: {err}; try a smaller env.num_envs", file=sys.stderr)
        return 1
    except OSError as err:
        where = f" ({err.filename})" if err.filename else ""
        full = err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        print(f"error: {err.strerror or err}{where}{NO_SPACE * full}", file=sys.stderr)
        return 1


def say(line: str) -> None:
    show(f"{line}\n", sys.stdout)


def split_keys(argv: list[str], keys: tuple[str, ...]) -> tuple[dict[str, Any], list[str], list[str]]:
    """A command's own keys with their values, their mistakes, and the recipe's arguments."""
    of_command = [arg for arg in argv if arg.partition("=")[0] in keys]
    _, values, problems = parse(of_command)
    return values, problems, [arg for arg in argv if arg not in of_command]


def own_options(model: type[OwnOptions], argv: list[str]) -> tuple[OwnOptions, list[str]]:
    """A command's own options, whose mistakes are all refused at once, and the recipe's arguments."""
    values, problems, rest = split_keys(argv, tuple(model.model_fields))
    try:
        options = model.model_validate(values)
    except ValidationError as err:
        from embodied.config.answers import explain

        problems += explain(err.errors(), root(model), Tree(values))
    if problems:
        raise ConfigError("\n".join(problems))
    return options, rest


# From a recipe to a plan for these machines


def planned(
    config: RunConfig, learn: bool = True, dry: bool = False, roles: Iterable[Any] = EMBODIED
) -> tuple[RunConfig, PlacementPlan]:
    """The config with every "auto" of the env decided, and the plan. Refuses recipes that cannot run on this machine; a
    `dry` run may be planned for other machines. `roles` are the program's."""
    roles = roles_of(roles)
    topology = machines(config)
    check_where(config, dry)
    kind = env_class(config.env)
    config, physics = devices.with_gpu_physics(config, topology, dry, say) if learn else (config, "")
    config = with_env(config, kind, topology, learn, dry)
    if config.policy.published:
        from embodied.policies.hub import with_folder

        config = config.model_copy(update={"policy": with_folder(config.policy, dry, bool(config.cluster.machines))})
    check_evaluation(config, kind)
    memory_check.check_speech(config, kind, learn)
    check_policy(config, kind)
    if learn:
        check_training(config, kind)
    config = chosen_cluster(config, len(topology.nodes) > 1)
    try:
        config, plan = with_placement(config, topology, learn, roles)
        config, plan = with_renderer(config, plan, topology, learn, roles, dry)
        plan = replace(plan, reason="; ".join(filter(None, [plan.reason, physics])))
    except PlacementError as err:
        raise ConfigError(f"placement: {err}") from None
    check_devices(config, plan)
    check_engine(config, plan, topology)
    if not is_loop(roles):
        return config, plan  # the memory of the user's own workers is unknown
    plan = plan if learn else plan.restricted_to("sim", "policy")
    check_room(config, plan, topology, learn)
    if learn:
        check_learners(config, plan, topology, roles)
        config, plan = memory_check.with_saved_memory(config, plan, topology)
    lines = check_memory(config, plan, topology, learn, lambda other: with_placement(other, topology, learn, roles))
    return config, replace(plan, memory=lines)


def check_where(config: RunConfig, dry: bool) -> None:
    """Refuse to run on machines that are only named for planning, and on systems without Linux's shared memory."""
    if not (dry or sys.platform.startswith("linux")):
        raise ConfigError(f"runs need Linux, and this is {sys.platform}; --dry-run and embodied.plan work here")
    if (named := config.cluster.machines) and not dry:
        raise ConfigError(
            f"cluster.machines={named} is for planning: add --dry-run, or leave it out; "
            "`python -m embodied.plan` with the same words compares placements there"
        )


def with_env(config: RunConfig, kind: Any, topology: Topology, learn: bool, dry: bool) -> RunConfig:
    """The config with the env's open options decided. Refuses envs that lack something on this machine."""
    if not kind.speaks:
        memory_check.refuse(broken_rules(memory_check.ACTING, config))
    check_simulator(config, topology)
    config = devices.for_all_gpus(config, topology) if learn else config
    env = kind.proven(config.env, proofs(config))
    try:
        kind.check(env)
    except MissingAsset:
        if not config.cluster.machines:  # other machines may have the files
            raise
    if learn and not dry:
        kind.seek_proof(config.env, proofs(config), say)
        env = kind.proven(config.env, proofs(config))
    if ":" in config.env.reward and not config.env.elsewhere:
        reward_class(config.env)
    return config.model_copy(update={"env": kind.resolve(env)})


def check_evaluation(config: RunConfig, kind: Any) -> None:
    """Refuse unknown protocols and published models, sets that cannot be read, and datasets that this machine cannot
    write."""
    if config.eval.sets and kind.speaks:
        from embodied.workflows.evaluator import evaluated

        config = evaluated(config)
        kind = env_class(config.env)
        memory_check.check_pictures(config, kind)
    choose_protocol(kind, config.env, config.eval.protocol)
    if config.eval.dataset:
        DATASETS.check("eval.dataset=true")
    if config.eval.reference:
        from embodied.run.published_models import reference_of

        reference_of(config.eval.reference, config.env.task)


def check_policy(config: RunConfig, kind: Any) -> None:
    """Refuse policies without the inputs that they need, and engines that cannot be divided over GPUs."""
    policy, env = config.policy, config.env
    if kind.speaks:
        memory_check.check_pictures(config, kind)
    if type(env).observed_images is not CommonEnvConfig.observed_images:  # else only the built env knows its images
        policy.check_images(env.observed_images)
    if policy.worker_gpus > 1:
        policy_class(policy.name).check_division(policy)


def check_training(config: RunConfig, kind: Any) -> None:
    """Refuse what would end a training run in its first iteration, in a worker."""
    if len(kind.tasks(config.env)) > 1 and not kind.mixes_tasks:
        raise ConfigError(f"env.task={list(config.env.task)}: {config.env.name} trains one task at a time; name one")
    if config.algo.prompts == "epochs":
        kind.count_training_questions(config.env)
    check_log(config.run.log)
    memory_check.check_scorers(config)
    if ":" in config.policy.name:
        check_package(config.policy.name)
    if not getattr(config.policy, "pretrained", None):
        config.policy.check_sizes(None)


def check_room(config: RunConfig, plan: PlacementPlan, topology: Topology, learn: bool) -> None:
    """Refuse a learner that cannot hold all weights, simulators that need too much memory, and too many images."""
    if learn and config.learner.shard and plan.count("learner") == 1:  # a single rank holds all weights
        check_memory(config.with_values("learner", shard=False), plan, topology, learn)
    if not memory_check.is_large(config):
        memory = sum(node.memory_bytes for node in topology.nodes)
        memory_check.check_simulators(config, plan.count("sim"), memory, learn)
        if learn:
            memory_check.check_images(config, memory)


def check_engine(config: RunConfig, plan: PlacementPlan, machines: Topology) -> None:
    """Raise ConfigError if vLLM cannot run on the cores on which the plan has policies."""
    on_cores = any("policy" in host.roles and not host.device.startswith("gpu:") for host in plan.hosts)
    if not (on_cores and config.policy.speaks and config.policy.engine == "vllm"):
        return
    if machines.gpus:
        raise ConfigError(
            "policy.engine=vllm runs on GPUs on a machine that has some, but policies are on cores here; try "
            "policy.engine=transformers, or place policies on GPUs"
        )
    policy_class(config.policy.name).check_engine(config.policy)


def check_learners(config: RunConfig, plan: PlacementPlan, machines: Topology, roles: tuple[PlacedRole, ...]) -> None:
    """Raise ConfigError if the learners' devices do not allow the schedule or the granularity."""
    updating = [role.name for role in roles if role.phase == "update"]
    if not plan.has_own_devices(*updating) and not gives_way(config, plan, updating):
        placement = "this map" if plan.mode == "explicit" else f"placement={plan.mode}"
        turns = f"but with {placement} they take turns with other roles on their devices"
        if schedule := overlap_key(config):
            works = "placement=auto, or pipeline.schedule=sync"
            try:
                with_placement(config.model_copy(update={"placement": "auto"}), machines, True, roles)
            except PlacementError:
                works = "pipeline.schedule=sync"
            raise ConfigError(f"{schedule}: learners learn while sims and policies collect, {turns}; try {works}")
        if pieces := config.pipeline.granularity:
            raise ConfigError(
                f"pipeline.granularity={pieces}: learners put a rollout together during it, {turns}; leave it "
                """out, or give them devices of their own: placement='{"sim,policy": "cpu:0", learner: "cpu:1"}'"""
            )
    try:
        ranks = plan.count("learner"), config.cluster.backend
        config.learner.check_ranks(*ranks, with_two_learners(machines))
        if config.learner.sequence_degree != 1:
            config.learner.check_degree(*ranks, policy_class(config.policy.name).attention_heads(config.policy))
    except ValueError as err:
        raise ConfigError(str(err)) from None


def with_two_learners(machines: Topology) -> str:
    """A placement with two learners on the first of these machines; or, if that has too few devices, "a machine with
    more devices"."""
    node = machines.nodes[0]
    cores, gpus = node.core_numbers, [gpu.index for gpu in node.gpus]
    if len(gpus) < 2 and len(cores) < 2:
        return "a machine with more devices"
    learners = f"gpu:{gpus[0]},gpu:{gpus[1]}" if len(gpus) > 1 else f"cpu:{cores[0]},cpu:{cores[1]}"
    return f"""placement='{{"sim,policy": "cpu:{cores[0]}", learner: "{learners}"}}'"""


def gives_way(config: RunConfig, plan: PlacementPlan, updating: list[str]) -> bool:
    """True if only policy workers in separate processes share the learners' devices, and other policy workers can act
    meanwhile."""
    learning = {device for host in plan.hosts if {*updating} & {*host.roles} for device in host.device_names}
    acting = [host for host in plan.hosts if "policy" in host.roles]
    sharing = [host for host in plan.hosts if not {*updating} >= {*host.roles} and learning & {*host.device_names}]
    alone = all(host.roles == ("policy",) for host in sharing)
    return config.pipeline.schedule == "async" and alone and len(sharing) < len(acting)


def overlap_key(config: RunConfig) -> str:
    """The option that makes learners update during the rollout; empty if they take turns with sims and policies."""
    schedule = config.pipeline.schedule
    return f"pipeline.schedule={schedule}" if schedule in ("periodic", "async") else ""


def proofs(config: RunConfig) -> Path:
    """The folder with measured facts about envs on this machine."""
    return config.run.dir / "profiles"


def with_placement(
    config: RunConfig, machines: Topology, learn: bool, roles: tuple[PlacedRole, ...] = EMBODIED
) -> tuple[RunConfig, PlacementPlan]:
    """The config with the schedule decided, and the plan. A training run with placement=auto uses the newest profile of
    these machines, if there is one. Without a profile pipeline.schedule=auto is sync."""
    uncounted = ""
    if config.placement == "auto" and learn and any(proofs(config).glob("*.json")):
        from embodied.profiling.stored_profiles import plan_from_profile, profile_for

        path, uncounted = profile_for(config, machines, roles)
        if path:
            return plan_from_profile(config, machines, path, roles)
    if config.pipeline.schedule == "auto":
        config = config.with_values("pipeline", schedule="sync")
    kind, env = env_class(config.env), config.env
    plan = make_plan(
        config.placement,
        machines,
        env.num_envs,
        config.pipeline.stages,
        networks_on(config, machines),
        gpu_sims=env.on_gpu,
        rows=ENVS_PER_SIM if kind.plays_together(env) else 1,
        most_sims=memory_check.most_sims(config, machines, learn),
        draws=draws_on_gpus(env),
        roles=roles,
        more=not learn,  # a map may place roles that only learning needs
        overlap=overlap_key(config) if learn else "",
        shared=devices.divides_requests(config),
        small_steps=learn and devices.has_small_steps(config),
        policy_gpus=config.policy.worker_gpus,
    )
    return config, replace(plan, reason="; ".join(filter(None, [plan.reason, uncounted])))


def with_renderer(
    config: RunConfig, plan: PlacementPlan, topology: Topology, learn: bool, roles: tuple[PlacedRole, ...], dry: bool
) -> tuple[RunConfig, PlacementPlan]:
    """The config and the plan; with images drawn on cores if GPUs of this machine do not draw while they compute. Only
    a plan that draws on GPUs asks, and a dry run only for a remembered result."""
    result = drawing_result(config, plan, dry)
    if result is None or result.on_gpus or not result.software_s:
        return config, plan
    if result.problem and not isinstance(config.placement, str):
        raise ConfigError(f"drawing: {result.describe()}; {result.ways_out(type(config.env))}")
    config = config.with_values("env", renderer="cores")
    config, plan = with_placement(config, topology, learn, roles)
    reason = (
        f"drawing on cores, since {result.describe()}{f'; {result.ways_out(type(config.env))}' * bool(result.problem)}"
    )
    return config, replace(plan, reason="; ".join(filter(None, [plan.reason, reason])))


def drawing_result(config: RunConfig, plan: PlacementPlan, dry: bool) -> drawing.Result | None:
    """What is known of drawing on the plan's GPUs; None if nothing is, or if nobody asks."""
    seats, elsewhere = devices.seats_of(plan), config.cluster.joined or config.cluster.machines
    if not seats or elsewhere or getattr(config.env, "renderer", "gpu") != "auto":
        return None
    from embodied.system import drawing

    return drawing.recorded(config.env, seats) if dry else drawing.ask(config.env, seats, say)


def chosen_cluster(config: RunConfig, several: bool) -> RunConfig:
    """The config with the backend decided."""
    several = several or bool(named_nodes(config.placement))
    backend = choose_backend(config.cluster.backend, config.cluster.joined, several)
    if several and backend != "ray":
        raise ConfigError(
            f"cluster.backend={backend} uses one machine, but there are several; try cluster.backend=auto"
        )
    return config.with_values("cluster", backend=backend)


# The first lines of a command


def describe(config: RunConfig, plan: PlacementPlan, weights: Path | str | None = None) -> str:
    """The first lines of a command: task, policy, placement, memory. `weights`: the folder of the evaluated weights, if
    the recipe does not name it."""
    from embodied.workflows.evaluator import evaluated, unasked

    env, physics = config.env, config.env.physics
    kind = env_class(env)
    evaluates = config
    if config.eval.sets:
        from embodied.envs.text.math import notes_on_sets

        evaluates, remarks = evaluated(config), notes_on_sets(config.eval.sets, env)
    else:
        remarks = [] if len(kind.tasks(env)) > 1 else [*kind.remarks(env, proofs(config)), *other_recipes(config)]
    protocol = choose_protocol(env_class(evaluates.env), evaluates.env, config.eval.protocol)
    if config.cluster.machines:
        from embodied.policies.hub import missing_folders
        from embodied.run.rehearsal import files_missing_here

        missing = files_missing_here(config)
        remarks += [f"missing on this machine: {missing}"] if missing else []
        remarks += missing_folders(config.policy)
    remarks += [*unasked(config), *memory_check.remarks(config, plan.count("learner") > 0)]
    lines = [
        f"task        {played_task(env.name, env.task)}{f', physics {physics}' if physics else ''}",
        *(line for note in remarks for line in wrap(f"note        {note}", WIDTH, subsequent_indent=" " * 12)),
        *wrap(f"evaluation  {protocol.name}: {protocol.rules}", WIDTH, subsequent_indent=" " * 12),
        f"policy      {config.policy.name}{describe_weights(config, weights)}",
        *placement_lines(plan),
        *drawing_lines(config, plan),
        *(schedule_lines(config) if plan.count("learner") else []),
        *(whole_networks(config, plan) if plan.count("learner") else []),
        *[f"{'' if i else 'memory':<12}{line}" for i, line in enumerate(plan.memory)],
        f"processes   {describe_backend(config.cluster.backend)}",
    ]
    return "\n".join(lines)


def placement_lines(plan: PlacementPlan) -> list[str]:
    return [f"{'' if i else 'placement':<12}{line}" for i, line in enumerate(plan.describe())]


def drawing_lines(config: RunConfig, plan: PlacementPlan) -> list[str]:
    """What a probe found about drawing on the plan's GPUs."""
    result = drawing_result(config, plan, dry=True)
    return wrap(f"drawing     {result.describe()}", WIDTH, subsequent_indent=" " * 12) if result else []


def notes(loaded: Loaded) -> list[str]:
    """Lines that name the recipe's settings dropped for the command line's variants, task or engine."""
    return [line for note in loaded.left_out for line in wrap(f"note        {note}", WIDTH, subsequent_indent=" " * 12)]


def other_recipes(config: RunConfig) -> list[str]:
    """The recipe with this task's settings, if they differ and the policy is of the same kind."""
    name = recipe_of_task(env_class(config.env).tasks(config.env)[0])
    if name is None or config.run.name == name or config.sft.data:
        return []
    its = load([f"recipe={name}"]).config
    if (its.algo.name, its.policy.name) != (config.algo.name, config.policy.name):
        return []
    if its.algo == config.algo:  # the same settings under another name
        return []
    return [f"recipe={name} has settings that were found for this task"]


def schedule_lines(config: RunConfig) -> list[str]:
    """For schedules other than sync, lines that say when an update begins, with advice."""
    schedule, level, algo = config.pipeline.schedule, config.pipeline.async_level, config.algo
    if schedule == "periodic":
        how = "learners process groups during the rollout, and take one step after the last group"
        return [f"schedule    periodic: {how}"]
    if schedule != "async":
        return []
    older = f"{level} version{'s' if level > 1 else ''} older"
    lines = [f"schedule    async: batches are collected while learners update, with weights {older} than theirs"]
    if algo.epochs > 1 and not algo.decoupled and algo.clip == "two_sided":
        advice = (
            f"algo.epochs={algo.epochs} takes weights far from those that collect: algo.decoupled=true learned more in "
            "our measurements (docs/schedules.md)"
        )
        lines += wrap(advice, WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 12)
    return lines


def whole_networks(config: RunConfig, plan: PlacementPlan) -> list[str]:
    """Says which networks of roles learner.shard does not split."""
    hosts = [host.roles for host in plan.hosts]
    held = [name for name in memory_check.NETWORKS if getattr(config.roles, name)]
    held = [name for name in held if not config.shards_role(name, hosts)]
    if not (config.learner.shard and held):
        return []
    note = f"note        role {' and '.join(held)}: all weights on each device; learner.shard=true splits "
    splits = "them over several devices of their own (a map in placement)"
    note += splits if config.policy.speaks else "roles of language models only"
    return wrap(note, WIDTH, subsequent_indent=" " * 12)


def without_success(config: RunConfig) -> str:
    """A line of advice if no episode in the first third of a run succeeded; empty for language models, whose runs stop
    by themselves if all groups are skipped."""
    if config.policy.speaks:
        return ""
    env, run = config.env, config.run
    task = env_class(env).tasks(env)[0]
    recipe = recipe_of_task(task)
    steps = f"run.env_steps={LONGER * run.env_steps}" if run.env_steps else f"run.iterations={LONGER * run.iterations}"
    options = [
        f"the settings found for this task, recipe={recipe}" if recipe and run.name != recipe else "",
        f"a shaped reward, env.reward_mode={env.shaped}" if env.shaped else "",
        "the simulator's own reward, env.reward=own" if env.reward == "success" else "",
        f"a longer run, {steps}",
        "demonstrations to begin with (docs/demonstrations.md)" if run.start_from is None else "",
    ]
    return f"no success so far; suggestions: {'; '.join(filter(None, options))}"


def describe_weights(config: RunConfig, folder: Path | str | None) -> str:
    """Says where a large policy's weights come from."""
    if not config.policy.published:
        return ""
    folder = folder or config.run.start_from or config.policy.pretrained
    if memory_check.is_large(config) and not folder:
        return ", RANDOM WEIGHTS: a model of full size that nobody has trained; name one with policy.pretrained=FOLDER"
    return f", weights of {folder}" if folder else f", random weights ({config.policy.preset})"


def describe_saving(config: RunConfig) -> str:
    """Says when checkpoints are written, and how many stay on disk."""
    run = config.run
    by_time = f"at most {run.save_minutes:g} min of training apart" if run.save_minutes else ""
    by_count = f"every {run.save_every} iterations" if run.save_every else ""
    when = " and ".join(filter(None, [by_count, by_time])) or "before evaluations and at the end"
    stay = f"the newest {run.keep} stay, the best, and those evaluated by hand" if run.keep else "all stay"
    return f"checkpoints {when}; {stay}"


def describe_learner(config: RunConfig) -> str:
    """A line with the memory of a learner that holds the whole model of a published family."""
    if not config.policy.published:
        return ""
    from embodied.learners.memory_estimate import estimate

    shared = ", shared out among the learners" if config.learner.shard else " in each learner"
    estimated = memory_check.measured_memory(config, 1) or estimate(config, memory_check.decisions_of(config) or 1)
    return f"learner     {estimated}{shared}\n" if estimated else ""


def cluster(
    config: RunConfig,
    plan: PlacementPlan,
    logs: Path,
    on_start: Callable[[str, int], None] = lambda host, pid: None,
    program: type | None = None,
    reserves: bool = True,
) -> Cluster:
    """The processes of a plan; `program` is the workflow. `reserves`: its devices are reserved on a Ray cluster."""
    # Of a cluster, other nodes may reach servers that this machine does not.
    if config.policy.speaks and config.policy.engine == "http" and not config.cluster.joined:
        from embodied.policies.language.servers.remote_server import check_servers

        check_servers(config.policy)
    options, about = config.cluster, (logs, config.faults.timeout_s, config.cluster.joined)
    modules = modules_of(config, program)
    with_policy = [role.name for role in program.roles if role.holds_policy] if program else ["policy", "learner"]
    hosts = host_plans(plan, with_policy, slow_imports(config.policy))
    return Cluster(options.backend, hosts, *about, modules, options.start_s, on_start, reserves)


# Programs of the user's own


def program_of(argv: list[str]) -> tuple[type[EmbodiedLoop], list[str]]:
    """The workflow of program=my_module:MyLoop (`EmbodiedLoop` without that key), and the other arguments."""
    named = [arg.partition("=")[2] for arg in argv if arg.startswith("program=")]
    rest = [arg for arg in argv if not arg.startswith("program=")]
    return own_program(named[-1] if named else "embodied.workflows.rl_loop:EmbodiedLoop"), rest


def own_program(name: str) -> type[EmbodiedLoop]:
    """The workflow my_module:MyLoop. Raises ConfigError if it is no workflow, or its roles do not fit together."""
    from embodied.workflows import check_roles
    from embodied.workflows.rl_loop import EmbodiedLoop

    program = import_class(name, "program")
    if not (isinstance(program, type) and issubclass(program, EmbodiedLoop)):
        raise ConfigError(f"program={name} is not a workflow: derive it from embodied.EmbodiedLoop (docs/workflows.md)")
    check_roles(program.roles)
    names = {role.name for role in program.roles}
    if lacking := [role.name for role in EmbodiedLoop.roles if role.name not in names]:
        raise ConfigError(
            f"program={name} lacks {', '.join(lacking)}: EmbodiedLoop, from which it derives, calls their workers; "
            "declare these roles (docs/workflows.md)"
        )
    return program


def command_of(program: type) -> str:
    """The words after `python -m embodied.` that start this workflow or resume its runs."""
    named = f" program={program.__module__}:{program.__qualname__}" * is_own(program)
    return f"{program.command}{named}"


def is_own(program: type) -> bool:
    """True if a workflow is the user's."""
    return not program.__module__.startswith("embodied.")


def modules_of(config: RunConfig, program: type | None) -> list[str]:
    """The user's modules that a run imports; nodes of a Ray cluster may lack them."""
    modules = own_modules(config.env) + [config.policy.name.partition(":")[0]] * (":" in config.policy.name)
    return [*modules, program.__module__] if program and is_own(program) else modules
