"""The arithmetic of the GRPO benchmark; the runs themselves take too long for a test."""

import numpy as np
import pytest

from benchmarks.learning import grpo_gain, starts
from embodied.config.recipe import load


def test_the_gain_is_paired_and_its_interval_holds_what_chance_allows():
    before = [True] * 50 + [False] * 150
    after = [True] * 40 + [False] * 10 + [True] * 60 + [False] * 90  # 10 lost, 60 won: +50 of 200
    found = grpo_gain.paired_gain(before, after)
    assert found["mean"] == pytest.approx(0.25)
    # differences +1 (60), -1 (10), 0 (130): variance 0.35 - 0.0625 = 0.2875, error sqrt(0.2875 / 200) = 0.0379
    expected = 0.25 + np.array([-1.96, 1.96]) * 0.0379
    assert found["bootstrap_interval"] == pytest.approx(expected, abs=0.01)
    assert grpo_gain.paired_gain(before, before) == {"mean": 0.0, "bootstrap_interval": [0.0, 0.0]}


def test_every_case_names_a_recipe_with_a_sparse_reward():
    for case in grpo_gain.CASES.values():
        config = load([f"recipe={case.recipe}", *case.options]).config
        sparse = config.env.reward == "success" or config.env.name == "libero"  # whose own reward is that
        assert sparse and config.algo.name == ("ppo" if "ppo" in case.recipe else "grpo")


def test_rl_can_begin_with_what_imitation_leaves():
    for case, start in [*((name, name) for name in starts.STARTS), ("libero_ppo", "libero")]:
        told, rl = starts.options_of(start), grpo_gain.CASES[case]
        imitating = load([f"recipe={starts.STARTS[start].sft}", "sft.data=demos", *told], entry="sft").config
        going_on = load([f"recipe={rl.recipe}", *rl.options]).config
        assert imitating.policy == going_on.policy and imitating.eval.protocol == going_on.eval.protocol
        assert (imitating.env.task, imitating.env.max_episode_steps) == (
            going_on.env.task,
            going_on.env.max_episode_steps,
        )


def test_the_report_counts_certain_gains():
    one = {
        "start_success": {"rate": 0.4, "interval": [0.3, 0.5]},
        "final_success": {"rate": 0.9, "interval": [0.8, 0.95]},
        "gain": {"mean": 0.5, "bootstrap_interval": [0.4, 0.6]},
        "env_steps": 1000,
        "cpu_s": 60.0,
    }
    flat = one | {"gain": {"mean": 0.0, "bootstrap_interval": [-0.01, 0.01]}}
    told = grpo_gain.report([("seed-0", one), ("seed-1", flat), ("control", flat)])
    assert "1 of 2 seeds gain for certain; 2 of 2 begin between 20% and 70%" in told
