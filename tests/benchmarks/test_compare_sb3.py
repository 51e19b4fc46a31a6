"""Both sides do the same work, and the table says what was measured."""

import copy

import numpy as np
import pytest

from benchmarks.common import Cost, resolved
from benchmarks.compare_sb3 import best_peer, our_evaluations, report, seconds_to_enough
from benchmarks.contestants import ALIKE, Speed, our_speed, sb3_speed
from benchmarks.sb3_ppo import success_once
from benchmarks.sb3_settings import gradient_steps, items, sb3_settings

COST = Cost(wall_s=20.0, cpu_s=30.0, peak_bytes=500_000_000)


def speed(steps_per_s):
    return Speed(steps_per_s, rollout_s=1.0, update_s=0.5, wall_s=20.0, peak_bytes=500_000_000, parameters=9)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_both_sides_take_the_same_gradient_steps_for_the_same_env_steps(processes):
    config = resolved("maniskill_ppo", *ALIKE)
    settings = sb3_settings(config, processes, seed=0, env_steps=10 * items(config))
    ppo = settings["ppo"]
    assert settings["iterations"] == 10
    assert ppo["n_steps"] * processes == items(config)
    assert ppo["n_epochs"] * -(-items(config) // ppo["batch_size"]) == gradient_steps(config)


def test_the_last_smaller_minibatch_counts_as_a_gradient_step():
    config = {"env": {"num_envs": 10}, "algo": {"rollout_decisions": 10, "epochs": 3, "minibatch_size": 30}}
    assert gradient_steps(config) == 3 * 4  # 30 + 30 + 30 + 10


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("algo", "target_kl", 0.1),
        ("env", "on_success", "terminate"),
        ("algo", "clip_high", 0.3),
        ("policy", "chunk", 4),
    ],
)
def test_a_recipe_that_the_peer_cannot_follow_is_refused(section, key, value):
    config = copy.deepcopy(resolved("maniskill_ppo", *ALIKE))
    config[section][key] = value
    with pytest.raises(ValueError, match=f"{section}.{key}={value}"):
        sb3_settings(config, 2, seed=0, env_steps=1600)


def test_our_speed_leaves_out_the_first_iteration():
    rows = [
        {"env_steps": 1000, "train_s": 10.0, "time/rollout_s": 9.0},
        {"env_steps": 2000, "train_s": 12.0, "time/rollout_s": 1.5},
        {"env_steps": 3000, "train_s": 14.0, "time/rollout_s": 0.5},
    ]
    # 2000 steps in 4 s, of which 2 s are rollouts, over 2 iterations
    assert our_speed(rows, 9, COST) == Speed(500.0, 1.0, 1.0, 20.0, 500_000_000, 9)


def test_the_peers_speed_leaves_out_the_first_iteration():
    told = {"rollout_s": [9.0, 1.5, 0.5], "update_s": [3.0, 1.0, 1.0], "parameters": 9}
    assert sb3_speed(told, {"items": 1000}, COST) == Speed(500.0, 1.0, 1.0, 20.0, 500_000_000, 9)


def test_ours_is_compared_with_the_peer_at_its_best_by_medians():
    speeds = {
        "ours": [speed(3000.0), speed(3100.0), speed(100.0)],
        "shipped": [speed(4800.0)],
        "2": [speed(900.0), speed(1000.0), speed(9000.0)],
        "4": [speed(1200.0), speed(1300.0), speed(1100.0)],
    }
    learned = [
        {
            "seed": 0,
            "ours": [{"train_s": 31.0, "success_once": 0.96}],
            "shipped": [{"train_s": 20.0, "success_once": 0.97}],
            "sb3": [{"train_s": 80.0, "success_once": 0.94}],
        }
    ]
    table, ratio, shipped = report(speeds, learned).split("\n\n")
    assert ratio == "ours / stable-baselines3 at its best (4 processes): 2.50x env steps/s"
    assert shipped == "shipped / stable-baselines3 at its best (4 processes): 4.00x env steps/s"
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    assert lines[2] == ["Embodied Loop, all else alike", "3,000", "1.00", "0.50", "20.0", "500", "31"]
    assert [line[-1] for line in lines[3:]] == ["20", "-", "never"]
    assert best_peer({who: runs[0] for who, runs in speeds.items()}) == "4"


def test_seconds_count_to_the_first_evaluation_that_is_good_enough():
    evaluations = [{"train_s": at, "success_once": rate} for at, rate in ((10, 0.5), (20, 0.95), (30, 0.8), (40, 1.0))]
    assert seconds_to_enough(evaluations) == 20
    assert seconds_to_enough(evaluations[:1]) is None


def test_an_evaluation_is_placed_at_the_training_seconds_of_the_version_it_judged():
    rows = [{"policy_version": v, "env_steps": 100 * v, "train_s": 1.5 * v} for v in (1, 2, 3)]
    found = [{"policy_version": v, "overall": {"success_once": {"rate": v / 4}}} for v in (3, 1)]
    assert our_evaluations(rows, found) == [
        {"env_steps": 100, "train_s": 1.5, "success_once": 0.25},
        {"env_steps": 300, "train_s": 4.5, "success_once": 0.75},
    ]


class TwoEnvs:
    """Env 0 succeeds after 2 steps, again and again; env 1 fails after 6."""

    num_envs = 2
    lengths = np.array([2, 6])

    def seed(self, seed):
        pass

    def reset(self):
        self.at = np.zeros(2, int)
        return np.zeros((2, 1))

    def step(self, actions):
        self.at += 1
        dones = self.at == self.lengths
        self.at[dones] = 0
        return np.zeros((2, 1)), np.zeros(2), dones, [{"success": bool(dones[0])}, {"success": False}]

    def predict(self, obs, deterministic):
        return np.zeros((2, 1)), None


def test_short_successful_episodes_do_not_crowd_out_long_failures():
    envs = TwoEnvs()
    assert success_once(envs, envs, episodes=4, seed=0) == 0.5
