"""Runs in bfloat16: acting and learning agree, and what is saved is what acted."""

import json

import numpy as np
import pytest

from embodied import evaluate, train
from embodied.policies.policy_folder import read_blobs

ARGUMENTS = [
    "recipe=pointmass_ppo",
    "env.num_envs=8",
    "policy.hidden=[32,32]",
    "policy.normalize_observations=true",
    "algo.rollout_decisions=32",
    "algo.minibatch_size=256",
    "algo.epochs=1",
    "cluster.backend=inline",
    "run.iterations=2",
    "eval.episodes=4",
    "eval.videos=0",
]


@pytest.mark.parametrize(
    ("option", "stored"), [("learner.precision=bf16", "float32"), ("policy.dtype=bfloat16", "bfloat16")]
)
def test_acting_and_learning_compute_alike(tmp_path, monkeypatch, option, stored):
    monkeypatch.chdir(tmp_path)
    assert train.main([*ARGUMENTS, option]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["train/logprob_gap"] for row in rows]
    assert max(gaps) < 1e-5 and np.isfinite(gaps).all()
    policy = run / "checkpoints" / "v000002" / "policy"
    assert {blob.spec.dtype for name, blob in read_blobs(policy).items() if "weight" in name} == {stored}
    assert evaluate.main([f"checkpoint={run}", "eval.videos=0", "cluster.backend=inline"]) == 0
    first, again = (run / "eval" / name / "episodes.csv" for name in ("v000002", "v000002-evaluate"))
    assert first.read_text() == again.read_text()
