"""The planner's answer equals trying every layout, holds on the devices there are, and never gets worse with more."""

import random
from dataclasses import replace
from itertools import pairwise, product

import pytest

from embodied.placement import profile_planner
from embodied.placement.dataflow import Component, Dataflow, Edge
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.profile import Cost, Curve, Profile, Sync, constant
from embodied.placement.profile_planner import Planner
from embodied.placement.topology import DeviceClass

from .brute_force import brute_force, random_case, scheduled

STAGES = (1, 2)


def plan_modes(dataflow, profile, classes):
    found = Planner(dataflow, profile, classes, STAGES).modes()
    return {mode: choice for mode, choice in found.items() if choice}


def case(seed, schedule="sync", devices=3, classes=(1, 1, 2), more=0):
    rng = random.Random(seed)
    made = random_case(rng, rng.choice(classes), devices, more)
    return made if schedule == "sync" else scheduled(rng, made, schedule)


def check_against_brute_force(dataflow, profile, classes):
    tried = brute_force(dataflow, profile, classes, STAGES)
    found = {mode: choice.price.seconds for mode, choice in plan_modes(dataflow, profile, classes).items()}
    assert found == pytest.approx(tried, rel=1e-9)


@pytest.mark.parametrize("schedule", ["sync", "periodic", "async"])
def test_the_fastest_layout_of_every_mode_is_that_of_brute_force(schedule):
    for seed in range(4 if schedule == "sync" else 10):
        check_against_brute_force(*case(seed, schedule))


@pytest.mark.parametrize("schedule", ["sync", "periodic", "async"])
def test_the_fastest_layout_equals_brute_force_with_roles_that_take_groups_as_they_come(schedule):
    for seed in range(2 if schedule == "sync" else 6):
        dataflow, profile, classes = case(seed, "periodic", classes=(1,), more=1)
        parts = tuple(replace(c, units=c.name == "reward") for c in dataflow.components)
        dataflow = replace(dataflow, components=parts, schedule=schedule)
        check_against_brute_force(dataflow, replace(profile, dataflow=dataflow), classes)


@pytest.mark.parametrize("schedule", ["sync", "periodic", "async"])
def test_the_fastest_layout_equals_brute_force_with_policy_workers_of_two_devices(schedule):
    for seed in range(4):
        dataflow, profile, classes = case(seed, schedule, devices=4)
        wide = tuple(replace(c, devices=2) if c.name == "policy" else c for c in dataflow.components)
        dataflow = replace(dataflow, components=wide)
        check_against_brute_force(dataflow, replace(profile, dataflow=dataflow), classes)


def test_a_first_search_that_finds_little_changes_nothing(monkeypatch):
    monkeypatch.setattr(profile_planner, "BEAM", 1)
    for seed, schedule in product(range(2), ("sync", "periodic", "async")):
        check_against_brute_force(*case(seed, schedule, devices=6, classes=(1,)))


@pytest.mark.slow
@pytest.mark.parametrize("block", range(30))
def test_the_fastest_layout_is_that_of_brute_force_in_thousands_of_cases(block):
    for seed in range(1_000 + block * 100, 1_100 + block * 100):
        check_against_brute_force(*case(seed))


@pytest.mark.parametrize("memory", [1e9, 60])
def test_on_a_cluster_few_splits_are_priced_and_none_is_much_faster(memory):
    cost = Cost(Curve((0.0, 16.0, 4096.0), (0.01, 0.02, 2.0)), bytes=Curve((0.0, 4096.0), (10.0, 400.0)), offload_s=0.3)
    others = [Component(name, 1, 4096) for name in ("reward", "reference")]
    sim, policy = Component("sim", 20, 1024, even=True, splits=True), Component("policy", 20, 1024, merges=64)
    edges = [edge for c in others for edge in (Edge("sim", c.name), Edge(c.name, "learner"))]
    dataflow = Dataflow((sim, policy, Component("learner", 32, 2000), *others), (*SIMPLE.edges, *edges))
    profile = Profile(
        dataflow, {c.name: {"gpu": cost} for c in dataflow.components}, Sync(0.1, Curve((1, 999), (0, 3)))
    )
    planner = Planner(dataflow, profile, [DeviceClass("gpu", "gpu", 1024, memory)])
    modes = planner.modes()
    assert planner.priced < 1e6
    best, rng = modes["disaggregated"].price.seconds, random.Random(0)
    for _ in range(300):  # splits of the same zones
        layers = [split(layer, 1024, rng) for layer in modes["disaggregated"].layout.layers]
        other = planner.pricer.price(replace(modes["disaggregated"].layout, layers=tuple(layers)))
        assert not other.fits or other.seconds > 0.99 * best


