"""Whole training runs of the tiny preset in one process: a toy env, its images and its instruction."""

import json

import numpy as np
import pytest

from embodied import evaluate, train

SHORT = [
    "recipe=pointmass_ppo_openvla_tiny",
    "run.iterations=2",
    "env.num_envs=4",
    "algo.rollout_decisions=4",
    "algo.minibatch_size=8",
    "cluster.backend=inline",
    "eval.episodes=2",
    "eval.videos=0",
]


def test_it_trains_and_its_checkpoint_evaluates_alike(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SHORT, "env.max_episode_steps=6", "policy.temperature=1.6"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["train/logprob_gap"] for row in rows) < 1e-5
    assert all(row["train/grad_norm"] > 0 and np.isfinite(row["train/value_loss"]) for row in rows)
    assert evaluate.main([f"checkpoint={run}", "eval.videos=0", "cluster.backend=inline"]) == 0
    first, again = (run / "eval" / name / "episodes.csv" for name in ("v000002", "v000002-evaluate"))
    assert first.read_text() == again.read_text()


@pytest.mark.slow
def test_activations_computed_again_give_the_same_weights(tmp_path, monkeypatch):
    norms = []
    for change in ("learner.checkpoint_activations=false", "learner.checkpoint_activations=true"):
        (tmp_path / change).mkdir()
        monkeypatch.chdir(tmp_path / change)
        assert train.main([*SHORT, change]) == 0
        (run,) = (tmp_path / change / "runs").iterdir()
        norms.append([json.loads(line)["train/grad_norm"] for line in (run / "metrics.jsonl").read_text().splitlines()])
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
