"""Policy workers on the learners' devices act while no learner needs these, and no result depends on when that is."""

import os
import random
import signal
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from gated_env import wait_until
from test_async import GRPO, ITERATIONS, PPO, Run

from embodied.workflows import rollout_manager
from embodied.workflows.contract import UPDATE

APART = {"sim": "cpu:0-1*2", "policy": "cpu:2", "learner": "cpu:3"}
OVERLAP = {"sim": "cpu:0-1*2", "policy": "cpu:2-3*2", "learner": "cpu:3"}
ALL_OVERLAP = {"sim": "cpu:0-1*2", "policy": "cpu:3", "learner": "cpu:3"}
ASYNC = ["pipeline.schedule=async", "pipeline.async_level=1"]
STOPS = 2  # of a gated env in a rollout


def close(one, other):
    return all(np.allclose(one[name], other[name], rtol=1e-9, atol=1e-12) for name in one)


def weights_of(folder, *recipe, placement):
    folder.mkdir()
    with Run(folder, *recipe, *ASYNC, backend="local", placement=placement) as run:
        numbers = run.train()
        assert [each["train/staleness"] for each in numbers] == [min(n, 1) for n in range(ITERATIONS)]
        assert all(each["train/grad_norm"] > 1e-3 for each in numbers)
        return run.weights()


@pytest.mark.parametrize("recipe", [PPO, GRPO], ids=["ppo", "grpo"])
def test_policies_on_the_learners_devices_change_when_and_not_what(recipe, tmp_path):
    apart, overlap, all_overlap = (
        weights_of(tmp_path / str(number), *recipe, placement=placement)
        for number, placement in enumerate((APART, OVERLAP, ALL_OVERLAP))
    )
    assert close(apart, overlap) and close(apart, all_overlap)


class Gated(Run):
    """Rollouts of 16 decisions that stop before the 8th and the 16th until `pass_on`."""

    def __init__(self, folder, *arguments, **more):
        self.gates = folder / "gates"
        self.gates.mkdir(parents=True)
        env = f"env.kwargs={{gates: {self.gates}, every: 8}}"
        recipe = [a for a in PPO if not a.startswith("env.dtype")]
        options = {"placement": OVERLAP, "backend": "local", **more}
        super().__init__(folder, *recipe, "env.name=gated_env:GatedEnv", env, *ASYNC, *arguments, **options)

    def __enter__(self):
        super().__enter__()
        self.rollouts, self.turns = self.loop.rollouts, self.loop.turns
        return self

    def pass_on(self, *stops):
        for stop in stops:
            (self.gates / str(stop)).touch()

    def stopped(self, stop):
        """Whether all sims wait there."""
        return len(list(self.gates.glob(f"{stop}-*"))) == len(self.rollouts.sims)

    def decided(self, policy):
        """How often a policy worker has acted so far."""
        totals = self.rollouts.policies[policy].timings().wait()[0]
        return totals["act"].count if "act" in totals else 0

    def kill(self, worker):
        where = self.cluster._backend.where(self.cluster._host_of(worker))
        os.kill(int(where.split(",")[0].removeprefix("pid ")), signal.SIGKILL)


@pytest.fixture
def watched(monkeypatch):
    """Calls `each(round)` after every change that a round knows of."""
    heard = []

    class Watched(rollout_manager.Round):
        def go_on(self):
            super().go_on()
            for each in heard:
                each(self)

    monkeypatch.setattr(rollout_manager, "Round", Watched)
    return heard


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Weights of the gated run in which nobody shares a device."""
    with Gated(tmp_path_factory.mktemp("apart"), placement=APART) as run:
        run.pass_on(*range(STOPS * ITERATIONS))
        run.train()
        return run.weights()


def test_they_take_part_again_in_the_round_in_which_the_update_ends(expected, watched, tmp_path):
    joined = []
    with Gated(tmp_path) as run:
        run.pass_on(0, 1)  # the first rollout has no update beside it

        def pass_on(going):
            """Sims that stop in mid-round go on when the policy worker on the learner's device is there."""
            if 1 in going.serving:
                stop = STOPS * (run.rollouts.rounds - 1)
                joined.append(run.stopped(stop))
                run.pass_on(stop, stop + 1)

        watched.append(pass_on)
        acted = []
        for number in range(ITERATIONS):
            before = run.decided(1)
            run.loop.iterate(number, ITERATIONS)
            acted.append(run.decided(1) - before)
        # Sims had stopped or were about to: then it answers one of two sources for 8 or more decisions.
        assert len(joined) >= ITERATIONS - 1 and all(count >= 8 for count in acted[:-1]), (joined, acted)
        assert close(run.weights(), expected)
