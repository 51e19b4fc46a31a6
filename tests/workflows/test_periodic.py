"""schedule=periodic: learners work on finished groups while others are played, and take the very step that they would
have taken after all of them."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import stepped
import torch
from talking_runs import far

from embodied.core.errors import WorkerFailed
from embodied.envs.sim_worker import SimWorker
from embodied.policies.config import MLPConfig
from embodied.policies.networks import MLPPolicy
from embodied.workflows.group_collector import Groups

ITERATIONS = 2
GROUPS, SIZE = 6, 3
ARGUMENTS = [
    "recipe=pointmass_grpo",
    "env.name=uneven_env:Uneven",
    "env.num_envs=4",
    "env.max_episode_steps=12",
    "policy.dtype=float64",
    "policy.hidden=[16,16]",
    "policy.normalize_observations=true",
    f"algo.groups={GROUPS}",
    f"algo.group_size={SIZE}",
    "algo.minibatch_size=null",
    "algo.epochs=1",
    "algo.filter=resample",
    "algo.filter_low=0.0",  # about half of the groups
    "algo.surplus=discard",
    "algo.max_rounds=8",
    "algo.lr=0.01",
    "algo.adam_eps=0.1",  # with a small one, Adam steps as far whatever the gradient is divided by
    "algo.max_grad_norm=null",
    "learner.micro_batch_size=16",
    "seed=1",
    "faults.timeout_s=240",
    "faults.hang_s=20",
    f"run.iterations={ITERATIONS}",
]
AS_MANY = ["algo.surplus=null", "algo.filter_low=null"]  # groups are played as are learned from
PERIODIC = "pipeline.schedule=periodic"
FOUR_SIMS = {"sim": "fake:0-3", "policy": "fake:4", "learner": "fake:5-6"}
FALLING = {"pauses": "falling", "most_s": 0.02}
TWO_SIMS = {"sim": "fake:0-1", "policy": "fake:2", "learner": "fake:3-4"}


class Run(stepped.Run):
    usual = ARGUMENTS

    def __init__(self, folder, *arguments, pauses="drawn", least_s=0.0, most_s=0.001, placement=FOUR_SIMS, **more):
        kwargs = f"env.kwargs={{pauses: {pauses}, least_s: {least_s}, most_s: {most_s}, dtype: float64}}"
        super().__init__(folder, kwargs, *arguments, placement=placement, **more)


@pytest.fixture(autouse=True, scope="module")
def uneven_env():
    """`uneven_env:Uneven` can be named in the hosts too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.path.join(os.path.dirname(os.path.dirname(__file__)), "support"))
        yield


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    with Run(tmp_path_factory.mktemp("sync")) as run:
        return run.play(), run.weights()


@pytest.fixture
def arrivals(monkeypatch):
    """The groups that learners were given, by their first episodes, in that order."""
    given = []
    watch_arrivals(monkeypatch, lambda group: given.append(group.episodes[0]))
    return given


def watch_arrivals(monkeypatch, heard):
    """Let `heard` have every group whose data have come to the learners."""
    arrived = Groups._arrived

    def watched(groups, *padding):
        for group, units in arrived(groups, *padding):
            yield group, units
            heard(group)

    monkeypatch.setattr(Groups, "_arrived", watched)


def test_the_sync_run_learns_from_rewards_that_differ_and_plays_more_than_it_needs(sync):
    for episodes, row in sync[0]:
        assert np.var([episode.total_reward for episode in episodes]) > 0.01
        assert row["train/grad_norm"] > 1e-3 and row["groups/used"] == GROUPS
    numbers = [row for _, row in sync[0]]
    assert any(row["groups/rounds"] > 1 for row in numbers)
    assert any(row["groups/dropped_out_of_bounds"] for row in numbers)
    assert any(row["groups/discarded_episodes"] >= SIZE for row in numbers)
    assert not any(row["groups/carried_episodes"] or row["train/staleness"] for row in numbers)


def test_periodic_equals_sync_whatever_the_order_in_which_groups_come(sync, tmp_path, arrivals):
    with Run(tmp_path, PERIODIC, **FALLING) as run:
        rows = run.play()
        assert far(run.weights(), sync[1]) < 1e-10
    assert_alike(rows, sync[0])
    assert arrivals != sorted(arrivals), "some groups overtake others"
    assert all(row["train/staleness"] == 0 for _, row in rows)
    first = [row["time/first_backward_s"] for _, row in rows]
    assert all(begin < row["time/rollout_s"] for begin, (_, row) in zip(first, rows, strict=True))


