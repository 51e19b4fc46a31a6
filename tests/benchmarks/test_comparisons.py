"""The comparisons with others: both sides do the same work, and our side runs without the other's packages."""

import numpy as np
import pytest

from benchmarks import compare_sb3, compare_trl, engines
from benchmarks.common import resolved
from embodied.config.recipe import load
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_stable_baselines3_takes_the_gradient_steps_of_our_recipe(processes):
    config = resolved(compare_sb3.RECIPE, *compare_sb3.OURS["ours, alike"])
    options = compare_sb3.peer_options(config, processes)
    assert options["n_steps"] * processes == config["env"]["num_envs"] * config["algo"]["rollout_decisions"]
    assert (options["n_epochs"], options["batch_size"]) == (config["algo"]["epochs"], config["algo"]["minibatch_size"])
    assert config["algo"]["clip_low"] == config["algo"]["clip_high"]  # it has one
    assert config["algo"]["value_lr"] and config["policy"]["normalize_observations"]


def test_our_speed_leaves_out_the_first_iteration_and_95_percent_counts_training_seconds():
    rows = [{"env_steps": 1000 * n, "train_s": 8.0 + 2 * n, "policy_version": n} for n in (1, 2, 3)]
    found = [{"policy_version": n, "overall": {"success_once": {"rate": rate}}} for n, rate in ((3, 1.0), (2, 0.95))]
    assert compare_sb3.our_result(rows, found) == (500.0, 12.0)  # 2,000 steps in 4 s
    assert compare_sb3.our_result(rows, []) == (500.0, None)


class TwoEnvs:
    """Env 0 succeeds after 2 steps, again and again; env 1 fails after 6."""

    num_envs = 2

    def seed(self, seed):
        pass

    def reset(self):
        self.at = np.zeros(2, int)

    def step(self, actions):
        self.at += 1
        dones = self.at == (2, 6)
        self.at[dones] = 0
        return None, None, dones, [{"success": bool(dones[0])}, {"success": False}]

    def predict(self, obs, deterministic):
        return None, None


def test_short_successful_episodes_do_not_crowd_out_long_failures():
    assert compare_sb3.success_once(TwoEnvs(), TwoEnvs()) == 0.5


def test_trl_answers_the_prompts_of_our_groups():
    from idle_groups import idle_groups

    config = load([f"recipe={compare_trl.RECIPE}", "seed=3"]).config
    found = compare_trl.prompts(3, 4)
    assert all(str(sum(map(int, each["prompt"][:-1].split("+")))) == each["answer"] for each in found)
    groups, env = idle_groups(config, ("add2",), text=True), text_env(config.env)
    ours = [env.reset(groups.episodes[number]) for number in range(4 * config.algo.group_size)]
    assert ours == [each["prompt"] for each in found for _ in range(config.algo.group_size)]


def test_trl_is_given_our_rewards():
    assert compare_trl.right(["95", " 95 ", "95\n1", "9", "195", ""], ["95"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    env = text_env(load([f"recipe={compare_trl.RECIPE}"]).config.env)
    env.reset(EpisodeSpec("add2", 0, 0, 0))
    assert [env.step(answer).reward for answer in (f" {env.solution()}\n1", "nothing")] == [1.0, 0.0]


def text_env(config):
    kind = env_class(config)
    return kind(config, kind.load(config))


def test_steps_that_warm_up_count_as_time_but_not_as_speed():
    run = [(10.0, 0.0, 100)] * 3 + [(0.5, 0.0, 100)] * 4 + [(0.5, 1.0, 100)] * 5
    assert compare_trl.tokens_per_s(run) == 200.0
    assert compare_trl.seconds_to_half(run) == 30.0 + 9 * 0.5  # five right batches among the last ten
    assert compare_trl.seconds_to_half(run[:-1]) is None


@pytest.mark.parametrize("answers", ["equal", "tail"])
def test_both_engines_write_all_tokens_that_are_asked_for(answers):
    found = engines.rates(engines.make_model(None, 3), answers, 3, 1, [1])
    assert found.keys() == {("ours", 1), ("generate", 1)}
    assert all(len(rates) == 1 and rates[0] > 0 for rates in found.values())
