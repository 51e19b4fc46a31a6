"""Predicts the gain of sharing devices: replays the iterations of every run, with the times of its profile, under each
rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError
from embodied.placement import roles_of
from embodied.placement.grammar import extra_roles
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.placement_errors import number
from embodied.placement.profile import read_profile
from embodied.plan import load_warning
from embodied.profiling import stored_profiles
from embodied.run.devices import divides_requests, machines, networks_on
from embodied.sharing.page import aligned, record_of
from embodied.sharing.replay import RULES, RunWork, SteadyBatch, replay
from embodied.sharing.runs import SharedRuns, load_run, planned
from embodied.workflows.rl_loop import EmbodiedLoop
from embodied.workflows.shipped_roles import roles_of_run

TICKS = 5_000  # steps of a replay, approximately
MOST = 1_000  # largest number of devices of a rollout


@dataclass(frozen=True)
class IterationCost:
    """The cost of an iteration by the run's number of shared devices. Simulators stay on the run's own devices."""

    rollout_s: Callable[[int], float]
    update_s: Callable[[int], float]
    fixed_s: float
    switch_s: tuple[float, float]  # seconds in which a policy worker stops, and seconds in which it loads weights
    iterations: int
    warnings: Sequence[str]  # of the profile


def iteration_cost(config: RunConfig, arguments: Sequence[str], own: int, runs: int) -> IterationCost:
    """The cost of an iteration by the newest valid profile of this recipe on this machine. `arguments`: of the run.
    `own`: the number of the run's own devices. The cores beside GPUs are divided among `runs` runs."""
    topology, name = machines(config), config.run.name
    roles = roles_of(roles_of_run(EmbodiedLoop, config))
    advice = f"measure it (a minute): {stored_profiles.profiling_command(arguments)}"
    path, why = stored_profiles.profile_for(config, topology, roles)
    if path is None:
        raise ConfigError(f"{name}: {why or 'it has not been measured here'}; {advice}")
    profile = stored_profiles.fitted_to(config, read_profile(path), path, roles)
    profile, classes = stored_profiles.with_memory(profile, topology, config.cluster.memory_gb)
    if profile.missing(classes, stored_profiles.homes(config, topology, roles)):
        raise ConfigError(f"{name}: {path} was measured on other devices; {advice}")
    flow = profile.dataflow.under("sync")
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
        return float(rollout.seconds if phase == 0 else sum(layer.seconds for layer in rest))

    if not all(seconds(phase, own) < inf for phase in (0, 1)):
        raise ConfigError(
            f"{name} does not fit on {number(own, 'device')} by {path}; let fewer runs share, or by weights="
        )
    call, run = pricer.cost("policy", shared.name), config.run
    return IterationCost(
        lambda count: seconds(0, count),
        lambda count: seconds(1, count),
        flow.fixed_s,
        (float(call.seconds.at(flow["policy"].items)), float(profile.sync.copy_s.at(1))),
        run.iterations or max(1, (run.env_steps or 1) // flow.env_steps),
        load_warning(profile),
    )


def run_work(name: str, config: RunConfig, own: int, weight: float, cost: IterationCost) -> RunWork:
    """The run's work, for a replay. A rollout stays on the run's own devices if it cannot be divided, or if simulators
    use these devices."""
    divides, topology = divides_requests(config), machines(config)
    stays = config.env.on_gpu or networks_on(config, topology) == "cpu" or not divides

    def batch(iteration: int) -> SteadyBatch:
        return SteadyBatch(cost.rollout_s, own if not divides else MOST)

    return RunWork(name, cost.iterations, batch, cost.update_s, cost.fixed_s, weight, borrows=divides, stays=stays)


def predict(shared: SharedRuns, warn: Callable[[str], object] = lambda line: None) -> dict[str, list[dict[str, Any]]]:
    """The events under each rule, as lines of share.jsonl. Raises ConfigError if a run has not been measured."""
    configs = {run.name: planned(run, load_run(run.words))[0] for run in shared.runs}  # profiles name planned configs
    own = {run.name: run.own for run in shared.runs}
    weights = {run.name: run.weight for run in shared.runs}
    words = {run.name: run.words for run in shared.runs}
    devices = {device for devices_of_run in own.values() for device in devices_of_run}

    def works(sizes: Mapping[str, int], runs: int) -> tuple[list[RunWork], list[IterationCost]]:
        costs = {name: iteration_cost(config, words[name], sizes[name], runs) for name, config in configs.items()}
        made = [run_work(name, configs[name], sizes[name], weights[name], cost) for name, cost in costs.items()]
        return made, [*costs.values()]

    together, costs = works({name: len(devices_of_run) for name, devices_of_run in own.items()}, len(own))
    for line in dict.fromkeys(line for cost in costs for line in cost.warnings):
        warn(line)
    alone, _ = works(dict.fromkeys(own, len(devices)), 1)
    switch_s = max(cost.switch_s[0] for cost in costs), max(cost.switch_s[1] for cost in costs)
    whole_s = sum(
        cost.iterations * (cost.rollout_s(len(own[name])) + cost.update_s(len(own[name])))
        for name, cost in zip(own, costs)
    )
    tick_s = max(0.05, sum(switch_s) / 2, whole_s / TICKS)
    return {rule: replay(alone if rule == "serial" else together, own, rule, switch_s, tick_s) for rule in RULES}


def describe_prediction(predicted: Mapping[str, Sequence[Mapping[str, Any]]], rule: str) -> list[str]:
    """A line for each rule: the makespan, and every run's end and share of the devices' time. `rule` is the chosen
    one."""
    records = {name: record_of(lines) for name, lines in predicted.items()}
    serial = records["serial"].makespan_s()
    head = ["predicted", "makespan", "x serial", *(f"{name} ends (share)" for name in records[rule].runs)]
    rows = [head]
    for name, record in records.items():
        makespan, used = record.makespan_s(), record.device_seconds()
        whole = len(record.devices) * makespan or 1.0
        ends = [f"{run.ended_s:.4g} s ({used[run.name] / whole:.0%})" for run in record.runs.values()]
        rows.append([f"{name}{' *' if name == rule else ''}", f"{makespan:.4g} s", f"{serial / makespan:.2f}", *ends])
    return aligned(rows)
