"""A training loop that is only timed: iterations of the real recipe under one plan, nothing written, nothing kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from embodied.config.recipe import RunConfig
from embodied.learners.rendezvous import rendezvous_point
from embodied.placement import PlacementPlan
from embodied.reporting.timeline import Timeline
from embodied.run import launch
from embodied.runtime.channel import hosts_of_runs
from embodied.runtime.timers import Total
from embodied.workflows.embodied import EmbodiedLoop

MANY = 1_000_000  # iterations that the schedule of the learning rate is stretched over
PHASES = ("rollout", "update", "publish")
# The work of an iteration, by role; a role that is not named here does nothing else.
OUTER = {"sim": ("collect",), "policy": ("serve",), "learner": ("take_in", "update")}
WAITING = ("wait", "sync")


@dataclass(frozen=True)
class Round:
    """One timed iteration. `busy` is, for every role, the share of its workers' time that is not waiting."""

    seconds: float
    rollout_s: float
    update_s: float
    publish_s: float
    sync_s: float  # of the update, in which a learner waits for the others or exchanges with them; their mean
    first_backward_s: float | None  # since the iteration began; None where the first rank learned nothing
    env_steps: int
    busy: dict[str, float]


class Trial:
    """Use it as a context manager: it starts the processes of the plan and ends them."""

    def __init__(self, config: RunConfig, plan: PlacementPlan, logs: Path, program: type = EmbodiedLoop) -> None:
        self.config, self.plan, self.logs, self.program = config, plan, logs, program
        self.iteration = 0

    def __enter__(self) -> Trial:
        self.logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            cluster = stack.enter_context(launch.cluster(self.config, self.plan, self.logs, program=self.program))
            ranks, timeout_s = self.plan.count("learner"), self.config.faults.timeout_s
            rendezvous = rendezvous_point(ranks, self.config.cluster.backend, self.logs, timeout_s)
            self.loop = self.program(self.config, cluster, rendezvous=rendezvous)
            self.loop.start()
            self.loop.publish(0)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    def iterate(self) -> Round:
        before = self._totals()
        self.flows()  # forgets those of earlier iterations
        started = time.perf_counter()
        _, numbers = self.loop.iterate(self.iteration, MANY)
        seconds = time.perf_counter() - started
        self.iteration += 1
        after = self._totals()
        spent = {name: seconds_of(after["driver"][name]) - seconds_of(before["driver"].get(name)) for name in PHASES}
        busy = {}
        for group in self.loop.groups:
            shares = [self._busy(before[worker], after[worker], group.role) / seconds for worker in group.workers]
            busy[group.role] = sum(shares) / len(shares)
        learners = [
            seconds_of(after[w].get("sync")) - seconds_of(before[w].get("sync")) for w in self.loop.learners.workers
        ]
        first = numbers.get("time/first_backward_s")
        phases = (spent[name] for name in PHASES)
        return Round(seconds, *phases, sum(learners) / len(learners), first, int(numbers["env_steps"]), busy)

    def traced(self, path: Path) -> Path:
        """One more iteration, whose every piece of work is written to `path`."""
        with Timeline(self.loop.groups, self.loop.timers, path, 1) as timeline:
            self.iterate()
            timeline.collect(1)
        return path

    def flows(self) -> dict[tuple[str, str], tuple[float, float]]:
        """From which role to which items went in the last iteration, from when to when. Weights have ways of their own
        besides channels."""
        known = {group.role for group in self.loop.groups}
        found: dict[tuple[str, str], tuple[float, float]] = {("learner", "policy"): self.loop.weight_sync.times}
        here = []  # through channels at home with the driver
        for host in hosts_of_runs.values():
            here.append(host.flows)
            host.flows = {}
        for flows in [*here, *(flows for group in self.loop.groups for flows in group.flows().wait())]:
            for workers, (first, last) in flows.items():
                roles = tuple(worker.rpartition("-")[0] for worker in workers)
                if known.issuperset(roles):
                    before, after = found.get(roles, (first, last))
                    found[roles] = min(before, first), max(after, last)
        return found

    def peak_bytes(self) -> int:
        """Of all processes of the plan, each at its fullest; shared pages count in all that map them."""
        peaks: dict[tuple[str, int], int] = {}
        for group in self.loop.groups:
            peaks |= zip(group.process().wait(), group.peak_bytes().wait(), strict=True)
        return sum(peaks.values())

    def idle(self, rounds: Sequence[Round], num_devices: int) -> float:
        """The share of all devices' time in which no worker of the plan was at work."""
        busy = sum(sum(r.busy[g.role] for r in rounds) / len(rounds) * len(g.workers) for g in self.loop.groups)
        return max(0.0, 1 - busy / num_devices)

    def _totals(self) -> dict[str, dict[str, Total]]:
        found = {"driver": self.loop.timers.totals()}
        for group in self.loop.groups:
            for worker, totals in zip(group.workers, group.timings().wait(), strict=True):
                found[worker] = totals
        return found

    def _busy(self, before: dict[str, Total], after: dict[str, Total], role: str) -> float:
        if role not in OUTER:
            working = [name for name in after if name not in WAITING]
            return sum(after[name].own_s - (before[name].own_s if name in before else 0.0) for name in working)

        def grown(name: str) -> float:
            return seconds_of(after.get(name)) - seconds_of(before.get(name))

        return max(sum(map(grown, OUTER[role])) - sum(map(grown, WAITING)), 0.0)


def seconds_of(total: Total | None) -> float:
    return total.seconds if total else 0.0
