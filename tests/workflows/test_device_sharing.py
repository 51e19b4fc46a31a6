"""Policies and learners that do not fit on a device together swap there, and learn the same."""

import threading

import numpy as np
import pytest

from embodied.config.recipe import load
from embodied.core.errors import EmbodiedError
from embodied.envs.pointmass.env import PointMassEnv
from embodied.envs.vector_env import VectorEnv
from embodied.placement import make_plan
from embodied.policies.policy_folder import read_weights
from embodied.records.timeline import Timeline, read_trace
from embodied.run import launch
from embodied.runtime import device_memory, shared_leases
from embodied.runtime.device_leases import SHARE
from embodied.workflows.rl_loop import EmbodiedLoop

ARGUMENTS = "recipe=pointmass_ppo env.num_envs=4 env.dtype=float64 policy.dtype=float64 policy.hidden=[16]".split()
ARGUMENTS += ["algo.rollout_decisions=8", "algo.minibatch_size=16", "algo.epochs=2"]
ARGUMENTS += ["run.iterations=3"]
SHARED = {"sim": "fake:0-1", "policy": "fake:2", "learner": "fake:2"}
WEIGHTS = 8 * (16 * 8 + 16 * 8 + 21)  # bytes
PARTS = {"policy-0": "cache", "learner-0": "optimizer"}
LEARNING = 4  # times these: themselves, their gradients, two averages of those


class Trained:
    def __init__(self, folder, placement, memory=None, backend="inline", iterations=3, arguments=ARGUMENTS):
        """`memory`: bytes of a device."""
        options = [f"cluster.memory_gb={memory / 1e9}"] if memory else []
        config = load([*arguments, f"cluster.backend={backend}", *options]).config
        plan = make_plan(placement, (0,), config.env.num_envs)
        folder.mkdir(parents=True, exist_ok=True)
        with launch.cluster(config, plan, folder) as cluster:
            loop = EmbodiedLoop(config, cluster)
            timeline = Timeline(loop.groups, loop.timers, folder / "trace.json", iterations)
            loop.publish(0)
            for i in range(iterations):
                loop.iterate(i, iterations)
                timeline.collect(i)
            loop.save_learners(folder / "saved")
            self.moves = [(move.verb, move.worker) for move in loop.device_sharing.moves]
            self.bytes = {name: claim.num_bytes for name, claim in loop.device_sharing.coordinator.claims.items()}
            self.here = {name for name in self.bytes if loop.device_sharing.has_memory(name)}
            self.used = {
                d: loop.device_sharing.coordinator.used_bytes(d) for d in loop.device_sharing.coordinator.capacity
            }
            timeline.end()
        self.spans = {(span.worker, span.name) for span in read_trace(folder / "trace.json")}
        self.weights = read_weights(folder / "saved" / "policy")


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    return Trained(tmp_path_factory.mktemp("roomy"), SHARED)


def test_without_a_limit_nothing_moves_and_in_one_process_the_weights_are_there_once(roomy):
    assert roomy.moves == []
    assert roomy.bytes["policy-0"] == 0
    assert roomy.used["fake:2"] == roomy.bytes["learner-0"] == LEARNING * WEIGHTS


def test_a_run_that_nobody_started_beside_others_asks_nobody_and_is_the_same_bit_for_bit(roomy, tmp_path, monkeypatch):
    monkeypatch.delenv(SHARE, raising=False)
    monkeypatch.setattr(shared_leases, "SharedLeases", None)  # whoever would connect fails
    before = {*threading.enumerate()}
    again = Trained(tmp_path, SHARED)
    assert not [thread for thread in {*threading.enumerate()} - before if thread.name.startswith("share")]
    assert all(np.array_equal(again.weights[name], roomy.weights[name]) for name in roomy.weights)


def test_policies_and_learners_swap_while_sims_keep_their_devices(roomy, tmp_path):
    tight = Trained(tmp_path, SHARED, LEARNING * WEIGHTS + 1, "local")
    assert tight.bytes["policy-0"] == WEIGHTS
    to_learn = [("offload", "policy-0"), ("onload", "learner-0")]
    to_act = [("offload", "learner-0"), ("onload", "policy-0")]
    # What is built is there: the learner's first turn has only the policy leave. Three iterations, then saving.
    assert tight.moves == to_learn[:1] + to_act + 3 * (to_learn + to_act) + to_learn
    assert {("learner-0", "onload"), ("learner-0", "offload"), ("policy-0", "onload")} <= tight.spans
    assert ("driver", "switch") in tight.spans
    # who is started again away from its turn gives its memory back at once
    assert tight.here == {"sim-0", "sim-1", "learner-0"} and roomy.here == {*tight.here, "policy-0"}
    assert all(np.array_equal(tight.weights[name], roomy.weights[name]) for name in roomy.weights)


