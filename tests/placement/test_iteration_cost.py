"""Prices of iterations worked out by hand, and their timelines: who works when, and who waits."""

import random
from collections import defaultdict
from itertools import pairwise

import pytest

from embodied.placement.dataflow import Component, Dataflow, Edge, embodied_dataflow
from embodied.placement.forecast import timeline_of
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.profile import Cost, Curve, Profile, Sync, constant
from embodied.placement.profile_planner import Planner
from embodied.placement.topology import DeviceClass

from .brute_force import random_case, scheduled

EDGES = (Edge("sim", "policy"), Edge("policy", "sim"), Edge("sim", "learner"))


def iteration(layers, sim, policy, learner, stages=1, chunks=1, streams=False, passes=1, merges=100, ahead_s=0.0):
    dataflow = Dataflow(
        (
            Component("sim", 10, 8, even=True, splits=True),
            Component("policy", 10, 8, merges=merges),
            Component("learner", 4, 8, streams=streams, ahead=0 if streams else 8),
        ),
        EDGES,
        passes=passes,
    )
    costs = {"sim": Cost(sim), "policy": Cost(policy), "learner": Cost(learner, ahead_s=ahead_s)}
    profile = Profile(dataflow, {name: {"gpu": cost} for name, cost in costs.items()})
    pricer = Pricer(dataflow, profile, [DeviceClass("gpu", "gpu", 8, 1e12)])
    layout = Layout(layers, stages, chunks)
    return timeline_of(pricer, layout), pricer.price(layout).seconds


def busy_s(timeline):
    """Seconds of work by device, to four digits."""
    busy = defaultdict(float)
    for span in timeline.spans:
        for number in span.devices if span.works else ():
            busy[f"{span.device_class}:{number}"] += span.end_s - span.start_s
    return {device: float(f"{seconds:.4g}") for device, seconds in busy.items()}


HALVES = ((Zone(("sim",), "gpu", 1), Zone(("policy",), "gpu", 1)), (Zone(("learner",), "gpu", 2),))


def test_one_stage_takes_turns_and_each_device_waits_for_the_other():
    timeline, seconds = iteration(HALVES, constant(3), constant(1), Curve((1, 8), (1.0, 8.0)))
    assert timeline.seconds == seconds == 10 * (3 + 1) + 4 * 4
    assert busy_s(timeline) == {"gpu:0": 30 + 16, "gpu:1": 10 + 16}


def test_two_stages_hide_the_faster_one_behind_the_slower_one():
    timeline, seconds = iteration(HALVES, Curve((4, 8), (3.0, 6.0)), constant(2), constant(0), stages=2)
    # Nothing but the first answer (2 s) comes before the sim's twenty turns of 3 s, and the last value asks no time.
    assert seconds == timeline.seconds == pytest.approx(2 + 20 * 3, rel=0.05)


def test_frozen_features_are_computed_during_the_rollout_where_learners_are_apart_from_sims():
    costs = constant(3), constant(1), constant(1)
    apart = ((Zone(("sim", "policy"), "gpu", 1), Zone(("learner",), "gpu", 1)),)
    together = ((Zone(("sim", "policy", "learner"), "gpu", 1),),)
    # Ten decisions of 3 + 1 s, 8 items looked at in 1 s each, four steps of 1 s; of four pieces one is left at 40 s.
    for layers, chunks, expected in [(apart, 1, 40 + 8 + 4), (apart, 4, 40 + 2 + 4), (together, 4, 40 + 8 + 4)]:
        timeline, seconds = iteration(layers, *costs, chunks=chunks, ahead_s=1.0)
        assert timeline.seconds == seconds == expected
    assert sum(s.end_s - s.start_s for s in timeline.spans if s.what == "learner") == 12


def test_waiting_for_weights_and_for_memory_to_move_is_shown_and_is_not_work():
    dataflow = Dataflow(
        (Component("sim", 1, 1), Component("learner", 1, 1)),
        (Edge("sim", "learner"), Edge("learner", "sim", next_iteration=True)),
    )
    costs = {"sim": Cost(constant(4)), "learner": Cost(constant(2), onload_s=1, offload_s=0.5)}
    profile = Profile(dataflow, {name: {"gpu": cost} for name, cost in costs.items()}, Sync(0, constant(3)))
    pricer = Pricer(dataflow, profile, [DeviceClass("gpu", "gpu", 1, 1e12)])
    layers = ((Zone(("sim",), "gpu", 1),), (Zone(("learner",), "gpu", 1),))
    timeline = timeline_of(pricer, Layout(layers, swapped=frozenset({"learner"})))
    shown = [(span.what, span.start_s, span.end_s) for span in sorted(timeline.spans, key=lambda s: s.start_s)]
    moving = "moving memory"
    works = [("sim", 0, 4), (moving, 4, 5), ("learner", 5, 7), (moving, 7, 7.5), ("weights", 7.5, 10.5)]
    assert shown == works
    assert busy_s(timeline) == {"gpu:0": 6} and timeline.seconds == 10.5
    assert timeline.idle_share("gpu", 1) == pytest.approx(1 - 6 / 10.5)


