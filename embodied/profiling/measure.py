"""Measure the costs of a recipe's parts: python -m embodied.profiling recipe=maniskill_ppo [seconds=60]

Each part is measured on its kind of device, on all devices of that kind at the same time, as in a run. Then short real
runs measure the remaining costs (`timed_run.py`). The result is one file, which `python -m embodied.plan`,
`placement=auto` and `python -m embodied.benchmark` read.

usage: python -m embodied.profiling recipe=NAME [seconds=60] [key=value ...] [--help]

  program   a workflow of your own, my_module:MyLoop, with roles of its own (default: collect, update, publish)
  seconds   about how long it may take: where that is short, so are rollouts, and sizes are left out (default 60)

The profile goes to runs/profiles/ and is found there by plan, benchmark and placement=auto.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from pydantic import Field

from embodied.config.recipe import RunConfig, load
from embodied.core.options import Strict
from embodied.learners.config import DEGREES
from embodied.placement import PlacementPlan, PlannedHost, Topology, roles_of
from embodied.placement.dataflow import Lengths
from embodied.placement.forecast import devices_of, join_words
from embodied.placement.grammar import Slot, extra_roles, join_devices
from embodied.placement.placement_plan import hosts_on, whole_workers
from embodied.placement.profile import NOTHING, Cost, Curve, Profile, constant, fit, write_profile
from embodied.placement.topology import DeviceClass
from embodied.profiling import stored_profiles
from embodied.profiling.timed_run import FEWEST_DECISIONS, Clock, calibrate
from embodied.records.progress import commit, timestamp
from embodied.run import devices, launch
from embodied.run.launch import program_of
from embodied.run.memory_check import CUDA_BYTES
from embodied.system.machine import LoadMeter, load_before, under_load
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

if TYPE_CHECKING:
    from embodied.profiling.role_probe import Moves

REPEATS = 3
QUANTILES = 33  # number of quantiles of the lengths of answers
PROBING = 0.4  # share of the time for the parts; the rest is for short real runs
MOST_PROBES = 8  # processes that measure at the same time
MOST_SIZES = 4
UNMEASURED = Curve((0.0, 1.0), (0.0, 1e-9))  # of a role without a probe: more workers are faster, as when it is known
LEAST_ALONE = 0.5  # two threads of a core slow each other down by at most this factor; less is noise
PROBERS = {  # the measuring worker, for language policies and for robot policies
    True: "embodied.profiling.conversation_probe:ConversationProbe",
    False: "embodied.profiling.role_probe:ProbeWorker",
}


class Options(Strict):
    seconds: float = Field(60.0, gt=0)


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, __doc__)


def start(argv: list[str]) -> None:
    program, words = program_of(argv)
    options, rest = launch.own_options(Options, words)
    loaded = load(rest)
    if loaded is None:
        return
    config, _ = launch.planned(stored_profiles.timed_recipe(loaded.config), roles=roles_of_run(program, loaded.config))
    profile = measure(config, argv, options.seconds, print, program)
    path = stored_profiles.profile_path(config, profile.made, roles_of(roles_of_run(program, loaded.config)))
    write_profile(profile, path)
    print("\n".join(describe(profile)))
    print(f"\nprofile     {path}")


def measure(
    config: RunConfig,
    arguments: Sequence[str],
    seconds: float,
    say: Callable[[str], None],
    program: type[EmbodiedLoop] = EmbodiedLoop,
) -> Profile:
    """Measure the parts, then calibrate with short real runs of the program, which also measure other roles.
    `arguments`: of the command that measures this recipe."""
    roles = roles_of(roles_of_run(program, config))
    config = stored_profiles.timed_recipe(config).with_values("cluster", memory_gb=None)
    clock = Clock(seconds)
    topology = devices.machines(config)
    counts, nodes = stored_profiles.device_counts(topology), len(topology.nodes)
    on = stored_profiles.describe_devices(counts, nodes)
    before, meter = load_before(), LoadMeter()
    with tempfile.TemporaryDirectory(prefix="embodied-profile-") as logs:
        say(f"measuring on {on}, about {seconds:.0f} s: {', '.join(map(str, sites_of(config, topology)))}")
        probed = probe(config, topology, clock, Path(logs))
        made = {
            "recipe": config.run.name,
            "arguments": [*arguments],
            "name": f"{config.run.name} on {stored_profiles.processor()}, {on}",
            "key": stored_profiles.cost_key(config, roles),
            "devices": counts,
            "nodes": nodes,
            "commit": commit(),
            "date": timestamp(),
            # Each conversation continues as soon as it is answered, so stages would not help.
            "stages": [n for n in (1, 2, 4) if config.env.num_envs % n == 0 and (n == 1 or not config.policy.speaks)],
        }
        if config.algo.whole_episodes:
            # Episodes of an untrained policy last until their step limit.
            made["episode_decisions"] = probed.horizon
        costs = probed.costs | {
            role.name: {
                str(c): Cost(UNMEASURED) for c in stored_profiles.device_kinds(config, topology, roles)[role.name]
            }
            for role in extra_roles(roles)
        }
        if probed.lengths:
            made["lengths"] = asdict(probed.lengths)
        whole = stored_profiles.dataflow_of(config, probed.horizon, roles, probed.lengths)
        profile = Profile(whole, costs, made=made)
        profile = calibrate(config, profile, topology, clock, Path(logs), say, probed.reset_s, program)
        traced = profile.dataflow
        profile = replace(profile, dataflow=replace(whole, edges=traced.edges, fixed_s=traced.fixed_s))
    # Workers on a Ray cluster are not child processes of this one, and would count as other programs.
    during = None if config.cluster.backend == "ray" else meter.load_of_others()
    busy = {"before": before["others"], "during": during}
    return replace(profile, made={**profile.made, "seconds": round(clock.spent(), 1), "busy": busy})


@dataclass(frozen=True)
class Site:
    """Devices of one kind, and the parts of the recipe on them."""

    on: DeviceClass
    parts: tuple[str, ...]
    sims: int = 0  # on other devices, at most
    each: int = 1  # devices of a process that measures

    def sizes(self, config: RunConfig) -> list[int]:
        """Numbers of envs per worker and stage: a device's share first, then sizes around it. If sims run elsewhere,
        numbers of rows of a policy worker's call: at most its share, the rows of a merged call, or a sim's request."""
        total, workers = config.env.num_envs, max(self.on.count // self.each, 1)
        if "sim" in self.parts:
            shares = [total // n for n in (workers, 1, 2 * workers, 4 * workers, 8 * workers)]
        else:
            most = max(min(total // workers, config.merged_rows), total // self.sims, 1)
            shares = [most // n for n in (1, 2, 4, 16)]
        return list(dict.fromkeys(max(1, share) for share in shares))[:MOST_SIZES]

    def __str__(self) -> str:
        return f"{join_words(self.parts)} on {stored_profiles.describe_devices({str(self.on): self.on.count})}"


def sites_of(config: RunConfig, topology: Topology) -> list[Site]:
    """Every used kind of device, the simulators' kind first."""
    where = stored_profiles.device_kinds(config, topology)
    kinds = {c.name: c for classes in where.values() for c in classes}
    sims = sum(c.count for c in where["sim"])
    gpus = config.policy.worker_gpus
    return [
        Site(c, tuple(role for role, classes in where.items() if c in classes), sims, gpus if c.kind == "gpu" else 1)
        for c in kinds.values()
    ]


