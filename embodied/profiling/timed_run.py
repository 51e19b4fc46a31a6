"""Short real runs: timed iterations of the real recipe under one plan, without writing any file.

A profile takes from them the costs of a real run beyond its parts: transfers between processes, sims and learners
waiting for each other, weight sync, the driver, and roles without a probe. A benchmark compares them with predictions.
Both store them in the profile (`Profile.runs`), for `plan` and `placement=auto`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from statistics import median
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.placement import PlacedRole, PlacementPlan, Topology, roles_of
from embodied.placement.dataflow import Edge, traced_edges
from embodied.placement.forecast import as_placement, forecast, phases
from embodied.placement.grammar import EMBODIED, extra_roles
from embodied.placement.iteration_cost import Choice, Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.profile import Cost, Curve, Link, Profile, Sync, constant
from embodied.placement.topology import DeviceClass
from embodied.profiling.stored_profiles import dataflow_of, device_kinds
from embodied.records.timeline import Timeline
from embodied.run import launch
from embodied.run.devices import draws_on_gpus, plan_of_map
from embodied.runtime.channel import hosts_of_runs
from embodied.runtime.worker import Total, seconds_between
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop

MANY = 1_000_000  # iterations, so that the learning-rate schedule is flat
PHASES = ("rollout", "update", "publish")
# The work of an iteration by role; other roles are measured as a whole.
OUTER = {"sim": ("play",), "policy": ("serve",), "learner": ("learn",)}
WAITING = ("wait", "sync")
AFTER = ("update", "encoding", "swap", "weights", "rest")  # parts of an iteration besides the rollout


@dataclass(frozen=True)
class Round:
    """One timed iteration. `busy` is, for every role, the share of its workers' time that is not waiting."""

    seconds: float
    rollout_s: float
    update_s: float
    publish_s: float
    sync_s: float  # of the update: a learner's exchanges with other learners, waits included; mean over learners
    barrier_s: float  # of the rollout: waits of finished sims for the slowest sim; mean over sims
    first_backward_s: float | None  # since the iteration began; None if the first rank had no gradient
    env_steps: float
    busy: dict[str, float]

    @property
    def rest_s(self) -> float:
        """Seconds outside of the phases."""
        return max(self.seconds - self.rollout_s - self.update_s - self.publish_s, 0.0)


def typical(rounds: Sequence[Round]) -> Round:
    """The median of every number of these rounds, where it is known."""

    def middle(values: Iterable[float | None]) -> Any:
        numbers = [value for value in values if value is not None]
        return median(numbers) if numbers else None

    numbers = {field.name: middle(getattr(r, field.name) for r in rounds) for field in fields(Round)[:-1]}
    return Round(**numbers, busy={role: median(r.busy[role] for r in rounds) for role in rounds[0].busy})


def timed_forecast(predicted: Mapping[str, Any], rounds: Sequence[Round]) -> dict[str, Any]:
    """A run as a profile keeps it: the forecast, and the rounds under its placement."""
    return {**predicted, "rounds": [asdict(timed) for timed in rounds]}


