"""schedule=periodic: learners work on finished groups while others are played, and take the very step that they would
have taken after all of them."""

import os
import re
import signal
from dataclasses import replace

import numpy as np
import pytest

from embodied.algorithms.groups import GroupPool
from embodied.config.recipe import load
from embodied.core.errors import ConfigError, WorkerFailed
from embodied.envs.worker import SimWorker
from embodied.learners.accumulation import Groups
from embodied.learners.model import Optimizer
from embodied.learners.rendezvous import rendezvous_point
from embodied.placement import make_plan
from embodied.policies.folder import read_weights
from embodied.run import launch
from embodied.workflows.embodied import EmbodiedLoop
from embodied.workflows.group_collector import GroupStream

ITERATIONS = 4
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
    "faults.timeout_s=60",
    "faults.hang_s=20",
    f"run.iterations={ITERATIONS}",
]
PERIODIC = "pipeline.schedule=periodic"
FOUR_SIMS = {"sim": "fake:0-3", "policy": "fake:4", "learner": "fake:5-6"}
TWO_SIMS = {"sim": "fake:0-1", "policy": "fake:2", "learner": "fake:3-4"}


class Run:
    def __init__(self, folder, *arguments, order=0, most_s=0.001, placement=FOUR_SIMS, backend="inline"):
        changed = {argument.partition("=")[0] for argument in arguments}
        own = [argument for argument in ARGUMENTS if argument.partition("=")[0] not in changed]
        kwargs = f"env.kwargs={{order: {order}, most_s: {most_s}, dtype: float64}}"
        self.config = load([*own, kwargs, f"cluster.backend={backend}", *arguments]).config
        plan = make_plan(placement, (0, 1, 2, 3), self.config.env.num_envs, 1)
        self.plan = replace(plan, hosts=tuple(replace(host, cores=()) for host in plan.hosts))
        self.folder, self.told = folder, []

    def __enter__(self):
        self.cluster = launch.cluster(self.config, self.plan, self.folder)
        rendezvous = rendezvous_point(self.plan.count("learner"), self.config.cluster.backend, self.folder, 60)
        self.loop = EmbodiedLoop(self.config, self.cluster, rendezvous=rendezvous, tell=self.told.append)
        self.loop.start()
        return self

    def __exit__(self, *args):
        self.cluster.__exit__(*args)

    def train(self, first=0, last=ITERATIONS):
        if not first:
            self.loop.publish(0)
        return [self.loop.iterate(number, ITERATIONS) for number in range(first, last)]

    def weights(self):
        self.loop.learners.save(self.folder / "saved").wait()
        return read_weights(self.folder / "saved" / "policy")


def far(ours, theirs):
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    sizes = {name: np.abs(array).max() or 1.0 for name, array in theirs.items()}
    return max(float(np.abs(ours[name] - theirs[name]).max() / sizes[name]) for name in theirs)


@pytest.fixture(autouse=True, scope="module")
def uneven_env():
    """`uneven_env:Uneven` can be named in the hosts too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(os.path.dirname(os.path.dirname(__file__)))
        yield


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    with Run(tmp_path_factory.mktemp("sync")) as run:
        return run.train(), run.weights()


@pytest.fixture
def arrivals(monkeypatch):
    """The groups that learners were given, by their first episodes, in that order."""
    given, learn = [], GroupStream._learn

    def watched(stream, sent):
        given.append(sent.group.episodes[0])
        learn(stream, sent)

    monkeypatch.setattr(GroupStream, "_learn", watched)
    return given


def test_the_sync_run_learns_from_rewards_that_differ_and_plays_more_than_it_needs(sync):
    for episodes, row in sync[0]:
        assert np.var([episode.total_reward for episode in episodes]) > 0.01
        assert row["train/grad_norm"] > 1e-3 and row["groups/used"] == GROUPS
    numbers = [row for _, row in sync[0]]
    assert any(row["groups/rounds"] > 1 for row in numbers)
    assert any(row["groups/dropped_out_of_bounds"] for row in numbers)
    assert any(row["groups/discarded_episodes"] >= SIZE for row in numbers)
    assert not any(row["groups/carried_episodes"] or row["train/staleness"] for row in numbers)


@pytest.mark.parametrize("order", range(5))
def test_periodic_equals_sync_whatever_the_order_in_which_groups_come(sync, tmp_path, arrivals, order):
    with Run(tmp_path, PERIODIC, order=order, most_s=0.004) as run:
        rows = run.train()
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
        ["algo.weighting=episode", "algo.kl_coef=0.1", "algo.lr=0.01"],
        ["algo.baseline=leave_one_out", "algo.scale=none", "algo.filter=drop", "algo.surplus=null", "algo.max_grad_norm=0.01"],
        ["algo.group_size=2", "algo.groups=2", "algo.entropy_coef=0.01", "algo.lr_schedule=linear", "algo.deviation=sample"],
    ],
    ids=["episodes_weigh_alike", "clipped", "small"],
)  # fmt: skip
def test_periodic_equals_sync_with_other_options(tmp_path, options):
    found = []
    for name, schedule in (("sync", "pipeline.schedule=sync"), ("periodic", PERIODIC)):
        with Run(tmp_path / name, schedule, *options, placement=TWO_SIMS) as run:
            found.append((run.train(), run.weights()))
    assert any(row["train/grad_norm"] > 1e-3 for _, row in found[0][0])
    assert_alike(found[1][0], found[0][0])
    assert far(found[1][1], found[0][1]) < 1e-10


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_processes_give_the_same_weights(sync, tmp_path, backend):
    with Run(tmp_path, PERIODIC, placement=TWO_SIMS, backend=backend) as run:
        rows = run.train()
        assert far(run.weights(), sync[1]) < 1e-10
    assert_alike(rows, sync[0])


# What the comparison must notice


def test_a_wrong_divisor_is_noticed(sync, tmp_path, monkeypatch):
    exchange = Optimizer.exchange
    monkeypatch.setattr(
        Optimizer, "exchange", lambda self, stats, count=None: exchange(self, stats, count and count + 1)
    )
    with Run(tmp_path, PERIODIC) as run:
        run.train()
        assert far(run.weights(), sync[1]) > 1e-6


def test_a_group_that_sync_would_not_take_is_noticed(sync, tmp_path, monkeypatch):
    late = lambda pool: list(pool.ready.values())[: GROUPS - len(pool.handed)]  # noqa: E731 - whichever are ready
    monkeypatch.setattr(GroupPool, "certain", late)
    for order in range(5):
        with Run(tmp_path / str(order), PERIODIC, order=order, most_s=0.004) as run:
            run.train()
            if far(run.weights(), sync[1]) > 1e-6:
                return
    pytest.fail("no late group was learned from")


def test_a_group_of_another_version_is_an_error(tmp_path, monkeypatch):
    hand_on = SimWorker.hand_on

    def older(sim, episodes, *to):
        sim.ended |= {one: replace(sim.ended[one], versions=sim.ended[one].versions - 1) for one in episodes}
        return hand_on(sim, episodes, *to)

    older.served_while_busy = True
    monkeypatch.setattr(SimWorker, "hand_on", older)
    with Run(tmp_path, PERIODIC) as run:
        with pytest.raises(WorkerFailed, match="were played with version -1 of the weights, but version 0 learns"):
            run.train()
