"""The arithmetic of the benchmark of sums; the runs themselves take too long for a test."""

import copy

import pytest

from benchmarks.common import resolved
from benchmarks.learning import sums
from embodied.config.recipe import load

FLAT = {"mean": 0.0, "bootstrap_interval": [0.0, 0.0]}


def result(low, high, gain, changed=True):
    part = {"start": {"rate": 0.3, "interval": [0.24, 0.37]}, "final": {"rate": high - 0.1, "interval": [low, high]}}
    both = dict.fromkeys(("sampled", "greedy"), part | {"gain": gain})
    return {**both, "wall_s": 170.0, "cpu_s": 150.0, "weights_changed": changed}


CONTROL = result(0.24, 0.37, FLAT, changed=False)
GAIN = {"mean": 0.4, "bootstrap_interval": [0.3, 0.5]}


@pytest.mark.parametrize("task", sums.TASKS)
def test_grpo_begins_with_what_imitation_leaves(task):
    imitating = load([f"recipe={task}_sft"], entry="sft").config
    going_on = load([f"recipe={task}_grpo"]).config
    assert str(going_on.run.start_from) == f"{task}_sft"
    assert (imitating.policy, imitating.env) == (going_on.policy, going_on.env)


@pytest.mark.parametrize("schedule", sums.SCHEDULES)
def test_every_schedule_is_one_that_the_recipe_can_take(schedule):
    assert resolved("sums_grpo", f"pipeline.schedule={schedule}")["pipeline"]["schedule"] == schedule


def test_a_result_names_what_imitation_and_grpo_are_asked_to_do():
    assert sums.hash_of("sums", ()) == sums.hash_of("sums", ())
    assert len({sums.hash_of("sums", ()), sums.hash_of("sort", ()), sums.hash_of("sums", sums.CONTROL)}) == 3
    assert sums.resolved_start("sums")["sft"]["episodes"]


def test_the_report_counts_intervals_that_lie_apart_and_looks_whether_control_is_flat():
    done = [("sync-seed-0", result(0.5, 0.7, GAIN)), ("sync-seed-1", result(0.36, 0.5, GAIN)), ("control", CONTROL)]
    assert "1 of 2 end with their interval above the start's; control is exactly its start" in sums.report(done)


def test_control_is_not_flat_if_weights_or_a_single_answer_differ():
    assert sums.is_flat(CONTROL)
    assert not sums.is_flat(CONTROL | {"weights_changed": True})
    moved = copy.deepcopy(CONTROL)
    moved["greedy"]["gain"] = {"mean": 0.0, "bootstrap_interval": [-0.01, 0.01]}  # one lost, one won
    assert not sums.is_flat(moved)
    assert "control is NOT its start" in sums.report([("sync-seed-0", CONTROL), ("control", moved)])
