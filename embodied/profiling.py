"""Measure what the parts of a recipe cost: python -m embodied.profiling recipe=maniskill_ppo [seconds=60]

Every core runs the same measurements at the same time, as sims do in a run. Then short real runs tell what the parts
leave out: handing over between processes, learners waiting for each other, new weights, and the driver. The result is
one file that `python -m embodied.plan`, `placement=auto` and `python -m embodied.benchmark` read.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from embodied import commands
from embodied.config import RunConfig, load
from embodied.discovery import cores as cores_here
from embodied.discovery import discover
from embodied.errors import ConfigError
from embodied.placement import PlacementPlan, make_plan
from embodied.placement.costs import Pricer
from embodied.placement.curves import Curve, constant, fit
from embodied.placement.layout import Layout, Zone
from embodied.placement.profile import NOTHING, Cost, Link, Profile, Sync, write_profile
from embodied.placement.topology import Topology
from embodied.placement.workflow import Edge, traced_edges
from embodied.profiles import cost_key, processor, profile_path, repeated, without_limit, workflow_of
from embodied.runtime import Cluster, HostPlan
from embodied.trial import Trial

SECONDS = 60.0
REPEATS = 3
PROBING = 0.4  # of the time goes to the parts, the rest to short real runs
FEWEST_DECISIONS = 4
MOST_PROBES = 8  # processes that measure at the same time
MOST_SIZES = 4
REAL_ITERATIONS = 4  # of each of two short real runs; the first one warms up
LEAST_ALONE = 0.5  # two threads of a core slow each other down no more than this; less is noise
START_S = 8.0  # of the processes of a real run, on a machine that is not busy
USAGE = """Measure what the env, policy and learner of a recipe cost on this machine, for planning.

usage: python -m embodied.profiling recipe=NAME [seconds=60] [key=value ...] [--help]

  seconds   about how long it may take: where that is short, so are rollouts, and sizes are left out (default 60)

