"""Runs in which a language policy talks keep what runs of robots keep: the same batches and steps wherever and however
they are collected, and nothing lost or counted twice where a worker dies."""

import os
import signal

import numpy as np
import pytest
from stepped import ITERATIONS, Run

TALK = [
    "recipe=sums_grpo",
    "run.start_from=null",
    "env.name=talking_env:Digits",
    "env.num_envs=8",
    "policy.preset=tiny_gpt2",
    "policy.dtype=float64",
    "policy.max_tokens=4",
    "policy.max_running=8",
    "algo.groups=5",
    "algo.group_size=4",
    "algo.adam_eps=0.1",  # with a small one, Adam steps as far whatever the gradient is divided by
    "algo.lr=0.01",
    "eval.episodes=6",
    "eval.videos=0",
    "faults.timeout_s=60",
    "faults.hang_s=20",
    f"run.iterations={ITERATIONS}",
]
ONE_OF_EACH = {"sim": "cpu:0", "policy": "cpu:1", "learner": "cpu:2"}
APART = {"sim": "cpu:0-1*2", "policy": "cpu:1-2*2", "learner": "cpu:2-3*2"}


class Talk(Run):
    """A run of conversations."""

    def __init__(self, folder, *arguments, placement=APART, backend="inline", **more):
        changed = {argument.partition("=")[0] for argument in arguments}
        own = [argument for argument in TALK if argument.partition("=")[0] not in changed]
        folder.mkdir(exist_ok=True)
        super().__init__(folder, *own, *arguments, placement=placement, backend=backend, **more)

    def iterate(self, number):
        return self.loop.iterate(number, ITERATIONS)

    def some(self, count):
        return [self.iterate(number) for number in range(count)]

    def pid(self, worker):
        host = self.cluster._host_of(worker)
        return int(self.cluster._backend.where(host).split(",")[0].removeprefix("pid "))


def far(ours, theirs):
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    sizes = {name: np.abs(array).max() or 1.0 for name, array in theirs.items()}
    return max(float(np.abs(ours[name] - theirs[name]).max() / sizes[name]) for name in theirs)


def told(rows):
    """What episodes came to: their number, tokens and reward."""
    return [[(e.index, e.tokens, e.total_reward) for e in episodes] for episodes, _ in rows]


@pytest.fixture(scope="module")
def sync(tmp_path_factory):
    with Talk(tmp_path_factory.mktemp("sync"), placement=ONE_OF_EACH) as run:
        return run.some(2), run.weights()


def test_the_run_that_others_are_compared_with_learns(sync):
    for episodes, row in sync[0]:
        assert np.var([episode.total_reward for episode in episodes]) > 0
        assert row["train/grad_norm"] > 1e-3 and row["train/staleness"] == 0 and row["groups/used"] > 1
        assert row["train/logprob_gap"] < 1e-6  # log-probs travel in float32
    assert len({episode.index for episodes, _ in sync[0] for episode in episodes}) == 2 * 20


@pytest.mark.parametrize("schedule", ["sync", "periodic"])
def test_two_learners_and_any_schedule_of_this_version_take_the_same_step(sync, schedule, tmp_path):
    with Talk(tmp_path, f"pipeline.schedule={schedule}") as run:
        rows = run.some(2)
        assert told(rows) == told(sync[0])
        assert far(run.weights(), sync[1]) < 1e-10