def test_a_learner_that_streams_begins_before_the_rollout_ends():
    layers = ((Zone(("sim", "policy"), "gpu", 1), Zone(("learner",), "gpu", 1)),)
    _, late = iteration(layers, constant(1), constant(1), constant(5), passes=4, chunks=4)
    timeline, early = iteration(layers, constant(1), constant(1), constant(5), passes=4, chunks=4, streams=True)
    assert late == 4 * 20 + 4 * 20
    assert timeline.seconds == early == 20 + 4 * 20
    assert [span.start_s for span in timeline.spans if span.what == "learner"] == [20, 40, 60, 80]


APART = ((Zone(("sim", "policy"), "gpu", 1), Zone(("learner",), "gpu", 1)),)
TAUGHT = (*EDGES, Edge("learner", "policy", next_iteration=True))


def overlapped(schedule, sim, learner, layers=APART, alone=1.0, envs=4, **more):
    """Twenty decisions of so many seconds; groups of two, episodes of ten decisions."""
    dataflow = Dataflow(
        (
            Component("sim", 20, envs, even=True, splits=True),
            Component("policy", 20, envs),
            Component("learner", 1, 80),
        ),
        TAUGHT,
        groups=4,
        group_size=2,
        schedule=schedule,
    )
    costs = {"sim": Cost(sim, alone=alone), "policy": Cost(constant(0)), "learner": Cost(learner, alone=alone, **more)}
    profile = Profile(dataflow, {name: {"gpu": cost} for name, cost in costs.items()}, Sync(0, constant(1)))
    pricer = Pricer(dataflow, profile, [DeviceClass("gpu", "gpu", 2, 1e12)])
    return timeline_of(pricer, Layout(layers)), pricer.price(Layout(layers)).seconds


LINE = Curve((0, 80), (0.0, 80.0))  # a learner that takes a second for each of 80 items


@pytest.mark.parametrize(
    ("schedule", "step_s", "seconds"),
    [
        ("sync", 2, 40 + 80 + 1),
        ("async", 2, 80),  # the longer side, beside which weights travel
        ("async", 5, 100),
        ("async", 4, (80 + 80 + 1) / 2),  # a rollout waits for the update on the one before the last
        # Four rows play the first two groups of two in ten decisions. They take 40 s, and the others come meanwhile.
        ("periodic", 2, 20 + 80 + 1),
        ("periodic", 5, 100 + 40 + 1),  # or before them
    ],
)
def test_rollout_and_update_overlap_as_the_schedule_says(schedule, step_s, seconds):
    timeline, priced = overlapped(schedule, constant(step_s), LINE)
    assert timeline.seconds == priced == pytest.approx(seconds)
    assert busy_s(timeline) == pytest.approx({"gpu:0": 20 * step_s, "gpu:1": 80})


def test_costs_once_per_update_come_after_the_last_group():
    _, priced = overlapped("periodic", constant(5), LINE, fixed_s=3.0, exchange_s=constant(4.0))
    assert priced == pytest.approx(100 + 40 + 3 + 4 + 1)


def test_groups_of_which_no_sim_has_all_rows_are_finished_later():
    two = ((Zone(("sim", "policy"), "gpu", 1), Zone(("learner",), "gpu", 1)),)
    _, priced = overlapped("periodic", constant(5), LINE, layers=two, envs=2)  # four waves, a group in each
    assert priced == pytest.approx(100 + 20 + 1)
    _, priced = overlapped("periodic", constant(5), LINE, layers=two, envs=8)  # one wave with all groups
    assert priced == pytest.approx(100 + 80 + 1)


OWN = (Zone(("sim", "policy"), "gpu", 1), Zone(("judge",), "gpu", 1), Zone(("learner",), "gpu", 1))
SHARED = (Zone(("sim", "policy", "judge"), "gpu", 1), Zone(("learner",), "gpu", 1))


