"""The arithmetic of the benchmark of sums; the runs themselves take too long for a test."""

import copy

import numpy as np
import pytest
from safetensors.numpy import save_file

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


@pytest.mark.parametrize("recipe", [name for name in sums.RECIPES if name != "smol_grpo"])
def test_rl_begins_with_what_imitation_leaves(recipe):
    going_on = load([f"recipe={recipe}"]).config
    imitating = load([f"recipe={going_on.run.start_from}"], entry="sft").config
    same = {"value_head": imitating.policy.value_head}  # PPO's is new
    assert (imitating.policy, imitating.env) == (going_on.policy.model_copy(update=same), going_on.env)


def test_a_model_that_has_read_begins_without_imitation():
    config = resolved("smol_grpo")
    assert config["run"]["start_from"] is None and config["policy"]["pretrained"]
    assert sums.resolved_start(None) == {}


def test_weights_are_compared_one_by_one(tmp_path):
    for name, value in (("one", 1.0), ("same", 1.0), ("other", 2.0)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        save_file({"w": np.full(3, value, np.float32)}, tmp_path / name / "model.safetensors")
    assert sums.same_weights(tmp_path / "one", tmp_path / "same")
    assert not sums.same_weights(tmp_path / "one", tmp_path / "other")


@pytest.mark.parametrize("schedule", sums.SCHEDULES)
def test_every_schedule_is_one_that_the_recipe_can_take(schedule):
    assert resolved("sums_grpo", f"pipeline.schedule={schedule}")["pipeline"]["schedule"] == schedule


def test_a_result_names_what_imitation_and_grpo_are_asked_to_do():
    assert sums.hash_of("sums_grpo", ()) == sums.hash_of("sums_grpo", ())
    hashes = {sums.hash_of("sums_grpo", ()), sums.hash_of("sort_grpo", ()), sums.hash_of("sums_grpo", sums.CONTROL)}
    assert len(hashes) == 3
    assert sums.resolved_start("sums_sft")["sft"]["episodes"]


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