The profile goes to runs/profiles/ and is found there by plan, benchmark and placement=auto."""


@dataclass
class Clock:
    seconds: float
    started: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        return time.monotonic() - self.started

    def left(self, share: float) -> bool:
        """Whether less than this share of the time is spent."""
        return self.spent() < share * self.seconds


def main(argv: list[str] | None = None) -> int:
    return commands.answer(argv, USAGE, start)


def start(argv: list[str]) -> int:
    values, problems, rest = commands.split(argv, ("seconds",))
    seconds = values.get("seconds", SECONDS)
    if problems or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise ConfigError("\n".join(problems) or f"seconds={seconds}: should be a number above 0, seconds=60 say")
    loaded = load(rest)
    if loaded is None:
        return 0
    config, _ = commands.planned(loaded.config)
    profile = measure(config, seconds, print)
    path = profile_path(config)
    write_profile(profile, path)
    print("\n".join(describe(profile)))
    print(f"\nprofile     {path}")
    return 0


def measure(config: RunConfig, seconds: float, say: Callable[[str], None]) -> Profile:
    """Probe the parts, then calibrate with short real runs."""
    config = without_limit(repeated(config))
    clock = Clock(seconds)
    topology = discover()
    cores = cores_here()
    with tempfile.TemporaryDirectory(prefix="embodied-profile-") as logs:
        say(f"measuring env, policy and learner on {len(cores)} cores, about {seconds:.0f} s")
        probed = probe(config, cores, clock, Path(logs))
        made = {
            "recipe": config.run.name,
            "name": f"{config.run.name} on {processor()}, {len(cores)} cores",
            "key": cost_key(config),
            "cores": len(cores),
            "load": round(os.getloadavg()[0], 1),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "stages": [n for n in (1, 2, 4) if config.env.num_envs % n == 0],
        }
        if config.algo.name != "ppo":
            made["episode_decisions"] = (
                probed.horizon
            )  # while a policy knows nothing, episodes last as long as they may
        profile = Profile(workflow_of(config, probed.horizon), probed.costs, made=made)
        profile = calibrate(config, profile, topology, clock, Path(logs), say, probed.reset_s)
        whole = workflow_of(config, probed.horizon)
        whole = replace(whole, edges=profile.workflow.edges, fixed_s=profile.workflow.fixed_s)
        profile = replace(profile, workflow=whole)
    return replace(profile, made={**profile.made, "seconds": round(clock.spent(), 1)})


def env_sizes(config: RunConfig, cores: int) -> list[int]:
    """Envs per worker and stage, the share of a core first, then others around it."""
    total = config.env.num_envs
    shares = [max(1, total // n) for n in (cores, 1, 2 * cores, 4 * cores, 8 * cores)]
    return list(dict.fromkeys(shares))[:MOST_SIZES]


@dataclass(frozen=True)
class Probed:
    costs: dict[str, dict[str, Cost]]
    horizon: int  # decisions of a rollout, or of a whole episode
    reset_s: float  # of the resets of whole episodes, per episode of a row; part of what a sim's decisions cost


def probe(config: RunConfig, cores: tuple[int, ...], clock: Clock, logs: Path) -> Probed:
    """The costs of every part on one core, while the other cores do the same."""
    used = cores[:MOST_PROBES]
    hosts = [HostPlan(f"probe-{i}", ("probe",), (core,), 1) for i, core in enumerate(used)]
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    alone: dict[str, float] = defaultdict(lambda: 1.0)
    used_bytes: dict[int, int] = {}
    fixed: list[float] = []
    ahead: list[float] = []
    resets: list[float] = []
    with Cluster("local", hosts, logs, config.faults.timeout_s) as cluster:
        probes = cluster.launch("embodied.probing:ProbeWorker", "probe", config)
        sizes = env_sizes(config, len(cores))
        decisions, horizon = affordable(sizes, probes, clock)
        for place, num_envs in enumerate(sizes):
            if place > 1 and not clock.left(PROBING):  # a curve needs two sizes
                break
            for samples in probes.rollout(num_envs, decisions, REPEATS).wait():
                for name, seconds in samples.seconds.items():
                    found[name][num_envs] += seconds
                used_bytes[num_envs] = max(used_bytes.get(num_envs, 0), samples.bytes)
                resets += samples.reset_s if place == 0 else []
            minibatch = max(1, round(config.algo.minibatch_size * num_envs / config.env.num_envs))
            minibatch = min(minibatch, num_envs * decisions)
            for learned in probes.update(num_envs, minibatch, 1).wait():
                found["step"][minibatch] += learned["step"]
                found["whole"][minibatch] += learned["whole"]
                if place == 0:
                    fixed += learned["fixed"]
                    ahead += learned["ahead"]
            if place == 0 and len(used) > 1:
                alone = beside_nobody(probes[0], found, num_envs, decisions, minibatch)
        moves = probes.moves(sizes[0]).wait()
    sim = Cost(fit(found["sim"]), bytes=rising_bytes(used_bytes), alone=alone["sim"])
    last_s = fit(found["value"]) if "value" in found else NOTHING
    policy = Cost(fit(found["policy"]), last_s=last_s, alone=alone["policy"], weight_bytes=moves[0]["policy"].bytes)
    learner = Cost(fit(found["step"]), fixed_s=median(fixed), alone=alone["whole"], ahead_s=median(ahead))
    moving = [
        movable(cost, [each[name] for each in moves]) for name, cost in (("policy", policy), ("learner", learner))
    ]
    costs = {"sim": {"cpu": sim}, "policy": {"cpu": moving[0]}, "learner": {"cpu": moving[1]}}
    return Probed(costs, horizon, median(resets))


def beside_nobody(probe, together: dict, num_envs: int, decisions: int, minibatch: int) -> dict[str, float]:
    """How long each part takes on one core while the others do nothing, next to what it took while all did the same."""
    (samples,) = probe.rollout(num_envs, decisions, REPEATS).wait()
    (learned,) = probe.update(num_envs, minibatch, 1).wait()
    took = {name: samples.seconds[name][-REPEATS:] for name in ("sim", "policy")} | {"whole": learned["whole"]}
    size = {"sim": num_envs, "policy": num_envs, "whole": minibatch}
    ratios = {name: median(seconds) / median(together[name][size[name]]) for name, seconds in took.items()}
    return {name: float(min(max(ratio, LEAST_ALONE), 1.0)) for name, ratio in ratios.items()}


def movable(cost: Cost, moves: list) -> Cost:
    """With what its workers need of a device, and what it takes them to leave it and to come back."""
    onload_s, offload_s = (median(getattr(m, name) for m in moves) for name in ("onload_s", "offload_s"))
    return replace(cost, bytes=constant(moves[0].bytes), onload_s=onload_s, offload_s=offload_s)


def affordable(sizes: list[int], probes, clock: Clock) -> tuple[int, int]:
    """How many decisions long rollouts can be so that two sizes of envs are measured in time; and how many the recipe's
    have."""
    samples = probes.rollout(sizes[0], FEWEST_DECISIONS, 1).wait()
    horizon = samples[0].horizon
    decision_s = max(sum(sum(part) for part in found.seconds.values()) for found in samples)
    rows = sum(sizes[:2]) / sizes[0] + 1  # and the first again, beside nobody
    left = PROBING * clock.seconds - clock.spent()
    most = int(left / 2 / ((REPEATS + 1) * rows * decision_s))
    return min(max(FEWEST_DECISIONS, most), horizon), horizon


def rising_bytes(used: dict[int, int]) -> Curve:
    return fit({size: [float(value)] for size, value in used.items()})


# What only a real run shows


@dataclass(frozen=True)
class Seen:
    """Medians over the iterations of a short real run."""

    rollout_s: float
    update_s: float
    sync_s: float  # of it, between learners
    publish_s: float
    rest_s: float
    edges: tuple[Edge, ...]  # between roles, as the last iteration's items went through the channels


def calibrate(
    config: RunConfig, profile: Profile, topology: Topology, clock: Clock, logs: Path, say, reset_s: float
) -> Profile:
    """Short real runs: collocated on all cores, then with sims apart. Without time for them, these costs are 0."""
    cores = cores_here()
    classes = [c for c in topology.classes() if c.kind == "cpu"]
    n = config.env.num_envs
    sims = next(k for k in range(min(len(cores), n), 0, -1) if n % k == 0)
    layout = Layout(((Zone(("sim", "policy"), "cpu", sims),), (Zone(("learner",), "cpu", sims),)))
    config, profile = shortened(config, profile, Pricer(profile.workflow, profile, classes), layout, clock)
    resets_s = more_resets(config, profile, reset_s)
    profile = with_sim(profile, resets_s)
    span = "cpu:0" if sims == 1 else f"cpu:0-{sims - 1}*{sims}"
    plan = make_plan({"sim,policy": span, "learner": span}, cores, n)
    say(f"a short real run, collocated on {sims} cores")
    seen = real_run(config, plan, logs / "collocated", clock)
    profile = replace(profile, workflow=replace(profile.workflow, edges=seen.edges))
    profile = take_over(profile, Pricer(profile.workflow, profile, classes), layout, seen, sims)
    if len(cores) < 2:
        return with_sim(profile, -resets_s)
    if not clock.left(0.8):
        say("no time for a run with sims apart: handing over between processes counts as free")
        return with_sim(profile, -resets_s)
    say("a short real run with sims apart from policy and learner")
    plan = make_plan({"sim": "cpu:0", "policy,learner": "cpu:1"}, cores, n)
    apart = real_run(config, plan, logs / "apart", clock)
    pricer = Pricer(profile.workflow, profile, classes)
    layout = Layout(((Zone(("sim",), "cpu", 1), Zone(("policy", "learner"), "cpu", 1)),))
    at = {name: (zone, zone.devices) for zone in layout.layers[0] for name in zone.components}
    expected = float(pricer.node_seconds(("sim", "policy"), at, 1))
    decisions = profile.workflow["sim"].calls
    both_ways = max(apart.rollout_s - expected, 0.0) / (decisions + 1)
    sync = replace(profile.sync, shared_s=apart.publish_s)
    return with_sim(replace(profile, link=Link(latency_s=both_ways / 2), sync=sync), -resets_s)


def more_resets(short: RunConfig, profile: Profile, reset_s: float) -> float:
    """Seconds of a sim's decision that go into resets because episodes are cut short here."""
    whole = profile.made.get("episode_decisions")
    if whole is None:
        return 0.0
    cut = -(-short.env.max_episode_steps // getattr(short.policy, "chunk", 1)) if short.env.max_episode_steps else whole
    return reset_s * max(1 / cut - 1 / whole, 0.0)


def with_sim(profile: Profile, seconds: float) -> Profile:
    """The same with sims that take so much longer for each decision."""
    sim = profile.costs["sim"]["cpu"]
    return replace(profile, costs={**profile.costs, "sim": {"cpu": replace(sim, seconds=raised(sim.seconds, seconds))}})


def take_over(profile: Profile, pricer: Pricer, layout: Layout, seen: Seen, ranks: int) -> Profile:
    """Put what the run took beyond its parts where it belongs."""
    at = {name: (zone, zone.devices) for layer in layout.layers for zone in layer for name in zone.components}
    workflow = profile.workflow
    rollout = float(pricer.node_seconds(("sim", "policy"), at, 1))
    update = float(pricer.node_seconds(("learner",), at, 1) + pricer.ahead_seconds("learner", at))
    handing = max(seen.rollout_s - rollout, 0.0) / workflow["sim"].calls
    besides = max(seen.update_s - update, 0.0)
    exchange = min(seen.sync_s, besides)
    sim, learner = profile.costs["sim"]["cpu"], profile.costs["learner"]["cpu"]
    sim = replace(sim, seconds=raised(sim.seconds, handing))
    learner = replace(learner, fixed_s=learner.fixed_s + besides - exchange)
    if ranks > 1:
        each = Curve((1.0, float(ranks)), (0.0, exchange / workflow["learner"].calls))
        learner = replace(learner, exchange_s=each)
    costs = {**profile.costs, "sim": {"cpu": sim}, "learner": {"cpu": learner}}
    return replace(
        profile,
        costs=costs,
        workflow=replace(workflow, fixed_s=seen.rest_s),
        sync=Sync(seen.publish_s, constant(seen.publish_s)),
    )


def raised(curve: Curve, seconds: float) -> Curve:
    """The same at every size, plus so much."""
    points = tuple((size, value + seconds) for size, value in curve.measured)
    return replace(curve, values=tuple(value + seconds for value in curve.values), measured=points)


def shortened(
    config: RunConfig, profile: Profile, pricer: Pricer, layout: Layout, clock: Clock
) -> tuple[RunConfig, Profile]:
    """With fewer decisions and epochs per iteration, where so many iterations would take longer than there is time.
    What is taken from the real runs is per decision and per gradient step."""
    expected = pricer.price(layout).seconds
    left = max(clock.seconds - clock.spent() - 2 * START_S, 0.1 * clock.seconds)
    share = left / (2 * REAL_ITERATIONS * expected)
    if share >= 1:
        return config, profile
    decisions = profile.workflow["sim"].calls
    if config.algo.name == "ppo":
        kept = max(min(FEWEST_DECISIONS, decisions), int(share * decisions))
        short, length = with_algo(config, rollout_decisions=kept), 1
    else:
        short, length = fewer_episodes(config, share, profile.made["episode_decisions"])
    kept = workflow_of(short, length)["sim"].calls / decisions
    short = with_algo(short, minibatch_size=max(1, round(kept * config.algo.minibatch_size)), epochs=1)
    return short, replace(profile, workflow=workflow_of(short, length))


def with_algo(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"algo": config.algo.model_copy(update=changes)})


