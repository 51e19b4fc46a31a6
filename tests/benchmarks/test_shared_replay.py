"""Several runs replayed in simulated time, against hand-computed ends."""

import random
from statistics import median

import pytest

from benchmarks.shared_replay import SHARING, SWITCH_S, RunWork, SteadyBatch, TimedConversations, ends, replay
from embodied.share import RunCost, course

DEVICES = ["fake:0", "fake:1"]
OWN = {"a": DEVICES[:1], "b": DEVICES[1:]}
AT_ONCE = (0.0, 0.0)  # changes of hands that take no time


def work(name, seconds, iterations=1, slots=1, update_s=1.0, **more):
    return RunWork(
        name, iterations, lambda i: TimedConversations(seconds, slots), lambda devices: update_s / devices, **more
    )


@pytest.mark.parametrize(
    ("rule", "a", "b"),
    [
        # a: 4 conversations of 1 s, one at a time, then 1 s on one device, twice; b: 12 s of conversations and 1 s.
        ("split", 2 * (4 + 1), 12 + 1),
        ("serial", 2 * (2 + 0.5), 5 + 6 + 0.5),
    ],
)
def test_runs_alone_take_the_time_of_their_parts(rule, a, b):
    works = [work("a", [1.0] * 4, iterations=2), work("b", [1.0] * 12)]
    assert ends(replay(works, OWN, rule, AT_ONCE)) == pytest.approx({"a": a, "b": b})


def drawn(random):
    """Two or three runs, each with two devices, of which some wait for simulators and some cannot be divided."""
    names = ["a", "b", "c"][: random.choice([2, 3])]
    costs = {}
    for name in names:
        rollout_s, fixed_s, update_s = (random.uniform(low, high) for low, high in ((4, 30), (0, 2), (0.5, 8)))
        costs[name] = RunCost(
            random.randint(5, 15),
            lambda devices, s=rollout_s, fixed=fixed_s: fixed + s / devices,
            lambda devices, s=update_s: s / devices,
            random.choice([0.0, random.uniform(2, 8)]),
            sum(SWITCH_S),
            borrows=random.random() < 0.7,
        )
    return costs, {name: [f"fake:{2 * place}", f"fake:{2 * place + 1}"] for place, name in enumerate(names)}


@pytest.mark.parametrize(("rule", "usual", "largest"), [("lend", 0.03, 0.15), ("remaining", 0.1, 0.3)])
def test_runs_end_about_when_the_closed_form_says(rule, usual, largest):
    source, errors = random.Random(3), []
    for _ in range(5):
        costs, own = drawn(source)
        works = [
            RunWork(
                name,
                cost.iterations,
                lambda i, cost=cost: SteadyBatch(cost.rollout_s, 100 if cost.borrows else 2),
                cost.update_s,
                cost.wait_s,
                borrows=cost.borrows,
                stays=not cost.borrows,
            )
            for name, cost in costs.items()
        ]
        played, predicted = ends(replay(works, own, rule, tick_s=0.1)), ends(course(costs, own, rule))
        errors += [abs(predicted[name] / played[name] - 1) for name in costs]
    assert rule in SHARING and median(errors) < usual and max(errors) < largest, errors
