"""Runs in which PPO learns from conversations: values come from the learner, and nothing depends on where it runs."""

import numpy as np
import pytest
from talking_runs import APART, ONE_OF_EACH, Talk, far, program, told

from embodied import evaluate, train
from embodied.policies.policy_folder import read_weights

PPO = ["algo.name=ppo", "policy.value_head=true", "algo.groups=6", "algo.group_size=2", "algo.epochs=2"]
PPO += ["algo.minibatch_size=6", "algo.gamma=1", "algo.gae_lambda=0.9", "algo.value_lr=0.1"]
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
        assert np.var([episode.total_reward for episode in episodes]) > 0 and len(episodes) == 12
        assert row["groups/used"] == 6 and row["train/staleness"] == 0 and row["train/logprob_gap"] < 1e-6
        assert row["train/grad_norm"] > 1e-3 and row["train/value_loss"] > 1e-3
    assert rows[0][1]["train/explained_variance"] == 0  # a fresh head says 0 of everything
    assert rows[1][1]["train/explained_variance"] != 0
    assert np.abs(weights[HEAD]).max() > 1e-3


def test_many_learners_give_the_same_conversations_and_weights(sync, tmp_path):
    options = ("learner.pack_tokens=40", "learner.checkpoint_activations=true")
    with ppo(tmp_path, *options, placement=MANY_LEARNERS) as run:
        rows = run.some(2)
        assert told(rows) == told(sync[0]) and far(run.weights(), sync[1]) < 1e-10
        names = ("train/value_loss", "train/explained_variance", "train/policy_loss")
        for (_, row), (_, known) in zip(rows, sync[0], strict=True):
            assert [row[name] for name in names] == pytest.approx([known[name] for name in names], rel=1e-6, abs=1e-9)


def test_periodic_equals_sync_in_ppo_on_conversations_where_an_update_has_one_step(tmp_path):
    found = []
    for schedule, placement in (("sync", ONE_OF_EACH), ("periodic", APART)):
        asked = (*ONE_STEP, "algo.overlong=2", f"pipeline.schedule={schedule}")
        with ppo(tmp_path / schedule, *asked, placement=placement) as run:
            rows = run.some(2)
            found.append((told(rows), run.weights(), [row["train/value_loss"] for _, row in rows]))
    assert found[0][0] == found[1][0] and far(found[0][1], found[1][1]) < 1e-10
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-9) and min(found[0][2]) > 1e-3


def test_async_learns_from_exactly_so_old_conversations_with_values_of_its_own(tmp_path):
    with ppo(tmp_path, "pipeline.schedule=async", "pipeline.async_level=2") as run:
        rows = [row for _, row in run.some(3)]
        assert [row["train/staleness"] for row in rows] == [0, 1, 2]
        assert all(row["train/value_loss"] > 1e-3 for row in rows)


WAYS = [
    ("policy.lora_rank=4", "policy.preset=tiny", "algo.kl_coef=0.1", "algo.kl_in=reward"),
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
    if options == ("learner.shard=true",):
        assert far(weights, sync[1]) < 1e-10


def final_weights(run):
    return read_weights(run / "checkpoints" / "v000002" / "policy")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole")
    assert train.main(program(folder, *PPO, "run.iterations=2", "run.eval_every=2")) == 0
    (run,) = folder.iterdir()
    return run


def test_a_policy_with_values_is_evaluated_and_begun_from_with_or_without_them(whole, tmp_path):
    asked = [f"checkpoint={whole}", "eval.videos=0", "cluster.backend=inline", "eval.episodes=6"]
    assert evaluate.main(asked) == 0
    still = ["run.iterations=1", "algo.lr=0", f"run.start_from={whole}", "seed=7"]
    for name, options in (("ppo", [*PPO[:-1], "algo.value_lr=0"]), ("grpo", ["policy.value_head=false"])):
        assert train.main(program(tmp_path / name, *still, *options)) == 0
        (run,) = (tmp_path / name).iterdir()
        ours, theirs = read_weights(run / "checkpoints" / "v000001" / "policy"), final_weights(whole)
        assert (HEAD in ours) == (name == "ppo")
        assert all(np.array_equal(ours[each], theirs[each]) for each in ours)
