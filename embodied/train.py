"""Train a policy: python -m embodied.train recipe=maniskill_ppo [key=value ...]

`train` is the whole story of a run; each step is one word further down in `workflows/` and `reporting/`.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

from embodied import commands
from embodied.checkpoints import name_of, newest, read_sims, verify, write_checkpoint
from embodied.config import Loaded, RunConfig, load
from embodied.errors import NothingToLearn
from embodied.evaluate import evaluate_run
from embodied.learners.meeting import meeting_point
from embodied.reporting.console import Console
from embodied.reporting.report import report_or_say_why
from embodied.reporting.timeline import Timeline
from embodied.run_folder import RunFolder
from embodied.targets import Target, check_continues, check_fits, find_start
from embodied.workflows.embodied import EmbodiedLoop


def main(argv: list[str] | None = None) -> int:
    return commands.run(lambda: start(sys.argv[1:] if argv is None else argv), lost=commands.UNSAVED)


def start(argv: list[str]) -> int:
    loaded = load(argv)
    return 0 if loaded is None else follow(loaded, EmbodiedLoop)


def follow(loaded: Loaded, program: type[EmbodiedLoop]) -> int:
    """Open or continue a run folder, train as the recipe and the program say, and close the folder with what
    happened."""
    config, plan = commands.planned(loaded.config)
    origin = find_start(config.run.start_from, config.policy) if config.run.start_from else None
    if loaded.dry_run:
        commands.rehearse(config)
        print(commands.describe(config, plan, weights=config.resume))
        print(commands.describe_memory(config), end="")
        return 0
    with commands.Interruption() as interruption:
        folder, checkpoint = open_folder(loaded, program.command)
        with commands.closing(folder, interruption):
            console = Console(folder.path, folder.note, command=program.command)
            folder.record(placement=asdict(plan))
            console.say(commands.describe(config, plan, folder.path, checkpoint))
            train(program, config, plan, origin, folder, checkpoint, console, interruption)
    return interruption.exit_code


def open_folder(loaded: Loaded, command: str) -> tuple[RunFolder, Path | None]:
    """A new folder, or the one to resume with its newest whole checkpoint."""
    config = loaded.config
    found = config.resume and commands.run_to_resume(config.resume, config.run.dir, loaded.name)
    if not found:
        return RunFolder.create(config.run.dir, loaded.name, loaded.yaml, command), None
    checkpoint = newest(found)
    check_continues(found, checkpoint, config)
    return RunFolder.reopen(found, command), checkpoint


def train(
    program: type[EmbodiedLoop],
    config: RunConfig,
    plan,
    origin: Target | None,
    folder: RunFolder,
    checkpoint: Path | None,
    console: Console,
    interruption,
) -> None:
    """`origin` is the policy to start from, `checkpoint` that of this run to continue from."""
    with commands.cluster(config, plan, folder.logs) as cluster:
        ranks, timeout_s = plan.count("learner"), config.faults.timeout_s
        meeting = meeting_point(ranks, config.cluster.backend, folder.logs, timeout_s)
        tell, start = partial(restarted, folder, console), origin and origin.folder
        loop = program(config, cluster, meeting=meeting, tell=tell, start_folder=start)
        spec = loop.start()
        if origin:
            check_fits(origin, config.env, spec)
            folder.record(started_from=origin.described())
        state = resume(loop, folder, checkpoint, console) if checkpoint else fresh(loop)
        total = loop.total_iterations()
        if state["iteration"] >= total:
            console.nothing_left(state["iteration"], total)
        with Timeline(loop.groups, loop.timers, folder.new_trace(), config.run.trace) as timeline:
            while state["iteration"] < total and not interruption.requested and not loop.collection.exhausted:
                iterate(loop, state, total, folder, console)
                last = state["iteration"] == total or bool(loop.collection.exhausted)
                judge = last or due(state["iteration"], config.run.eval_every)
                if judge or due(state["iteration"], config.run.save_every):  # an evaluation takes long
                    console.saved(save(loop, state, folder))
                if judge and not interruption.requested:
                    out = folder.path / "eval" / name_of(loop.version)
                    console.evaluating(loop.version, config.eval.episodes)
                    console.evaluated(loop.version, evaluate_run(loop, out, folder.checkpoints / name_of(loop.version)))
                    report_or_say_why(folder.path)
                timeline.collect(state["iteration"])
            if interruption.requested:
                console.saved(save(loop, state, folder))
            spent = timeline.end()
        exhausted = loop.collection.exhausted
    console.end(state, interruption.requested or bool(exhausted), spent)
    if exhausted:
        raise NothingToLearn(exhausted)


def fresh(loop: EmbodiedLoop) -> dict:
    loop.publish(0)
    return {"iteration": 0, "version": 0, "env_steps": 0, "abandoned_episodes": 0, "train_s": 0.0}


def resume(loop: EmbodiedLoop, folder: RunFolder, checkpoint: Path, console: Console) -> dict:
    """Continue from a checkpoint: weights, optimizer, env rows, counters; later metrics are dropped and made again."""
    state = verify(checkpoint)
    folder.keep_metrics(state["iteration"])
    abandoned = loop.restore(checkpoint, read_sims(checkpoint), state["version"])
    state["abandoned_episodes"] += abandoned
    console.resumed(checkpoint, state, abandoned)
    return state


def restarted(folder: RunFolder, console: Console, line: str) -> None:
    folder.count_restart()
    console.say(line)


def iterate(loop: EmbodiedLoop, state: dict, total: int, folder: RunFolder, console: Console) -> None:
    started = time.perf_counter()
    finished, numbers = loop.iterate(state["iteration"], total)
    elapsed = time.perf_counter() - started
    state["iteration"] += 1
    state["version"] = loop.version
    state["env_steps"] += int(numbers["env_steps"])
    state["abandoned_episodes"] += loop.crew.take_abandoned()
    state["train_s"] += elapsed
    folder.log(console.iteration(state, finished, numbers, elapsed, total))


def save(loop: EmbodiedLoop, state: dict, folder: RunFolder) -> Path:
    with loop.timers.measure("save"):
        return write_checkpoint(folder.checkpoints, state["version"], loop.save_learners, state, loop.save_sims())


def due(iteration: int, every: int | None) -> bool:
    return bool(every) and iteration % every == 0


if __name__ == "__main__":
    raise SystemExit(main())