def fewer_episodes(config: RunConfig, share: float, length: int) -> tuple[RunConfig, int]:
    """One group for every group's worth of envs at least; if that is too much, episodes of fewer decisions."""
    algo = config.algo
    fewest = min(-(-config.env.num_envs // algo.group_size), algo.groups)
    groups = max(fewest, int(share * algo.groups))
    cut = max(min(FEWEST_DECISIONS, length), min(length, int(length * share * algo.groups / groups)))
    steps = cut * getattr(config.policy, "chunk", 1)
    env = config.env if cut == length else config.env.model_copy(update={"max_episode_steps": steps})
    return with_algo(config, groups=groups).model_copy(update={"env": env}), cut


def real_run(config: RunConfig, plan: PlacementPlan, logs: Path, clock: Clock) -> Seen:
    """Two iterations at least, of which the first warms up."""
    with Trial(config, plan, logs) as trial:
        rounds = [trial.iterate()]
        while len(rounds) < 2 or (len(rounds) < REAL_ITERATIONS and clock.left(1.0)):
            rounds.append(trial.iterate())
        edges = traced_edges(trial.flows())
    rounds = rounds[1:]
    rest = [r.seconds - r.rollout_s - r.update_s - r.publish_s for r in rounds]
    return Seen(
        median(r.rollout_s for r in rounds),
        median(r.update_s for r in rounds),
        median(r.sync_s for r in rounds),
        median(r.publish_s for r in rounds),
        max(median(rest), 0.0),
        edges,
    )


def describe(profile: Profile) -> list[str]:
    """Every curve with its fit."""
    lines = ["", f"{'part':<10}{'size':>8}{'ms':>10}   fit error, spread of the repetitions"]
    for name, on in profile.costs.items():
        curve = on["cpu"].seconds
        points = curve.measured or tuple(zip(curve.sizes, curve.values, strict=True))
        for i, (size, seconds) in enumerate(points):
            told = f"   {curve.error:.0%}, {curve.spread:.0%}" if i == 0 else ""
            lines.append(f"{name if i == 0 else '':<10}{size:>8.0f}{seconds * 1000:>10.3f}{told}")
    learner, cores = profile.costs["learner"]["cpu"], profile.made["cores"]
    rest = {
        "an exchange between learners": learner.exchange_s.at(cores),
        "handing over to another process": profile.link.latency_s,
        "new weights": profile.sync.copy_s.at(1),
        "the driver": profile.workflow.fixed_s,
    }
    lines += [f"{name} {1000 * seconds:.2f} ms" for name, seconds in rest.items()]
    lines.append(f"measured in {profile.made['seconds']:.0f} s")
    if profile.made.get("load", 0) > cores + 1:
        lines.append(
            f"the machine was busy with other work (load {profile.made['load']} on {cores} cores): measure again"
        )
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
