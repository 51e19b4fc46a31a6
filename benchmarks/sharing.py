"""The gain of several runs from sharing devices, by rule, with known delays.

    python -m benchmarks.sharing           # simulated time: the rules of the real coordinator, seconds
    python -m benchmarks.sharing --real    # also by processes that ask the real coordinator, at --scale 0.4 of the time
    python -m benchmarks.sharing --case 1

Five pairs and quartets of runs on 4 or 8 devices. Conversations have log-normal durations, 8 at a time on a device;
robot runs wait for simulators between rollout and update; an update takes all of a run's own devices.

    serial     one run after the other, each on all devices
    split      each run on its own devices (at_once=2)
    remaining  RLix's rule: generation follows remaining work
    lend       a device belongs to a run, and is lent while the run has no work for it

Adds to benchmarks/results/sharing.json.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from benchmarks.common import RESULTS, code_commit, environment, machine, markdown, write_json
from benchmarks.shared_replay import SHARING, SWITCH_S, RunWork, TimedConversations, ends, replay
from embodied.runtime.device_leases import SHARE
from embodied.share import PRICED_RULES
from embodied.sharing.lease_server import LeaseServer

SLOTS, MEAN_S = 8, 2.0  # conversations at a time on a device, and their mean duration
SCALE = 0.4  # default of real seconds per second of a run
BEGIN_S = 20.0  # limit for all processes to start
LOOK_S = 0.01  # between two looks at the clock, in real time


@dataclass(frozen=True)
class FakeRun:
    """A run with known delays; `update_s` on one device."""

    conversations: int
    sigma: float
    update_s: float
    iterations: int
    wait_s: float = 0.0

    def lengths(self, seed: int) -> list[list[float]]:
        """The seconds of every conversation, by iteration."""
        draw, mu = random.Random(seed), math.log(MEAN_S) - self.sigma**2 / 2
        return [
            [draw.lognormvariate(mu, self.sigma) for _ in range(self.conversations)] for _ in range(self.iterations)
        ]

    def work(self, name: str, seed: int) -> RunWork:
        lengths = self.lengths(seed)

        def batch(iteration: int) -> TimedConversations:
            return TimedConversations(lengths[iteration], SLOTS)

        return RunWork(name, self.iterations, batch, lambda devices: self.update_s / devices, self.wait_s)


@dataclass(frozen=True)
class Case:
    what: str
    devices: int
    runs: dict[str, FakeRun]

    def works(self) -> list[RunWork]:
        return [run.work(name, seed) for seed, (name, run) in enumerate(self.runs.items())]

    def owned_devices(self) -> dict[str, list[str]]:
        """Every run owns equally many devices."""
        each = self.devices // len(self.runs)
        return {name: [f"fake:{i * each + j}" for j in range(each)] for i, name in enumerate(self.runs)}


def robots() -> FakeRun:
    return FakeRun(16, 0.8, 4, 14, wait_s=6)


def language(iterations: int) -> FakeRun:
    return FakeRun(256, 0.8, 8, iterations)


CASES = (
    Case("two alike, long tails", 4, {"a": FakeRun(64, 1.2, 4, 6), "b": FakeRun(64, 1.2, 4, 6)}),
    Case("robots that wait 6 s of 9, wide language run", 4, {"robots": robots(), "language": language(8)}),
    Case("a short run beside a long wide one", 4, {"short": FakeRun(64, 0.8, 4, 3), "long": language(8)}),
    Case("two wide runs", 4, {"a": language(5), "b": language(5)}),
    Case(
        "four runs of which two wait",
        8,
        {"robots-0": robots(), "robots-1": robots(), "language-0": language(6), "language-1": language(6)},
    ),
)


def simulated(case: Case) -> dict[str, dict[str, float]]:
    """When each run ends, by rule."""
    return {rule: ends(replay(case.works(), case.owned_devices(), rule)) for rule in PRICED_RULES}


# In real time


def played(case: Case) -> dict[str, dict[str, float]]:
    """The same cases with processes in real time, all rules at the same time, since processes mostly sleep."""
    every = [f"fake:{i}" for i in range(case.devices)]
    together = {name: (run, seed, case.owned_devices()[name]) for seed, (name, run) in enumerate(case.runs.items())}
    on_all = {name: (run, seed, every) for name, (run, seed, _) in together.items()}
    with ThreadPoolExecutor(2 * len(together) + len(SHARING)) as pool:
        found = {rule: pool.submit(play, together, every, rule) for rule in SHARING}

        def alone(runs: dict[str, tuple[FakeRun, int, list[str]]]) -> Iterator[float]:
            return pool.map(lambda name: play({name: runs[name]}, runs[name][2], "lend")[name], runs)

        split, whole = alone(together), alone(on_all)
        both = {rule: shared.result() for rule, shared in found.items()}
        return {"serial": dict(zip(on_all, accumulate(whole))), "split": dict(zip(together, split)), **both}


def play(
    runs: dict[str, tuple[FakeRun, int, list[str]]],
    devices: list[str],
    rule: str,
    lines: list[dict[str, Any]] | None = None,
) -> dict[str, float]:
    """The end of each run, with all runs at the same time. `lines` gets the lines of share.jsonl."""
    lines = [] if lines is None else lines
    server = LeaseServer(devices, rule, lines.append, lambda words: "error: nobody joins here")
    server.turns.drain_s, server.turns.wake_s = (seconds * SCALE for seconds in SWITCH_S)
    zero = server.now + BEGIN_S
    going: dict[str, subprocess.Popen] = {}
    for name, (run, seed, own) in runs.items():
        told = {"devices": devices, "own": own, "slots": SLOTS, "lengths": run.lengths(seed), "scale": SCALE}
        told |= {
            "wait_s": run.wait_s,
            "update_s": run.update_s,
            "switch_s": SWITCH_S,
            "start_at": time.time() + BEGIN_S,
        }
        command = [sys.executable, "-m", "benchmarks.shared_delays", json.dumps(told)]
        going[name] = subprocess.Popen(command, env={**environment(), SHARE: str(server.path)})
        server.expect(name, going[name].pid, 1.0, own)
    try:
        while going:
            server.serve(LOOK_S)
            for name in [name for name, process in going.items() if process.poll() is not None]:
                if code := going.pop(name).returncode:
                    raise SystemExit(f"{name} ended with {code}")
                server.end(name, "finished")
    finally:
        for process in going.values():
            process.kill()
        server.close()
    whole = {line["run"]: line["at"] for line in lines if line.get("progress", 0) is None}
    return {name: (at - zero) / SCALE for name, at in whole.items()}


def row(case: Case, found: dict[str, dict[str, float]]) -> dict[str, Any]:
    """Makespans; the speed-up of lending over other rules; the largest delay of a run's end compared with a split."""
    makespan = {rule: max(each.values()) for rule, each in found.items()}
    later = max(found["lend"][name] / found["split"][name] - 1 for name in case.runs)
    return {
        "case": case.what,
        "devices": case.devices,
        "makespan_s": makespan,
        "ends_s": found,
        "lend_over_serial": makespan["serial"] / makespan["lend"],
        "lend_over_split": makespan["split"] / makespan["lend"],
        "remaining_over_split": makespan["split"] / makespan["remaining"],
        "latest_beside_split": later,
    }


