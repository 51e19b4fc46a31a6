"""Policy workers on the learners' devices act while no learner needs these, and no result depends on when that is."""

import os
import random
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
import stepped
from gated_env import wait_until
from stepped import Run

from embodied.workflows import UPDATE, rollout_manager

APART = {"sim": "fake:0-1", "policy": "fake:2-3", "learner": "fake:4"}
OVERLAP = {"sim": "fake:0-1", "policy": "fake:2-3", "learner": "fake:3"}
ALL_OVERLAP = {"sim": "fake:0-1", "policy": "fake:3", "learner": "fake:3"}
ASYNC = ["pipeline.schedule=async", "pipeline.async_level=1"]
SLOW = pytest.mark.slow
ITERATIONS = 4
PPO, GRPO = (
    [*(word for word in words if not word.startswith("run.iterations")), f"run.iterations={ITERATIONS}"]
    for words in (stepped.PPO, stepped.GRPO)
)
STOPS = 2  # of a gated env in a rollout


def close(one, other):
    return all(np.allclose(one[name], other[name], rtol=1e-9, atol=1e-12) for name in one)


def weights_of(folder, *recipe, placement):
    folder.mkdir()
    with Run(folder, *recipe, *ASYNC, placement=placement) as run:
        numbers = [row for _, row in run.play(0, 3)]
        assert [each["train/staleness"] for each in numbers] == [0, 1, 1]
        assert all(each["train/grad_norm"] > 1e-3 for each in numbers)
        return run.weights()


@pytest.mark.parametrize("recipe", [PPO, GRPO], ids=["ppo", "grpo"])
def test_policies_on_the_learners_devices_give_the_same_weights(recipe, tmp_path):
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
        own = any(argument.startswith("policy.name") for argument in arguments)
        recipe = [a for a in PPO if not a.startswith(("env.dtype", "policy.") if own else "env.dtype")]
        options = {"placement": OVERLAP, "backend": "local", **more}
        super().__init__(folder, *recipe, "env.name=gated_env:GatedEnv", env, *ASYNC, *arguments, **options)

    def __enter__(self):
        super().__enter__()
        self.rollouts, self.device_sharing = self.loop.rollouts, self.loop.device_sharing
        assert not self.device_sharing.gives_way("policy-0")
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
        os.kill(self.pid(worker), signal.SIGKILL)


@pytest.fixture
def watched(monkeypatch):
    """Calls `each(round)` after every change that a round knows of."""
    heard = []

    class Watched(rollout_manager.Broker):
        def go_on(self):
            super().go_on()
            for each in heard:
                each(self)

    monkeypatch.setattr(rollout_manager, "Broker", Watched)
    return heard


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Weights of the gated run in which nobody shares a device."""
    with Gated(tmp_path_factory.mktemp("apart"), placement=APART, backend="inline") as run:
        run.pass_on(*range(STOPS * ITERATIONS))
        run.train()
        return run.weights()


def test_policy_workers_on_learner_devices_rejoin_in_the_round_in_which_the_update_ends(expected, watched, tmp_path):
    joined = []
    with Gated(tmp_path) as run:
        assert run.device_sharing.gives_way("policy-1")
        run.pass_on(0, 1)  # the first rollout has no update beside it

        def pass_on(going):
            """Sims that stop in mid-round go on when the policy worker on the learner's device is there."""
            if 1 in going.takers:
                stop = STOPS * (run.rollouts.rounds - 1)
                joined.append(run.stopped(stop))
                run.pass_on(stop, stop + 1)

        watched.append(pass_on)
        acted = []
        for number in range(ITERATIONS):
            before = run.decided(1)
            run.loop.iterate(number, ITERATIONS)
            acted.append(run.decided(1) - before)
        # Sims had stopped or were about to: then it answers one of two sources for 8 or more decisions, or fewer if the
        # source hears of it only after having gone on.
        assert len(joined) >= ITERATIONS - 1 and all(acted[:-1]), (joined, acted)
        assert close(run.weights(), expected)


