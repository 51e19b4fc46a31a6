"""Predicts the gain of sharing devices under each rule, from the profiles of the runs.

The planner's price of an iteration gives a run's speed by its number of devices. How long a device is idle, and who
borrows it, follow in closed form: no iteration is played. `benchmarks.shared_replay` plays them by the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from math import inf
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError
from embodied.core.files import aligned
from embodied.placement import roles_of
from embodied.placement.grammar import extra_roles
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.topology import number
from embodied.plan import load_warning
from embodied.profiling import stored_profiles
from embodied.run.devices import divides_requests, machines, networks_on
from embodied.sharing.page import record_of
from embodied.sharing.run_turns import FORMAT, LEND_FACTOR
from embodied.sharing.runs import SharedRuns, load_run, planned
from embodied.workflows.rl_loop import EmbodiedLoop
from embodied.workflows.shipped_roles import roles_of_run

RULES = ("serial", "split", "remaining", "lend")
ROUNDS = 30  # of the fixed point of durations and borrowed devices


@dataclass(frozen=True)
class RunCost:
    """The iterations of a run, in seconds by number of devices. A rollout generates on borrowed devices too; other
    phases work on the run's own devices."""

    iterations: int
    rollout_s: Callable[[int], float]
    update_s: Callable[[int], float]
    wait_s: float = 0.0  # of an iteration, without devices
    switch_s: float = 0.0  # for a policy worker to stop, and to load weights on another device
    weight: float = 1.0
    borrows: bool = True  # its rollout can be divided among devices
    stays: bool = False  # keeps its own devices until its batch is complete, because its simulators run there
    warnings: Sequence[str] = ()  # of the profile

    def iteration_s(self, devices: int) -> float:
        return self.rollout_s(devices) + self.update_s(devices) + self.wait_s

    def rollout_on(self, devices: float) -> float:
        """Seconds of a rollout on a mean number of devices, at the speed between whole numbers."""
        whole = int(devices)
        slower, faster = 1 / self.rollout_s(whole), 1 / self.rollout_s(whole + (devices > whole))
        return 1 / (slower + (devices - whole) * (faster - slower))


