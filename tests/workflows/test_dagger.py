"""algo.name=dagger: the policy plays, the expert labels, and the learners imitate all labels so far."""

import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import stepped
import torch
from talking_runs import far

from embodied import train
from embodied.config.recipe import load
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.learners.dagger import Aggregate
from embodied.policies.policy_folder import read_weights
from embodied.train import check_trains
from embodied.workflows.rl_loop import EmbodiedLoop

DAGGER = [
    *stepped.SHORT,
    "recipe=pointmass_ppo",
    "run.env_steps=null",
    "algo.name=dagger",
    "algo.rollout_decisions=8",
    "algo.steps=5",
    "algo.minibatch_size=48",
    "algo.lr=0.01",
    "algo.adam_eps=0.1",
]


def played(folder, *arguments, placement=stepped.TWO_SIMS):
    folder.mkdir()
    with stepped.Run(folder, *DAGGER, *arguments, placement=placement) as run:
        return run.play(0, 3), run.weights()


@pytest.mark.parametrize("more", [(), ("algo.keep=100",)], ids=["all", "newest"])
def test_one_and_two_learners_imitate_the_same_labels(more, tmp_path):
    rows, alone = played(tmp_path / "1", *more)
    others, shared = played(tmp_path / "2", *more, placement=stepped.TWO_LEARNERS)
    assert far(shared, alone) < 1e-10
    assert [row["train/labels"] for _, row in rows] == ([64, 100, 100] if more else [64, 128, 192])
    assert [row["train/loss"] for _, row in rows] == pytest.approx([row["train/loss"] for _, row in others], rel=1e-9)


def test_the_expert_plays_first_and_labels_what_the_policy_meets(monkeypatch, tmp_path):
    seen = []
    add = Aggregate.add
    monkeypatch.setattr(
        Aggregate,
        "add",
        lambda self, trajectory, iteration: (seen.append(trajectory), add(self, trajectory, iteration)),
    )
    played(tmp_path / "1")
    first, second, _ = seen
    assert np.array_equal(np.clip(first.actions, -1, 1), first.replay["labels"])
    assert not np.allclose(second.actions, second.replay["labels"], atol=0.1)


def test_a_resumed_dagger_run_gives_the_same_weights(tmp_path):
    short = [one for one in DAGGER if not one.startswith("run.iterations")]
    short += ["run.iterations=3", "cluster.backend=inline", "eval.episodes=1", "eval.videos=0", "run.save_every=1"]
    whole = train(*short, "run.keep=null", f"run.dir={tmp_path}", "algo.keep=150").folder
    first = shutil.copytree(whole, tmp_path / "first")
    for later in ("v000002", "v000003"):
        shutil.rmtree(first / "checkpoints" / later)
    train(f"resume={first}")
    ends = [read_weights(run / "checkpoints" / "v000003" / "policy") for run in (whole, first)]
    assert all(np.array_equal(ends[0][name], ends[1][name]) for name in ends[0])


def decisions(rows, length, value):
    """A rollout of these env rows."""
    count = len(rows) * length
    obs = {"state": np.full((count, 2), value), "instruction": np.array(["go"] * count, object)}
    labels = np.arange(count, dtype=np.float32).reshape(count, 1, 1) + value
    mask = np.ones((count, 1), bool)
    lengths = np.full(len(rows), length)
    return SimpleNamespace(ids=np.array(rows), lengths=lengths, mask=mask, obs=obs, replay={"labels": labels})


def test_labels_are_saved_and_divided_anew_among_learners(tmp_path):
    ranks = [Aggregate(), Aggregate()]
    for iteration in range(2):
        ranks[0].add(decisions([0, 1], 3, 10 * iteration), iteration)
        ranks[1].add(decisions([2], 3, 10 * iteration + 6), iteration)
    saved = []
    for number, rank in enumerate(ranks):
        rank.save(tmp_path / f"{number}.npz")
        with np.load(tmp_path / f"{number}.npz", allow_pickle=False) as arrays:
            saved.append(dict(arrays))
    one = Aggregate()
    one.load(saved, 0, 1)
    assert one.labels.ravel().tolist() == [*range(9), *range(10, 19)] and (np.diff(one.numbers) > 0).all()
    second = Aggregate()
    second.load(saved, 1, 3)
    assert second.labels.ravel().tolist() == [6, 7, 8, 10, 11, 12]
    assert second.find(one.numbers[[0, 9, 17, 6]]).tolist() == [3, 0]
    batch = second.batch(torch.tensor([3, 0]))
    assert batch["obs"]["instruction"] == ["go", "go"] and batch["actions"].ravel().tolist() == [10, 6]


def test_envs_without_an_expert_and_policies_with_chunks_are_refused(tmp_path):
    loaded = load(["recipe=gym_ppo", "algo.name=dagger"])
    with pytest.raises(ConfigError, match="there is no expert"):
        check_trains(loaded, EmbodiedLoop)
    with pytest.raises(EmbodiedError, match="an expert labels one action of a decision"):
        played(tmp_path / "1", "policy.chunk=2")
