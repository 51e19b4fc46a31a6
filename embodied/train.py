"""Train a policy: python -m embodied.train recipe=maniskill_ppo [key=value ...]

`train` is the whole story of a run; each step is one word further down in `workflows/` and `reporting/`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from embodied import commands
from embodied.checkpoints import locate, newest, read_sims, verify
from embodied.config import RunConfig
from embodied.errors import ConfigError
from embodied.reporting.console import Console
from embodied.run_folder import RunFolder


def main(argv: list[str] | None = None) -> int:
    return commands.run(lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: list[str]) -> int:
    """Read the recipe, open or continue a run folder, train, and close the folder with what happened."""
    loaded = commands.load(argv)
    if loaded is None:
        return 0
    config, plan = loaded.config, commands.plan(loaded.config)
    if loaded.dry_run:
        print(commands.describe(config, plan))
        return 0
    commands.check_env(config)
    folder, checkpoint = open_folder(config, loaded.name, loaded.yaml)
    console = Console(config, folder.path)
    console.begin(commands.describe(config, plan))
    with commands.Interruption() as interruption, commands.closing(folder):
        train(config, plan, folder, checkpoint, console, interruption)
    return interruption.exit_code


def open_folder(config: RunConfig, name: str, yaml: str) -> tuple[RunFolder, Path | None]:
    """A new folder, or the one to resume with its newest whole checkpoint."""
    if config.resume is None:
        return RunFolder.create(Path(config.run.dir), name, yaml), None
    path = commands.run_to_resume(config.resume, Path(config.run.dir), name)
    if path is None:
        return RunFolder.create(Path(config.run.dir), name, yaml), None
    folder = RunFolder.reopen(path)
    return folder, newest(path)


def train(config: RunConfig, plan, folder: RunFolder, checkpoint: Path | None, console: Console, interruption) -> None:
    from embodied.workflows.embodied import EmbodiedLoop

    with commands.cluster(config, plan, folder.logs) as cluster:
        loop = EmbodiedLoop(config, cluster)
        spec = loop.start()
        console.started(spec)
        state = resume(loop, folder, checkpoint, console) if checkpoint else fresh(loop)
        total = commands.total_iterations(config)
        while state["iteration"] < total and not interruption.requested:
            iterate(loop, state, total, folder, console)
            last = state["iteration"] == total
            if last or interruption.requested or due(state["iteration"], config.run.save_every):
                console.saved(save(loop, state, folder))
            if last or (due(state["iteration"], config.run.eval_every) and not interruption.requested):
                console.evaluated(commands.evaluate_version(loop, folder.path / "eval", config, spec))
    console.end(state, interruption)


def fresh(loop) -> dict:
    loop.publish(0)
    return {"iteration": 0, "version": 0, "env_steps": 0, "abandoned": 0, "train_s": 0.0}


def resume(loop, folder: RunFolder, checkpoint: Path, console: Console) -> dict:
    state = verify(checkpoint)
    if state["total_env"] != loop.config.env.num_envs:
        raise ConfigError(
            f"this run was started with env.num_envs={state['total_env']}; resume with the same number, or start a new run"
        )
    folder.keep_metrics(state["iteration"])
    abandoned = loop.restore(checkpoint, read_sims(checkpoint), state["version"])
    state["abandoned"] += abandoned
    console.resumed(checkpoint, state, abandoned)
    return state


def iterate(loop, state: dict, total: int, folder: RunFolder, console: Console) -> None:
    started = time.perf_counter()
    finished, numbers = loop.iterate(state["iteration"], total)
    elapsed = time.perf_counter() - started
    state["iteration"] += 1
    state["version"] = loop.version
    state["env_steps"] += numbers.pop("env_steps")
    state["train_s"] += elapsed
    folder.log(console.iteration(state, finished, numbers, elapsed, total))


def save(loop, state: dict, folder: RunFolder) -> Path:
    from embodied.checkpoints import write_checkpoint

    content = {**state, "total_env": loop.config.env.num_envs}
    return write_checkpoint(
        folder.checkpoints,
        state["version"],
        lambda draft: loop.learners[0].save(draft).wait(),
        content,
        loop.save_sims(),
    )


def due(iteration: int, every: int | None) -> bool:
    return bool(every) and iteration % every == 0


if __name__ == "__main__":
    raise SystemExit(main())