def probe_hosts(site: Site, topology: Topology, draws: bool) -> list[PlannedHost]:
    """A process on each device of all machines, or on several; `draws`: simulators on cores render on GPUs."""
    chosen = sorted(devices_of(site.on, topology), key=lambda device: device[2])
    if site.each > 1:
        slots = [Slot(kind, (number,), node) for node, kind, number in whole_workers(chosen, site.each)]
        return hosts_on(("probe",), join_devices(slots, site.each)[:MOST_PROBES], topology)
    chosen = chosen[:MOST_PROBES]
    cards = min(len(node.gpus) for node in topology.nodes) if draws and site.on.kind == "cpu" else 0
    slots = [
        Slot(kind, (number,), node, render=f"gpu:{i * cards // len(chosen)}" if cards else "")
        for i, (node, kind, number) in enumerate(chosen)
    ]
    return hosts_on(("probe",), slots, topology)


@dataclass(frozen=True)
class Probed:
    costs: dict[str, dict[str, Cost]]
    horizon: int  # decisions of a rollout, or of a whole episode
    reset_s: float  # of whole episodes' resets, per episode of a row; part of a sim's cost per decision
    lengths: Lengths | None = None  # of conversations


def probe(config: RunConfig, topology: Topology, clock: Clock, logs: Path) -> Probed:
    """The costs of every part on each of its kinds of devices."""
    costs: dict[str, dict[str, Cost]] = {"sim": {}, "policy": {}, "learner": {}}
    sites, horizon, reset_s, lengths = sites_of(config, topology), 1, 0.0, None
    for place, site in enumerate(sites):
        share = PROBING * (place + 1) / len(sites)
        hosts = probe_hosts(site, topology, devices.draws_on_gpus(config.env))
        curves = probe_site(config, site, hosts, clock, share, logs / f"probe-{site.on}")
        for name, on in curves.costs.items():
            costs[name] |= on
        horizon = curves.horizon
        reset_s = curves.reset_s if "sim" in site.parts else reset_s
        lengths = curves.lengths or lengths
    return Probed(costs, horizon, reset_s, lengths)