@pytest.mark.parametrize(
    ("schedule", "groups", "zones", "chunks", "judged", "seconds"),
    [
        # Four groups, one every 5 s, that a judge works 8 s on; then an update of 80 s.
        ("sync", 4, OWN, 1, 8, 20 + 2 + 80 + 1),
        ("sync", 4, OWN, 1, 40, 5 + 40 + 80 + 1),  # the judge is slower than the sims
        ("sync", 4, SHARED, 1, 8, 20 + 8 + 80 + 1),  # where sims work, it waits for their end
        ("async", 4, OWN, 1, 8, 80),
        ("periodic", 4, OWN, 1, 8, 5 + 2 + 80 + 1),
        ("periodic", 4, OWN, 1, 120, 5 + 120 + 20 + 1),  # the last quarter is learned from after the judge
        ("periodic", 4, SHARED, 1, 8, 20 + 8 + 80 + 1),
        ("sync", 0, OWN, 4, 8, 20 + 2 + 80 + 1),  # four parts of a rollout of a fixed length
        ("sync", 0, OWN, 1, 8, 20 + 8 + 80 + 1),
    ],
)
def test_a_role_on_devices_of_its_own_works_while_sims_play(schedule, groups, zones, chunks, judged, seconds):
    dataflow = embodied_dataflow(
        2, 20, 1, 40, 40, others={"judge": True}, groups=groups, group_size=2, schedule=schedule
    )
    costs = {"sim": constant(1), "policy": constant(0), "judge": constant(judged), "learner": Curve((0, 40), (0, 80))}
    profile = Profile(dataflow, {name: {"gpu": Cost(cost)} for name, cost in costs.items()}, Sync(0, constant(1)))
    pricer, layout = Pricer(dataflow, profile, [DeviceClass("gpu", "gpu", 3, 1e12)]), Layout((zones,), 1, chunks)
    timeline = timeline_of(pricer, layout)
    assert timeline.seconds == pricer.price(layout).seconds == pytest.approx(seconds)
    assert sum(busy_s(timeline).values()) == pytest.approx(20 + judged + 80)


@pytest.mark.parametrize(("step_s", "seconds"), [(2, 40 + 40 * 0.5), (8, 80 + 80 * 0.5)])
def test_sides_slow_each_other_down_only_while_both_work(step_s, seconds):
    # Both take twice as long together: 80 s of update beside 40 s of rollout, then half of it alone; or 80 s of update
    # beside 160 s of rollout, then half of that.
    _, priced = overlapped("async", constant(step_s), LINE, alone=0.5)
    assert priced == pytest.approx(seconds)


@pytest.mark.parametrize("schedule", ["sync", "periodic", "async"])
def test_a_timeline_ends_with_its_iteration_and_no_device_does_two_things_at_once(schedule):
    for seed in range(20):
        rng = random.Random(seed)
        made = random_case(rng, rng.choice([1, 2]), 4)
        planner = Planner(*(made if schedule == "sync" else scheduled(rng, made, schedule)), (1, 2))
        for choice in filter(None, planner.modes().values()):
            timeline = timeline_of(planner.pricer, choice.layout)
            assert timeline.seconds == pytest.approx(choice.price.seconds)
            for spans in timeline.rows().values():
                busy = sorted((span.start_s, span.end_s) for span in spans)
                assert all(a[1] <= b[0] + 1e-9 * timeline.seconds for a, b in pairwise(busy))


FOUR_ASK_TWO = ((Zone(("sim",), "gpu", 4), Zone(("policy",), "gpu", 2)), (Zone(("learner",), "gpu", 1),))


@pytest.mark.parametrize(
    ("merges", "seconds"),
    [
        # Two sims of two rows ask each policy worker; an answer takes 1 s and 1 s a row. One after the other: the
        # worker is never idle after the first 3 s, and answers twenty questions of 3 s.
        (1, 3 + 20 * 3),
        (3, 3 + 20 * 3),  # two questions are four rows
        (4, 10 * (3 + 5)),
        (100, 10 * (3 + 5)),
    ],
)
def test_waiting_requests_are_answered_in_one_call_up_to_the_limit_of_rows(merges, seconds):
    costs = constant(3), Curve((0, 8), (1.0, 9.0)), constant(0)
    assert iteration(FOUR_ASK_TWO, *costs, merges=merges)[1] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("merges", "stages", "seconds"),
    [
        (1, 1, 10 * (3 + 9)),  # one sim of eight rows asks one of the four
        (64, 1, 10 * (3 + 3)),  # all four, two rows each
        (64, 2, 2 + 20 * 3),  # in two halves, one row each: the sim has no pause
    ],
)
def test_a_question_goes_to_one_policy_worker_or_where_it_may_be_cut_to_all_of_the_sim(merges, stages, seconds):
    layers = ((Zone(("sim",), "gpu", 1), Zone(("policy",), "gpu", 4)), (Zone(("learner",), "gpu", 1),))
    costs = constant(3), Curve((0, 8), (1.0, 9.0)), constant(0)
    assert iteration(layers, *costs, stages=stages, merges=merges)[1] == pytest.approx(seconds)
