"""An update without the slice of a sim worker that died."""

import importlib.util
import threading
from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from embodied.algorithms.config import PPOConfig
from embodied.learners.batch import merge
from embodied.learners.collective import Alone, Threads
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.learners.optimizer import Optimizer
from embodied.learners.rendezvous import RendezvousRoom
from embodied.learners.update import prepare, update_policy
from embodied.learners.worker import receive

_spec = importlib.util.spec_from_file_location("toy", Path(__file__).parent / "toy.py")
toy = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(toy)
CONFIG = PPOConfig(rollout_decisions=toy.T, epochs=2, minibatch_size=5, lr=1e-2)


def trained(part, env_ids, collective):
    """The weights after an update with this part of the env rows `env_ids`."""
    policy = toy.make()
    share = prepare(part, CONFIG, collective, env_ids, torch.float64)
    update_policy(Model(policy, LearnerConfig()), Optimizer(policy, CONFIG, collective), CONFIG, share, 0, 0, 10)
    return policy.state_dict()


def test_all_counts_are_those_of_a_smaller_run():
    """Env 1 is missing: rank 0 has env 0, rank 1 has envs 2 and 3; together they are a run of three envs."""
    data = toy.rollout(toy.make(), seed=1)
    parts = [toy.columns(data, slice(0, 1)), toy.columns(data, slice(2, 4))]
    small = replace(merge(parts), env_ids=np.arange(3))
    room, weights = RendezvousRoom(2, 30.0), {}

    def work(rank):
        weights[rank] = trained(parts[rank], np.array([0, 2, 3]), Threads(room, rank))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for name, weight in trained(small, np.arange(3), Alone()).items():
        torch.testing.assert_close(weights[0][name], weight, atol=1e-12, rtol=0)
        assert torch.equal(weights[0][name], weights[1][name])


class Fifo(deque):
    get = deque.popleft


def test_a_rank_takes_the_trajectories_it_is_told_of_and_no_other():
    data = toy.rollout(toy.make(), seed=2)
    sources = ("sim-0/0#1", "sim-1/0#2", "sim-0/0#2", "sim-0/0#3")
    channel = Fifo(replace(data, source=source) for source in sources)
    assert [part.source for part in receive(channel, ("sim-0/0#2", "sim-1/0#2"))] == ["sim-1/0#2", "sim-0/0#2"]
    assert [part.source for part in channel] == ["sim-0/0#3"]
