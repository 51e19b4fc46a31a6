"""Devices are held by one gang at a time; memory moves only where two do not fit."""

import random

import pytest

from embodied.runtime import Cluster, HostPlan, Needs, Timers, Worker, take_turns
from embodied.runtime.device_sharing import Turns
from embodied.runtime.leases import GB, Action, Claim, Coordinator, LeaseError


def finish(coordinator, actions):
    """Carry out everything at once; -> what was done."""
    done = []
    while actions:
        done += actions
        actions = [further for action in actions for further in coordinator.done(action)]
    return [(action.verb, action.worker) for action in done]


def hybrid(capacity):
    """The sim keeps its device; policy and learner swap on the other."""
    rollout = [Claim("sim-0", ("fake:0",), 4 * GB), Claim("policy-0", ("fake:1",), 6 * GB)]
    update = [Claim("learner-0", ("fake:1",), 8 * GB, kept_bytes=1 * GB)]
    return Coordinator({"fake:0": 10 * GB, "fake:1": capacity * GB}, {"rollout": rollout, "update": update})


def test_what_fits_beside_each_other_is_loaded_once_and_never_moves():
    coordinator = hybrid(14)
    assert finish(coordinator, coordinator.acquire("rollout")) == [("onload", "policy-0"), ("onload", "sim-0")]
    coordinator.release("rollout")
    assert finish(coordinator, coordinator.acquire("update")) == [("onload", "learner-0")]
    coordinator.release("update")
    assert finish(coordinator, coordinator.acquire("rollout")) == []
    assert coordinator.used_bytes("fake:1") == 14 * GB


def test_what_does_not_fit_swaps_while_the_sim_keeps_its_device():
    coordinator = hybrid(10)
    finish(coordinator, coordinator.acquire("rollout"))
    coordinator.release("rollout")
    moves = finish(coordinator, coordinator.acquire("update"))
    assert moves == [("offload", "policy-0"), ("onload", "learner-0")]
    coordinator.release("update")
    moves = finish(coordinator, coordinator.acquire("rollout"))
    assert moves == [("offload", "learner-0"), ("onload", "policy-0")]
    assert coordinator.used_bytes("fake:1") == 7 * GB  # the policy, and what the learner keeps
    assert coordinator.used_bytes("fake:0") == 4 * GB


def test_who_came_to_need_more_in_its_turn_makes_room_from_then_on():
    rollout, update = [Claim("policy-0", ("fake:0",), gives_back=False)], [Claim("learner-0", ("fake:0",), 9, 2)]
    coordinator = Coordinator({"fake:0": 10}, {"rollout": rollout, "update": update}, ["policy-0", "learner-0"])
    assert coordinator.acquire("rollout") == []
    coordinator.revise([Claim("policy-0", ("fake:0",), 3)])
    coordinator.release("rollout")
    assert finish(coordinator, coordinator.acquire("update")) == [("offload", "policy-0")]
    coordinator.release("update")
    assert finish(coordinator, coordinator.acquire("rollout")) == [("offload", "learner-0"), ("onload", "policy-0")]
    assert coordinator.used_bytes("fake:0") == 3 + 2
    with pytest.raises(LeaseError, match="rollout does not fit on fake:0"):
        coordinator.revise([Claim("policy-0", ("fake:0",), 9)])


def test_nobody_loads_before_room_was_made():
    coordinator = hybrid(10)
    finish(coordinator, coordinator.acquire("rollout"))
    coordinator.release("rollout")
    (first,) = coordinator.acquire("update")
    assert first == Action("offload", "policy-0", "update")
    assert not coordinator.granted("update")
    (second,) = coordinator.done(first)
    assert second.verb == "onload"
    coordinator.done(second)
    assert coordinator.granted("update")


def test_what_can_never_fit_is_refused_with_the_arithmetic():
    with pytest.raises(LeaseError) as caught:
        hybrid(6.5)
    assert "rollout does not fit on fake:1: policy-0 6 GB + learner-0 1 GB are more than its 6.5 GB" in str(
        caught.value
    )
    with pytest.raises(LeaseError, match="gpu:9: no such device; there are gpu:0"):
        Coordinator({"gpu:0": 1}, {"a": [Claim("a-0", ("gpu:9",))]})


def gang(name, *devices):
    return [Claim(f"{name}-{i}", (device,)) for i, device in enumerate(devices)]


def test_a_gang_gets_all_its_devices_or_none():
    devices = {"d:0": 0, "d:1": 0}
    coordinator = Coordinator(devices, {"a": gang("a", "d:0"), "b": gang("b", "d:0", "d:1"), "c": gang("c", "d:1")})
    finish(coordinator, coordinator.acquire("a"))
    assert coordinator.acquire("b") == []
    assert not coordinator.granted("b")
    assert coordinator.acquire("c") == []  # b is before c in the workflow and waits for this device
    finish(coordinator, coordinator.release("a"))
    assert coordinator.granted("b") and not coordinator.granted("c")
    finish(coordinator, coordinator.release("b"))
    assert coordinator.granted("c")


def test_gangs_on_devices_of_their_own_never_wait():
    coordinator = Coordinator({"d:0": 0, "d:1": 0}, {"a": gang("a", "d:0"), "b": gang("b", "d:1")})
    for name in ("a", "b"):
        finish(coordinator, coordinator.acquire(name))
        assert coordinator.granted(name)


