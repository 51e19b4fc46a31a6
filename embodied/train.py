"""Train a policy: python -m embodied.train recipe=maniskill_ppo [key=value ...]

`train` is a whole run; its steps are in `workflows/` and `reporting/`. It runs any `EmbodiedLoop`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from embodied import let_call
from embodied.config.command_line import SEVERAL, from_python
from embodied.config.recipe import Loaded, RunConfig, commands_of_recipe, load
from embodied.core.errors import CheckpointError, ConfigError, EmbodiedError, NothingToLearn, StepGivenUp, WorkerFailed
from embodied.core.files import read_arrays, reading
from embodied.core.options import pinned
from embodied.envs import env_class, interpreter_of
from embodied.placement import PlacementPlan
from embodied.records.progress import RECENT_EPISODES, Console
from embodied.run import launch
from embodied.run.ending import Interruption, closing, what_next
from embodied.run.launch import command_of, program_of, without_success
from embodied.run.run_folder import REQUEST, SIMS, STATE, RunFolder, SaveClock, name_of, newest, prune, read_counters
from embodied.runtime import Budget
from embodied.runtime.supervision import Supervisor
from embodied.workflows import UPDATE, WARNING, roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

if TYPE_CHECKING:
    from embodied.reporting.runs import Run
    from embodied.run.policy_source import FirstRun, PolicySource
    from embodied.workers import WorkerChanges

LOOK_S = 0.5  # interval at which a run looks for requests
BY_RL = ("algo.", "run.start_from", "resume")  # keys that ask for RL with a recipe that imitates


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, lost=launch.UNSAVED)


def start(argv: list[str]) -> int:
    if asks_for_several_runs(argv):
        from embodied.sweep import run_several

        return run_several(argv)[0]
    program, rest = program_of(argv)
    loaded = load(rest)
    return 0 if loaded is None else follow(check_trains(loaded, program), program)


def call(*words: str | Mapping[str, Any]) -> Run:
    """Train from Python, like the command, and return the run. User errors raise EmbodiedError.

    `embodied.train("pointmass_ppo", "env.num_envs=64", {"algo.lr": 1e-3})`
    """
    from embodied.reporting.runs import read_run

    program, rest = program_of(from_python(words))
    if asks_for_several_runs(rest):
        raise ConfigError("seeds=, at_once= and group= make several runs: embodied.sweep(...) returns them")
    loaded = load(rest)
    assert loaded is not None, "it was asked for no help"
    folders: list[Path] = []
    follow(check_trains(loaded, program), program, opened=folders.append)
    return read_run(folders[0])


def asks_for_several_runs(argv: list[str]) -> bool:
    return any(word.partition("=")[0] in SEVERAL for word in argv) and not {"-h", "--help"} & {*argv}


def check_trains(loaded: Loaded, program: type[EmbodiedLoop]) -> Loaded:
    """Refuse a recipe of another command (evaluation of published models, imitation), and name the right command."""
    by_rl = any(key.startswith(BY_RL) for key in loaded.asked)
    if loaded.recipe and program is EmbodiedLoop and not by_rl and commands_of_recipe(loaded.recipe) == ["sft"]:
        raise ConfigError(
            f"recipe={loaded.recipe} imitates demonstrations: python -m embodied.sft "
            f"{quote(f'recipe={loaded.recipe}')}; to train by RL in its env, give the recipe a section algo, or "
            "set its start here: run.start_from=RUN, or null for a new policy"
        )
    if loaded.recipe and "_published_" in loaded.recipe:
        from embodied.run.published_models import recipes_to_train

        if others := recipes_to_train(loaded.recipe):
            evaluate = f"python -m embodied.evaluate checkpoint=FOLDER {quote(f'recipe={loaded.recipe}')}"
            raise ConfigError(
                f"recipe={loaded.recipe} evaluates published models: {evaluate}; to train one by RL: "
                f"recipe={'|'.join(others)} policy.pretrained=FOLDER (docs/published.md)"
            )
    if loaded.config.algo.name == "dagger":
        env_class(loaded.config.env).check_expert(loaded.config.env, "scripted")
    if loaded.config.algo.imitation:
        from embodied.workflows.demonstrations import check_kept_data

        check_kept_data(loaded.config)
    return loaded


def follow(
    loaded: Loaded,
    program: type[EmbodiedLoop],
    clock: Callable[[], float] = time.perf_counter,
    opened: Callable[[Path], None] = lambda folder: None,
    before: tuple[str, ...] = (),
) -> int:
    """Open or continue a run folder, train, and record the end in the folder. Returns the command's exit code; `opened`
    is called with the folder. `before`: the recipes of the runs that wait for this run's policy."""
    loaded = replace(loaded, config=pinned(loaded.config))
    config, plan = launch.planned(loaded.config, dry=loaded.dry_run, roles=roles_of_run(program, loaded.config))
    run, checkpoint = to_resume(loaded, command_of(program))
    code, start = choose_start(loaded, config, run, before)
    if code:
        return code
    if start:
        from embodied.run.policy_source import imitating_as, starting_from

        config, loaded = starting_from(config, start), replace(loaded, config=starting_from(loaded.config, start))
        if program.command != "sft":
            config, loaded = imitating_as(start, config), replace(loaded, config=imitating_as(start, loaded.config))
    origin = origin_of(start, config, run, checkpoint) if start else None
    examples = config.sft if program.command == "sft" else config.algo.imitation
    kept: list[str] = []
    if program.command != "sft" and config.algo.imitation:
        speaks = env_class(config.env).speaks
        kept = [config.algo.imitation.describe("the env's own solutions" if speaks else "what its start imitates")]
    if loaded.dry_run:
        from embodied.run.rehearsal import rehearse

        rehearse(config, *([origin] if origin else []), examples=examples, imitators=plan.count("learner"))
        print("\n".join([launch.describe(config, plan, weights=config.resume), *launch.notes(loaded)]))
        print("\n".join([launch.describe_saving(config), *kept]))
        print(launch.describe_learner(config), end="")
        if program.command == "train":
            print(launch.memory_check.describe_seconds(config, plan, launch.machines(config)), end="")
        return 0
    if examples and not run:
        from embodied.run.rehearsal import check_before

        check_before(config, examples, plan.count("learner"))
    # From here on the folder exists and records how the run ends.
    command = command_of(program)
    with Interruption(stop_s=config.run.stop_s) as interruption:
        folder = open_folder(loaded, command, run, checkpoint)
        opened(folder.path)
        with closing(folder, interruption, write_report):
            dagger = config.algo.name == "dagger"
            advice = without_success(config)
            console = Console(folder.path, folder.log.note, command=command, advice=advice, expert_plays=dagger)
            folder.record(placement=asdict(plan), **interpreter_of(config.env))
            console.say("\n".join([launch.describe(config, plan, weights=checkpoint), *launch.notes(loaded)]))
            console.say(launch.describe_saving(config))
            for line in kept:
                console.say(line)
            for line in folder.log.begin(config.run.log, bool(config.cluster.joined)):
                console.say(line)
            console.say(f"results     {folder.path}")
            lives = Supervisor(
                Budget(config.faults.max_restarts, config.faults.window_s, config.faults.hang_s), ["run"]
            )
            updating = [role.name for role in roles_of_run(program, config) if role.phase == UPDATE]
            changes = WorkerRequests(config, plan, updating, folder)
            while True:
                try:
                    train(program, config, changes, origin, folder, checkpoint, console, interruption, clock)
                    break
                except StepGivenUp as err:
                    console.say("\n".join([f"stopped     {err}", *what_next(folder, err)]))
                    break
                except WorkerFailed as err:
                    if not err.lost_state or interruption.requested or lives.died("run", time.monotonic()) is not None:
                        raise
                    decided, remaining = without_node(err, loaded, program) if config.cluster.joined else (config, plan)
                    changes.config = config = config.model_copy(update={"learner": decided.learner})
                    checkpoint = newest_of(folder, err, lives, console, moves=remaining != plan)
                    if remaining != (changes.plan if config.cluster.joined else plan):
                        plan = changes.plan = remaining
                        folder.record(placement=asdict(plan))
                        console.say("\n".join(launch.placement_lines(plan)))
                    origin = origin_of(start, config, folder.path, checkpoint) if start else None
    return interruption.exit_code


