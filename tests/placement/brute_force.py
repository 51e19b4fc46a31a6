"""Tries every layout there is, one after the other: what the planner's answer must equal."""

from dataclasses import replace
from itertools import chain, combinations, product

from embodied.placement.dataflow import Component, Dataflow, Edge
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.profile import Cost, Curve, Link, Profile, Sync, constant
from embodied.placement.profile_planner import chunk_grid
from embodied.placement.topology import DeviceClass


def subsets(items):
    return chain.from_iterable(combinations(items, size) for size in range(len(items) + 1))


def set_partitions(items):
    if not items:
        yield []
        return
    for rest in set_partitions(items[1:]):
        yield [[items[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]]


def cuts(dataflow, left=None):
    """Sequences of sets of nodes in which every node comes with or after its sources."""
    left = frozenset(range(len(dataflow.order))) if left is None else left
    if not left:
        yield []
    for chosen in subsets(sorted(left)):
        first = frozenset(chosen)
        if first and all(dataflow.sources[node] & left <= first for node in first):
            yield from ([first, *rest] for rest in cuts(dataflow, left - first))


def layers(dataflow, nodes, classes, pricer):
    """Zones of every size on every class, idle devices allowed."""
    runs_on = pricer.runs_on()
    names = [name for node in sorted(nodes) for name in dataflow.order[node]]
    for parts in set_partitions(names):
        parts = sorted((sorted(part, key=names.index) for part in parts), key=lambda part: names.index(part[0]))
        for homes in product(*([c for c in classes if all(c.name in runs_on[n] for n in part)] for part in parts)):
            for sizes in product(*(range(1, c.count + 1) for c in homes)):
                zones = tuple(Zone(tuple(p), c.name, size) for p, c, size in zip(parts, homes, sizes))
                used = {c.name: sum(z.devices for z in zones if z.device_class == c.name) for c in classes}
                if all(used[c.name] <= c.count for c in classes):
                    yield zones


def all_layouts(dataflow, profile, classes, stages):
    pricer = Pricer(dataflow, profile, classes)
    able = [c.name for c in dataflow.components if pricer.can_swap(c.name)]
    for cut in cuts(dataflow):
        for chosen in product(*(list(layers(dataflow, nodes, classes, pricer)) for nodes in cut)):
            if dataflow.schedule != "sync" and not learns_alone(chosen):
                continue
            for s, c, swapped in product(stages, chunk_grid(dataflow, profile), subsets(able)):
                yield Layout(tuple(chosen), s, c, frozenset(swapped))


def learns_alone(layers):
    """Whether the learner shares no device, at any time."""
    return len(layers) == 1 and any(zone.components == ("learner",) for zone in layers[0])


def brute_force(dataflow, profile, classes, stages):
    """-> mode -> seconds of its fastest layout that fits; modes without one are absent."""
    pricer = Pricer(dataflow, profile, classes)
    best = {}
    for layout in all_layouts(dataflow, profile, classes, stages):
        price = pricer.price(layout)
        if price.fits and price.seconds < best.get(layout.mode, float("inf")):
            best[layout.mode] = price.seconds
    return best


def random_curve(rng, top):
    sizes = sorted(rng.sample(range(1, 20), rng.randint(1, 3)))
    values = sorted(round(rng.uniform(0, top), 2) for _ in sizes)
    return Curve(tuple(map(float, sizes)), tuple(values))


def random_cost(rng, memory):
    return Cost(
        random_curve(rng, 2),
        bytes=random_curve(rng, memory),
        fixed_s=rng.choice([0, 0.5]),
        last_s=constant(rng.choice([0, 0.3])),
        exchange_s=rng.choice([constant(0), Curve((1.0, 4.0), (0.0, rng.uniform(0, 1)))]),
        onload_s=rng.choice([0, 0.4]),
        offload_s=rng.choice([None, 0, 0.3]),
        kept_bytes=rng.choice([0, 0, 1]),
    )


def random_case(rng, num_classes, num_devices, more=0):
    """A dataflow of sim, policy, learner and `more`, its profile, and classes of devices."""
    envs = rng.choice([4, 6, 8, 12])
    merges, streams = rng.choice([1, 1, 3, 100]), rng.random() < 0.5
    components = [
        Component("sim", rng.randint(1, 5), envs, even=True, splits=True),
        Component("policy", rng.randint(1, 5), envs, merges=merges),
        Component("learner", rng.randint(1, 4), rng.randint(1, 20), streams=streams),
    ]
    edges = [
        Edge("sim", "policy", rng.choice([0, 3])),
        Edge("policy", "sim"),
        Edge("sim", "learner"),
        Edge("learner", "policy", next_iteration=True),
    ]
    for name in ("reward", "reference")[:more]:
        components.append(Component(name, 1, rng.randint(1, 12), streams=rng.random() < 0.5))
        edges += [Edge(rng.choice(["sim", "policy"]), name), Edge(name, "learner")]
    dataflow = Dataflow(tuple(components), tuple(edges), passes=rng.choice([1, 2, 4]), fixed_s=rng.choice([0, 0.1]))
    kinds = [("gpu", "gpu"), ("cpu", "cpu"), ("gpu-old", "gpu")][:num_classes]
    limit = rng.choice([4, 8, 1000])
    classes = [DeviceClass(name, kind, rng.randint(1, num_devices), limit, rng.randint(1, 2)) for name, kind in kinds]
    costs = {}
    for c in components:
        chosen = [name for name, _ in kinds if rng.random() < 0.8] or ["gpu"]
        costs[c.name] = {name: random_cost(rng, 8) for name in chosen}
    sync = Sync(rng.choice([0, 0.1]), Curve((1.0, 4.0), (0.1, rng.uniform(0.1, 1))))
    link = Link(rng.choice([0, 0.05]), rng.choice([float("inf"), 10.0]))
    if not streams and rng.random() < 0.5:
        dataflow = replace(dataflow, components=tuple(encoding_ahead(c) for c in dataflow.components))
    costs = {name: {kind: with_more(cost, rng) for kind, cost in on.items()} for name, on in costs.items()}
    return dataflow, Profile(dataflow, costs, sync, link), classes


def scheduled(rng, case, schedule):
    """The case under this schedule; groups of episodes for periodic, batches that wait for async."""
    dataflow, profile, classes = case
    if schedule == "periodic":
        whole = tuple(replace(c, streams=False, ahead=0, calls=4 * c.calls) for c in dataflow.components[:2])
        whole += tuple(replace(c, streams=False, ahead=0) for c in dataflow.components[2:])
        dataflow = replace(dataflow, components=whole, passes=1, groups=rng.choice([1, 2, 4]), group_size=4)
    dataflow = replace(dataflow, schedule=schedule, level=rng.choice([1, 2]))
    learner = {kind: replace(cost, item_bytes=rng.choice([0, 0.01])) for kind, cost in profile.costs["learner"].items()}
    return dataflow, replace(profile, dataflow=dataflow, costs={**profile.costs, "learner": learner}), classes


def encoding_ahead(component):
    return replace(component, ahead=20) if component.name == "learner" else component


def with_more(cost, rng):
    more = {"alone": [1, 1, 0.7], "ahead_s": [0, 0.05], "weight_bytes": [0, 0, 1]}
    more["split_bytes"] = [0, 0, cost.bytes.values[0]]
    return replace(cost, **{name: rng.choice(values) for name, values in more.items()})