def assert_alike(rows, others):
    for (episodes, row), (wanted, other) in zip(rows, others, strict=True):
        assert [(e.index, e.length) for e in episodes] == [(e.index, e.length) for e in wanted]
        assert [e.total_reward for e in episodes] == pytest.approx([e.total_reward for e in wanted], abs=1e-9)
        names = [name for name in other if name.startswith(("groups/", "faults/", "env_steps"))]
        assert [row[name] for name in names] == [other[name] for name in names]
        means = [name for name in other if name.startswith("train/")]
        assert [row[name] for name in means] == pytest.approx([other[name] for name in means], abs=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        ["algo.groups=4", "algo.weighting=episode", "algo.kl_coef=0.1", "algo.deviation=sample"],
        [
            *("algo.baseline=leave_one_out", "algo.scale=none", "algo.filter=drop", *AS_MANY, "pipeline.stages=2"),
            *"algo.group_size=2 algo.groups=2 algo.entropy_coef=0.01 algo.lr_schedule=linear".split(),
            "algo.max_grad_norm=0.01",
        ],
    ],
    ids=["episodes_weigh_alike", "clipped"],
)
def test_periodic_equals_sync_with_other_options(tmp_path, options):
    found = []
    for name, schedule in (("sync", "pipeline.schedule=sync"), ("periodic", PERIODIC)):
        with Run(tmp_path / name, schedule, *options, placement=TWO_SIMS) as run:
            found.append((run.play(), run.weights()))
    assert any(row["train/grad_norm"] > 1e-3 for _, row in found[0][0])
    assert_alike(found[1][0], found[0][0])
    assert far(found[1][1], found[0][1]) < 1e-10


@pytest.mark.parametrize(
    "learners", [2, pytest.param(3, marks=pytest.mark.slow)], ids=["a_share_each", "more_ranks_than_episodes"]
)
def test_ranks_with_shards_take_every_group_together_and_compare_it_with_the_reference(tmp_path, learners):
    options = ["algo.kl_coef=0.1", "algo.group_size=2", "algo.groups=3"]
    with Run(tmp_path / "whole", *options, placement=TWO_SIMS) as run:
        rows, weights = run.play(), run.weights()
    assert any(row["train/reference_kl"] > 1e-6 for _, row in rows)
    place = {"sim": "fake:0-1", "policy": "fake:2", "learner": f"fake:3-{2 + learners}"}
    with Run(tmp_path / "shards", PERIODIC, *options, "learner.shard=true", placement=place, backend="local") as run:
        found = run.play()
        assert far(run.weights(), weights) < 1e-10
    assert_alike(found, rows)


def test_groups_that_are_sent_before_the_batch_is_complete_change_no_result(tmp_path, arrivals):
    options = ["algo.groups=4", "algo.epochs=2", "algo.minibatch_size=9", "algo.surplus=carry", "algo.kl_coef=0.1"]
    with Run(tmp_path / "together", *options) as run:
        rows, weights = run.play(), run.weights()
    assert any(row["groups/carried_episodes"] for _, row in rows)
    assert arrivals == sorted(arrivals)
    arrivals.clear()
    with Run(tmp_path / "early", "pipeline.granularity=1", *options, **FALLING) as run:
        found = run.play()
        assert far(run.weights(), weights) < 1e-10
    assert arrivals != sorted(arrivals), "some groups overtake others"
    assert_alike(found, rows)


class Looking(MLPPolicy):
    """Its frozen part hands observations on."""

    looked = 0  # observations that the frozen part has seen

    def __init__(self, config, spec):
        super().__init__(MLPConfig(hidden=(16,), dtype="float64"), spec)

    def frozen_features(self, obs):
        type(self).looked += len(obs["state"])
        return {"seen": torch.as_tensor(np.array(obs["state"]))}

    def forward(self, inputs):
        return super().forward(inputs | {"obs": inputs["obs"] | {"state": inputs["seen"]}})


