"""Several runs replayed in simulated time, against hand-computed ends."""

import random
from statistics import median

import pytest

from benchmarks.shared_replay import SHARING, SWITCH_S, RunWork, SteadyBatch, TimedConversations, ends, replay
from embodied.sharing.plan import RunCost, course

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


def test_an_idle_device_is_lent_until_its_run_has_work_for_it():
    # a generates until 1, waits until 7 and updates until 8. Its device is lent as soon as it is free, until 7 at most:
    # 1 + 6 of b's 14 s of conversations are on it, or on b's own, where conversations of 1 s leave at a border.
    works = [work("a", [1.0], wait_s=6.0), work("b", [1.0] * 14)]
    found = ends(replay(works, OWN, "lend", AT_ONCE))
    assert found["a"] == pytest.approx(8.0, abs=0.06)
    assert found["b"] == pytest.approx(9.0, abs=0.06)  # without loans 15
    dear = ends(replay(works, OWN, "lend", (3.0, 3.0)))  # no change of hands would pay before a has ended
    assert dear["a"] == pytest.approx(8.0) and 11 < dear["b"] <= 15.0


def test_simulators_keep_their_devices_until_the_batch_is_whole():
    works = [work("a", [1.0, 6.0]), work("b", [1.0] * 12, stays=True, borrows=False)]
    own = {"a": ["fake:0", "fake:2"], "b": ["fake:1"]}
    assert ends(replay(works, own, "lend", AT_ONCE)) == pytest.approx({"a": 6.5, "b": 13.0})
    lines = replay(works[1:], own, "remaining", AT_ONCE)
    assert {line["phase"] for line in lines if line.get("device")} == {"rollout", "update", None}


def test_a_batch_of_known_seconds_goes_on_by_the_devices_that_it_has():
    batch = SteadyBatch({1: 8.0, 2: 4.0}.__getitem__, most=2)
    assert batch.has_more() and batch.next_s() == float("inf")
    batch.work_on(["x"])
    batch.pass_time(4.0)  # half of it
    batch.work_on(["x", "y", "z"])
    assert batch.next_s() == 2.0 and batch.busy() == {"x", "y"} and not batch.has_more()
    batch.pass_time(2.0)
    assert batch.progress == 1.0 and not batch.busy()


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
