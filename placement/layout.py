"""The shape of a plan: components that share devices, components with separate devices, and the order of turns.

A layout is a sequence of layers that take turns on all devices. Inside a layer, zones are disjoint sets of devices of
one class each; components of one zone take turns on it, zones work at the same time. So

    collocated     [sim, policy, learner]                 one zone
    hybrid         [sim | policy, learner]                or, the learner on all devices: [sim | policy] [learner]
    disaggregated  [sim | policy | learner]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product

from embodied.placement.dataflow import Dataflow
from embodied.placement.topology import DeviceClass

LOOP = ("sim", "policy", "learner")


def named(components: Iterable[str]) -> tuple[str, ...]:
    """The components that decide the mode: sim, policy and learner, or all components of a program that lacks one of
    these."""
    every = tuple(components)
    return LOOP if {*LOOP} <= {*every} else every


@dataclass(frozen=True)
class Zone:
    components: tuple[str, ...]  # in the dataflow's order
    device_class: str
    devices: int = 0  # their number; 0 while undecided

    def __str__(self) -> str:
        return f"{', '.join(self.components)}: {self.devices} {self.device_class}"


Layer = tuple[Zone, ...]


@dataclass(frozen=True)
class Layout:
    layers: tuple[Layer, ...]
    stages: int = 1  # parts into which a sim worker splits its envs
    chunks: int = 1  # parts in which an iteration's data is handed on
    swapped: frozenset[str] = frozenset()  # components that offload their memory between turns

    @property
    def zones(self) -> list[Zone]:
        return [zone for layer in self.layers for zone in layer]

    def zone_of(self, component: str) -> Zone:
        return next(zone for zone in self.zones if component in zone.components)

    def share_no_device(self, a: str, b: str) -> bool:
        """True if two components have no device in common."""
        first, second = self.zone_of(a), self.zone_of(b)
        together = any(first in layer and second in layer for layer in self.layers)
        return first.device_class != second.device_class or (together and first is not second)

    @property
    def mode(self) -> str:
        """The mode's name, or "custom" where roles are combined in another way."""
        names = named(name for zone in self.zones for name in zone.components)
        if names != LOOP:
            apart = [self.share_no_device(a, b) for a, b in combinations(names, 2)]
            return "collocated" if not any(apart) else "disaggregated" if all(apart) else "custom"
        sims = self.share_no_device("sim", "policy")
        if self._simulates_beside():
            return self._mode_beside()
        learns, mixes = self.share_no_device("policy", "learner"), self.share_no_device("sim", "learner")
        if not sims and not learns and not mixes:
            return "collocated"
        if sims and learns and mixes:
            return "disaggregated"
        return "hybrid" if sims and not learns else "custom"

    def _simulates_beside(self) -> bool:
        """True if simulators run on cores and networks on other devices."""
        homes = {name: self.zone_of(name).device_class for name in LOOP}
        return homes["sim"] == "cpu" and "cpu" not in (homes["policy"], homes["learner"])

    def _mode_beside(self) -> str:
        """The mode, decided by policies and learners: they take turns, share processes, or have separate devices."""
        if self.share_no_device("policy", "learner"):
            return "disaggregated"
        return "hybrid" if self.zone_of("policy") is self.zone_of("learner") else "collocated"

    def __str__(self) -> str:
        return " ".join(f"[{' | '.join(map(str, layer))}]" for layer in self.layers)


def layer_sets(dataflow: Dataflow) -> list[tuple[frozenset[int], ...]]:
    """Every way to cut the order of nodes into layers, sources before their receivers."""
    nodes = frozenset(range(len(dataflow.order)))

    def cut(left: frozenset[int]) -> Iterator[tuple[frozenset[int], ...]]:
        if not left:
            yield ()
        for first in closed_sets(left, dataflow.sources):
            yield from ((first, *rest) for rest in cut(left - first))

    return list(cut(nodes))


def closed_sets(left: frozenset[int], sources: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The non-empty subsets of `left` that need no node of the rest of `left`."""
    chosen = [
        frozenset(s) for size in range(1, len(left) + 1) for s in combinations(sorted(left), size)
    ]  # at most 31 for five nodes
    return [s for s in chosen if all(sources[node] & left <= s for node in s)]


def arrangements(
    components: Sequence[str], classes: Sequence[DeviceClass], runs_on: dict[str, set[str]]
) -> Iterator[Layer]:
    """Every way to put components into zones, and zones onto device classes on which their components run."""
    for parts in partitions(tuple(components)):
        choices = [
            [c.name for c in classes if c.count and all(c.name in runs_on[name] for name in group)] for group in parts
        ]
        for chosen in product(*choices):
            yield tuple(Zone(group, name) for group, name in zip(parts, chosen))


def partitions(items: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Set partitions, parts in the order of their first item."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest), -1, -1):
        for friends in combinations(rest, size):
            others = tuple(item for item in rest if item not in friends)
            yield from (((first, *friends), *parts) for parts in partitions(others))