class TimedRun:
    """Use it as a context manager: it starts the processes of the plan and ends them."""

    def __init__(
        self,
        config: RunConfig,
        plan: PlacementPlan,
        logs: Path,
        program: type[EmbodiedLoop] = EmbodiedLoop,
        reserves: bool = True,
    ) -> None:
        self.config, self.plan, self.logs, self.program, self.reserves = config, plan, logs, program, reserves
        self.iteration = 0

    def __enter__(self) -> TimedRun:
        self.logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            processes = launch.cluster(self.config, self.plan, self.logs, program=self.program, reserves=self.reserves)
            cluster = stack.enter_context(processes)
            self.loop = self.program(self.config, cluster)
            self.loop.publish(0)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)

    def iterate(self) -> Round:
        before = self._totals()
        self.flows()  # forget earlier iterations
        started = time.perf_counter()
        _, numbers = self.loop.iterate(self.iteration, MANY)
        seconds = time.perf_counter() - started
        self.iteration += 1
        after = self._totals()
        busy = {}
        for group in self.loop.groups:
            shares = [self._busy(before[worker], after[worker], group.role) / seconds for worker in group.workers]
            busy[group.role] = sum(shares) / len(shares)
        phases = seconds_between(before["driver"], after["driver"], *PHASES)
        learners = self.loop.learners.workers
        synced = sum(sum(seconds_between(before[w], after[w], "sync")) for w in learners) / len(learners)
        played = [sum(seconds_between(before[w], after[w], "play")) for w in self.loop.workers.sims.workers]
        barrier_s = max(played) - sum(played) / len(played)
        first = numbers.get("time/first_backward_s")
        return Round(seconds, *phases, synced, barrier_s, first, int(numbers["env_steps"]), busy)

    def traced(self, path: Path) -> Path:
        """One more iteration, with a trace of all its work in `path`."""
        with Timeline(self.loop.groups, self.loop.timers, path, 1) as timeline:
            self.iterate()
            timeline.collect(1)
        return path

    def flows(self) -> dict[tuple[str, str], tuple[float, float]]:
        """The edges between roles in the last iteration, with first and last time. Weights do not only use channels."""
        role_names = {group.role for group in self.loop.groups}
        edges: dict[tuple[str, str], tuple[float, float]] = {("learner", "policy"): self.loop.weight_sync.times}
        here = []  # through channels whose home is the driver
        for host in hosts_of_runs.values():
            here.append(host.flows)
            host.flows = {}
        for flows in [*here, *(flows for group in self.loop.groups for flows in group.flows().wait())]:
            for workers, (first, last) in flows.items():
                roles = tuple(worker.rpartition("-")[0] for worker in workers)
                if role_names.issuperset(roles):
                    before, after = edges.get(roles, (first, last))
                    edges[roles] = min(before, first), max(after, last)
        return through_the_driver(edges, roles_of_run(self.program, self.loop.config))

    def peak_bytes(self) -> int:
        """The sum of the peak bytes of the plan's processes; shared pages count in every process that maps them."""
        peaks: dict[tuple[str, int], int] = {}
        for group in self.loop.groups:
            peaks |= zip(group.process().wait(), group.peak_bytes().wait(), strict=True)
        return sum(peaks.values())

    def idle(self, rounds: Sequence[Round], num_devices: int) -> float:
        """The share of all devices' time without work."""
        busy = sum(sum(r.busy[g.role] for r in rounds) / len(rounds) * len(g.workers) for g in self.loop.groups)
        return max(0.0, 1 - busy / num_devices)

    def _totals(self) -> dict[str, dict[str, Total]]:
        seconds = {"driver": self.loop.timers.totals()}
        for group in self.loop.groups:
            for worker, totals in zip(group.workers, group.timings().wait(), strict=True):
                seconds[worker] = totals
        return seconds

    def _busy(self, before: dict[str, Total], after: dict[str, Total], role: str) -> float:
        if role not in OUTER:
            working = [name for name in after if name not in WAITING]
            return sum(after[name].own_s - (before[name].own_s if name in before else 0.0) for name in working)
        worked, waited = (sum(seconds_between(before, after, *names)) for names in (OUTER[role], WAITING))
        return max(worked - waited, 0.0)


def through_the_driver(
    flows: dict[tuple[str, str], tuple[float, float]], roles: Sequence[Any]
) -> dict[tuple[str, str], tuple[float, float]]:
    """These edges, and edges through the driver, such as prompts for any engine with room: answers come back directly
    and give the times. A role that asks another role sends its results on after the answers: sim -> reward -> judge ->
    learner. `roles`: as declared by the program."""
    declared = {(role.name, other) for role in roles for other in role.sends_to}
    routed = {pair: flows[pair[::-1]] for pair in declared if pair not in flows and pair[::-1] in flows}
    edges = flows | routed
    for role in roles:
        if role.asks and edges.pop((role.asks, role.name), None):
            handed_on = {pair for pair in edges if pair[0] == role.name and pair[1] != role.asks}
            edges |= {(role.asks, target): edges[source, target] for source, target in handed_on}
    return edges


# Costs for a profile

FEWEST_DECISIONS = 4
REAL_ITERATIONS = 4  # iterations of each of two short real runs; the first one warms up
START_S = 8.0  # start of a real run's processes on an idle machine


@dataclass
class Clock:
    seconds: float
    started: float = field(default_factory=time.monotonic)

    def spent(self) -> float:
        return time.monotonic() - self.started

    def has_left(self, share: float) -> bool:
        """True if less than this share of the time has passed."""
        return self.spent() < share * self.seconds