@pytest.mark.parametrize("moment", [pytest.param("asleep", marks=SLOW), pytest.param("joining", marks=SLOW), "acting"])
def test_a_killed_policy_worker_on_a_learner_device_is_replaced_at_any_moment(moment, expected, watched, tmp_path):
    killed, built = [], []
    with Gated(tmp_path) as run:
        run.pass_on(0, 1)
        update, build = run.loop.collector.update, run.loop.weight_sync.build

        def updating(*about):
            if moment == "asleep" and run.rollouts.rounds == 3:
                killed.append(run.kill("policy-1"))
            return update(*about)

        def joins(going):
            stop = STOPS * (run.rollouts.rounds - 1)
            if 1 in going.takers:
                if moment == "acting" and run.rollouts.rounds == 3 and not killed:
                    killed.append(run.kill("policy-1"))
                run.pass_on(stop, stop + 1)

        leave = run.device_sharing.go_on

        def go_on():
            if moment == "joining" and run.rollouts.rounds == 3 and not killed:
                killed.append(run.kill("policy-1"))
            leave()

        def build_late(worker):
            built.append(run.device_sharing.coordinator.granted("rollout of policy-1"))
            return build(worker)

        run.loop.collector.update, run.device_sharing.go_on = updating, go_on
        run.loop.weight_sync.build = build_late
        watched.append(joins)
        assert [numbers["train/staleness"] for numbers in run.train()] == [min(n, 1) for n in range(ITERATIONS)]
        assert len(killed) == 1 and len(run.lines) == 1 and "policy-1" in run.lines[0]
        assert all(built) and (built or moment != "asleep"), "it was built while others had its device"
        assert close(run.weights(), expected)


class Other:
    """Another thread that wants the learner's device, time and again."""

    def __init__(self, run, seed, times):
        self.run, self.rng, self.times = run, random.Random(seed), times
        self.had, self.errors = [], []
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.want, daemon=True)

    def want(self):
        try:
            for _ in range(self.times):
                with self.run.device_sharing.phase(UPDATE):
                    self.had.append(self.run.device_sharing.takes_part("policy-1"))
                    self.over.wait(self.rng.uniform(0, 0.02))
                self.over.wait(self.rng.uniform(0, 0.02))
        except BaseException as error:
            self.errors.append(error)


@pytest.mark.parametrize("victim", [None, *(pytest.param(name, marks=SLOW) for name in ("policy-0", "policy-1"))])
def test_another_thread_that_wants_the_device_gets_it_without_changing_results(victim, expected, watched, tmp_path):
    """A thread takes the device again and again while the first rollout is played, some of it stopped."""
    with Gated(tmp_path, backend="local" if victim else "inline") as run:
        other, killed = Other(run, seed=5, times=12), []

        def each(going):
            if len(other.had) >= 3:
                if victim and not killed:
                    killed.append(run.kill(victim))
                run.pass_on(0)
            if len(other.had) >= 9:
                run.pass_on(1)

        watched.append(each)
        other.thread.start()
        run.loop.ahead.append(run.loop.collect())
        other.thread.join()
        run.pass_on(*range(STOPS * ITERATIONS))
        assert len(other.had) == 12 and not any(other.had) and not other.errors
        run.train()
        assert len(run.lines) == bool(victim)
        assert close(run.weights(), expected)


def test_a_policy_worker_that_does_not_release_its_device_in_time_is_replaced(expected, tmp_path):
    (once := tmp_path / "once").parent.mkdir(exist_ok=True)
    fault = f"policy.kwargs={{fault: hang, place: rollout, worker: policy-1, once: {once}}}"
    with Gated(tmp_path, "policy.name=faulty_policy:FaultyPolicy", fault) as run:
        run.pass_on(*range(STOPS * ITERATIONS))
        run.rollouts.budget = replace(run.rollouts.budget, hang_s=0.5)  # long before it counts as hung
        other = Other(run, seed=5, times=1)
        first = threading.Thread(target=lambda: (wait_until(once.exists), other.want()), daemon=True)
        first.start()
        run.loop.ahead.append(run.loop.collect())
        first.join()
        assert other.had == [False] and not other.errors
        (line,) = run.lines
        assert "policy-1 is started again" in line and "still answered 0.5 s after others asked for its devices" in line
        run.train()
        assert close(run.weights(), expected)
