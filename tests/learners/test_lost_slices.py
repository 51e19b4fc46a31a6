"""An update without the slice of a sim worker that died."""

from dataclasses import replace

import numpy as np
import torch
import toy
from ranks import on_ranks

from embodied.algorithms.config import PPOConfig
from embodied.core.types import BatchEnd, Unit, join, map_decisions
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model, PolicyOptimizer
from embodied.learners.train_batch import RolloutBuffer
from embodied.learners.update import update_policy
from embodied.runtime import Cluster, HostPlan, Timers
from embodied.runtime.collective import Alone

CONFIG = PPOConfig(rollout_decisions=toy.T, epochs=2, minibatch_size=5, lr=1e-2)


def trained(part, collective):
    """The weights after an update with these env rows."""
    policy = toy.make()
    share, optimizer = toy.batch_of(part, CONFIG, policy, collective), PolicyOptimizer(policy, CONFIG, collective)
    update_policy(Model(policy, LearnerConfig()), optimizer, CONFIG, share, 0, BatchEnd(0, 10))
    return policy.state_dict()


def test_all_counts_are_those_of_a_smaller_run():
    """Env 1 is missing: rank 0 has env 0, rank 1 has envs 2 and 3; together they are a run of three envs."""
    data = toy.rollout(toy.make(), seed=1)
    parts = [toy.columns(data, slice(0, 1)), toy.columns(data, slice(2, 4))]
    small = replace(join(parts), ids=np.arange(3))
    weights = on_ranks(2, lambda rank, collective: trained(parts[rank], collective))
    for name, weight in trained(small, Alone()).items():
        torch.testing.assert_close(weights[0][name], weight, atol=1e-12, rtol=0)
        assert torch.equal(weights[0][name], weights[1][name])


def test_a_rank_learns_only_from_the_rollouts_that_the_driver_names():
    data = toy.rollout(toy.make(), seed=2)
    wanted = ("sim-0/0#2", "sim-1/0#2")
    with Cluster("inline", [HostPlan("a", ("learner",))]) as cluster:
        channel = cluster.channel("trajectories", capacity=None)
        channel.put(replace(data, source="sim-0/0#3"), key=2)  # of the next batch, which is collected meanwhile
        for source in ("sim-0/0#1", *wanted):  # the first is of a sim that died then
            channel.put(replace(data, source=source), key=1)
        for item in (Unit(wanted, data.ids), BatchEnd(0, 10)):
            channel.put(item, key=1)
        channel.put(replace(data, source="sim-1/0#1"), key=1)
        (unit,) = RolloutBuffer().units(channel, 1, Timers())
        assert unit.sources == wanted
        assert channel.qsize() == 1 and channel.get(key=2).source == "sim-0/0#3"


def test_decisions_of_older_weights_are_marked_as_stale():
    """Half of the decisions are those of the version before the one that is trained on."""
    data = toy.rollout(toy.make(), seed=3)
    data.versions[: toy.T * toy.N // 2] = 4
    data.versions[toy.T * toy.N // 2 :] = 5
    share = toy.batch_of(data, CONFIG, toy.make(), version=5)
    assert share.metrics["train/staleness"] == 0.5
    assert share.current.tolist() == [version == 5 for version in data.versions]


def test_sequences_of_different_lengths_get_the_advantages_they_would_get_alone():
    """The first two decisions of env 0 beside all of env 1: the value after them is what they bootstrap from."""
    config = PPOConfig(rollout_decisions=toy.T, normalize_advantages=False)
    data = toy.rollout(toy.make(), seed=4)
    short, whole = toy.columns(data, slice(0, 1)), toy.columns(data, slice(1, 2))
    short = replace(short, lengths=np.array([2]), **map_decisions(lambda array: array[:2], short))
    both = join([whole, short])
    assert both.lengths.tolist() == [2, toy.T]
    found = toy.batch_of(both, config, toy.make())
    alone = [toy.batch_of(one, config, toy.make()) for one in (short, whole)]
    assert found.num_items == 2 + toy.T
    for name in ("advantages", "returns", "values"):
        assert torch.equal(getattr(found, name), torch.cat([getattr(one, name) for one in alone]))