def test_learners_take_the_devices_of_idle_sims_and_policies_and_learn_the_same(tmp_path):
    """Hybrid, with a learner on every device."""
    one = Trained(tmp_path / "one", {"sim,policy": "fake:0", "learner": "fake:1"})
    placement = {"sim": "fake:0", "policy": "fake:1", "learner": "fake:0-1"}
    room = LEARNING * WEIGHTS + 1  # of a device: for a learner, or a policy
    on_all = Trained(tmp_path / "all", placement, room, "local")
    assert set(on_all.moves) == {
        (verb, worker) for verb in ("offload", "onload") for worker in ("policy-0", "learner-1")
    }
    assert all(np.allclose(one.weights[name], on_all.weights[name], rtol=1e-9, atol=1e-12) for name in one.weights)


def test_policies_on_a_learners_device_leave_for_the_update_alone(tmp_path):
    options = [*ARGUMENTS, "pipeline.schedule=async"]
    apart = Trained(
        tmp_path / "apart", {"sim": "fake:0-1", "policy": "fake:2-3", "learner": "fake:4"}, arguments=options
    )
    shared = {"sim": "fake:0-1", "policy": "fake:2-3", "learner": "fake:3"}
    tight = Trained(tmp_path / "tight", shared, LEARNING * WEIGHTS + 1, arguments=options)
    assert {worker for _, worker in tight.moves} == {"policy-1", "learner-0"}
    assert all(np.allclose(apart.weights[name], tight.weights[name], rtol=1e-9, atol=1e-12) for name in apart.weights)


@pytest.mark.slow
def test_a_policy_and_a_learner_in_one_process_swap_cache_and_optimizer(tmp_path):
    options = ["env.num_envs=2", "algo.rollout_decisions=2", "algo.minibatch_size=2", "algo.epochs=1"]
    options = {"arguments": ["recipe=pointmass_ppo_openvla_tiny", *options], "iterations": 2}
    hybrid = {"sim": "fake:0", "policy,learner": "fake:1"}
    roomy = Trained(tmp_path / "roomy", hybrid, **options)
    limit = roomy.bytes["learner-0"] + 1  # not for the keys and values of acting besides
    tight = Trained(tmp_path / "tight", hybrid, limit, **options)
    to_learn = [("offload", "policy-0"), ("onload", "learner-0")]
    to_act = [("offload", "learner-0"), ("onload", "policy-0")]
    # The first rollout finds the learner's memory there. Two iterations, then saving.
    assert tight.moves == to_learn[:1] + to_act + to_learn + to_act + to_learn and not roomy.moves
    moved = {(worker, name.partition(",")[0]) for worker, name in tight.spans if " MB" in name}
    both = [(worker, f"{verb} {part}") for worker, part in PARTS.items() for verb in ("offload", "onload")]
    assert moved == set(both)  # the weights are there once and stay
    assert 0 < tight.bytes["policy-0"] < 1e7
    assert all(np.array_equal(tight.weights[name], roomy.weights[name]) for name in roomy.weights)


def test_an_update_that_never_fits_is_refused_with_the_sum(tmp_path):
    with pytest.raises(EmbodiedError, match=r"update does not fit on fake:2: learner-0 .* more than its"):
        Trained(tmp_path, SHARED, LEARNING * WEIGHTS - 1)


@pytest.fixture
def card(monkeypatch):
    """A GPU as its driver and torch tell of it: every simulator takes 4 kB, and all computing 5 kB on top of that."""
    free = iter(range(10**9, 0, -4000))
    monkeypatch.setattr(device_memory, "free_bytes", lambda: next(free))
    monkeypatch.setattr(device_memory, "begin_peak", lambda: 100)
    monkeypatch.setattr(device_memory, "allocated_bytes", lambda: (300, 5300))


ON_ONE = {"sim": "fake:0", "policy": "fake:0", "learner": "fake:0"}
LEARNER = LEARNING * WEIGHTS


def test_simulators_are_counted_and_leave_and_so_is_what_computing_takes(card, roomy, tmp_path):
    tight = Trained(tmp_path, ON_ONE, 4000 + LEARNER + 5000 + 100)
    # The policy acts with the learner's weights, in one process.
    assert tight.bytes == {"sim-0": 4000, "policy-0": 5000, "learner-0": LEARNER + 5000}
    assert {worker for _, worker in tight.moves} == {"sim-0", "policy-0", "learner-0"}
    assert all(np.allclose(tight.weights[name], roomy.weights[name], rtol=0, atol=1e-12) for name in roomy.weights)


def test_a_learner_that_does_not_fit_beside_simulators_that_stay_is_refused_with_the_sum(card, tmp_path, monkeypatch):
    monkeypatch.setattr(PointMassEnv, "_get_state", VectorEnv._get_state)
    with pytest.raises(EmbodiedError, match=r"update does not fit on fake:0: learner-0 .* \+ sim-0 4e-06 GB are more"):
        Trained(tmp_path, ON_ONE, LEARNER + 3000)


def test_on_cores_nothing_is_asked_of_a_gpu(monkeypatch):
    monkeypatch.delenv("EMBODIED_DEVICE", raising=False)
    taken, computing = device_memory.AllocatedMemory(), device_memory.Computing()
    with taken.measured(), computing.measured():
        device_memory.give_back_unused()
    assert (taken.num_bytes, computing.num_bytes) == (0, 0)
