"""Train a policy to imitate demonstrations: python -m embodied.sft recipe=maniskill_ppo sft.data=demos/pushcube

Works like `train`, with a workflow that learns from a dataset instead of simulators; with a text env, from its own
solutions or a file. Without sft.data the env's own expert demonstrates first (`collect`). The run is evaluated
and resumed like any other, and RL continues from it: python -m embodied.train recipe=NAME run.start_from=RUN
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from embodied import let_call
from embodied.collect import demonstrated
from embodied.config.command_line import from_python
from embodied.config.recipe import Loaded, load
from embodied.reporting.runs import Run, read_run
from embodied.run import launch
from embodied.train import follow
from embodied.workflows.demonstrations import check_data
from embodied.workflows.imitation import ImitationLoop


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, lost=launch.UNSAVED)


def start(argv: list[str]) -> int:
    loaded = load(argv, entry="sft")
    return 0 if loaded is None else imitate(loaded)


def call(*words: str | Mapping[str, Any]) -> Run:
    """Imitate from Python, like the command, and return the run: `embodied.sft("pointmass_ppo", "sft.data=demos")`."""
    loaded = load(from_python(words), entry="sft")
    folders: list[Path] = []
    imitate(loaded, folders.append)
    return read_run(folders[0])


def imitate(loaded: Loaded, opened: Callable[[Path], None] = lambda folder: None) -> int:
    """Collect demonstrations if none are named, and imitate them. `opened` is called with the run's folder."""
    loaded = demonstrated(loaded)
    check_data(loaded.config)
    return follow(loaded, ImitationLoop, opened=opened)


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
