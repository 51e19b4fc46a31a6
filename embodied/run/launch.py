"""What every command does around its story: plan, cluster, signals, errors as a few lines.

Nothing here imports torch or a simulator, so that the first screen and mistakes come at once.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from shlex import quote
from textwrap import wrap
from typing import Any

from embodied import _stop_at_once
from embodied.config.cli import parse
from embodied.config.merge import recipe_names
from embodied.config.recipe import RunConfig
from embodied.core.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    EmbodiedError,
    NothingToLearn,
    WorkerFailed,
)
from embodied.envs import env_class, import_class
from embodied.envs.own_modules import own_modules
from embodied.envs.protocols import choose_protocol
from embodied.placement import PlacementError, PlacementPlan, Role, Topology, make_plan, named_nodes, roles_of
from embodied.placement.grammar import EMBODIED
from embodied.placement.modes import ENVS_PER_SIM
from embodied.policies import check_package
from embodied.reporting.run_page import report_or_say_why
from embodied.run.devices import (
    check_devices,
    check_simulator,
    draws_on_gpus,
    environment,
    machines,
    networks_on,
)
from embodied.run.folder import RunFolder
from embodied.run.hub import with_folder
from embodied.run.memory_check import (
    check_memory,
    check_pictures,
    check_simulators,
    describe_memory,
    is_large,
    most_sims,
    random_weights,
)
from embodied.runtime import Cluster, HostPlan, choose_backend, describe_backend

WIDTH = 118

UNSAVED = "; what came after the last checkpoint is lost"


def run(body: Callable[[], int], lost: str = "") -> int:
    """Run a command's body; mistakes of the user's side become a few lines and an exit code. `lost`: what a second
    Ctrl-C costs."""
    if signal.getsignal(signal.SIGINT) is _stop_at_once:  # from now on there is something to close
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return body()
    except EmbodiedError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    except KeyboardInterrupt as err:
        print(f"stopped at once{lost}", file=sys.stderr)
        return getattr(err, "exit_code", 130)
    except BrokenPipeError:  # who reads what we print, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except MemoryError as err:
        print(f"error: not enough memory: {err}; try a smaller env.num_envs", file=sys.stderr)
        return 1
    except OSError as err:
        where = f" ({err.filename})" if err.filename else ""
        full = err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        advice = "free some space or choose another run.dir" if full else "choose another run.dir"
        print(f"error: {err.strerror or err}{where}; {advice}", file=sys.stderr)
        return 1


def answer(argv: list[str] | None, usage: str, body: Callable[[list[str]], int]) -> int:
    """Run a command that explains itself: --help prints `usage`."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(usage)
        return 0
    return run(lambda: body(arguments))


def split(argv: list[str], keys: tuple[str, ...]) -> tuple[dict[str, Any], list[str], list[str]]:
    """A command's own keys with their values, what is wrong with them, and the recipe's arguments."""
    mine = [arg for arg in argv if arg.partition("=")[0] in keys]
    arguments = parse(mine, recipe_names())
    return dict(arguments.values), list(arguments.problems), [arg for arg in argv if arg not in mine]


def planned(
    config: RunConfig, learn: bool = True, dry: bool = False, roles: Iterable[Any] = EMBODIED
) -> tuple[RunConfig, PlacementPlan]:
    """The config with everything "auto" in the env decided, and the plan. Refuses what cannot run here; `dry`: nothing
    will, so it may be planned for other machines. `roles`: those that the program declares."""
    roles = roles_of(roles)
    if config.cluster.machines and not dry:
        raise ConfigError(f"cluster.machines={config.cluster.machines} is for planning: add --dry-run, or leave it out")
    kind = env_class(config.env)
    if learn and len(kind.tasks(config.env)) > 1 and not kind.mixes_tasks:
        raise ConfigError(f"env.task={list(config.env.task)}: {config.env.name} trains one task at a time; name one")
    there = machines(config)
    check_simulator(config, there)
    env = kind.proven(config.env, proofs(config))
    kind.check(env)
    if ":" in config.env.reward:
        import_class(config.env.reward, "env.reward")
    config = config.model_copy(update={"env": kind.resolve(env)})
    config = config.model_copy(update={"policy": with_folder(config.policy)})
    if config.eval.dataset:
        from embodied.datasets.lerobot_layout import check_pyarrow

        check_pyarrow()
    choose_protocol(kind, config.env, config.eval.protocol)  # refuses a name the env does not have
    if learn and ":" in config.policy.name:
        check_package(config.policy.name)
    config = chosen_cluster(config, len(there.nodes) > 1)
    try:
        config, plan = placed(config, there, learn, roles)
    except PlacementError as err:
        raise ConfigError(f"placement: {err}") from None
    check_devices(config, plan)
    plan = plan if learn else plan.only("sim", "policy")
    if learn:
        check_learners(config, plan)
    if not is_large(config):
        memory = sum(node.memory_bytes for node in there.nodes)
        check_simulators(config, plan.count("sim"), memory)
        if learn:
            check_pictures(config, memory)
    found = check_memory(config, plan, there, learn, lambda changed, there: placed(changed, there, learn, roles)[1])
    return config, replace(plan, memory=tuple(describe_memory(found)))


