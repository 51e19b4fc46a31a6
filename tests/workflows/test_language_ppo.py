"""Runs in which PPO learns from conversations: values come from the learner, and nothing depends on where it runs."""

import numpy as np
import pytest
from talking_runs import APART, ONE_OF_EACH, TALK, Talk, far, told

from embodied import evaluate, train
from embodied.policies.policy_folder import read_weights

PPO = ["algo.name=ppo", "policy.value_head=true", "algo.groups=10", "algo.group_size=2", "algo.epochs=2"]
PPO += ["algo.minibatch_size=8", "algo.gamma=1", "algo.gae_lambda=0.9", "algo.value_lr=0.1"]
ONE_STEP = ["algo.epochs=1", "algo.minibatch_size=null", "algo.normalize_advantages=false"]
MANY_LEARNERS = {"sim,policy": "cpu:0", "learner": "cpu:0-3*4"}
HEAD = "value_head.weight"


def ppo(folder, *options, **more):
    names = {option.partition("=")[0] for option in options}
    return Talk(folder, *(one for one in PPO if one.partition("=")[0] not in names), *options, **more)


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    with ppo(tmp_path_factory.mktemp("sync"), placement=ONE_OF_EACH) as run:
        return run.some(2), run.weights()


def test_the_run_that_others_are_compared_with_learns_values(sync):
    rows, weights = sync
    for episodes, row in rows:
        assert np.var([episode.total_reward for episode in episodes]) > 0 and len(episodes) == 20
        assert row["groups/used"] == 10 and row["train/staleness"] == 0 and row["train/logprob_gap"] < 1e-6
        assert row["train/grad_norm"] > 1e-3 and row["train/value_loss"] > 1e-3
    assert rows[0][1]["train/explained_variance"] == 0  # a fresh head says 0 of everything
    assert rows[1][1]["train/explained_variance"] != 0
    assert np.abs(weights[HEAD]).max() > 1e-3


def test_many_learners_give_the_same_conversations_and_weights(sync, tmp_path):
    with ppo(tmp_path, "learner.pack_tokens=40", placement=MANY_LEARNERS) as run:
        rows = run.some(2)
        assert told(rows) == told(sync[0]) and far(run.weights(), sync[1]) < 1e-10
        names = ("train/value_loss", "train/explained_variance", "train/policy_loss")
        for (_, row), (_, known) in zip(rows, sync[0], strict=True):
            assert [row[name] for name in names] == pytest.approx([known[name] for name in names], rel=1e-6, abs=1e-9)


def test_periodic_is_sync_where_there_is_one_step(tmp_path):
    found = []
    for schedule, placement in (("sync", ONE_OF_EACH), ("periodic", APART)):
        asked = (*ONE_STEP, "algo.overlong=2", f"pipeline.schedule={schedule}")
        with ppo(tmp_path / schedule, *asked, placement=placement) as run:
            rows = run.some(3)
            found.append((told(rows), run.weights(), [row["train/value_loss"] for _, row in rows]))
    assert found[0][0] == found[1][0] and far(found[0][1], found[1][1]) < 1e-10
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-9) and min(found[0][2]) > 1e-3


def test_async_learns_from_exactly_so_old_conversations_with_values_of_its_own(tmp_path):
    with ppo(tmp_path, "pipeline.schedule=async", "pipeline.async_level=2") as run:
        rows = [row for _, row in run.some(4)]
        assert [row["train/staleness"] for row in rows] == [0, 1, 2, 2]
        assert all(row["train/value_loss"] > 1e-3 for row in rows)


WAYS = [
    ("policy.lora_rank=4", "policy.preset=tiny"),
    ("learner.checkpoint_activations=true",),
    ("algo.kl_coef=0.1", "algo.kl_in=reward"),
    pytest.param(("learner.shard=true",), marks=pytest.mark.slow),
    pytest.param(("learner.shard=true", "policy.dtype=bfloat16"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_every_way_to_train_learns_values(sync, options, tmp_path):
    backend = "local" if "learner.shard=true" in options else "inline"
    with ppo(tmp_path, *options, backend=backend) as run:
        rows, weights = run.some(2), run.weights()
    assert all(np.isfinite(row["train/grad_norm"]) and row["train/value_loss"] > 1e-3 for _, row in rows)
    assert np.abs(weights[HEAD]).max() > 1e-3
    if options in (("learner.shard=true",), ("learner.checkpoint_activations=true",)):
        assert far(weights, sync[1]) < 1e-10


ONE_PROCESS = ["cluster.backend=inline", "placement={'sim,policy': 'cpu:0', learner: 'cpu:1'}", "run.keep=null"]


def program(folder, *arguments):
    often = ["run.iterations=3", "run.save_every=1", "run.eval_every=2", "eval.temperature=1", f"run.dir={folder}"]
    names = {one.partition("=")[0] for one in (*arguments, *PPO, *often)}
    return [*(one for one in TALK if one.partition("=")[0] not in names), *ONE_PROCESS, *often, *PPO, *arguments]


def final_weights(run):
    return read_weights(run / "checkpoints" / "v000003" / "policy")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert train.main(program(folder)) == 0
    (run,) = folder.iterdir()
    return run


def test_a_policy_with_values_is_evaluated_and_begun_from_with_or_without_them(whole, tmp_path):
    asked = [f"checkpoint={whole}", "eval.videos=0", "cluster.backend=inline", "eval.episodes=6"]
    assert evaluate.main(asked) == 0
    still = ["run.iterations=1", "algo.lr=0", f"run.start_from={whole}", "seed=7"]
    for name, options in (("ppo", ["algo.value_lr=0"]), ("grpo", ["algo.name=grpo", "policy.value_head=false"])):
        given = [*still, *options]
        names = {one.partition("=")[0] for one in given}
        usual = [one for one in program(tmp_path / name) if one.partition("=")[0] not in names]
        if name == "grpo":
            usual = [one for one in usual if not one.startswith(("algo.gamma", "algo.gae", "algo.value"))]
        assert train.main([*usual, *given]) == 0
        (run,) = (tmp_path / name).iterdir()
        ours, theirs = read_weights(run / "checkpoints" / "v000001" / "policy"), final_weights(whole)
        assert (HEAD in ours) == (name == "ppo")
        assert all(np.array_equal(ours[each], theirs[each]) for each in ours)
