"""Train a policy to imitate demonstrations: python -m embodied.sft recipe=maniskill_ppo sft.data=demos/pushcube

The story is that of `train`, with a workflow that learns from a dataset instead of simulators. The run is evaluated
and resumed like any other, and RL goes on from it: python -m embodied.train run.start_from=RUN ...
"""

from __future__ import annotations

import sys

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.datasets import read_dataset
from embodied.run import launch
from embodied.train import follow
from embodied.workflows.supervised import ImitationLoop


def main(argv: list[str] | None = None) -> int:
    return launch.run(lambda: start(sys.argv[1:] if argv is None else argv), lost=launch.UNSAVED)


def start(argv: list[str]) -> int:
    loaded = load(argv, entry="sft")
    if loaded is None:
        return 0
    demos = loaded.config.sft
    if demos.data is None:
        raise ConfigError("which demonstrations? sft.data=demos/NAME; python -m embodied.collect makes some")
    read_dataset(demos.data, images=False, names=demos.names)  # refuses what is none
    return follow(loaded, ImitationLoop)


if __name__ == "__main__":
    raise SystemExit(main())