def newest_of(folder: RunFolder, error: WorkerFailed, lives: Supervisor, console: Console, moves: bool) -> Path | None:
    """The checkpoint from which all workers restart after a learner's death; None: from the beginning. `moves`: they
    restart on other nodes."""
    checkpoint = newest(folder.path) if any(folder.checkpoints.glob("v[0-9]*")) else None
    saved, played = read_counters(checkpoint)["iteration"] if checkpoint else 0, folder.log.last_iteration()
    again = f"iterations {saved + 1} to {played} are" if played > saved + 1 else f"iteration {saved + 1} is"
    restarts = "is lost: all workers are started again on other nodes" if moves else "is started again with all workers"
    folder.count_restart()
    console.say(
        f"{error.worker} {restarts} (restart {lives.restarts('run')}, at most "
        f"{lives.budget.max_restarts} in {lives.budget.window_s:g} s), from "
        f"{checkpoint.name if checkpoint else 'the beginning'}: {error.cause}; {again} played again"
    )
    console.recent.clear()
    return checkpoint


def without_node(error: WorkerFailed, loaded: Loaded, program: type[EmbodiedLoop]) -> tuple[RunConfig, PlacementPlan]:
    """The config, decided again, and the plan for the cluster's remaining nodes. Raises the error again if there is no
    such plan."""
    try:
        return launch.planned(loaded.config, roles=roles_of_run(program, loaded.config))
    except EmbodiedError as problem:
        launch.say(f"without the lost node there is no plan: {problem}")
        raise error from None