def check_learners(config: RunConfig, plan: PlacementPlan) -> None:
    """Raise ConfigError where they cannot learn as the recipe says."""
    if config.pipeline.granularity and not plan.apart("learner"):
        placement = "this map" if plan.mode == "explicit" else f"placement={plan.mode}"
        raise ConfigError(
            f"pipeline.granularity={config.pipeline.granularity}: learners put a rollout together while it goes on, "
            f"but with {placement} they take turns with others on their devices; leave it out, or give them devices of "
            "their own: "
            """placement='{"sim,policy": "cpu:0", learner: "cpu:1"}'"""
        )
    try:
        config.learner.check_ranks(plan.count("learner"), config.cluster.backend)
    except ValueError as err:
        raise ConfigError(str(err)) from None


def proofs(config: RunConfig) -> Path:
    """Where what was found out about envs on this machine is kept."""
    return config.run.dir / "profiles"


def rehearse(config: RunConfig) -> None:
    """For a dry run: refuse what only a built env would refuse."""
    if config.cluster.machines and getattr(config.env, "backend", "") == "cuda":
        return  # of machines that are not here
    env_class(config.env).rehearse(config.env)


def placed(
    config: RunConfig, machines: Topology, learn: bool, roles: tuple[Role, ...] = EMBODIED
) -> tuple[RunConfig, PlacementPlan]:
    """The plan; placement=auto of a training run asks the profile of such machines, if there is one."""
    uncounted = ""
    if config.placement == "auto" and learn:
        from embodied.profiling.store import plan_from_profile, profile_for

        path, uncounted = profile_for(config, machines, roles)
        if path:
            return plan_from_profile(config, machines, path, roles)
    kind, env = env_class(config.env), config.env
    plan = make_plan(
        config.placement,
        machines,
        env.num_envs,
        config.pipeline.stages,
        networks_on(config, machines),
        gpu_sims=getattr(env, "backend", "") == "cuda",
        rows=ENVS_PER_SIM if kind.plays_together(env) else 1,
        most_sims=most_sims(config, machines),
        draws=draws_on_gpus(env),
        roles=roles,
        more=not learn,  # a map may place roles that only learning needs
    )
    return config, replace(plan, reason="; ".join(filter(None, [plan.reason, uncounted])))


def chosen_cluster(config: RunConfig, several: bool) -> RunConfig:
    """The config with the backend decided."""
    several = several or bool(named_nodes(config.placement))
    backend = choose_backend(config.cluster.backend, config.cluster.address, several)
    return config.model_copy(update={"cluster": config.cluster.model_copy(update={"backend": backend})})


def describe(config: RunConfig, plan: PlacementPlan, weights: Path | str | None = None) -> str:
    """The first screen: what will run, and where. `weights` is the folder of those played, where
    the recipe does not say it."""
    env, backend = config.env, getattr(config.env, "backend", "")
    first, *rest = plan.describe()
    tasks = env.task if isinstance(env.task, str) else ", ".join(env.task)
    protocol = choose_protocol(env_class(env), env, config.eval.protocol)
    kind = env_class(env)
    noted = [] if len(kind.tasks(env)) > 1 else kind.remarks(env, proofs(config))
    lines = [
        f"task        {env.name} {tasks}{f', physics {backend}' if backend else ''}",
        *(line for note in noted for line in wrap(f"note        {note}", WIDTH, subsequent_indent=" " * 12)),
        *wrap(f"evaluation  {protocol.name}: {protocol.rules}", WIDTH, subsequent_indent=" " * 12),
        f"policy      {config.policy.name}{describe_weights(config, weights)}",
        f"placement   {first}",
        *[f"            {line}" for line in rest],
        *[f"{'' if i else 'memory':<12}{line}" for i, line in enumerate(plan.memory)],
        f"processes   {describe_backend(config.cluster.backend)}",
    ]
    return "\n".join(lines)


def describe_weights(config: RunConfig, folder: Path | str | None) -> str:
    """Where a large policy's weights come from."""
    if not hasattr(config.policy, "pretrained"):
        return ""
    folder = folder or config.run.start_from or config.policy.pretrained
    if random_weights(config, folder):
        return ", RANDOM WEIGHTS: a model of full size that nobody has trained; name one with policy.pretrained=FOLDER"
    return f", weights of {folder}" if folder else f", random weights ({config.policy.preset})"


