"""Mixtures: envs by weight in training, each by itself in evaluations, and metrics apart."""

from collections import Counter

import pytest
from pydantic import TypeAdapter
from talking_runs import Talk

from embodied.core.types import EpisodeSpec
from embodied.envs import env_class
from embodied.envs.config import EnvConfig
from embodied.envs.text.text_env_checker import check_text_env
from embodied.records.progress import text_numbers

TWO = {"sums": {"name": "sums", "task": ["add2", "calc2"], "weight": 3}, "sort": {"name": "sort"}}


def mixture(**envs):
    return TypeAdapter(EnvConfig).validate_python({"name": "mixture", "mixture": envs})


def test_training_asks_by_weight_and_evaluations_each_by_itself():
    config = mixture(**TWO)
    kind = env_class(config)
    assert kind.tasks(config) == ("sums/add2", "sums/calc2", "sort") and kind.longest_episode(config) == 2
    env = kind(config, kind.load(config))
    drawn = Counter()
    for seed in range(2000):
        said = env.reset(EpisodeSpec("sort", -1, seed, 0))
        drawn[env.source] += 1
        assert ("sort" in said) == (env.source == "sort") and ("*" in said) == (env.source == "sums/calc2")
    assert drawn["sort"] / 2000 == pytest.approx(0.25, abs=0.03)
    assert drawn["sums/add2"] / 2000 == pytest.approx(0.375, abs=0.035)
    for task in kind.tasks(config):
        env.reset(EpisodeSpec(task, 7, 0, 0))
        assert env.source == task
    assert env.reset(EpisodeSpec("sums/calc2", 7, 0, 0)).endswith("=")
    assert not env.step("<calc>1+1</calc>").done and env.step(env.solution()).success


def test_mixtures_keep_the_rules_of_text_envs():
    config = mixture(sums={"name": "sums"}, sort={"name": "sort"})
    check_text_env(env_class(config), config)


def test_a_run_logs_each_env_of_a_mixture_separately(tmp_path):
    given = ["env.name=mixture", "env.mixture={a: {name: 'talking_env:Digits', weight: 4}, b: {name: sums}}"]
    with Talk(tmp_path / "run", *given, "algo.filter=none", "algo.groups=20", "algo.group_size=2") as run:
        ((finished, _),) = run.some(1)
    tasks = Counter(one.task for one in finished)
    numbers = text_numbers(finished, 1.0)
    assert {*tasks} == {"a", "b"} and tasks["a"] > tasks["b"]
    assert all(numbers[f"task/{task}/conversations"] == tasks[task] for task in tasks)
    assert numbers["task/a/success"] > 0 and numbers["task/b/success"] <= numbers["task/a/success"]
    assert not any(name.startswith("task/") for name in text_numbers([one._replace(task="a") for one in finished], 1.0))
