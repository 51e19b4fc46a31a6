"""What the planner does for machines nobody has at hand: search times, and how published winners depend on the profile.

    python -m benchmarks.planner_tables

Writes benchmarks/results/planner_tables.json and prints two tables. Search times are CPU seconds for all modes of a
workload of 3 to 5 components on 8 to 4,096 GPUs. The second table scales one cost of a published workload at a time by
0.7 and 1.3 and says which mode wins then, and by how much.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import product
from statistics import median

from benchmarks.common import RESULTS, code_commit, machine
from embodied.placement.cost_curves import Curve, constant
from embodied.placement.dataflow import Component, Dataflow, Edge
from embodied.placement.profile import Cost, Link, Profile, Sync, read_profile
from embodied.placement.profile_planner import Planner
from embodied.placement.topology import read_topology
from embodied.plan import packaged

PUBLISHED = ("published_maniskill_openvla", "published_libero_openvla_oft")
CLUSTERS = {8: "8xH100", 16: "2x8xH100", 32: "4x8xH100"}
GPUS = (8, 64, 256, 1024, 4096)
REPEATS = 5
GB = 1e9


def workload(components: int, envs: int) -> Profile:
    """OpenVLA-sized parts: sim and policy in a cycle, up to two models that read trajectories, a learner."""
    parts = [
        Component("sim", 80, envs, even=True, splits=True),
        Component("policy", 80, envs, merges=64),
        Component("learner", 32, 640, streams=True),
    ]
    edges = [Edge("sim", "policy"), Edge("policy", "sim"), Edge("sim", "learner")]
    edges.append(Edge("learner", "policy", next_iteration=True))
    for name in ("reference", "reward")[: components - 3]:
        parts.append(Component(name, 1, envs * 80, streams=True))
        edges += [Edge("sim", name), Edge(name, "learner")]
    swap = {"onload_s": 1.0, "offload_s": 1.0}
    costs = {
        "sim": Cost(Curve((16, 256), (0.3, 0.5)), bytes=Curve((16, 256), (6 * GB, 40 * GB))),
        "policy": Cost(Curve((1, 16, 64), (0.2, 0.3, 1.0)), bytes=constant(30 * GB), **swap),
        "learner": Cost(
            Curve((1, 10, 80), (0.1, 0.4, 3.0)),
            bytes=Curve((1, 80), (50 * GB, 70 * GB)),
            exchange_s=Curve((1, 8, 1024), (0, 0.3, 0.6)),
            **swap,
        ),
        "reference": Cost(Curve((1, 100), (0.01, 1.0)), bytes=constant(20 * GB)),
        "reward": Cost(Curve((1, 100), (0.01, 0.5)), bytes=constant(20 * GB)),
    }
    dataflow = Dataflow(tuple(parts), tuple(edges), passes=2, env_steps=envs * 160)
    used = {part.name: {"gpu": costs[part.name]} for part in parts}
    return Profile(dataflow, used, Sync(0.01, Curve((1, 8), (0.5, 1.0))), Link(1e-3, 1e10))


def search_times() -> list[dict]:
    rows = []
    for components, gpus in product((3, 4, 5), GPUS):
        profile = workload(components, max(1024, gpus))
        classes = [c for c in read_topology(f"{gpus // 8}x8xH200").classes() if c.kind == "gpu"]
        times = []
        for _ in range(REPEATS):
            started = time.process_time()
            best = Planner(profile.dataflow, profile, classes).best()
            times.append(time.process_time() - started)
        seconds = median(times)
        rows.append({"components": components, "gpus": gpus, "seconds": seconds, "winner": str(best.layout)})
        print(f"{components} components, {gpus:>5} GPUs: {seconds * 1000:>7.0f} ms   {best.layout}", flush=True)
    return rows


def winners(profile: Profile, gpus: int) -> dict[str, float]:
    """Seconds of an iteration by mode, fastest first."""
    classes = [c for c in read_topology(CLUSTERS[gpus]).classes() if profile.knows(c)]
    found = Planner(profile.dataflow, profile, classes, profile.made["stages"]).modes()
    seconds = {mode: choice.price.seconds for mode, choice in found.items() if choice and mode != "custom"}
    return dict(sorted(seconds.items(), key=lambda item: item[1]))


def scaled(profile: Profile, name: str, factor: float) -> Profile:
    """One component slower or faster, or all memory (`bytes`), or what swapping takes (`swap`)."""
    costs = {c: dict(on) for c, on in profile.costs.items()}
    for component, on in costs.items():
        ((kind, cost),) = on.items()
        if component == name:
            cost = replace(cost, seconds=cost.seconds.scaled(factor))
        elif name == "bytes":
            cost = replace(cost, bytes=cost.bytes.scaled(factor))
        elif name == "swap" and cost.offload_s is not None:
            cost = replace(cost, onload_s=cost.onload_s * factor, offload_s=cost.offload_s * factor)
        on[kind] = cost
    return replace(profile, costs=costs)


def sensitivity() -> list[dict]:
    rows = []
    for name in PUBLISHED:
        profile = read_profile(packaged(name))
        changes = [("as it is", 1.0), *product(("sim", "policy", "learner", "bytes", "swap"), (0.7, 1.3))]
        for gpus, (what, factor) in product(CLUSTERS, changes):
            found = winners(scaled(profile, what, factor), gpus)
            first = next(iter(found), "nothing fits: no mode")
            ahead = {mode: seconds / found[first] - 1 for mode, seconds in found.items()}
            rows.append({"profile": name, "gpus": gpus, "changed": what, "factor": factor, "seconds": found})
            told = ", ".join(f"{ahead[mode]:.0%} ahead of {mode}" for mode in list(found)[1:])
            print(f"{name:<30}{gpus:>4} GPUs  {what:>9} x {factor:<4}{first:>12} wins: {told}", flush=True)
    return rows


def main() -> None:
    results = {
        "machine": machine(),
        "commit": code_commit(),
        "search": search_times(),
        "sensitivity": sensitivity(),
    }
    (RESULTS / "planner_tables.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