class WorkerRequests:
    """A background task of a run: looks for a user's requests for more or fewer policy workers. Only a run that is
    asked imports `workers.py`."""

    def __init__(self, config: RunConfig, plan: PlacementPlan, updating: Collection[str], folder: RunFolder) -> None:
        """`updating`: the roles that work in updates."""
        self.config, self.plan, self.updating, self.folder = config, plan, updating, folder
        self.file, self.look_at = folder.path / REQUEST, 0.0
        self.changes: WorkerChanges | None = None
        self.file.unlink(missing_ok=True)  # to an earlier process of this run

    def begin(self, loop: EmbodiedLoop, say: Callable[[str], None]) -> None:
        """All workers of the plan work."""
        self.loop, self.say = loop, say
        if self.changes:
            self.changes.begin(loop)
        loop.rollouts.background.append(self)

    def is_due(self) -> bool:
        return time.monotonic() >= self.look_at

    def go_on(self) -> None:
        self.look_at = time.monotonic() + LOOK_S
        if self.changes is None and self.file.exists():
            from embodied.workers import WorkerChanges

            self.changes = WorkerChanges(self)
            self.changes.begin(self.loop)
        if self.changes:
            self.changes.go_on()


def to_resume(loaded: Loaded, command: str) -> tuple[Path | None, Path | None]:
    """The run to resume and its newest whole checkpoint, if any was saved."""
    resume = loaded.config.resume
    if isinstance(resume, Path) and not resume.is_dir():
        raise CheckpointError(f"resume={resume}: no such run folder")
    run = resume if isinstance(resume, Path) else None  # resume=auto has found no run
    if run:
        RunFolder.check_resumable(run, command)
    if run is None or not any(run.glob("checkpoints/v[0-9]*")):  # it ended before its first checkpoint
        return run, None
    return run, newest(run)


def choose_start(
    loaded: Loaded, config: RunConfig, run: Path | None, before: tuple[str, ...]
) -> tuple[int, Path | None]:
    """The folder of the start policy: `run.start_from`, or the start of the resumed run; None without one. A start that
    does not exist yet is trained first; its exit code is returned, too."""
    start = config.run.start_from
    if start is None:
        return 0, None
    from embodied.run.policy_source import first_run, start_of_resumed

    if run and (kept := start_of_resumed(run, start)):
        return 0, kept
    first = first_run(loaded, before)
    return make_start(first, config, before) if first else (0, start)