def probe_site(
    config: RunConfig, site: Site, hosts: list[PlannedHost], clock: Clock, share: float, logs: Path
) -> Probed:
    """The costs of a site's parts on one device, while its other devices do the same. `share`: the largest share of the
    time."""
    measured: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    alone: dict[str, float] = defaultdict(lambda: 1.0)
    used_bytes: dict[str, dict[float, float]] = defaultdict(lambda: defaultdict(float))
    resets: list[float] = []
    conversations: list[tuple[int, int]] = []
    learns = "learner" in site.parts
    logs.mkdir(parents=True)
    here = not any(host.node for host in hosts)
    plan = PlacementPlan("probe", tuple(hosts), config.env.num_envs)
    with launch.cluster(config.with_values("cluster", backend="local") if here else config, plan, logs) as run:
        prober = PROBERS[config.policy.speaks]
        probes = run.launch(prober, "probe", config, devices.torch_device(site.on.kind), site.parts)
        sizes = site.sizes(config)
        decisions, horizon = affordable(sizes, probes, clock, share)
        for place, num_envs in enumerate(sizes):
            if place > 1 and not clock.has_left(share):  # a curve needs two sizes
                break
            for samples in probes.rollout(num_envs, decisions, REPEATS).wait():
                for name, seconds in samples.seconds.items():
                    measured[name][num_envs] += seconds
                for name, num_bytes in (("sim", samples.bytes), ("policy", samples.policy_bytes)):
                    used_bytes[name][num_envs] = max(used_bytes[name][num_envs], num_bytes)
                resets += samples.reset_s if place == 0 else []
                conversations += samples.conversations
                pass_cost = samples.pass_cost
            minibatch = share_of_step(config, num_envs, decisions)
            for learned in probes.update(num_envs, minibatch, 1).wait() if learns else []:
                used_bytes["learner"][minibatch] = max(used_bytes["learner"][minibatch], *learned.pop("bytes"))
                for name, values in learned.items():
                    measured[name][minibatch] += values
            if place == 0 and len(hosts) > 1:
                alone |= beside_nobody(probes[0], measured, num_envs, decisions, minibatch)
        moves = probes.moves(sizes[0]).wait() if learns else []
    needed = {name: fit({size: [num_bytes] for size, num_bytes in used.items()}) for name, used in used_bytes.items()}
    costs = {}
    if "sim" in site.parts:
        costs["sim"] = Cost(fit(measured["sim"]), bytes=needed["sim"], alone=alone["sim"])
    if "policy" in site.parts:
        last_s = fit(measured["value"]) if "value" in measured else NOTHING
        policy = Cost(fit(measured["policy"]), bytes=needed["policy"], last_s=last_s, alone=alone["policy"])
        costs["policy"] = with_moves(policy, [moves_of_worker["policy"] for moves_of_worker in moves], site.on)
    if learns:
        first = {name: median(next(iter(measured[name].values()))) for name in ("fixed", "ahead", "item_bytes")}
        learner = Cost(fit(measured["step"]), needed["learner"], first["fixed"], alone=alone["whole"])
        learner = replace(learner, ahead_s=first["ahead"], item_bytes=first["item_bytes"])
        costs["learner"] = with_moves(learner, [moves_of_worker["learner"] for moves_of_worker in moves], site.on)
    on = {name: {str(site.on): cost} for name, cost in costs.items()}
    lengths = lengths_of(config, conversations, pass_cost) if conversations else None
    return Probed(on, horizon, median(resets or [0.0]), lengths)


def lengths_of(config: RunConfig, conversations: list[tuple[int, int]], pass_cost: tuple[float, ...]) -> Lengths:
    """The lengths of these conversations (tokens of the prompt, and of the rest), in the form of a plan."""
    prompts, answers = np.array(conversations).T
    quantiles = np.quantile(np.maximum(answers, 1), np.linspace(0, 1, QUANTILES)).round().astype(int)
    shares = config.learner.share_prompts
    return Lengths(
        tuple(quantiles.tolist()),
        config.algo.group_size,
        int(np.median(prompts)) if shares else 0,
        config.policy.max_running,
        *pass_cost[:2],  # pictures are not planned by their places
        degrees=DEGREES if config.learner.sequence_degree == "auto" else (1,),
    )


