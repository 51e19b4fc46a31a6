"""What only a real run shows of a recipe's costs: handing over between processes, learners waiting for each other, new
weights, and the driver. Short real runs on the devices that were measured tell them, as what these take beyond their
parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.placement import PlacementPlan, Role, Topology, make_plan, roles_of
from embodied.placement.cost_curves import Curve, constant
from embodied.placement.costs import Pricer
from embodied.placement.dataflow import Edge, traced_edges
from embodied.placement.deploy import as_placement
from embodied.placement.grammar import EMBODIED, others
from embodied.placement.layout import DeviceClass, Layout, Zone
from embodied.placement.profile import Cost, Link, Profile, Sync
from embodied.profiling.store import dataflow_of, homes
from embodied.profiling.timed_run import Trial
from embodied.run.devices import draws_on_gpus

FEWEST_DECISIONS = 4
REAL_ITERATIONS = 4  # of each of two short real runs; the first one warms up
START_S = 8.0  # of the processes of a real run, on a machine that is not busy


@dataclass
class Clock:
    seconds: float
    started: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        return time.monotonic() - self.started

    def left(self, share: float) -> bool:
        """Whether less than this share of the time is spent."""
        return self.spent() < share * self.seconds


@dataclass(frozen=True)
class Seen:
    """Medians over the iterations of a short real run."""

    rollout_s: float
    update_s: float
    sync_s: float  # of it, between learners
    publish_s: float
    rest_s: float
    edges: tuple[Edge, ...]  # between roles, as the last iteration's items went through the channels
    busy_s: dict[str, float]  # of a worker of each role


def calibrate(
    config: RunConfig, profile: Profile, there: Topology, clock: Clock, logs: Path, say, reset_s: float, program: type
) -> Profile:
    """Short real runs: rollout and update in turns on all devices, then policies with learners, apart from sims.
    Without time for them, these costs are 0."""
    classes = [c for c in there.classes() if c.count and profile.knows(c)]
    roles = roles_of(program.roles)
    where, draws = homes(config, there, roles), draws_on_gpus(config.env)
    layouts = trial_layouts(where["sim"][0], where["learner"][0], config.env.num_envs, others(roles))
    config, profile = shortened(config, profile, Pricer(profile.dataflow, profile, classes), layouts[0], clock, roles)
    resets_s = more_resets(config, profile, reset_s)
    profile = with_sim(profile, resets_s)
    for place, layout in enumerate(layouts):
        if place and not clock.left(0.8):
            say("no time for a run with sims apart: handing over between processes counts as free")
            break
        say(f"a short real run: {layout}")
        pricer = Pricer(profile.dataflow, profile, classes)
        plan = make_plan(as_placement(pricer, layout, there, draws), there, config.env.num_envs, roles=roles)
        seen = real_run(config, plan, logs / f"run-{place}", clock, program)
        if not place:
            profile = replace(profile, dataflow=replace(profile.dataflow, edges=seen.edges))
            profile = with_others(profile, pricer, layout, seen, others(roles))
            pricer = Pricer(profile.dataflow, profile, classes)
        profile = (with_turns if not place else with_apart)(profile, pricer, layout, seen)
    return with_sim(profile, -resets_s)


def trial_layouts(sims: DeviceClass, networks: DeviceClass, num_envs: int, more: Sequence[Role] = ()) -> list[Layout]:
    """What the real runs are: learners take turns with policies; then, where there are enough devices, they share
    processes, and have others than sims. Other roles are beside the policies, or, without networks, the sims."""
    computing = tuple(role.name for role in more if role.network or sims == networks)
    playing = tuple(role.name for role in more if role.name not in computing)
    workers = next(k for k in range(min(sims.count, num_envs), 0, -1) if num_envs % k == 0)
    if sims != networks:
        cards = min(networks.count, workers)
        simulating, acting = Zone(("sim", *playing), sims.name, workers), ("policy", *computing)
        turns = (simulating, Zone(acting, networks.name, cards)), (Zone(("learner",), networks.name, cards),)
        return [Layout(turns), Layout(((simulating, Zone((*acting, "learner"), networks.name, cards)),))]
    turns = (Zone(("sim", "policy", *computing), sims.name, workers),), (Zone(("learner",), sims.name, workers),)
    apart = ((Zone(("sim",), sims.name, 1), Zone(("policy", *computing, "learner"), sims.name, 1)),)
    return [Layout(turns), *([Layout(apart)] if sims.count > 1 else [])]


def positions(layout: Layout) -> dict[str, tuple[Zone, int]]:
    return {name: (zone, zone.devices) for zone in layout.zones for name in zone.components}


def latency_of(profile: Profile, pricer: Pricer, layout: Layout, seen: Seen) -> float:
    """Of handing over between a sim's process and a policy's, as a rollout shows it."""
    expected = float(pricer.node_seconds(("sim", "policy"), positions(layout), 1))
    expected += beside_sims_s(profile, pricer, layout)
    return max(seen.rollout_s - expected, 0.0) / (profile.dataflow["sim"].calls + 1) / 2  # there and back


def with_apart(profile: Profile, pricer: Pricer, layout: Layout, seen: Seen) -> Profile:
    """With what the second run shows: weights that need not be handed over, and questions that must be."""
    link = profile.link
    if link == Link():
        link = Link(latency_s=latency_of(profile, pricer, layout, seen))
    return replace(profile, link=link, sync=replace(profile.sync, shared_s=seen.publish_s))


def more_resets(short: RunConfig, profile: Profile, reset_s: float) -> float:
    """Seconds of a sim's decision that go into resets because episodes are cut short here."""
    whole = profile.made.get("episode_decisions")
    if whole is None:
        return 0.0
    cut = -(-short.env.max_episode_steps // short.policy.chunk) if short.env.max_episode_steps else whole
    return reset_s * max(1 / cut - 1 / whole, 0.0)


def with_sim(profile: Profile, seconds: float) -> Profile:
    """The same with sims that take so much longer for each decision."""
    return with_costs(profile, "sim", lambda cost: replace(cost, seconds=cost.seconds.plus(seconds)))


def with_costs(profile: Profile, name: str, change: Callable[[Cost], Cost]) -> Profile:
    """With another cost of a component on all kinds of devices."""
    changed = {kind: change(cost) for kind, cost in profile.costs[name].items()}
    return replace(profile, costs={**profile.costs, name: changed})


def with_others(profile: Profile, pricer: Pricer, layout: Layout, seen: Seen, more: Iterable[Role]) -> Profile:
    """With what roles without a probe cost in a run, in proportion to their items."""
    at = positions(layout)
    for role in more:
        size = -(-profile.dataflow[role.name].items // int(pricer.count(role.name, at, 1)))
        curve = Curve((0.0, float(size)), (0.0, seen.busy_s[role.name]))
        profile = with_costs(profile, role.name, lambda cost, curve=curve: replace(cost, seconds=curve))
    return profile


def beside_sims_s(profile: Profile, pricer: Pricer, layout: Layout) -> float:
    """Seconds of a rollout that roles besides sims and policies take."""
    known = {role.name for role in EMBODIED}
    names = [c.name for c in profile.dataflow.components if c.name not in known]
    return sum(float(pricer.node_seconds((name,), positions(layout), 1)) for name in names)


def with_turns(profile: Profile, pricer: Pricer, layout: Layout, seen: Seen) -> Profile:
    """Put what the first run took beyond its parts where it belongs."""
    at, dataflow = positions(layout), profile.dataflow
    ranks = int(pricer.count("learner", at, 1))
    update = float(pricer.node_seconds(("learner",), at, 1) + pricer.ahead_seconds("learner", at))
    besides = max(seen.update_s - update, 0.0)
    exchange = min(seen.sync_s, besides)
    if at["sim"][0] is at["policy"][0]:
        rollout = float(pricer.node_seconds(("sim", "policy"), at, 1)) + beside_sims_s(profile, pricer, layout)
        profile = with_sim(profile, max(seen.rollout_s - rollout, 0.0) / dataflow["sim"].calls)
    else:
        profile = replace(profile, link=Link(latency_s=latency_of(profile, pricer, layout, seen)))

    def learning(cost: Cost) -> Cost:
        cost = replace(cost, fixed_s=cost.fixed_s + besides - exchange)
        if ranks == 1:
            return cost
        return replace(cost, exchange_s=Curve((1.0, float(ranks)), (0.0, exchange / dataflow["learner"].calls)))

    profile = with_costs(profile, "learner", learning)
    sync = Sync(seen.publish_s, constant(seen.publish_s))
    return replace(profile, dataflow=replace(dataflow, fixed_s=seen.rest_s), sync=sync)


def shortened(
    config: RunConfig, profile: Profile, pricer: Pricer, layout: Layout, clock: Clock, roles: Sequence[Role] = EMBODIED
) -> tuple[RunConfig, Profile]:
    """With fewer decisions and epochs per iteration, where so many iterations would take longer than there is time.
    What is taken from the real runs is per decision and per gradient step."""
    expected = pricer.price(layout).seconds
    left = max(clock.seconds - clock.spent() - 2 * START_S, 0.1 * clock.seconds)
    share = left / (2 * REAL_ITERATIONS * expected)
    if share >= 1:
        return config, profile
    decisions = profile.dataflow["sim"].calls
    if config.algo.name == "ppo":
        kept = max(min(FEWEST_DECISIONS, decisions), int(share * decisions))
        short, length = with_algo(config, rollout_decisions=kept), 1
    else:
        short, length = fewer_episodes(config, share, profile.made["episode_decisions"])
    kept = dataflow_of(short, length, roles)["sim"].calls / decisions
    short = with_algo(short, minibatch_size=max(1, round(kept * config.algo.minibatch_size)), epochs=1)
    return short, replace(profile, dataflow=dataflow_of(short, length, roles))


def with_algo(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"algo": config.algo.model_copy(update=changes)})


def fewer_episodes(config: RunConfig, share: float, length: int) -> tuple[RunConfig, int]:
    """One group for every group's worth of envs at least; if that is too much, episodes of fewer decisions."""
    algo = config.algo
    fewest = min(-(-config.env.num_envs // algo.group_size), algo.groups)
    groups = max(fewest, int(share * algo.groups))
    cut = max(min(FEWEST_DECISIONS, length), min(length, int(length * share * algo.groups / groups)))
    steps = cut * config.policy.chunk
    env = config.env if cut == length else config.env.model_copy(update={"max_episode_steps": steps})
    return with_algo(config, groups=groups).model_copy(update={"env": env}), cut


def real_run(config: RunConfig, plan: PlacementPlan, logs: Path, clock: Clock, program: type) -> Seen:
    """Two iterations at least, of which the first warms up."""
    with Trial(config, plan, logs, program) as trial:
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
        {role: median(r.busy[role] * r.seconds for r in rounds) for role in rounds[0].busy},
    )
