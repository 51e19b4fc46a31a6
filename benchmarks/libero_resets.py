"""Do resets of LIBERO leak? 1,000 of them, to stored states and to placements of our own, over several tasks.

    python -m benchmarks.libero_resets [--resets 1000]

Memory and file descriptors of the process are noted on the way; the verdict is by slope, a straight line through the
samples after the first quarter, as in benchmarks/soak.py. Writes results/libero_resets.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import threading

import numpy as np

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json
from benchmarks.soak import resident_mib

PLACE = RESULTS / "libero_resets.json"
TASKS = ("libero_spatial/0", "libero_object/3", "libero_goal/5")
ROWS = 3
SAMPLES = 40
GROWTH = {"memory_mib": 0.02, "descriptors": 0.0, "threads": 0.0}  # allowed over the whole run, as a part of the mean


def play(resets: int) -> list[dict[str, float]]:
    """Each row takes the next task at every reset; in between, one random step."""
    from embodied.core.types import EpisodeSpec
    from embodied.envs.config import LiberoConfig
    from embodied.envs.libero.env import LiberoEnv

    env = LiberoEnv(LiberoConfig(name="libero", task=TASKS), ROWS)
    draw, samples = np.random.default_rng(0), []
    for begun in range(0, resets, ROWS):
        specs = [
            EpisodeSpec(TASKS[(index // ROWS + index) % len(TASKS)], index % 50 if index % 2 else -1, index, 0)
            for index in range(begun, begun + ROWS)
        ]
        env.reset(options={"reset_mask": np.ones(ROWS, bool), "episodes": specs})
        env.step(draw.uniform(-1, 1, (ROWS, 7)).astype(np.float32))
        if not samples or begun >= len(samples) * resets / SAMPLES:
            samples.append(look(begun + ROWS))
    samples.append(look(begun + ROWS))
    env.close()
    return samples


def look(resets: int) -> dict[str, float]:
    gc.collect()
    return {
        "resets": resets,
        "memory_mib": round(resident_mib(os.getpid()), 1),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def judge(samples: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Mean and growth per 1,000 resets of every figure, after the first quarter."""
    late = [sample for sample in samples if sample["resets"] > samples[-1]["resets"] / 4]
    at = np.array([sample["resets"] for sample in late]) / 1000
    verdicts = {}
    for what, allowed in GROWTH.items():
        values = np.array([sample[what] for sample in late], float)
        slope = float(np.polyfit(at, values, 1)[0])
        flat = bool(slope <= allowed * values.mean() + 1e-6)
        verdicts[what] = {"mean": round(values.mean(), 1), "per_1000_resets": round(slope, 2), "flat": flat}
    return verdicts


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--resets", type=int, default=1000)
    options = ask.parse_args()

    samples = play(options.resets)
    verdicts = judge(samples)
    about = {"commit": code_commit(), "machine": machine(), "packages": packages(), "tasks": TASKS}
    write_json(PLACE, {**about, "resets": samples[-1]["resets"], "verdicts": verdicts, "samples": samples})
    rows = [
        [what, f"{found['mean']:g}", f"{found['per_1000_resets']:+g}", "flat" if found["flat"] else "GROWS"]
        for what, found in verdicts.items()
    ]
    print(markdown(["", "mean", "per 1,000 resets", ""], rows))


if __name__ == "__main__":
    main()