HEAD = (
    "runs",
    "devices",
    *(f"{rule} s" for rule in PRICED_RULES),
    "lend x serial",
    "lend x split",
    "remaining x split",
    "latest",
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """`latest`: the largest delay of a run's end with lending, compared with a split."""
    return markdown(
        HEAD,
        [
            [
                row["case"],
                str(row["devices"]),
                *(f"{row['makespan_s'][rule]:.0f}" for rule in PRICED_RULES),
                *(f"{row[key]:.2f}" for key in ("lend_over_serial", "lend_over_split", "remaining_over_split")),
                f"{row['latest_beside_split']:+.1%}",
            ]
            for row in rows
        ],
    )


def errors(predicted: dict[str, dict[str, float]], measured: dict[str, dict[str, float]]) -> dict[str, float]:
    """By rule, the largest error of a predicted end."""
    return {
        rule: max((predicted[rule][run] / end - 1 for run, end in ends.items()), key=abs)
        for rule, ends in measured.items()
    }


def main() -> None:
    global SCALE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", type=int, nargs="+", choices=range(1, len(CASES) + 1), help="some of the cases")
    parser.add_argument("--real", action="store_true", help="also in real time, ten minutes")
    parser.add_argument("--scale", type=float, default=SCALE, help="real seconds for each second of a run")
    asked = parser.parse_args()
    SCALE = asked.scale
    path = RESULTS / "sharing.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"simulated": {}, "real": {}}
    now = {"simulated": [], "real": []}
    for case in [CASES[number - 1] for number in asked.case or range(1, len(CASES) + 1)]:
        about = {"commit": code_commit(), "machine": machine()}
        predicted = simulated(case)
        found["simulated"][case.what] = row(case, predicted) | about
        now["simulated"].append(found["simulated"][case.what])
        if asked.real:
            measured = played(case)
            off = errors(predicted, measured)
            found["real"][case.what] = row(case, measured) | {"error": off, "scale": SCALE} | about
            now["real"].append(found["real"][case.what])
            print(
                f"{case.what}: predicted ends are off by {', '.join(f'{r} {e:+.1%}' for r, e in off.items())}",
                flush=True,
            )
        write_json(path, found)
    for name, rows in now.items():
        if rows:
            print(f"\n{name}\n{table(rows)}")


if __name__ == "__main__":
    main()