def make_start(first: FirstRun, config: RunConfig, before: tuple[str, ...]) -> tuple[int, Path | None]:
    """The run of the recipe in `run.start_from`, trained first if it does not exist; a dry run only prints the command.
    Returns the exit code, too."""
    from embodied.run.policy_source import check_same_policy

    launch.say(first.describe())
    if first.folder:
        return 0, first.folder
    check_same_policy(f"run.start_from={first.recipe}", first.loaded.config.policy, config.policy)
    folders: list[Path] = []
    loaded, program = first.loaded, EmbodiedLoop
    if first.command == "sft":
        from embodied.collect import demonstrated
        from embodied.workflows.demonstrations import check_data
        from embodied.workflows.imitation import ImitationLoop

        try:
            loaded = demonstrated(loaded)
        except ConfigError as err:
            raise ConfigError(f"{err}; or run.start_from=null: the policy then begins with random weights") from None
        check_data(loaded.config)
        program = ImitationLoop
    code = follow(loaded, program, opened=folders.append, before=(*before, first.recipe))
    if loaded.dry_run:
        launch.say("then")
        return code, None
    if code:
        again = f"python -m embodied.{first.command} {quote(f'resume={folders[0]}')}"
        launch.say(f"the start was stopped, so the run is not begun: {again}, then the same command again")
    else:
        launch.say(f"start       {folders[0]}, just made")
    return code, folders[0]


def origin_of(start: Path, config: RunConfig, run: Path | None, checkpoint: Path | None) -> PolicySource | None:
    """The policy to start from; None if the resumed run's checkpoint is enough."""
    from embodied.run.policy_source import find_start

    compared, judges = config.algo.kl_coef, config.roles.judge == "start"
    if checkpoint and not (compared or judges):
        return None
    if run and not start.exists():
        why = "nothing of the run was saved yet; put it back, or begin a new run without resume="
        if checkpoint and compared:
            why = f"algo.kl_coef={compared:g} compares the policy with it; put it back, or set algo.kl_coef=0"
        elif checkpoint:
            why = "roles.judge=start asks it about every answer; put it back"
        raise ConfigError(f"{run} started from {start}, which is gone, and {why}")
    return find_start(start, config.policy)


def open_folder(loaded: Loaded, command: str, run: Path | None, checkpoint: Path | None) -> RunFolder:
    """A new folder, or the resumed run's folder."""
    config = loaded.config
    if run is None:
        folder = RunFolder.create(config.run.dir, loaded.name, loaded.yaml, command)
        folder.record(recipe=loaded.recipe)  # a run from Python has none in its command
        return folder
    from embodied.run.policy_source import check_continues

    check_continues(run, checkpoint, config)
    return RunFolder.reopen(run, command, loaded.yaml)


