"""The time of a reset's random draws for many PushCube rows: the episodes' seeds, and each row's initial state.

    python -m benchmarks.reset_draws [--rows 1024 4096]

CPU time of one thread, the minimum over rounds: with generators built for each row, as ManiSkill does, and for all rows
at once. Both draw the same numbers; otherwise the benchmark ends with an error.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json
from embodied.core.rng import episode_seed
from embodied.core.types import EpisodeList
from embodied.envs.maniskill.cpu_batch import EpisodeDraws

JOINTS, PLACES = 9, 2  # normal and uniform numbers per row of PushCube-v1
ROUNDS = 20


def specs(rows: int) -> np.ndarray:
    return np.array([spec.seed for spec in EpisodeList(0, "train", ("PushCube-v1",)).first(rows)])


def specs_one_by_one(rows: int) -> np.ndarray:
    episode_seed.cache_clear()
    return np.array([episode_seed(0, "train", turn) for turn in range(rows)])


def states(seeds: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    draws = EpisodeDraws(seeds)
    return draws.normals(JOINTS), draws.uniforms(PLACES)


def states_one_by_one(seeds: np.ndarray) -> tuple[np.ndarray, torch.Tensor]:
    normals = np.stack([np.random.RandomState(seed).normal(size=JOINTS) for seed in seeds.tolist()])
    generators = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
    return normals, torch.stack([torch.rand(PLACES, generator=generator) for generator in generators])


def cpu_ms(work: Callable[[], Any], rounds: int) -> float:
    spent = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        spent.append(1000 * (time.process_time() - started))
    return min(spent)


def figures(rows: int, rounds: int = ROUNDS) -> dict[str, float]:
    """Milliseconds for this number of rows."""
    seeds = specs(rows)
    same = zip((seeds, *states(seeds)), (specs_one_by_one(rows), *states_one_by_one(seeds)), strict=True)
    if not all(np.array_equal(ours, theirs) for ours, theirs in same):
        raise SystemExit("rows drawn together differ from rows with a generator each: this is a bug")
    return {
        "seeds_one_by_one": cpu_ms(lambda: specs_one_by_one(rows), min(rounds, 3)),
        "seeds": cpu_ms(lambda: specs(rows), rounds),
        "states_one_by_one": cpu_ms(lambda: states_one_by_one(seeds), min(rounds, 3)),
        "states": cpu_ms(lambda: states(seeds), rounds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1024, 4096])
    torch.set_num_threads(1)
    found = {rows: figures(rows) for rows in parser.parse_args().rows}
    names = ("seeds_one_by_one", "states_one_by_one", "seeds", "states")
    table = [[str(rows), *(f"{ms[name]:.1f}" for name in names)] for rows, ms in found.items()]
    print(markdown(["rows", "seeds, ms", "states, ms", "seeds together, ms", "states together, ms"], table))
    about = {"commit": code_commit(), "machine": machine(), "packages": packages()}
    write_json(RESULTS / "reset_draws.json", about | {"cpu_ms": {str(rows): ms for rows, ms in found.items()}})


if __name__ == "__main__":
    main()