def test_frozen_parts_see_each_observation_once_whenever_its_group_comes(tmp_path, arrivals):
    class LookingRun(Run):
        usual = tuple(word for word in ARGUMENTS if not word.startswith("policy."))

    options = [f"policy.name={__name__}:Looking", "algo.epochs=2", "algo.filter=none", *AS_MANY]
    found = []
    for name, more in {"together": [], "early": ["pipeline.granularity=1"]}.items():
        Looking.looked = 0
        with LookingRun(tmp_path / name, *options, *more, **FALLING, placement=TWO_SIMS) as run:
            ((episodes, row),) = run.play(0, 1)
            assert Looking.looked == sum(episode.length for episode in episodes)
            found.append((episodes, row, run.weights()))
    assert arrivals[:GROUPS] == sorted(arrivals[:GROUPS]) and arrivals[GROUPS:] != sorted(arrivals[GROUPS:])
    assert far(found[1][2], found[0][2]) < 1e-10 and found[0][1]["train/grad_norm"] > 1e-3


# What the comparison must notice


def test_a_group_of_another_version_is_an_error(tmp_path, monkeypatch):
    send_stored = SimWorker.send_stored

    def older(sim, episodes, *to, **how):
        kept = sim.store
        kept |= {one: replace(kept[one], versions=kept[one].versions - 1) for one in episodes}
        return send_stored(sim, episodes, *to, **how)

    older.served_while_busy = True
    monkeypatch.setattr(SimWorker, "send_stored", older)
    with Run(tmp_path, PERIODIC) as run:
        with pytest.raises(WorkerFailed, match="were played with version -1 of the weights, but version 0 learns"):
            run.play()


# Faults


def test_a_sim_that_dies_takes_along_only_what_was_not_handed_on(tmp_path, monkeypatch):
    """Every sim plays two of eight groups, one episode after the other. The second is killed after its first group,
    long before the end of the other."""
    options = ["algo.filter=none", *AS_MANY, "algo.groups=8"]
    with Run(tmp_path, PERIODIC, *options, backend="local", pauses="waiting", most_s=5.0) as run:
        watch_arrivals(monkeypatch, lambda group: 6 in group.episodes and os.kill(run.pid("sim-1"), signal.SIGKILL))
        (episodes, numbers), (_, after) = run.play(0, 2)
    assert numbers["faults/restarts"] == 1 and len(run.lines) == 1 and "sim-1" in run.lines[0]
    assert [episode.index for episode in episodes] == [one for one in range(8 * SIZE) if one not in (9, 10, 11)]
    assert numbers["faults/lost_episodes"] == SIZE and numbers["groups/dropped_incomplete"] == 1
    assert numbers["groups/used"] == numbers["groups/kept"] == 7
    assert numbers["env_steps"] == sum(episode.length for episode in episodes)
    assert numbers["train/grad_norm"] > 1e-3 and numbers["train/staleness"] == 0
    assert after["groups/used"] == 8 and after["faults/lost_episodes"] == 0


def test_a_group_that_a_sim_has_forgotten_when_it_is_asked_for_is_lost_and_counted(tmp_path, monkeypatch):
    send_stored, asked = SimWorker.send_stored, []

    def forgetful(sim, episodes, *to, **how):
        asked.append(episodes)
        return len(asked) > 1 and send_stored(sim, episodes, *to, **how)

    forgetful.served_while_busy = True
    monkeypatch.setattr(SimWorker, "send_stored", forgetful)
    with Run(tmp_path, PERIODIC, "algo.filter=none", *AS_MANY) as run:
        ((_, row),) = run.play(0, 1)
    assert row["faults/lost_episodes"] == SIZE and row["groups/dropped_incomplete"] == 1
    assert row["groups/used"] == row["groups/kept"] == GROUPS - 1


def test_learners_wait_longer_than_the_timeout_for_a_long_first_episode(tmp_path):
    """The learners wait for longer than faults.timeout_s, while the sims show that they are alive."""
    few = ["algo.groups=2", "algo.group_size=2", "algo.filter=none", *AS_MANY]
    short = ["faults.timeout_s=4", "faults.hang_s=4"]
    with Run(tmp_path, PERIODIC, *few, *short, least_s=0.5, most_s=0.5, placement=TWO_SIMS) as run:
        ((_, row),) = run.play(0, 1)
    assert row["time/first_backward_s"] > 4 and row["groups/used"] == 2


def test_a_resumed_periodic_run_equals_one_that_was_not_stopped(sync, tmp_path):
    with Run(tmp_path / "first", PERIODIC) as run:
        run.play(0, 1)
        run.loop.save_learners(tmp_path / "saved")
        state = run.loop.collector.save()
    assert not any(name.startswith("kept.") for name in state)
    with Run(tmp_path / "second", PERIODIC) as run:
        assert run.loop.restore(tmp_path / "saved", dict(state), 1) == 0
        run.play(1)
        assert far(run.weights(), sync[1]) < 1e-10
