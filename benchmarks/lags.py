"""What does a lag buy where a rollout, an update and the way of new weights take equally long?

    python -m benchmarks.lags [--seconds 0.8] [--iterations 12]

Sims and policies work on one core, the learner on another, and each step sleeps. Prints the median seconds of an
iteration for a lag of 0, 1 and 2 beside max(R, U, P, (R + U + P) / (lag + 1)). Writes benchmarks/results/lags.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.common import RESULTS, code_commit, machine
from benchmarks.pieces import PLACEMENT
from embodied.config.recipe import load
from embodied.policies.worker import PolicyWorker
from embodied.profiling.timed_run import TimedRun
from embodied.run import launch
from embodied.runtime.weights import WeightReader
from embodied.workflows.rl_loop import LEARNER, POLICY, SIM, EmbodiedLoop

DECISIONS, ITEMS = 16, 128  # of a rollout, of benchmarks/delays.yaml
LAGS = (0, 1, 2)
WARM_UP = 3


class SlowReader(WeightReader):
    """Versions travel for a known time: to this reader through a snapshot, as on another machine through buckets."""

    seconds = 0.0

    def _check(self, publication, blobs) -> bool:
        time.sleep(self.seconds)
        return super()._check(publication, blobs)


class FarPolicyWorker(PolicyWorker):
    def __init__(self, config, *options) -> None:
        super().__init__(config, *options)
        self.weights = SlowReader()
        self.weights.seconds = config.kwargs["travel_s"]


class FarLoop(EmbodiedLoop):
    roles = (SIM, replace(POLICY, worker="benchmarks.lags:FarPolicyWorker"), LEARNER)


def iteration_s(lag: int, seconds: float, iterations: int, logs: Path) -> float:
    """The mean seconds of an iteration, once the first ones are over."""
    env = f"env.kwargs={{fixed_s: {seconds / DECISIONS}, row_s: 0.0}}"
    delays = f"{{load_s: 0.0, learn_row_s: {seconds / ITEMS}, travel_s: {seconds}}}"
    policy = ["policy.name=benchmarks.delays:DelayedPolicy", f"policy.kwargs={delays}"]
    schedule = ["pipeline.schedule=async", f"pipeline.async_level={lag}"] if lag else []
    length = f"run.iterations={WARM_UP + iterations}"
    asked = [
        "recipe=benchmarks/delays.yaml",
        f"placement={PLACEMENT}",
        length,
        "eval.videos=0",
        env,
        *policy,
        *schedule,
    ]
    config = load(asked).config
    with TimedRun(*launch.planned(config), logs, program=FarLoop) as run:
        for _ in range(WARM_UP):
            run.iterate()
        return mean(run.iterate().seconds for _ in range(iterations))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.8)
    parser.add_argument("--iterations", type=int, default=12)
    asked = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as logs:
        for lag in LAGS:
            measured = iteration_s(lag, asked.seconds, asked.iterations, Path(logs) / str(lag)) / asked.seconds
            predicted = max(1.0, 3 / (lag + 1))
            rows.append({"lag": lag, "predicted": predicted, "measured": measured})
            print(f"lag {lag}: {measured:.2f} units an iteration, predicted {predicted:.2f}", flush=True)
    found = {"rows": rows, **vars(asked), "machine": machine(), "commit": code_commit()}
    (RESULTS / "lags.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