def test_asking_twice_and_giving_back_twice_are_mistakes():
    coordinator = hybrid(14)
    finish(coordinator, coordinator.acquire("rollout"))
    with pytest.raises(LeaseError, match="has or waits for already"):
        coordinator.acquire("rollout")
    coordinator.release("rollout")
    with pytest.raises(LeaseError, match="does not hold"):
        coordinator.release("rollout")


def test_no_order_of_events_breaks_the_rules():
    for seed in range(200):
        rng = random.Random(seed)
        devices = [f"d:{i}" for i in range(3)]
        gangs = {}
        for name in "abcd":
            claims = [
                Claim(
                    f"{name}-{i}", tuple(rng.sample(devices, rng.randint(1, 2))), rng.randint(0, 5), rng.randint(0, 1)
                )
                for i in range(rng.randint(1, 3))
            ]
            gangs[name] = [c for c in claims if c.kept_bytes <= c.num_bytes] or [Claim(f"{name}-0", ("d:0",))]
        try:
            coordinator = Coordinator(dict.fromkeys(devices, 20), gangs)
        except LeaseError:
            continue
        pending, waiting, held = [], set(), set()
        for _ in range(80):
            if pending and rng.random() < 0.7:
                pending += coordinator.done(pending.pop(rng.randrange(len(pending))))
            elif held and rng.random() < 0.5:
                name = rng.choice(sorted(held))
                held.remove(name)
                pending += coordinator.release(name)
            elif idle := sorted(set(gangs) - waiting - held):
                name = rng.choice(idle)
                waiting.add(name)
                pending += coordinator.acquire(name)
            now = {name for name in waiting if coordinator.granted(name)}
            waiting, held = waiting - now, held | now
            taken = [d for name in held for c in gangs[name] for d in {*c.devices}]
            owners = {d: {n for n in held for c in gangs[n] if d in c.devices} for d in taken}
            assert all(len(names) == 1 for names in owners.values())
            assert all(coordinator.used_bytes(d) <= 20 for d in devices), seed
            assert all(c.worker in coordinator.resident for name in held for c in gangs[name])
            assert held or pending or not waiting  # somebody can always go on


class Accountant(Worker):
    """Counts bytes where a real one would allocate them."""

    loaded = False

    def onload(self):
        assert not self.loaded
        self.loaded = True

    def offload(self):
        assert self.loaded
        self.loaded = False

    def at_work(self):
        return self.loaded


def test_workers_of_a_cluster_swap_around_phases():
    hosts = [HostPlan("a", ("sim",), (), 1), HostPlan("b", ("policy", "learner"), (), 1)]
    with Cluster("inline", hosts) as cluster:
        groups = {role: cluster.launch(Accountant, role) for role in ("sim", "policy", "learner")}
        turns = Turns(hybrid(10), list(groups.values()), Timers())
        for _ in range(3):
            with turns.phase("rollout"):
                assert [groups[r].at_work().wait() for r in ("sim", "policy", "learner")] == [[True], [True], [False]]
            with turns.phase("update"):
                assert [groups[r].at_work().wait() for r in ("sim", "policy", "learner")] == [[True], [False], [True]]
        assert [a.worker for a in turns.moves].count("sim-0") == 1
        with turns.phase("rollout"), pytest.raises(LeaseError, match="cannot be nested"), turns.phase("update"):
            pass


class Holder(Worker):
    """Needs so many GB at work, 1 GB of it for weights; what it shares with others it counts once, and keeps."""

    def __init__(self, num_gb, trains=False):
        self.num_gb, self.trains = num_gb, trains

    def needs(self, shared=False):
        total = self.num_gb - (shared and not self.trains)
        return Needs(total * GB, GB if shared and self.trains else 0)


def test_a_program_names_the_phases_and_the_groups_that_work_in_each():
    """An actor and a critic guess, a scorer judges, a trainer learns: three phases on one device of 10 GB."""
    hosts = [HostPlan(name, (name,), devices=("fake:0",)) for name in ("actor", "critic", "scorer", "trainer")]
    with Cluster("inline", hosts) as cluster:
        actor, critic = cluster.launch(Holder, "actor", 3), cluster.launch(Holder, "critic", 2)
        scorer, trainer = cluster.launch(Holder, "scorer", 4), cluster.launch(Holder, "trainer", 6, True)
        phases = {"guess": [actor, critic], "judge": [scorer, critic], "learn": [trainer]}
        turns = take_turns(cluster, phases, Timers(), 10, sharing=[actor, trainer])
        claims = turns.coordinator.claims
        assert [claims[f"{name}-0"].num_bytes / GB for name in ("actor", "critic", "trainer")] == [2, 2, 6]
        for name in ("guess", "judge", "learn"):
            with turns.phase(name):
                assert {group.role for group in phases[name]} <= {
                    w.rpartition("-")[0] for w in turns.coordinator.resident
                }
        assert turns.coordinator.used_bytes("fake:0") <= 10 * GB
        moved = [(move.verb, move.worker) for move in turns.moves]
        assert moved.count(("offload", "critic-0")) <= 1 and ("onload", "critic-0") not in moved