def large_case(seed):
    """Up to 1,024 devices of a class, and work for them."""
    rng = random.Random(100_000 + seed)
    more = rng.choice([1, 2, 2])
    dataflow, profile, classes = random_case(rng, rng.choice([1, 1, 2]), 4, more)
    most = rng.choice([128, 300, 1024])
    counts = [rng.randint(65, most) if rng.random() < 0.8 or i == 0 else c.count for i, c in enumerate(classes)]
    times = rng.choice([8, 32, 128])
    dataflow = replace(dataflow, components=tuple(replace(c, items=times * c.items) for c in dataflow.components))
    classes = [replace(c, count=count) for c, count in zip(classes, counts, strict=True)]
    made = dataflow, replace(profile, dataflow=dataflow), classes
    schedule = rng.choice(["sync", "sync", "periodic", "async"])
    return made if schedule == "sync" else scheduled(rng, made, schedule)


def split(layer, devices, rng):
    borders = [0, *sorted(rng.sample(range(1, devices), len(layer) - 1)), devices]
    return tuple(replace(zone, devices=end - first) for zone, (first, end) in zip(layer, pairwise(borders)))


# Worked by hand

SIMPLE = Dataflow(
    (
        Component("sim", 10, 8, even=True, splits=True),
        Component("policy", 10, 8, merges=100),
        Component("learner", 4, 8),
    ),
    (
        Edge("sim", "policy"),
        Edge("policy", "sim"),
        Edge("sim", "learner"),
        Edge("learner", "policy", next_iteration=True),
    ),
)


def simple_profile(sim, policy, learner, **more):
    costs = {"sim": Cost(sim), "policy": Cost(policy), "learner": Cost(learner, **more)}
    return Profile(SIMPLE, {name: {"gpu": cost} for name, cost in costs.items()}, Sync())


def price(profile, layers, stages=1, devices=2, memory=1e12):
    pricer = Pricer(SIMPLE, profile, [DeviceClass("gpu", "gpu", devices, memory)])
    return pricer.price(Layout(layers, stages))


def test_devices_that_work_slow_each_other_down():
    profile = simple_profile(constant(1), constant(1), constant(1))
    slowing = {name: {"gpu": replace(on["gpu"], alone=0.8)} for name, on in profile.costs.items()}
    profile = replace(profile, costs=slowing)
    turns = ((Zone(("sim",), "gpu", 1), Zone(("policy", "learner"), "gpu", 1)),)
    # With one stage one of the two works at a time; with two both do, and a round is as long as two turns.
    assert price(profile, turns).seconds == pytest.approx((10 * 2 + 4) * 0.8)
    assert price(profile, turns, stages=2).seconds == pytest.approx(9 * 2 + 3 + 4 * 0.8)
    both = ((Zone(("sim", "policy"), "gpu", 2),), (Zone(("learner",), "gpu", 1),))
    assert price(profile, both).seconds == pytest.approx(10 * 2 + 4 * 0.8)


def test_weights_that_policy_and_learner_share_are_counted_once():
    profile = simple_profile(constant(1), constant(1), constant(1), bytes=constant(12), offload_s=0, onload_s=0)
    weights = replace(profile.costs["policy"]["gpu"], bytes=constant(4), weight_bytes=4, offload_s=0)
    profile = replace(profile, costs={**profile.costs, "policy": {"gpu": weights}})
    apart = ((Zone(("sim",), "gpu", 1), Zone(("policy", "learner"), "gpu", 1)),)
    pricer = Pricer(SIMPLE, profile, [DeviceClass("gpu", "gpu", 2, 1e12)])
    assert pricer.price(Layout(apart)).used_bytes["gpu"] == 12
    idle = pricer.swap_terms(apart[0], pricer.terms(apart[0], [1, 1], 1), {"learner": True})["idle", 1]
    assert float(idle) == 4
    together = ((Zone(("sim", "policy", "learner"), "gpu", 1),),)
    assert pricer.price(Layout(together)).used_bytes["gpu"] == 16  # a learner is never in a simulator's process


