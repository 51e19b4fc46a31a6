"""Whole runs of the tiny preset in one process: RL by both kinds of noise, and imitation."""

import json

import numpy as np
import pytest

from embodied import collect, evaluate, sft, train

SHORT = [
    "recipe=pointmass_ppo_pi0_tiny",
    "env.num_envs=4",
    "cluster.backend=inline",
    "placement=collocated",
    "eval.episodes=2",
    "eval.videos=0",
]
TWO = ["env.max_episode_steps=8", "run.iterations=2", "algo.rollout_decisions=3", "algo.minibatch_size=6"]


def rows_of(folder):
    (run,) = (folder / "runs").iterdir()
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("options", [[], ["policy.name=pi05", "policy.exploration=flow_noise", "policy.train=expert"]])
def test_it_trains_and_its_checkpoint_evaluates_alike(tmp_path, monkeypatch, options):
    monkeypatch.chdir(tmp_path)
    assert train.main([*SHORT, *TWO, *options]) == 0
    run, rows = rows_of(tmp_path)
    assert max(row["train/logprob_gap"] for row in rows) < 1e-5
    assert all(row["train/grad_norm"] > 0 and np.isfinite(row["train/value_loss"]) for row in rows)
    if not options:
        assert evaluate.main([f"checkpoint={run}", "eval.videos=0", "cluster.backend=inline"]) == 0
        first, again = (run / "eval" / name / "episodes.csv" for name in ("v000002", "v000002-evaluate"))
        assert first.read_text() == again.read_text()


@pytest.mark.slow
def test_it_imitates_demonstrations_and_their_statistics_stay_with_it(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    assert collect.main([*SHORT[:-2], "out=demos", "collect.episodes=3"]) == 0
    few = ["sft.data=demos", "sft.epochs=6", "sft.minibatch_size=32", "sft.lr=1e-3", "policy.statistics=demos"]
    assert sft.main([*SHORT, *few]) == 0
    run, rows = rows_of(tmp_path)
    assert rows[-1]["train/loss"] < 0.8 * rows[0]["train/loss"]
    (tmp_path / "demos").rename(tmp_path / "gone")
    assert train.main([*SHORT, *TWO, "run.name=rl", f"run.start_from={run}"]) == 0
