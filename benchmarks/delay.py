"""Success of a flow policy by delay, with and without joining its chunks.

    python -m benchmarks.delay runs/sft-pushcube_sft_pi0_tiny-DATE --delays 0 2 5 10 --episodes 100

A decision plays 5 env steps, or as many as the delay if that is more. `switch` takes a new chunk as it comes; `linear`
mixes it with the old one over 5 actions, or as many as the horizon has; `real_time` continues the old chunk, over all
that the horizon has. Every cell plays the same episodes. Writes results/delay.json; --resume skips its cells.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from benchmarks.common import RESULTS, code_commit, environment, machine, markdown, measure, write_json

PLAYED, MIXED, STEPS, TIMEOUT_S = 5, 5, 5, 3600.0
MODES = ("switch", "linear", "real_time")


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("run", type=Path)
    ask.add_argument("--delays", type=int, nargs="+", default=(0, 2, 5, 10))
    ask.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    ask.add_argument("--horizon", type=int, default=20)
    ask.add_argument("--episodes", type=int, default=100)
    ask.add_argument("--resume", action="store_true")
    asked, path = ask.parse_args(), RESULTS / "delay.json"
    about = {"run": asked.run.name, "episodes": asked.episodes, "horizon": asked.horizon}
    kept = json.loads(path.read_text()) if asked.resume and path.is_file() else {}
    cells = kept["cells"] if about.items() <= kept.items() else {}
    for delay in asked.delays:
        for mode in asked.modes:
            if f"{mode} {delay}" not in cells:
                cells[f"{mode} {delay}"] = played(asked, mode, delay) | {"commit": code_commit()}
                write_json(path, about | {"machine": machine(), "cells": cells})
                print(table(cells), flush=True)
    print(table(cells))


def played(asked: argparse.Namespace, mode: str, delay: int) -> dict:
    """The results of a cell."""
    steps = max(PLAYED, delay)
    room = asked.horizon - steps - delay
    overlap = {"switch": 0, "linear": min(MIXED, room), "real_time": room}[mode]
    chunks = "" if mode == "switch" else f"policy.chunks={{overlap: {overlap}, blend: {mode}}}"
    words = [f"checkpoint={asked.run}", f"eval.delay={delay}", f"policy.chunk={steps + delay + overlap}", chunks]
    words += [
        f"eval.episodes={asked.episodes}",
        f"policy.steps={STEPS}",
        "eval.seed=1000",
        "eval.videos=0",
        "eval.num_envs=20",
    ]
    command = [sys.executable, "-m", "embodied.evaluate", *filter(None, words)]
    cost = measure(command, environment(), TIMEOUT_S)
    results = json.loads(max(asked.run.glob("eval/*/results.json"), key=lambda file: file.stat().st_mtime).read_text())
    once = results["overall"]["success_once"]
    return {"rate": once["rate"], "interval": once["interval"], "wall_s": cost.wall_s, "cpu_s": cost.cpu_s}


def table(cells: dict[str, dict]) -> str:
    delays = sorted({int(name.split()[1]) for name in cells})
    return markdown(
        ["delay", *MODES], [[str(delay), *(shown(cells.get(f"{mode} {delay}")) for mode in MODES)] for delay in delays]
    )


def shown(cell: dict | None) -> str:
    if cell is None:
        return ""
    low, high = cell["interval"]
    return f"{100 * cell['rate']:.0f}% ({100 * low:.0f} to {100 * high:.0f})"


if __name__ == "__main__":
    main()