def test_memory_that_workers_divide_is_counted_once():
    profile = simple_profile(constant(0.1), constant(0.1), constant(1), bytes=constant(12), split_bytes=8)
    alone = ((Zone(("sim", "policy"), "gpu", 2),), (Zone(("learner",), "gpu", 1),))
    assert price(profile, alone).used_bytes["gpu"] == 12
    faster = simple_profile(constant(0.1), constant(0.1), Curve((1, 8), (1, 8)), bytes=constant(12), split_bytes=8)
    both = ((Zone(("sim", "policy"), "gpu", 2),), (Zone(("learner",), "gpu", 2),))
    assert price(faster, both).used_bytes["gpu"] == 12 - 4


def test_several_learners_with_shards_share_no_weights():
    profile = simple_profile(constant(0.1), constant(0.1), Curve((1, 8), (1, 8)), bytes=constant(12), split_bytes=8)
    policy = Cost(Curve((1, 8), (1, 8)), bytes=constant(4), weight_bytes=4)
    profile = replace(profile, costs={**profile.costs, "policy": {"gpu": policy}})
    for devices, used in ((1, 12), (2, (12 - 4) + 4)):  # a learner alone holds all, and the policy's weights with it
        apart = ((Zone(("sim",), "gpu", 1), Zone(("policy", "learner"), "gpu", devices)),)
        pricer = Pricer(SIMPLE, profile, [DeviceClass("gpu", "gpu", 3, 1e12)])
        assert pricer.price(Layout(apart)).used_bytes["gpu"] == used


def test_components_that_do_not_fit_together_swap_and_its_time_is_counted():
    profile = simple_profile(constant(1), constant(1), constant(1), bytes=constant(60), onload_s=2, offload_s=3)
    policy = Cost(constant(1), bytes=constant(50), onload_s=0.5, offload_s=0.25)
    profile = replace(profile, costs={**profile.costs, "policy": {"gpu": policy}})
    choice = Planner(SIMPLE, profile, [DeviceClass("gpu", "gpu", 1, 100)], (1,)).fastest()
    assert choice.layout.swapped == {"policy", "learner"}  # either alone leaves its bytes beside the other's
    assert choice.price.seconds == 10 * 2 + 4 + 2 + 3 + 0.5 + 0.25
    assert choice.price.used_bytes == {"gpu": 60}
    fits = Planner(SIMPLE, profile, [DeviceClass("gpu", "gpu", 1, 110)], (1,)).fastest()
    assert fits.layout.swapped == frozenset()
    assert fits.price.seconds == 10 * 2 + 4


def test_batches_that_wait_are_held_by_learners():
    profile = simple_profile(constant(0.1), constant(0.1), constant(1), bytes=constant(12), item_bytes=0.5)
    alone = ((Zone(("sim", "policy"), "gpu", 1), Zone(("learner",), "gpu", 1)),)
    # Ten decisions of eight envs: 40 bytes a batch, of which the one that is learned from and those ahead are held.
    for schedule, level, held in [("sync", 1, 0), ("async", 1, 2 * 40), ("async", 3, 4 * 40)]:
        dataflow = replace(SIMPLE, schedule=schedule, level=level)
        pricer = Pricer(dataflow, profile, [DeviceClass("gpu", "gpu", 2, 1e12)])
        assert pricer.price(Layout(alone)).used_bytes["gpu"] == 12 + held
    small = Planner(replace(SIMPLE, schedule="async"), profile, [DeviceClass("gpu", "gpu", 2, 80)], (1,))
    assert small.fastest() is None
    assert Planner(SIMPLE, profile, [DeviceClass("gpu", "gpu", 2, 80)], (1,)).fastest()