def run_cost(config: RunConfig, arguments: Sequence[str], own: int, runs: int, weight: float = 1.0) -> RunCost:
    """The cost of a run by the newest valid profile of its recipe on this machine. `arguments`: of the run. `own`: the
    number of the run's own devices. The cores beside GPUs are divided among `runs` runs."""
    topology, name = machines(config), config.run.name
    roles = roles_of(roles_of_run(EmbodiedLoop, config))
    advice = f"measure it (a minute): {stored_profiles.profiling_command(arguments)}"
    path, why = stored_profiles.profile_for(config, topology, roles)
    if path is None:
        raise ConfigError(f"{name}: {why or 'it has not been measured here'}; {advice}")
    profile = stored_profiles.fitted_to(config, path, roles)
    profile, classes = stored_profiles.with_memory(profile, topology, config.cluster.memory_gb)
    if profile.missing(classes, stored_profiles.device_kinds(config, topology, roles)):
        raise ConfigError(f"{name}: {path} was measured on other devices; {advice}")
    flow = profile.dataflow.with_schedule("sync")
    pricer = Pricer(flow, profile, classes)
    kinds = {c.kind: c for c in classes}
    shared = kinds[networks_on(config, topology)]
    home = shared if config.env.on_gpu else kinds["cpu"]
    sims = own if home is shared else max(1, home.count // runs)

    more = tuple(role.name for role in extra_roles(roles))  # these roles stay on the run's own devices

    @cache
    def seconds(phase: int, count: int) -> float:
        """Seconds of the rollout (0), or of other roles and the update (1)."""
        players = Zone(("sim",), home.name, sims), Zone(("policy",), shared.name, count)
        between = ((Zone(more, shared.name, own),),) if more else ()
        layers = players, *between, (Zone(("learner",), shared.name, count),)
        rollout, *rest = pricer.price(Layout(layers, config.pipeline.stages)).layers
        return rollout if phase == 0 else sum(rest)

    if not all(seconds(phase, own) < inf for phase in (0, 1)):
        raise ConfigError(
            f"{name} does not fit on {number(own, 'device')} by {path}; let fewer runs share, or by weights="
        )
    call, run, divides = pricer.cost("policy", shared.name), config.run, divides_requests(config)
    return RunCost(
        run.iterations or max(1, (run.env_steps or 1) // flow.env_steps),
        lambda count: seconds(0, count),
        lambda count: seconds(1, count),
        flow.fixed_s,
        float(call.seconds.at(flow["policy"].items)) + float(profile.sync.copy_s.at(1)),
        weight,
        borrows=divides,
        stays=home is shared or not divides,
        warnings=load_warning(profile),
    )


def predict(shared: SharedRuns, warn: Callable[[str], object] = lambda line: None) -> dict[str, list[dict[str, Any]]]:
    """The course of the runs under each rule, as lines of share.jsonl. Raises ConfigError if a run has not been
    measured."""
    configs = {run.name: planned(run, load_run(run.words))[0] for run in shared.members}  # of which profiles are
    own = {run.name: run.own for run in shared.members}
    every = tuple(dict.fromkeys(chain.from_iterable(own.values())))

    def costs(owned: Mapping[str, Sequence[str]], runs: int) -> dict[str, RunCost]:
        return {
            run.name: run_cost(configs[run.name], run.words, len(owned[run.name]), runs, run.weight)
            for run in shared.members
        }

    together, alone = costs(own, len(own)), costs(dict.fromkeys(own, every), 1)
    for line in dict.fromkeys(line for cost in together.values() for line in cost.warnings):
        warn(line)
    return {
        rule: course(alone, dict.fromkeys(own, every), rule) if rule == "serial" else course(together, own, rule)
        for rule in RULES
    }


def course(costs: Mapping[str, RunCost], own: Mapping[str, Sequence[str]], rule: str) -> list[dict[str, Any]]:
    """The predicted course of runs on their `own` devices, as lines of share.jsonl. Between two ends of runs, every run
    has its mean speed."""
    devices, now, lines = tuple(dict.fromkeys(chain.from_iterable(own.values()))), 0.0, []
    lines += [{"format": FORMAT, "rule": rule, "devices": devices, "started": ""}]
    lines += [{"at": 0.0, "run": run, "joins": {"weight": cost.weight, "own": own[run]}} for run, cost in costs.items()]
    left = {run: float(cost.iterations) for run, cost in costs.items()}
    while left:
        active = {run: costs[run] for run in [*left][: 1 if rule == "serial" else None]}
        seconds = iteration_seconds(active, own, len(devices), rule)
        span = min(left[run] * seconds[run] for run in active)
        for device in devices:
            owners = [run for run in active if device in own[run]]
            takers = owners or [run for run in active if active[run].borrows and rule != "split"]
            for place, run in enumerate(takers):
                at, end = (now + span * border / len(takers) for border in (place, place + 1))
                lines += [{"at": at, "device": device, "run": run, "phase": "rollout"}]
                lines += [{"at": end, "device": device, "run": None, "phase": None}]
        now += span
        left = {run: iterations - (span / seconds[run] if run in active else 0) for run, iterations in left.items()}
        for run in [run for run in left if left[run] < 1e-9 * costs[run].iterations]:
            del left[run]
            lines += [{"at": now, "run": run, "progress": None}, {"at": now, "run": run, "ends": "finished"}]
    return sorted(lines, key=lambda line: line.get("at", 0.0))


def iteration_seconds(
    costs: Mapping[str, RunCost], own: Mapping[str, Sequence[str]], devices: int, rule: str
) -> dict[str, float]:
    """The mean seconds of an iteration of each run while all of these go on, with `devices` in all. The durations
    decide how long devices can be borrowed, and the borrowed devices decide the durations: a fixed point."""
    whole = {run: cost.iteration_s(len(own[run])) for run, cost in costs.items()}
    if rule not in ("remaining", "lend"):
        return whole
    rollout = {run: cost.rollout_s(len(own[run])) for run, cost in costs.items()}
    for _ in range(ROUNDS):
        generating = {run: rollout[run] / whole[run] for run in costs}
        counts = {run: generates_on(run, costs, own, devices, rule, generating, whole) for run in costs}
        rollout = {run: cost.rollout_on(counts[run]) for run, cost in costs.items()}
        for run, cost in costs.items():
            neighbours = [other for other in costs if {*own[run]} & {*own[other]}]  # they take turns on a device
            turns_s = sum(rollout[other] + costs[other].update_s(len(own[other])) for other in neighbours)
            seconds = rollout[run] + cost.update_s(len(own[run])) + cost.wait_s
            whole[run] = (whole[run] + max(seconds, turns_s if len(neighbours) > 1 else 0.0)) / 2
    return whole


def generates_on(
    run: str,
    costs: Mapping[str, RunCost],
    own: Mapping[str, Sequence[str]],
    devices: int,
    rule: str,
    generating: Mapping[str, float],
    whole: Mapping[str, float],
) -> float:
    """The mean number of devices on which a run generates. `generating`: each run's share of its time in rollouts."""
    mine, others = len(own[run]), [other for other in costs if other != run and costs[other].borrows]
    if not costs[run].borrows:
        return mine
    if rule == "remaining":  # all devices without an update or a fixed rollout, divided by remaining work
        kept = sum(
            len(own[other])
            * ((cost.update_s(len(own[other])) if cost.borrows else whole[other] - cost.wait_s) / whole[other])
            for other, cost in costs.items()
            if other != run
        )
        work = {
            other: costs[other].rollout_s(len(own[other])) * len(own[other]) * costs[other].weight for other in costs
        }
        rivals = sum(work[other] * generating[other] for other in others)
        part = (devices - kept) * work[run] / (work[run] + rivals)
        return min(devices, max(part, mine if costs[run].stays else 1))
    free = devices - len({device for each in costs for device in own[each]})
    idle = sum(
        len(own[other]) * (cost.wait_s - cost.switch_s) / whole[other]
        for other, cost in costs.items()
        if not {*own[other]} & {*own[run]} and cost.wait_s > LEND_FACTOR * cost.switch_s
    )
    return min(devices, mine + (free + idle) / (1 + sum(generating[other] for other in others)))


def describe_prediction(predicted: Mapping[str, Sequence[Mapping[str, Any]]], rule: str) -> list[str]:
    """A line for each rule: the makespan, and every run's end and share of the devices' time. `rule` is the chosen
    one."""
    records = {name: record_of(lines) for name, lines in predicted.items()}
    serial = records["serial"].makespan_s()
    head = ["predicted", "makespan", "x serial", *(f"{name} ends (share)" for name in records[rule].runs)]
    rows = []
    for name, record in records.items():
        makespan, used = record.makespan_s(), record.device_seconds()
        whole = len(record.devices) * makespan or 1.0
        ends = [f"{run.ended_s:.4g} s ({used[run.name] / whole:.0%})" for run in record.runs.values()]
        rows.append([f"{name}{' *' if name == rule else ''}", f"{makespan:.4g} s", f"{serial / makespan:.2f}", *ends])
    return aligned(head, rows)