def share_of_step(config: RunConfig, num_envs: int, decisions: int) -> int:
    """The items of a gradient step from `num_envs` of all envs; conversations in whole groups."""
    whole = config.algo.minibatch_size or decisions * config.env.num_envs
    share = max(1, round(whole * num_envs / config.env.num_envs))
    if config.policy.speaks:
        share = max(share // config.algo.group_size, 1) * config.algo.group_size
    return min(share, num_envs * decisions)


def beside_nobody(probe, together: dict, num_envs: int, decisions: int, minibatch: int) -> dict[str, float]:
    """The seconds of each part on one device while the other devices are idle, relative to all devices working."""
    (samples,) = probe.rollout(num_envs, decisions, REPEATS).wait()
    took = {name: samples.seconds[name][-REPEATS:] for name in ("sim", "policy") if name in together}
    if "whole" in together:
        (learned,) = probe.update(num_envs, minibatch, 1).wait()
        took["whole"] = learned["whole"]
    size = {"sim": num_envs, "policy": num_envs, "whole": minibatch}
    ratios = {name: median(seconds) / median(together[name][size[name]]) for name, seconds in took.items()}
    return {name: float(min(max(ratio, LEAST_ALONE), 1.0)) for name, ratio in ratios.items()}


def with_moves(cost: Cost, moves: list[Moves], on: DeviceClass) -> Cost:
    """The cost with its workers' device memory, as a run counts it, and the seconds to offload and onload it."""
    seconds = {name: median(getattr(m, name) for m in moves) for name in ("onload_s", "offload_s")}
    alike = {name: getattr(moves[0], name) for name in ("weight_bytes", "split_bytes")}
    context_bytes = CUDA_BYTES if on.kind == "gpu" else 0.0
    needed = constant(moves[0].bytes) if moves[0].split_bytes else cost.bytes
    return replace(cost, bytes=needed.shifted_by(context_bytes), kept_bytes=context_bytes, **seconds, **alike)


def affordable(sizes: list[int], probes, clock: Clock, share: float) -> tuple[int, int]:
    """The largest number of decisions of a rollout with which two numbers of envs can be measured in time, and the
    recipe's number of decisions."""
    samples = probes.rollout(sizes[0], FEWEST_DECISIONS, 1).wait()
    horizon = samples[0].horizon
    decision_s = max(sample.decision_s for sample in samples)
    rows = sum(sizes[:2]) / sizes[0] + 1  # and the first size again, alone
    left = share * clock.seconds - clock.spent()
    most = int(left / 2 / ((REPEATS + 1) * rows * decision_s))
    return min(max(FEWEST_DECISIONS, most), horizon), horizon


def describe(profile: Profile) -> list[str]:
    """Every curve with its fit."""
    lines = ["", f"{'part':<10}{'on':<10}{'size':>8}{'ms':>10}   fit error, spread of the repetitions"]
    for name, kind, cost in [(name, kind, cost) for name, on in profile.costs.items() for kind, cost in on.items()]:
        curve = cost.seconds
        points = curve.measured or tuple(zip(curve.sizes, curve.values, strict=True))
        for i, (size, seconds) in enumerate(points):
            quality = f"   {curve.error:.0%}, {curve.spread:.0%}" if i == 0 else ""
            first = f"{name:<10}{kind:<10}" if i == 0 else f"{'':<20}"
            lines.append(f"{first}{size:>8.0f}{seconds * 1000:>10.3f}{quality}")
    counts = profile.made["devices"]
    learner = next(iter(profile.costs["learner"].items()))
    rest = {
        "waiting for the slowest sim, per decision": max(
            cost.exchange_s.at(counts[kind]) for kind, cost in profile.costs["sim"].items()
        ),
        "an exchange between learners": learner[1].exchange_s.at(counts[learner[0]]),
        "handing over to another process": profile.link.latency_s,
        "new weights": profile.sync.copy_s.at(1),
        "the driver": profile.dataflow.fixed_s,
    }
    lines += [f"{name} {1000 * seconds:.2f} ms" for name, seconds in rest.items()]
    on = stored_profiles.describe_devices(counts, profile.made["nodes"])
    lines.append(f"measured in {profile.made['seconds']:.0f} s on {on}")
    if busy := under_load(profile.made.get("busy") or {}, counts["cpu"]):
        lines.append(f"{busy}: measure again when the machine is quiet")
    return lines
