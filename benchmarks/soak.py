"""Whether a long run in which workers keep dying stays as small as it began.

    python -m benchmarks.soak [--backend local] [--iterations 300] [--kill-every 20]

Trains the toy env in the placement that a user gets without asking, kills its {sim + policy} processes in turn, each
time in the next phase of `benchmarks.fault_table`, and looks at memory, descriptors, threads and shared memory of the
driver, a learner and all processes together. The verdict is by slope: a straight line through the samples after the
first quarter.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, code_commit, machine, markdown, write_json
from benchmarks.fault_cases import PHASES as STRUCK
from benchmarks.fault_cases import Case
from benchmarks.fault_table import recovered
from benchmarks.strikes import StruckRun

PHASES = tuple(phase for phase in STRUCK if phase != "rebuild")  # which is two restarts
SAMPLES = 30
START_S = 240.0
ITERATION_S = 20.0  # the most that an iteration may take, on average


@dataclass(frozen=True)
class Sample:
    iteration: int
    driver_mib: float
    learner_mib: float
    all_mib: float
    descriptors: int
    threads: int
    shared_mib: float


@dataclass(frozen=True)
class Verdict:
    what: str
    mean: float
    slope: float  # per 100 iterations
    allowed: float

    @property
    def flat(self) -> bool:
        return self.slope <= self.allowed


# What may grow by how much per 100 iterations: memory by a small part of its mean, descriptors by less than one. Ray's
# own pools of threads breathe by a few; one that stayed after every kill would be five.
ALLOWED: dict[str, Callable[[float], float]] = {
    "driver_mib": lambda mean: 0.02 * mean,
    "learner_mib": lambda mean: 0.02 * mean,
    "all_mib": lambda mean: 0.02 * mean,
    "descriptors": lambda mean: 0.5,
    "threads": lambda mean: max(0.5, 0.02 * mean),
    "shared_mib": lambda mean: 0.5,
}


def look(iteration: int, driver: int, found: dict[str, int]) -> Sample:
    everybody = [driver, *found.values()]
    return Sample(
        iteration,
        resident_mib(driver),
        resident_mib(found["learner-0"]),
        sum(map(resident_mib, everybody)),
        sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in everybody),
        sum(len(os.listdir(f"/proc/{pid}/task")) for pid in everybody),
        sum(map(shared_mib, everybody)),
    )


def resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def shared_mib(pid: int) -> float:
    """Mapped memory without a name (what hosts exchange), and of /dev/shm."""
    total = 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:" in line or "/dev/shm/" in line:
            start, _, end = line.split()[0].partition("-")
            total += int(end, 16) - int(start, 16)
    return total / 2**20


def judge(samples: list[Sample]) -> list[Verdict]:
    """The slope of every figure after the first quarter."""
    late = [sample for sample in samples if sample.iteration > samples[-1].iteration / 4]
    at = np.array([sample.iteration for sample in late]) / 100
    verdicts = []
    for what, allowed in ALLOWED.items():
        values = np.array([getattr(sample, what) for sample in late], float)
        verdicts.append(Verdict(what, values.mean(), float(np.polyfit(at, values, 1)[0]), allowed(values.mean())))
    return verdicts


def soak(recipe: str, backend: str, iterations: int, kill_every: int, folder: Path) -> tuple[list[Sample], int, int]:
    """Run it; -> the samples, how many processes were killed, how many restarts were counted."""
    options = {
        "run.iterations": iterations,
        "run.save_every": kill_every,
        "run.eval_every": kill_every,
        "faults.max_restarts": iterations,
        "eval.videos": 0,
        "cluster.backend": backend,
    }
    samples, killed, every = [], 0, max(iterations // SAMPLES, 1)
    with StruckRun(recipe, options, folder) as run:
        run.said(r"^iteration 1/", 0, START_S)
        placed, phases = run.hosts(), itertools.cycle(PHASES)
        line = 0
        for iteration in range(every, iterations, every):
            line = run.said(rf"^iteration {iteration}/", line, ITERATION_S * iterations)
            found = run.hosts()
            if found.keys() == placed.keys():
                samples.append(look(run.iteration(), run.process.pid, found))
            if iteration % kill_every < every and iteration < iterations - 3 * kill_every:
                recovered(run, Case(recipe, "auto", backend, "sim+policy", next(phases)), killed)
                killed += 1
        if run.end(ITERATION_S * iterations):
            raise SystemExit(f"the run ended badly: {run.error}")
        return samples, killed, json.loads((run.path / "run.json").read_text()).get("restarts", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="local", choices=["local", "ray"])
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--kill-every", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: soak-BACKEND.json among the results")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = (chosen.iterations, chosen.kill_every)
        samples, killed, restarts = soak("pointmass_ppo", chosen.backend, *sizes, Path(folder).resolve())
    names = list(asdict(samples[0]))
    print(markdown(names, [[f"{value:.4g}" for value in asdict(sample).values()] for sample in samples]))
    verdicts = judge(samples)
    rows = [
        [v.what, f"{v.mean:.1f}", f"{v.slope:+.2f}", f"{v.allowed:.2f}", "flat" if v.flat else "grows"]
        for v in verdicts
    ]
    print()
    print(markdown(["figure", "mean", "per 100 iterations", "allowed", "verdict"], rows))
    print(f"\n{killed} processes were killed, {restarts} restarts were counted")
    about = {
        "machine": machine(),
        "commit": code_commit(),
        "backend": chosen.backend,
        "killed": killed,
        "restarts": restarts,
    }
    results = {"samples": [asdict(sample) for sample in samples], "verdicts": [asdict(v) for v in verdicts]}
    write_json(chosen.out or RESULTS / f"soak-{chosen.backend}.json", {**about, **results})
    if restarts != killed or not killed or not all(verdict.flat for verdict in verdicts):
        sys.exit("not flat")


if __name__ == "__main__":
    main()
