"""The work of an iteration: components, how much work each has, and which data flow between them.

The graph is data: it is traced from the channels of a run or read from a file. Edges that only matter for the next
iteration (weights) do not order the work of this one. Components that exchange data within an iteration in both
directions (sim and policy) form a cycle and are one node of the order.

Conversations differ in length: an engine ends with its longest answer, learner ranks wait for the busiest rank, and a
group is complete with its last answer. A profile has the lengths of answers as evenly spaced quantiles. Batches drawn
from them (equal in every process) are simulated on engines with a limited number of concurrent answers, and assigned
to ranks by `balance.py`. The resulting ratios multiply the profile's measured seconds; with one worker they are 1.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from embodied.placement.balance import ExchangeCosts, PassCost, SequenceLoad, deal_groups, divide_sequences

BATCHES = 4  # number of drawn batches
PARTS = 64  # parts of a rollout, for the times at which groups are complete


@dataclass(frozen=True)
class Lengths:
    """Lengths of answers. Example: an engine that writes two answers at a time writes three of 100, 200 and 900 tokens.
    If the longest begins last, when the first ends, all are written after 1,000 tokens, else after 900."""

    answers: tuple[int, ...]  # tokens of an answer, as even quantiles, the shortest first
    group: int = 1  # answers to one prompt
    prompt: int = 0  # tokens of the shared prompt
    running: int = 1  # answers that an engine writes at a time
    item: float = 1.0  # cost of a token in a learner's pass (`PassCost`)
    pair: float = 0.0  # cost of a pair of tokens in attention
    degrees: tuple[int, ...] = (1,)  # numbers of learners that may compute a group together

    def batches(self, groups: int, size: int) -> np.ndarray:
        """[BATCHES, groups, size] Drawn tokens of answers."""
        places = np.linspace(0.0, 1.0, len(self.answers))
        drawn = np.random.default_rng(0).random((BATCHES, groups, size))
        return np.maximum(np.interp(drawn, places, self.answers), 1).astype(int)


def lengths_from_json(content: Mapping[str, Any]) -> Lengths:
    """Lists in JSON are tuples here."""
    return Lengths(**{name: tuple(value) if isinstance(value, list) else value for name, value in content.items()})


def completion_times(lengths: np.ndarray, slots: int) -> np.ndarray:
    """The time at which each answer is complete, in tokens. The next answer begins when a slot is free.

    Lengths 3, 1, 4 in two slots: 3, 1, 5.
    """
    free = [0.0] * min(slots, len(lengths))
    times = np.empty(len(lengths))
    for place, length in enumerate(lengths):
        times[place] = heapq.heappop(free) + length
        heapq.heappush(free, times[place])
    return times


@cache
def engine_ratios(lengths: Lengths, answers: int, most: int) -> np.ndarray:
    """[most + 1] By the number of engines: the duration of all answers, relative to the mean duration of an equal part
    on one engine."""
    return interpolated_ratios(lambda engines: engine_ratio(lengths, answers, min(engines, answers)), most)


def engine_ratio(lengths: Lengths, answers: int, engines: int) -> float:
    ratios = []
    for batch in lengths.batches(1, answers)[:, 0]:
        alone = [completion_times(share, lengths.running).max() for share in np.array_split(batch, engines)]
        ratios.append((completion_times(batch, engines * lengths.running).max(), np.mean(alone)))
    together_s, alone_s = np.mean(ratios, axis=0)
    return max(1.0, float(together_s / alone_s))


@cache
def learner_ratios(lengths: Lengths, groups: int, size: int, most: int) -> np.ndarray:
    """[most + 1] By the number of learners: maximum over mean load, for groups of drawn lengths."""
    return interpolated_ratios(lambda ranks: learner_ratio(lengths, groups, size, ranks), most)


def interpolated_ratios(ratio: Callable[[int], float], most: int) -> np.ndarray:
    """The ratios of 0, 1, ... workers, computed at powers of two and interpolated between them."""
    counts = [2**power for power in range(most.bit_length() + 1)]
    ratios = [ratio(count) for count in counts]
    return np.interp(np.log2(np.maximum(np.arange(most + 1), 1)), np.log2(counts), ratios)


def learner_ratio(lengths: Lengths, groups: int, size: int, ranks: int) -> float:
    if ranks == 1:
        return 1.0
    return float(
        np.mean([dealt_ratio(lengths, batch + lengths.prompt, ranks) for batch in lengths.batches(groups, size)])
    )


def dealt_ratio(lengths: Lengths, batch: np.ndarray, ranks: int) -> float:
    """Maximum over mean load of learners for a batch [groups, size] of conversations' tokens: the lower of two
    assignments, with whole groups on single ranks, or with groups that several ranks compute together."""
    groups, size = batch.shape
    members = [[(group, place) for place in range(size)] for group in range(groups)]

    def cost(unit: Sequence[tuple[int, int]]) -> float:
        return PassCost(lengths.item, lengths.pair).of([int(batch[episode]) for episode in unit], lengths.prompt)

    whole = [cost(group) for group in members]
    rank_of = deal_groups(members, cost, ranks)
    loads = np.zeros(ranks)
    for group in members:
        for rank in {rank_of[member] for member in group}:
            loads[rank] += cost([member for member in group if rank_of[member] == rank])
    degrees = [degree for degree in lengths.degrees if ranks % degree == 0]
    together = [SequenceLoad(int(group.sum()), cost_of_group) for group, cost_of_group in zip(batch, whole)]
    divided = divide_sequences(together, ranks, ExchangeCosts(), degrees).loads if len(degrees) > 1 else [np.inf]
    return float(min(loads.max(), max(divided)) * ranks / sum(whole))


@cache
def group_times(lengths: Lengths, groups: int, size: int, engines: int) -> tuple[float, ...]:
    """The share of a rollout after which each group is complete, in ascending order."""
    times = []
    for batch in lengths.batches(groups, size):
        ends = completion_times(batch.reshape(-1), engines * lengths.running).reshape(groups, size).max(axis=1)
        times.append(np.sort(ends) / ends.max())
    return tuple(np.mean(times, axis=0).tolist())


@cache
def shares_by_time(lengths: Lengths, groups: int, size: int, most: int) -> np.ndarray:
    """[most + 1, PARTS] By the number of engines: the share of complete groups at the end of each part of a rollout."""
    shares = np.zeros((most + 1, PARTS))
    for engines in range(1, most + 1):
        at = np.ceil(np.array(group_times(lengths, groups, size, engines)) * PARTS).astype(int) - 1
        shares[engines] = np.bincount(np.clip(at, 0, PARTS - 1), minlength=PARTS) / groups
    return shares


SCHEDULES = ("sync", "periodic", "async")


@dataclass(frozen=True)
class Component:
    """Runs `calls` calls per pass, one after the other, each on `items` items that its workers divide.

    Worked example, 64 envs, 25 decisions, PPO with 8 epochs of minibatches of 200: sim calls=25 items=64 even=True
    splits=True; policy calls=25 items=64; learner calls=8 * 8 items=200.
    """

    name: str
    calls: int
    items: int
    even: bool = False  # every worker gets the same number of items (envs), so their number divides `items`
    splits: bool = False  # in a cycle: workers split their items into stages that send requests separately
    merges: int = 1  # in a cycle: the most items of waiting requests that a worker answers in one call
    streams: bool = False  # begins with partial input
    units: bool = False  # takes each group, or part of a rollout, as it comes, where only such components are
    ahead: int = 0  # items per iteration that frozen parts encode on arrival, before the calls
    devices: int = 1  # of every worker, all of one machine; a worker on cores has one

    def __post_init__(self) -> None:
        assert self.calls >= 1 and self.items >= 1, self
        assert not (self.streams and self.ahead), self  # items ahead come before calls that need all


@dataclass(frozen=True)
class Edge:
    source: str
    target: str
    bytes: int = 0  # per call of the source in a cycle, else per iteration; all workers together
    next_iteration: bool = False  # the next iteration uses this data


@dataclass(frozen=True)
class Dataflow:
    components: tuple[Component, ...]
    edges: tuple[Edge, ...]
    passes: int = 1  # runs of the whole graph per iteration; data can be handed on between them
    env_steps: int = 1  # per iteration, for throughput
    fixed_s: float = 0.0  # per iteration, independent of the placement
    groups: int = 0  # groups of whole episodes that a learner can process one by one; 0: none
    group_size: int = 1  # episodes
    schedule: str = "sync"  # or periodic, async: when an update begins
    level: int = 1  # the number of batches that async collects ahead
    lengths: Lengths | None = None  # of conversations, if items are conversations

    def __post_init__(self) -> None:
        assert len(self.by_name) == len(self.components), self.components
        assert {end for e in self.edges for end in (e.source, e.target)} <= self.by_name.keys(), self.edges
        assert self.schedule in SCHEDULES and (self.groups or self.schedule != "periodic"), self.schedule
        # Groups come in one pass, and nothing is encoded ahead of them.
        assert not self.groups or (self.passes == 1 and not any(c.ahead or c.streams for c in self.components))
        for node in self.order:  # in a cycle one component splits its items, elsewhere none
            assert sum(self[name].splits for name in node) == (len(node) > 1), node

    def __getitem__(self, name: str) -> Component:
        return self.by_name[name]

    @cached_property
    def by_name(self) -> dict[str, Component]:
        return {c.name: c for c in self.components}

    @cached_property
    def order(self) -> tuple[tuple[str, ...], ...]:
        """The nodes in topological order, with cycles collapsed: a node is the components of a cycle, or one
        component."""
        names = [c.name for c in self.components]
        after = {name: {e.target for e in self.edges if e.source == name and not e.next_iteration} for name in names}
        reach = {name: reachable_from(name, after) for name in names}
        nodes = {tuple(b for b in names if b == a or (b in reach[a] and a in reach[b])) for a in names}
        ordered: list[tuple[str, ...]] = []
        while nodes:
            done = {name for node in ordered for name in node}
            free = [n for n in nodes if all(p in done or p in n for m in n for p in names if m in after[p])]
            ordered.append(min(free, key=lambda node: names.index(node[0])))
            nodes.remove(ordered[-1])
        return tuple(ordered)

    @cached_property
    def sources(self) -> tuple[frozenset[int], ...]:
        """For each node of `order`, the indices of the nodes whose output it needs in the same iteration."""
        at = {name: i for i, node in enumerate(self.order) for name in node}
        pairs = {(at[e.source], at[e.target]) for e in self.edges if not e.next_iteration}
        return tuple(frozenset(a for a, b in pairs if b == i and a != i) for i in range(len(self.order)))

    def is_learner(self, name: str) -> bool:
        """True if the component sends weights for the next iteration, as learners do."""
        return any(edge.next_iteration and edge.source == name for edge in self.edges)

    def learner_ratios(self, most: int) -> np.ndarray | None:
        """Maximum over mean load of 0 to `most` learners, by their number; None if their parts are equal."""
        if self.lengths is None:
            return None
        learner = next(c for c in self.components if self.is_learner(c.name))
        groups, size = max(1, learner.items // self.lengths.group), min(self.lengths.group, learner.items)
        return learner_ratios(self.lengths, self.groups or groups, size, most)

    def with_schedule(self, schedule: str) -> Dataflow:
        """The same work under this schedule."""
        return replace(self, schedule=schedule)

    def to_json(self) -> dict[str, Any]:
        content = asdict(self)
        for component in content["components"]:
            if component["devices"] == 1:  # as in profiles that were measured before there were several
                del component["devices"]
        return content


def asker_of(dataflow: Dataflow, node: tuple[str, ...]) -> str | None:
    """The component that sends requests in a cycle; None outside of cycles."""
    return next((name for name in node if dataflow[name].splits), None) if len(node) > 1 else None


def traced_edges(flows: Mapping[tuple[str, str], tuple[float, float]]) -> tuple[Edge, ...]:
    """Reconstructs the graph of an iteration from the times at which data flowed between components.

    Data belongs to the next iteration if it starts to flow after all other data of its receiver has ended. Example:
    sims and policies exchange data from 0 to 9 s, sims send to the learner at 10 s, and the learner sends weights to
    the policies at 15 s; the weights are for the next iteration.
    """

    def end_of_others(component: str, beside: tuple[str, str]) -> float:
        others = [last for pair, (_, last) in flows.items() if component in pair and pair != beside]
        return max(others, default=float("inf"))

    in_order = sorted(flows, key=flows.get)
    return tuple(Edge(*pair, next_iteration=flows[pair][0] >= end_of_others(pair[1], pair)) for pair in in_order)


def reachable_from(start: str, after: Mapping[str, set[str]]) -> set[str]:
    names_reached: set[str] = set()
    ahead = list(after[start])
    while ahead:
        name = ahead.pop()
        if name not in names_reached:
            names_reached.add(name)
            ahead += after[name]
    return names_reached


def dataflow_from_json(content: Mapping[str, Any]) -> Dataflow:
    parts: dict[str, Any] = {"components": tuple(Component(**c) for c in content["components"])}
    parts["edges"] = tuple(Edge(**e) for e in content["edges"])
    if content.get("lengths"):
        parts["lengths"] = lengths_from_json(content["lengths"])
    return Dataflow(**{**content, **parts})


def embodied_dataflow(
    num_envs: int,
    decisions: int,
    learner_calls: int,
    learner_items: int,
    env_steps: int,
    ahead: int = 0,
    merges: int = 1,
    others: Mapping[str, bool] = MappingProxyType({}),
    policy_devices: int = 1,
    **more: Any,
) -> Dataflow:
    """The graph of `embodied.train`: sims and policies in a cycle, trajectories to the learner, weights to the next
    iteration. The components `others` process every decision once, between sims and learner: all together, or (True)
    by units."""
    return Dataflow(
        components=(
            Component("sim", decisions, num_envs, even=True, splits=True),
            Component("policy", decisions, num_envs, merges=merges, devices=policy_devices),
            *(Component(name, 1, decisions * num_envs, units=units) for name, units in others.items()),
            Component("learner", learner_calls, learner_items, ahead=ahead),
        ),
        edges=(
            Edge("sim", "policy"),
            Edge("policy", "sim"),
            Edge("sim", "learner"),
            Edge("learner", "policy", next_iteration=True),
            *(edge for name in others for edge in (Edge("sim", name), Edge(name, "learner"))),
        ),
        env_steps=env_steps,
        **more,
    )