def describe_saving(config: RunConfig) -> str:
    """How much a crash can cost, and what stays on disk."""
    run = config.run
    by_time = f"at most {run.save_minutes:g} min of training apart" if run.save_minutes else ""
    by_count = f"every {run.save_every} iterations" if run.save_every else ""
    when = " and ".join(filter(None, [by_count, by_time])) or "before evaluations and at the end"
    stay = f"the newest {run.keep} stay, the best, and those evaluated by hand" if run.keep else "all stay"
    return f"checkpoints {when}; {stay}"


def describe_learner(config: RunConfig) -> str:
    """What the policy of a model family needs in a learner that holds all of it."""
    if not hasattr(config.policy, "pretrained"):
        return ""
    from embodied.learners.memory_estimate import estimate

    shared = ", shared out among the learners" if config.learner.shard else " in each learner"
    return f"learner     {estimate(config)}{shared}\n"


def cluster(
    config: RunConfig, plan: PlacementPlan, logs: Path, on_start: Callable[[str, int], None] = lambda host, pid: None
) -> Cluster:
    hosts = [
        HostPlan(
            *(host.name, host.roles, host.cores, host.threads, environment(host), host.node, host.held),
            host.gpu.memory_bytes if host.device and host.gpu else float("inf"),
        )
        for host in plan.hosts
    ]
    own = own_modules(config.env) + [config.policy.name.partition(":")[0]] * (":" in config.policy.name)
    options, timeout_s = config.cluster, config.faults.timeout_s
    return Cluster(options.backend, hosts, logs, timeout_s, options.address, own, options.start_s, on_start)


class Interrupted(KeyboardInterrupt):
    def __init__(self, signal: int) -> None:
        self.exit_code = 128 + signal


class Interruption:
    """SIGTERM, Ctrl-C and a closed terminal ask the run to finish its step, save and stop; a second Ctrl-C stops at
    once. `at_once`: so does the first, where nothing has to be finished."""

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> Interruption:
        ends = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup asks to outlive the terminal
            ends.append(signal.SIGHUP)
        self._before = {sig: signal.signal(sig, self._handle) for sig in ends}
        return self

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)

    def _handle(self, sig: int, _frame: object) -> None:
        if self.requested and sig == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.signal = sig
            if self.at_once:
                raise Interrupted(sig)
            with suppress(OSError):  # the terminal may be what has gone
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")


@contextmanager
def closing(folder: RunFolder, interruption: Interruption) -> Iterator[None]:
    """Write into run.json how the run ended, whatever happens; say how to go on after a failure that came late."""
    try:
        yield
    except KeyboardInterrupt:
        record_end(folder, "stopped", "second Ctrl-C")
        raise
    except NothingToLearn as err:
        record_end(folder, "stopped", str(err))
        raise
    except BaseException as err:
        record_end(folder, "failed", f"{type(err).__name__}: {err}")
        if isinstance(err, (WorkerFailed, DeadlineExceeded)):
            told = EmbodiedError("\n".join([str(err), *what_next(folder, err)]))
            told.exit_code = err.exit_code
            raise told from err
        raise
    else:
        record_end(folder, "stopped" if interruption.requested else "finished", "")


def what_next(folder: RunFolder, error: Exception) -> list[str]:
    """After a worker failed for good: lines for who has to mend it."""
    saved = any(folder.checkpoints.glob("v[0-9]*"))
    crashed = "its process" in str(error) or "hung" in str(error)
    goes_on = "continue from the last checkpoint" if saved else "nothing was saved yet; begin it again"
    command = folder.info().get("command", "train")
    resume = f"  {goes_on}: python -m embodied.{command} {quote(f'resume={folder.path}')}"
    doctor = "  if this repeats: python -m embodied.doctor"
    return [resume] * (saved or crashed) + [doctor] * crashed


def record_end(folder: RunFolder, state: str, cause: str) -> None:
    if not folder.path.is_dir():
        print(f"{folder.path} was removed while the run went on", file=sys.stderr)
        return
    try:
        folder.finish(state, cause)
        folder.note(f"{state}: {cause}" if cause else state)
    except OSError as err:  # a full disk must not hide the first cause
        print(f"run.json could not be written: {err}", file=sys.stderr)
    report_or_say_why(folder.path)


def run_to_resume(resume: str | Path, parent: Path, recipe: str) -> Path | None:
    """`auto` is the newest run of this recipe with a checkpoint (None: start afresh); else the folder that is named."""
    if resume != "auto":
        if not Path(resume).is_dir():
            raise CheckpointError(f"resume={resume}: no such run folder")
        return Path(resume)
    runs = [path for path in parent.glob(f"{escape(recipe)}-[0-9]*") if any((path / "checkpoints").glob("v[0-9]*"))]
    return max(runs, key=lambda path: (path / "run.json").stat().st_mtime, default=None)
