"""Unequal lengths of conversations: what they cost, and that plans know it."""

import random
from dataclasses import replace

import numpy as np
import pytest

from embodied.placement.dataflow import (
    Component,
    Dataflow,
    Lengths,
    completion_times,
    dataflow_from_json,
    dealt_ratio,
    embodied_dataflow,
    engine_ratios,
    group_times,
    learner_ratios,
)
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.profile import Cost, Curve, Profile, constant
from embodied.placement.profile_planner import Planner
from embodied.placement.topology import DeviceClass

from .brute_force import brute_force, random_case, scheduled

K = 1024
LONG_TAIL = Lengths((100, 200, 400, 4000), group=4, prompt=50, running=2)


def test_an_engine_begins_the_next_answer_when_one_is_written():
    assert completion_times(np.array([3, 1, 4]), 2).tolist() == [3, 1, 5]


def test_equal_lengths_or_a_single_worker_cost_no_waiting():
    equal = Lengths((300, 300), group=4, running=2)
    assert engine_ratios(equal, 16, 4).tolist() == learner_ratios(equal, 8, 4, 4).tolist() == [1.0] * 5
    assert engine_ratios(LONG_TAIL, 16, 4)[1] == learner_ratios(LONG_TAIL, 8, 4, 4)[1] == 1.0
    assert engine_ratios(LONG_TAIL, 16, 4)[4] > 1.2 and learner_ratios(LONG_TAIL, 2, 4, 4)[4] > 1.05


def test_sequences_of_32k_two_16k_and_eight_8k_take_four_ranks_as_long_as_one_rank_a_quarter():
    """FlexRL's example, where attention is all that costs: 2.0 with each sequence on one rank."""
    batch = np.array([[32 * K], [16 * K], [16 * K], *[[8 * K]] * 8])
    attention = Lengths((1,), item=0.0, pair=1.0)
    assert dealt_ratio(attention, batch, 4) == pytest.approx(2.0)
    assert dealt_ratio(replace(attention, degrees=(1, 2, 4)), batch, 4) == pytest.approx(1.0)


def with_lengths(seed, schedule):
    rng = random.Random(seed)
    dataflow, profile, classes = scheduled(rng, random_case(rng, rng.choice([1, 2]), 3), schedule)
    answers = tuple(sorted(rng.randint(1, 1000) for _ in range(5)))
    about = {"prompt": rng.choice([0, 100]), "running": rng.randint(1, 4), "pair": rng.choice([0.0, 0.01])}
    lengths = Lengths(answers, rng.choice([1, 4]), **about, degrees=rng.choice([(1,), (1, 2)]))
    dataflow = replace(dataflow, lengths=lengths)
    return dataflow, replace(profile, dataflow=dataflow), classes


@pytest.mark.parametrize("schedule", ["sync", "periodic", "async"])
def test_the_fastest_layout_is_that_of_brute_force_also_where_lengths_differ(schedule):
    for seed in range(3):
        dataflow, profile, classes = with_lengths(seed, schedule)
        found = Planner(dataflow, profile, classes, (1, 2)).modes()
        found = {mode: choice.price.seconds for mode, choice in found.items() if choice}
        assert found == pytest.approx(brute_force(dataflow, profile, classes, (1, 2)), rel=1e-9)


TALK = {  # engines and learners on devices of their own; four groups of four answers, an engine writes two at a time
    "sim": {"gpu": Cost(constant(0.0))},
    "policy": {"gpu": Cost(Curve((0.0, 16.0), (0.0, 16.0)))},
    "learner": {"gpu": Cost(Curve((0.0, 16.0), (0.0, 16.0)))},
}


def talk(schedule, lengths, engines=2, learners=2):
    flow = embodied_dataflow(16, 1, 1, 16, 16, merges=100, schedule=schedule, groups=4, group_size=4, lengths=lengths)
    profile = Profile(flow, TALK)
    pricer = Pricer(flow, profile, [DeviceClass("gpu", "gpu", 8, 1e12)])
    zones = (Zone(("sim",), "gpu", 1), Zone(("policy",), "gpu", engines), Zone(("learner",), "gpu", learners))
    layout = Layout((zones,)) if schedule != "sync" else Layout((zones[:2], zones[2:]))
    return pricer.price(layout).seconds


def test_learners_begin_with_the_groups_that_are_whole_first():
    times = group_times(LONG_TAIL, 4, 4, 2)
    assert times[-1] == 1.0 and 0 < times[0] < 0.6 and [*times] == sorted(times)
    assert talk("periodic", LONG_TAIL) < 0.9 * talk("sync", LONG_TAIL)


def test_lengths_are_kept_in_a_profile():
    flow = Dataflow((Component("sim", 1, 4, splits=False),), (), lengths=LONG_TAIL)
    assert dataflow_from_json(flow.to_json()) == flow
