"""The comparisons with others: both sides do the same work, and our side runs without the other's packages."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks import common, compare_sb3, compare_trl, engines
from benchmarks.common import ROOT, resolved
from embodied.config.recipe import load
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class


@pytest.mark.parametrize(("module", "name"), [("compare_sb3", "stable-baselines3"), ("compare_trl", "trl")])
def test_packages_that_are_missing_are_named_with_the_command_that_installs_them_elsewhere(module, name, tmp_path):
    command = [sys.executable, "-m", f"benchmarks.{module}", "--packages", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=common.environment(), capture_output=True, text=True, timeout=300)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert f"pip install --target FOLDER --no-deps {name}==" in ended.stderr


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_stable_baselines3_takes_the_gradient_steps_of_our_recipe(processes):
    config = resolved(compare_sb3.RECIPE, *compare_sb3.OURS["ours, alike"])
    options = compare_sb3.peer_options(config, processes)
    assert options["n_steps"] * processes == config["env"]["num_envs"] * config["algo"]["rollout_decisions"]
    assert (options["n_epochs"], options["batch_size"]) == (config["algo"]["epochs"], config["algo"]["minibatch_size"])
    assert config["algo"]["clip_low"] == config["algo"]["clip_high"]  # it has one
    assert config["algo"]["value_lr"] and config["policy"]["normalize_observations"]


def test_env_steps_that_do_not_divide_are_refused():
    with pytest.raises(SystemExit, match="1600 env steps of an iteration do not divide among 3 processes"):
        compare_sb3.peer_options(resolved(compare_sb3.RECIPE), 3)


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


def test_a_step_of_two_processes_lasts_as_long_as_the_slower_one_and_has_the_tokens_of_both():
    assert compare_trl.joined([(1.0, 0.25, 50), (2.0, 0.75, 60)]) == (2.0, 0.5, 110)


def test_our_steps_last_from_one_iteration_to_the_next():
    rows = [{"train_s": at, "success_once": 0.5, "engine/tokens": 9.0} for at in (3.0, 4.0, 4.5)]
    assert [seconds for seconds, _, _ in compare_trl.steps_of(rows)] == [3.0, 1.0, 0.5]


def test_steps_that_warm_up_count_as_time_but_not_as_speed():
    run = [(10.0, 0.0, 100)] * 3 + [(0.5, 0.0, 100)] * 4 + [(0.5, 1.0, 100)] * 5
    assert compare_trl.tokens_per_s(run) == 200.0
    assert compare_trl.seconds_to_half(run) == 30.0 + 9 * 0.5  # five right batches among the last ten
    assert compare_trl.seconds_to_half(run[:-1]) is None


@pytest.mark.parametrize("module", [compare_sb3, compare_trl], ids=lambda module: module.__name__)
def test_ratios_are_to_the_best_of_the_other_round_by_round(module):
    speeds = {
        next(iter(compare_sb3.OURS)) if module is compare_sb3 else compare_trl.OURS: (40, 30),
        "two": (10, 10),
        "four": (20, 5),
    }
    of = (lambda rate: (rate, None)) if module is compare_sb3 else (lambda rate: [(1.0, 0.0, rate)] * 12)
    text = module.table({who: [of(rate) for rate in rates] for who, rates in speeds.items()})
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()[2:]]
    assert [line[-1] for line in cells] == ["4.00 (2.00 to 6.00)", "1.25 (0.50 to 2.00)", "1.00 (1.00 to 1.00)"]
    assert {line[2].split(",")[0] for line in cells} == {"never"}


@pytest.mark.parametrize("answers", ["equal", "tail"])
def test_both_engines_write_all_tokens_that_are_asked_for(answers):
    found = engines.rates(engines.make_model(None, 3), answers, 3, 1, [1])
    assert found.keys() == {("ours", 1), ("generate", 1)}
    assert all(len(rates) == 1 and rates[0] > 0 for rates in found.values())


def test_answers_of_the_tail_end_early_and_some_use_all_they_may():
    lengths = [request.max_tokens for request in engines.questions("tail", 64, 100)]
    assert max(lengths) == engines.LONGEST and min(lengths) >= engines.SHORTEST and np.median(lengths) < 40
    assert {request.max_tokens for request in engines.questions("equal", 64, 100)} == {engines.EQUAL}


def test_each_engine_is_compared_with_its_better_number_of_threads():
    found = {
        ("ours", 1): [40.0, 20.0],
        ("ours", 2): [1.0, 1.0],
        ("generate", 1): [2.0, 2.0],
        ("generate", 2): [10.0, 10.0],
    }
    assert engines.row("tail", 16, found) == ["tail", "16", "30", "10", "3.00 (2.00 to 4.00)"]
