"""An evaluation beside a rollout of the same version finds what one by itself finds, and changes no training."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from served_language import SECRET, served
from talking_runs import program
from tiny_language import build

from embodied import evaluate, train
from embodied.policies.policy_folder import read_weights
from embodied.serving.config import TOKEN
from embodied.workflows.evaluator import Evaluator
from embodied.workflows.rl_loop import EmbodiedLoop

BESIDE = "eval.interleave=true"
PATIENT = "faults.timeout_s=600"
TWO_ENGINES = "placement={sim: 'cpu:0', policy: 'cpu:0-1*2', learner: 'cpu:1'}"
ROBOTS = [
    *("cluster.backend=inline", "run.env_steps=null", "run.iterations=3", "run.save_every=1", "run.eval_every=1"),
    *("env.num_envs=8", "env.max_episode_steps=20", "algo.minibatch_size=64", "algo.epochs=1"),
    *("eval.episodes=6", "eval.num_envs=4", "eval.videos=0"),
]


def run_of(folder, *arguments):
    assert train.main(program(folder, PATIENT, *arguments)) == 0
    (run,) = folder.iterdir()
    return run


def found(evaluation):
    """All that was said, and the outcomes."""
    lines = (evaluation / "transcripts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines], (evaluation / "episodes.csv").read_text()


def final_weights(run):
    return read_weights(run / "checkpoints" / "v000003" / "policy")


def equal(one, other):
    return all(np.array_equal(one[name], other[name]) for name in other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that evaluates by itself."""
    return run_of(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def alone(monkeypatch):
    """The versions that were evaluated by themselves, with the number of episodes."""
    played, play = [], Evaluator.play

    def noted(evaluator, episodes, *about, **more):
        played.append((evaluator.version, len(episodes)))
        return play(evaluator, episodes, *about, **more)

    monkeypatch.setattr(Evaluator, "play", noted)
    return played


@pytest.mark.parametrize(
    "options",
    [(), (TWO_ENGINES, "eval.num_envs=2", "policy.max_running=2")],
    ids=["one engine", "two engines with little room"],
)
def test_an_interleaved_evaluation_finds_the_same_and_changes_no_training(whole, alone, options, tmp_path):
    run = run_of(tmp_path, BESIDE, *options)
    assert alone == [(3, 6)]  # the last one, with no rollout to be beside of
    for version in ("v000001", "v000002", "v000003"):
        assert found(run / "eval" / version) == found(whole / "eval" / version)
        results = json.loads((run / "eval" / version / "results.json").read_text())
        assert results["policy_version"] == int(version[1:]) and not (run / "eval" / version / "partial.json").exists()
    assert equal(final_weights(run), final_weights(whole))


def test_an_interleaved_evaluation_with_servers_finds_the_same(whole, alone, tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    models = [build(preset="tiny_gpt2", dtype="float64", max_running=4, seed=seed) for seed in (7, 8)]
    with served(models[0], tmp_path) as one, served(models[1], tmp_path) as other:
        options = [
            "policy.engine=http",
            f"policy.url=[{one.url}, {other.url}]",
            f"policy.weights={tmp_path / 'weights'}",
        ]
        run = run_of(tmp_path / "runs", BESIDE, *options)
    assert alone == [(3, 6)]
    for version in ("v000001", "v000002", "v000003"):
        turns = [[one["answer"] for one in line["turns"]] for line in found(run / "eval" / version)[0]]
        assert turns == [[one["answer"] for one in line["turns"]] for line in found(whole / "eval" / version)[0]]


@pytest.mark.parametrize("schedule", ["periodic", "async"])
def test_an_evaluation_beside_a_rollout_equals_one_of_its_checkpoint_with_every_schedule(schedule, alone, tmp_path):
    """Greedy answers, beside those of training that are drawn."""
    run = run_of(tmp_path, BESIDE, f"pipeline.schedule={schedule}", "eval.temperature=0")
    assert alone == [*([(2, 6)] if schedule == "async" else []), (3, 6)]  # where no rollout followed
    checkpoint = f"checkpoint={run / 'checkpoints' / 'v000001'}"
    assert evaluate.main([checkpoint, "eval.videos=0", "cluster.backend=inline"]) == 0
    assert found(run / "eval" / "v000001-evaluate") == found(run / "eval" / "v000001")


@pytest.mark.parametrize(
    ("options", "by_themselves"),
    [
        (("recipe=pointmass_ppo", "algo.rollout_decisions=32", "pipeline.schedule=async"), [2, 3]),
        (("recipe=pointmass_grpo", "algo.groups=2"), [3]),
    ],
    ids=["slices", "groups"],
)
def test_an_evaluation_beside_a_rollout_of_robots_changes_neither_results_nor_training(
    options, by_themselves, alone, tmp_path
):
    """Evaluations take the likeliest actions; rollouts, beside which they are played, draw theirs."""
    for name, beside in (("whole", ()), ("beside", (BESIDE,))):
        alone.clear()
        assert train.main([*options, *ROBOTS, *beside, f"run.dir={tmp_path / name}"]) == 0
    assert alone == [(version, 6) for version in by_themselves]
    (whole,), (beside,) = (tmp_path / "whole").iterdir(), (tmp_path / "beside").iterdir()
    for version in ("v000001", "v000002", "v000003"):
        outcomes = [(run / "eval" / version / "episodes.csv").read_text() for run in (whole, beside)]
        assert outcomes[0] == outcomes[1] and outcomes[0].count("\n") == 7
    assert equal(final_weights(beside), final_weights(whole))


@pytest.mark.parametrize("where", ["before", "after"])
def test_an_evaluation_under_way_when_the_run_died_is_played_again(where, whole, tmp_path, monkeypatch):
    collect = EmbodiedLoop.collect

    def dying(loop):
        if loop.version < 2:
            return collect(loop)
        if where == "after":
            collect(loop)
        raise RuntimeError("the power went")

    monkeypatch.setattr(EmbodiedLoop, "collect", dying)
    with pytest.raises(RuntimeError, match="the power went"):
        train.main(program(tmp_path, PATIENT, BESIDE))
    monkeypatch.undo()
    (run,) = tmp_path.iterdir()
    assert (run / "eval" / "v000002" / "partial.json").exists()
    assert not (run / "eval" / "v000002" / "results.json").exists()
    assert train.main([f"resume={run}"]) == 0
    for version in ("v000001", "v000002", "v000003"):
        assert found(run / "eval" / version) == found(whole / "eval" / version)
    assert equal(final_weights(run), final_weights(whole))


@pytest.mark.slow
def test_evaluation_episodes_of_a_sim_that_dies_are_played_without_a_rollout_beside_them(whole, tmp_path):
    fault = f"env.kwargs={{fault: sigkill, place: evaluation, worker: sim-0, once: {tmp_path}/struck}}"
    places = "placement={sim: 'cpu:0-1*2', policy: 'cpu:0', learner: 'cpu:1'}"
    options = (BESIDE, "cluster.backend=local", places, fault)
    command = [sys.executable, "-m", "embodied.train", *program(tmp_path / "runs", *options)]
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=path, timeout=600)
    assert done.returncode == 0 and done.stdout.count("is started again") == 1, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert found(run / "eval" / "v000001")[1] == found(whole / "eval" / "v000001")[1]
