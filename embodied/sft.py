"""Train a policy to imitate demonstrations: python -m embodied.sft recipe=maniskill_ppo sft.data=demos/pushcube

Works like `train`, with a workflow that learns from a dataset instead of simulators; with a text env, from its own
solutions or a file. Without sft.data the env's own expert demonstrates first (`collect`). The run is evaluated
and resumed like any other, and RL continues from it: python -m embodied.train recipe=NAME run.start_from=RUN
"""

from __future__ import annotations

from embodied.collect import demonstrated
from embodied.config.recipe import load
from embodied.run import launch
from embodied.train import follow
from embodied.workflows.imitation import ImitationLoop, check_data


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, lost=launch.UNSAVED)


def start(argv: list[str]) -> int:
    loaded = load(argv, entry="sft")
    if loaded is None:
        return 0
    loaded = demonstrated(loaded)
    check_data(loaded.config)
    return follow(loaded, ImitationLoop)


if __name__ == "__main__":
    raise SystemExit(main())