def calibrate(
    config: RunConfig,
    profile: Profile,
    topology: Topology,
    clock: Clock,
    logs: Path,
    say,
    reset_s: float,
    program: type,
) -> Profile:
    """Short real runs: first rollout and update in turns on all devices, then policies with learners on other devices
    than sims. Both always run, since without the second one transfers would cost nothing."""
    classes = [c for c in topology.classes() if c.count and profile.knows(c)]
    roles = roles_of(roles_of_run(program, config))
    where, draws = device_kinds(config, topology, roles), draws_on_gpus(config.env)
    on = where["sim"][0], where["learner"][0]
    layouts = timed_layouts(*on, config.env.num_envs, extra_roles(roles), config.policy.worker_gpus)
    expected_s = Pricer(profile.dataflow, profile, classes).price(layouts[0]).seconds
    config, profile = shorten_iterations(config, profile, expected_s, clock, roles)
    resets_s = more_resets(config, profile, reset_s)
    profile, timed = with_sim(profile, resets_s), {}
    for place, layout in enumerate(layouts):
        say(f"a short real run: {layout}")
        pricer = Pricer(profile.dataflow, profile, classes)
        plan = plan_of_map(config, as_placement(pricer, layout, topology, draws), topology, roles)
        timed[layout], edges = real_run(config, plan, logs / f"run-{place}", clock, program)
        seen = typical(timed[layout])
        if not place:
            profile = replace(profile, dataflow=replace(profile.dataflow, edges=edges))
            profile = with_others(profile, pricer, layout, seen, extra_roles(roles))
            pricer = Pricer(profile.dataflow, profile, classes)
        profile = (with_turns if not place else with_apart)(profile, pricer, layout, seen)
    choices = [Choice(Pricer(profile.dataflow, profile, classes), layout) for layout in layouts]
    runs = [timed_forecast(forecast(choice, topology, draws), timed[choice.layout]) for choice in choices]
    return replace(with_sim(profile, -resets_s), runs=runs)


def timed_layouts(
    sims: DeviceClass, networks: DeviceClass, num_envs: int, more: Sequence[PlacedRole] = (), policy_gpus: int = 1
) -> list[Layout]:
    """The layouts of the real runs: first learners take turns with policies; then, with enough devices, both share
    processes on other devices than sims. Other roles are beside the policies, or, without networks, beside the sims.
    Policy workers with several GPUs share none."""
    computing = tuple(role.name for role in more if role.network or sims == networks)
    playing = tuple(role.name for role in more if role.name not in computing)
    workers = next(k for k in range(min(sims.count, num_envs), 0, -1) if num_envs % k == 0)
    if sims != networks:
        cards = min(networks.count, workers)
        simulating, acting = Zone(("sim", *playing), sims.name, workers), ("policy", *computing)
        learning = (Zone(("learner",), networks.name, cards),)
        if policy_gpus > 1:
            return [Layout(((simulating, Zone(acting, networks.name, networks.count)), learning))]
        turns = (simulating, Zone(acting, networks.name, cards)), learning
        return [Layout(turns), Layout(((simulating, Zone((*acting, "learner"), networks.name, cards)),))]
    turns = (Zone(("sim", "policy", *computing), sims.name, workers),), (Zone(("learner",), sims.name, workers),)
    apart = ((Zone(("sim",), sims.name, 1), Zone(("policy", *computing, "learner"), sims.name, 1)),)
    return [Layout(turns), *([Layout(apart)] if sims.count > 1 else [])]


def positions(pricer: Pricer, layout: Layout) -> dict[str, tuple[Zone, int]]:
    return {name: place for layer in layout.layers for name, place in pricer.places(layer).items()}


def longer_s(pricer: Pricer, layout: Layout, seen: Round) -> float:
    """Seconds by which a rollout, with the roles between sims and learners, was longer than its parts."""
    spent = phases(pricer, layout)
    return max(seen.rollout_s - sum(seconds for name, seconds in spent.items() if name not in AFTER), 0.0)


def latency_of(pricer: Pricer, layout: Layout, seen: Round) -> float:
    """Seconds of a transfer between a sim's process and a policy's, from a rollout."""
    there_and_back = max(longer_s(pricer, layout, seen) - seen.barrier_s, 0.0) / (pricer.dataflow["sim"].calls + 1)
    return there_and_back / 2


def with_apart(profile: Profile, pricer: Pricer, layout: Layout, seen: Round) -> Profile:
    """The profile with costs from the second run: shared weights without a transfer, and requests with one."""
    link = profile.link
    if link == Link():
        link = Link(latency_s=latency_of(pricer, layout, seen))
    return replace(profile, link=link, sync=replace(profile.sync, shared_s=seen.publish_s))


