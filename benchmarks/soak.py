"""Whether a long run in which workers keep dying stays as small as it began.

    python -m benchmarks.soak [--backend local] [--iterations 300] [--kill-every 20]

Trains the toy env with two sim workers, a policy worker and a learner in processes of their own, kills one of the first
three in turn, and looks at memory, descriptors, threads and shared memory of the driver, the learner and all processes
together. The verdict is by slope: a straight line through the samples after the first quarter.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import (
    RESULTS,
    code_commit,
    hosts,
    machine,
    markdown,
    only_run,
    read_metrics,
    train_command,
    write_json,
)

PLACEMENT = "{sim: 'cpu:0-1*2', policy: 'cpu:0', learner: 'cpu:1'}"
VICTIMS = ("sim-0", "policy-0", "sim-1")
SAMPLES = 30
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


def soak(backend: str, iterations: int, kill_every: int, folder: Path) -> tuple[list[Sample], int]:
    """Run it; -> the samples, and how many workers were killed."""
    arguments = [
        f"run.iterations={iterations}",
        f"run.dir={folder}",
        f"run.save_every={kill_every}",
        f"run.eval_every={kill_every}",
        f"placement={PLACEMENT}",
        f"faults.max_restarts={iterations}",
        "eval.videos=0",
        f"cluster.backend={backend}",
    ]
    command = train_command("pointmass_ppo", *arguments)
    victims, samples, killed = itertools.cycle(VICTIMS), [], 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        watchdog = threading.Timer(ITERATION_S * iterations, process.kill)
        watchdog.start()
        try:
            for line in process.stdout:
                told = re.match(r"iteration (\d+)/", line)
                if told is None:
                    continue
                iteration = int(told[1])
                found = hosts(next(folder.glob("*/logs")))
                if iteration % max(iterations // SAMPLES, 1) == 0 and len(found) == 4:
                    samples.append(look(iteration, process.pid, found))
                if iteration % kill_every == kill_every // 2:
                    os.kill(found[next(victims)], signal.SIGKILL)
                    killed += 1
            process.wait(60)
        finally:
            watchdog.cancel()
            process.kill()
    if process.returncode:
        raise SystemExit(f"the run ended with {process.returncode}: {' '.join(command)}")
    return samples, killed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="local", choices=["local", "ray"])
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--kill-every", type=int, default=20)
    parser.add_argument("--out", type=Path, help="default: soak-BACKEND.json among the results")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples, killed = soak(chosen.backend, chosen.iterations, chosen.kill_every, Path(folder))
        restarts = int(sum(row["faults/restarts"] for row in read_metrics(only_run(Path(folder)))))
    names = list(asdict(samples[0]))
    print(markdown(names, [[f"{value:.4g}" for value in asdict(sample).values()] for sample in samples]))
    verdicts = judge(samples)
    rows = [
        [v.what, f"{v.mean:.1f}", f"{v.slope:+.2f}", f"{v.allowed:.2f}", "flat" if v.flat else "grows"]
        for v in verdicts
    ]
    print()
    print(markdown(["figure", "mean", "per 100 iterations", "allowed", "verdict"], rows))
    print(f"\n{killed} workers were killed, {restarts} restarts were counted")
    about = {
        "machine": machine(),
        "commit": code_commit(),
        "backend": chosen.backend,
        "killed": killed,
        "restarts": restarts,
    }
    results = {"samples": [asdict(sample) for sample in samples], "verdicts": [asdict(v) for v in verdicts]}
    write_json(chosen.out or RESULTS / f"soak-{chosen.backend}.json", {**about, **results})
    if restarts != killed or not all(verdict.flat for verdict in verdicts):
        sys.exit("not flat")


if __name__ == "__main__":
    main()