def train(
    program: type[EmbodiedLoop],
    config: RunConfig,
    changes: WorkerRequests,
    origin: PolicySource | None,
    folder: RunFolder,
    checkpoint: Path | None,
    console: Console,
    interruption,
    clock: Callable[[], float] = time.perf_counter,
) -> None:
    """The whole training, with the plan of `changes`, which may change it. `origin`: the policy to start from;
    `checkpoint`: this run's checkpoint to continue from."""
    start = origin.folder if origin else None
    if checkpoint and config.run.start_from and not origin:
        start = checkpoint / "policy"  # a run with a start keeps the start's statistics of observations
    with launch.cluster(config, changes.plan, folder.logs, folder.record_process, program) as cluster:
        cluster.interrupt = partial(interruption.check, "the start", grace=False)  # nothing is lost yet
        loop = program(config, cluster, notify=partial(print_workflow_line, folder, console), start_folder=start)
        if checkpoint or origin:
            check_origins(loop, checkpoint, origin, folder)
        state = resume(loop, folder, checkpoint, console) if checkpoint else fresh(loop, folder)
        total = loop.collector.total_iterations()
        if state["iteration"] >= total:
            console.nothing_left(state["iteration"], total)
        cluster.interrupt = interruption.check
        changes.begin(loop, console.say)
        # Each iteration is followed by saving and evaluating, if they are due. The run stops between iterations.
        saves = SaveClock(config.run.save_every, config.run.save_minutes)
        if checkpoint:
            saves.note_save(state["version"], state["train_s"])
        with (
            loop.timeline(folder.new_trace(), config.run.trace) as timeline,
            saving_what_is_learned(loop, state, saves, folder, console),
        ):
            if checkpoint and owes_evaluation(config, folder, state, total):
                evaluate(loop, folder, console, interruption)
            while state["iteration"] < total and not interruption.requested and not loop.exhausted:
                iterate(loop, state, total, folder, console, clock)
                if changes.is_due():
                    changes.go_on()
                last = state["iteration"] == total or bool(loop.exhausted)
                evaluates = last or is_due(state["iteration"], config.run.eval_every)
                if saves.is_due(state["iteration"], state["train_s"]) or evaluates:  # an evaluation takes long
                    save(loop, state, saves, folder, console)
                if evaluates and not interruption.requested:
                    evaluate(loop, folder, console, interruption, beside=config.eval.interleave and not last)
                timeline.collect(state["iteration"])
            if interruption.requested and saves.version != state["version"]:
                save(loop, state, saves, folder, console)
            spent = timeline.end()
        exhausted = "" if loop.solved else loop.exhausted
    if loop.solved:
        console.say("solved      every episode of the last iterations succeeded, so there is nothing more to learn")
    console.end(state, interruption.requested or bool(exhausted), spent, 0 if config.eval.sets else loop.evaluator.most)
    if exhausted:
        raise NothingToLearn(exhausted)


# How a run begins


def check_origins(loop: EmbodiedLoop, checkpoint: Path | None, origin: PolicySource | None, folder: RunFolder) -> None:
    """Refuse policies that were made for another env; run.json records the start."""
    from embodied.run.policy_source import check_fits, policy_of_checkpoint

    if checkpoint:
        check_fits(policy_of_checkpoint(checkpoint), loop.config.env, loop.spec)
    if origin:
        check_fits(origin, loop.config.env, loop.spec)
        folder.record(started_from=origin.described())


def fresh(loop: EmbodiedLoop, folder: RunFolder) -> dict:
    folder.log.keep_rows(0)  # of an earlier start of this run without a checkpoint
    loop.publish(0)
    counters = ("iteration", "version", "env_steps", "abandoned_episodes", "dropped_batches")
    return {**dict.fromkeys(counters, 0), "train_s": 0.0}


def resume(loop: EmbodiedLoop, folder: RunFolder, checkpoint: Path, console: Console) -> dict:
    """Continue from a checkpoint: weights, optimizer, env rows, counters. Later metrics are dropped, since their
    iterations are repeated."""
    state = read_counters(checkpoint)
    missing = folder.log.keep_rows(state["iteration"])
    sims = read_arrays(checkpoint / SIMS, CheckpointError)
    with reading(checkpoint / STATE, CheckpointError):
        console.restore(state.pop(RECENT_EPISODES, []))
    try:
        with reading(checkpoint / SIMS, CheckpointError):
            abandoned = loop.restore(checkpoint, sims, state["version"])
    except WorkerFailed as err:
        raise CheckpointError(f"{checkpoint} cannot be restored: {err}") from err
    dropped = loop.take_dropped()
    state["abandoned_episodes"] += abandoned
    state["dropped_batches"] += dropped
    console.resumed(checkpoint, state, abandoned, dropped)
    if missing:
        console.say(f"warning: rows {missing} of {folder.log.metrics.name} are missing; curves leave them out")
    return state


def print_workflow_line(folder: RunFolder, console: Console, line: str) -> None:
    """Print a line of the workflow; unless it is a warning, run.json counts a restart."""
    if not line.startswith(WARNING):
        folder.count_restart()
    console.say(line)


# An iteration, then saving and evaluating