def more_resets(short: RunConfig, profile: Profile, reset_s: float) -> float:
    """Seconds of resets in a sim's decision that are due to shortened episodes."""
    whole = profile.made.get("episode_decisions")
    if whole is None:
        return 0.0
    cut = -(-short.env.max_episode_steps // short.policy.chunk) if short.env.max_episode_steps else whole
    return reset_s * max(1 / cut - 1 / whole, 0.0)


def with_sim(profile: Profile, seconds: float) -> Profile:
    """The profile with sims that take these seconds longer for each decision."""
    return with_costs(profile, "sim", lambda cost: replace(cost, seconds=cost.seconds.shifted_by(seconds)))


def with_barrier(profile: Profile, sims: int, seconds: float) -> Profile:
    """The profile with a wait per decision of this number of sims for the slowest; a single sim does not wait."""
    if sims == 1:
        return profile
    return with_costs(profile, "sim", lambda cost: replace(cost, exchange_s=Curve((1.0, float(sims)), (0.0, seconds))))


def with_costs(profile: Profile, name: str, change: Callable[[Cost], Cost]) -> Profile:
    """The profile with another cost of a component on all kinds of devices."""
    changed = {kind: change(cost) for kind, cost in profile.costs[name].items()}
    return replace(profile, costs={**profile.costs, name: changed})


def with_others(profile: Profile, pricer: Pricer, layout: Layout, seen: Round, more: Iterable[PlacedRole]) -> Profile:
    """The profile with the costs of roles without a probe, in proportion to their items."""
    at = positions(pricer, layout)
    for role in more:
        size = -(-profile.dataflow[role.name].items // int(pricer.count(role.name, at, 1)))
        curve = Curve((0.0, float(size)), (0.0, seen.busy[role.name] * seen.seconds))
        profile = with_costs(profile, role.name, lambda cost, curve=curve: replace(cost, seconds=curve))
    return profile


def with_turns(profile: Profile, pricer: Pricer, layout: Layout, seen: Round) -> Profile:
    """The profile with the first run's additional seconds assigned to its parts."""
    at, dataflow = positions(pricer, layout), profile.dataflow
    ranks = int(pricer.count("learner", at, 1))
    spent = phases(pricer, layout)
    besides = max(seen.update_s - spent["update"] - spent.get("encoding", 0.0), 0.0)
    exchange = min(seen.sync_s, besides)
    if at["sim"][0] is at["policy"][0]:
        more = longer_s(pricer, layout, seen)
        barrier = min(seen.barrier_s, more)
        profile = with_sim(profile, (more - barrier) / dataflow["sim"].calls)
        profile = with_barrier(profile, int(pricer.count("sim", at, 1)), barrier / dataflow["sim"].calls)
    else:
        profile = replace(profile, link=Link(latency_s=latency_of(pricer, layout, seen)))

    def learning(cost: Cost) -> Cost:
        cost = replace(cost, fixed_s=cost.fixed_s + besides - exchange)
        if ranks == 1:
            return cost
        return replace(cost, exchange_s=Curve((1.0, float(ranks)), (0.0, exchange / dataflow["learner"].calls)))

    profile = with_costs(profile, "learner", learning)
    sync = Sync(seen.publish_s, constant(seen.publish_s))
    return replace(profile, dataflow=replace(dataflow, fixed_s=seen.rest_s), sync=sync)


def shorten_iterations(
    config: RunConfig, profile: Profile, expected_s: float, clock: Clock, roles: Sequence[PlacedRole] = EMBODIED
) -> tuple[RunConfig, Profile]:
    """The recipe with fewer decisions and epochs per iteration, if iterations of `expected_s` would take too long.
    Costs from real runs are per decision and per gradient step."""
    left = max(clock.seconds - clock.spent() - 2 * START_S, 0.1 * clock.seconds)
    share = left / (2 * REAL_ITERATIONS * expected_s)
    if share >= 1:
        return config, profile
    decisions = profile.dataflow["sim"].calls
    if not config.algo.whole_episodes:
        kept = max(min(FEWEST_DECISIONS, decisions), int(share * decisions))
        short, length = config.with_values("algo", rollout_decisions=kept), 1
    else:
        short, length = fewer_episodes(config, share, profile.made["episode_decisions"])
    kept = dataflow_of(short, length, roles)["sim"].calls / decisions
    minibatch = config.algo.minibatch_size
    short = short.with_values("algo", minibatch_size=minibatch and max(1, round(kept * minibatch)), epochs=1)
    return short, replace(profile, dataflow=dataflow_of(short, length, roles, profile.dataflow.lengths))


def fewer_episodes(config: RunConfig, share: float, length: int) -> tuple[RunConfig, int]:
    """The recipe with fewer groups, at least one per `group_size` envs; if that is still too long, with shorter
    episodes."""
    algo = config.algo
    fewest = min(-(-config.env.num_envs // algo.group_size), algo.groups)
    groups = max(fewest, int(share * algo.groups))
    cut = max(min(FEWEST_DECISIONS, length), min(length, int(length * share * algo.groups / groups)))
    if cut < length:
        config = config.with_values("env", max_episode_steps=cut * config.policy.chunk)
    return config.with_values("algo", groups=groups), cut


def real_run(
    config: RunConfig, plan: PlacementPlan, logs: Path, clock: Clock, program: type
) -> tuple[tuple[Round, ...], tuple[Edge, ...]]:
    """Iterations, at least one after a warm-up, and the edges between roles."""
    with TimedRun(config, plan, logs, program) as timed_run:
        rounds = [timed_run.iterate()]
        while len(rounds) < 2 or (len(rounds) < REAL_ITERATIONS and clock.has_left(1.0)):
            rounds.append(timed_run.iterate())
        return tuple(rounds[1:]), traced_edges(timed_run.flows())