def iterate(loop: EmbodiedLoop, state: dict, total: int, folder: RunFolder, console: Console, clock) -> None:
    started = clock()
    finished, numbers = loop.iterate(state["iteration"], total)
    elapsed = clock() - started
    state["iteration"] += 1
    state["version"] = loop.version
    state["env_steps"] += int(numbers["env_steps"])
    state["abandoned_episodes"] += loop.rollouts.take_abandoned()
    state["train_s"] += elapsed
    folder.log.row(console.iteration(state, finished, numbers, elapsed, total))
    folder.log.samples(state["iteration"], loop.collector.samples)
    folder.log.answers(state["iteration"], loop.collector.ends)


def save(loop: EmbodiedLoop, state: dict, saves: SaveClock, folder: RunFolder, console: Console) -> None:
    """Write a checkpoint of the acting version, and delete old checkpoints."""
    started, version = time.perf_counter(), state["version"]
    console.last_checkpoint = loop.save(folder.checkpoints, {**state, RECENT_EPISODES: list(console.recent)})
    saves.note_save(version, state["train_s"], time.perf_counter() - started)
    try:
        if keep := loop.config.run.keep:
            prune(folder.path, version, keep)
    except OSError as err:
        console.say(f"old checkpoints could not be removed: {err}")


@contextmanager
def saving_what_is_learned(
    loop: EmbodiedLoop, state: dict, saves: SaveClock, folder: RunFolder, console: Console
) -> Iterator[None]:
    """If a sim or policy worker fails for good inside, or a rollout is given up, save the learners' state before the
    run ends."""
    try:
        yield
    except (WorkerFailed, StepGivenUp) as err:
        failed = f"{err.worker} failed" if isinstance(err, WorkerFailed) else "then"
        is_learner = isinstance(err, WorkerFailed) and not err.worker.startswith(("sim-", "policy-"))
        if not is_learner and (loop.updating or saves.version != state["version"]):
            save_what_is_learned(loop, state, failed, folder, console)
        raise


def save_what_is_learned(loop: EmbodiedLoop, state: dict, until: str, folder: RunFolder, console: Console) -> None:
    try:
        recent = {RECENT_EPISODES: list(console.recent)}
        checkpoint = loop.save_what_is_learned(folder.checkpoints, state | recent)
    except EmbodiedError as problem:
        console.say(f"{WARNING}the training since the last checkpoint is lost: {problem}")
    else:
        if checkpoint:
            console.say(f"saved       {checkpoint}, what was learned until {until}")


def evaluate(loop: EmbodiedLoop, folder: RunFolder, console: Console, interruption, beside: bool = False) -> None:
    """Evaluate the saved (or resumed) version now or `beside` the next rollout. An interrupted evaluation continues
    when the run is resumed."""
    from embodied.evaluate import begin_in_run, evaluate_in_run

    loop.act_with_newest()
    version = loop.version
    evaluation, checkpoint = folder.evaluation(version), folder.checkpoints / name_of(version)
    kept = begin_in_run(loop.evaluator, evaluation, checkpoint, console.show_activity)
    console.evaluating(version, kept.num_episodes, len(kept.finished), beside)

    def tell(results: dict) -> None:
        console.evaluated(version, results)
        folder.log.evaluated(version, results)

    def finish() -> None:
        with loop.acting_with_mean():
            stop = lambda: interruption.requested  # noqa: E731
            if not evaluate_in_run(loop.evaluator, kept, stop, tell, console.show_activity):
                console.say(f"evaluation of v{version:06d} stopped: {kept} are over; a resumed run plays the rest")
        write_report(folder.path)

    if beside:
        loop.evaluate_beside(kept, finish)
    else:
        finish()


def write_report(run: Path) -> None:
    """Write a run's report, whose pages are imported only then."""
    from embodied.reporting.run_page import report_or_say_why

    report_or_say_why(run)


def owes_evaluation(config: RunConfig, folder: RunFolder, state: dict, total: int) -> bool:
    """True if the resumed version still lacks its evaluation, or a part of it."""
    from embodied.records.results import RESULTS, partial_in

    out, done = folder.evaluation(state["version"]), state["iteration"]
    if (out / RESULTS).is_file():
        return False
    return partial_in(out) is not None or (done > 0 and (done >= total or is_due(done, config.run.eval_every)))


def is_due(iteration: int, every: int | None) -> bool:
    return bool(every and iteration % every == 0)


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
