"""Devices are held by one gang at a time; memory moves only where two do not fit."""

import random
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied.core.errors import DeadlineExceeded, StepGivenUp, WorkerFailed
from embodied.runtime import Cluster, HostPlan, Needs, Timers, Worker, share_devices
from embodied.runtime.device_leases import GB, Claim, Coordinator, LeaseError
from embodied.runtime.device_sharing import DeviceSharing


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


def test_workers_that_fit_together_on_a_device_are_loaded_once_and_never_moved():
    coordinator = hybrid(14)
    assert finish(coordinator, coordinator.acquire("rollout")) == [("onload", "policy-0"), ("onload", "sim-0")]
    coordinator.release("rollout")
    assert finish(coordinator, coordinator.acquire("update")) == [("onload", "learner-0")]
    coordinator.release("update")
    assert finish(coordinator, coordinator.acquire("rollout")) == []
    assert coordinator.used_bytes("fake:1") == 14 * GB


def test_policy_and_learner_that_do_not_fit_swap_while_the_sim_keeps_its_device():
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


def test_a_worker_that_joins_a_gang_holds_its_devices_with_it_and_frees_them_when_it_goes():
    coordinator = hybrid(14)
    finish(coordinator, coordinator.acquire("rollout"))
    coordinator.add("rollout", Claim("policy-1", ("fake:2",), 6 * GB), 10 * GB)
    with pytest.raises(LeaseError, match="rollout does not fit on fake:1: policy-0 6 GB"):
        coordinator.add("rollout", Claim("policy-2", ("fake:1",), 9 * GB), 10 * GB)
    assert coordinator.holders.keys() == {"fake:0", "fake:1", "fake:2"} and "policy-2" not in coordinator.claims
    coordinator.release("rollout")
    assert finish(coordinator, coordinator.acquire("rollout")) == [], "its memory is there"
    assert coordinator.holders["fake:2"] == "rollout" and coordinator.used_bytes("fake:2") == 6 * GB
    coordinator.remove("policy-1")
    assert coordinator.holders.keys() == {"fake:0", "fake:1"} and coordinator.used_bytes("fake:2") == 0


def test_a_worker_whose_memory_has_grown_is_offloaded_for_other_phases():
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


def test_a_phase_that_can_never_fit_is_refused_with_the_arithmetic():
    with pytest.raises(LeaseError) as caught:
        hybrid(6.5)
    assert "rollout does not fit on fake:1: policy-0 6 GB + learner-0 1 GB are more than its 6.5 GB" in str(
        caught.value
    )
    with pytest.raises(LeaseError, match="gpu:9: no such device; there are gpu:0"):
        Coordinator({"gpu:0": 1}, {"a": [Claim("a-0", ("gpu:9",))]})


def gang(name, *devices):
    return [Claim(f"{name}-{i}", (device,)) for i, device in enumerate(devices)]


def test_acquiring_or_releasing_devices_twice_is_refused():
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


def test_no_gang_gives_way_to_one_that_would_still_wait_for_another():
    gangs = {"big": gang("big", "d:0", "d:1"), "act": gang("act", "d:0"), "keep": gang("keep", "d:1")}
    coordinator = Coordinator({"d:0": 0, "d:1": 0}, gangs, tiers={"act": 1}, preemptible=["act"])
    for name in ("act", "keep", "big"):
        finish(coordinator, coordinator.acquire(name))
    assert coordinator.leaving() == set() and coordinator.in_the_way("big") == {"act", "keep"}
    coordinator.release("keep")
    assert coordinator.leaving() == {"act"}


@st.composite
def shared_devices(draw):
    """Gangs on up to three devices, in two tiers, some of them preemptible, and what they do."""
    devices = st.sets(st.sampled_from(["d:0", "d:1", "d:2"]), min_size=1)
    names = "abcd"[: draw(st.integers(2, 4))]
    on = {name: draw(devices) for name in names}
    tiers = {name: draw(st.integers(0, 1)) for name in names}
    preemptible = {name for name in names if draw(st.booleans())}
    return on, tiers, preemptible, draw(st.lists(st.tuples(st.sampled_from(names), st.booleans()), max_size=30))


def who_could_hold(waiting, held, on, order):
    """By trying: gangs that get all they need if those of `held` keep theirs and earlier ones go first."""
    taken, found = {d for name in held for d in on[name]}, set()
    for name in order:
        if name in waiting:
            found |= set() if taken & on[name] else {name}
            taken |= on[name]
    return found


@given(shared_devices())
def test_holders_waiters_and_preemptions_equal_those_of_a_slow_reference(found):
    on, tiers, preemptible, wishes = found
    gangs = {name: gang(name, *sorted(devices)) for name, devices in on.items()}
    coordinator = Coordinator(dict.fromkeys(["d:0", "d:1", "d:2"], 0), gangs, tiers=tiers, preemptible=preemptible)
    order = sorted(on, key=lambda name: (tiers[name], name))
    waiting, held = set(), set()
    for name, gives_up in wishes:
        if name in held:
            held.remove(name)
            finish(coordinator, coordinator.release(name))
        elif name not in waiting:
            waiting.add(name)
            finish(coordinator, coordinator.acquire(name))
        elif gives_up:
            waiting.remove(name)
            finish(coordinator, coordinator.cancel(name))
        granted = who_could_hold(waiting, held, on, order)
        waiting, held = waiting - granted, held | granted
        assert {name for name in on if coordinator.granted(name)} == held
        # A gang gives way if it may, and if one of an earlier tier could go on when all that do so have left.
        leaving = coordinator.leaving()
        assert leaving <= preemptible & held
        served = who_could_hold(waiting, held - leaving, on, order)
        assert all(any(on[n] & on[one] and tiers[n] < tiers[one] for n in served) for one in leaving)
        for name in waiting:
            mine = {h for h in held if h in preemptible and tiers[h] > tiers[name]}
            assert name not in who_could_hold(waiting, held - mine, on, order) or name in served
            assert coordinator.in_the_way(name) <= held and coordinator.in_the_way(name)


def test_every_waiting_gang_gets_its_devices_exactly_once():
    for number in range(300):
        rng = random.Random(number)
        on = {name: set(rng.sample(["d:0", "d:1", "d:2"], rng.randint(1, 3))) for name in "abcd"}
        tiers, preemptible = {name: rng.randint(0, 1) for name in on}, {n for n in on if rng.random() < 0.5}
        gangs = {name: gang(name, *sorted(devices)) for name, devices in on.items()}
        coordinator = Coordinator(dict.fromkeys(["d:0", "d:1", "d:2"], 0), gangs, tiers=tiers, preemptible=preemptible)
        for name in rng.sample("abcd", 4):
            finish(coordinator, coordinator.acquire(name))
        had = []
        while held := sorted({*coordinator.holders.values()}):
            had.append(name := rng.choice(held))
            finish(coordinator, coordinator.release(name))
        assert sorted(had) == list("abcd") and not coordinator.waiting


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
        sharing = DeviceSharing(hybrid(10), list(groups.values()), Timers())
        for _ in range(3):
            with sharing.phase("rollout"):
                assert [groups[r].at_work().wait() for r in ("sim", "policy", "learner")] == [[True], [True], [False]]
            with sharing.phase("update"):
                assert [groups[r].at_work().wait() for r in ("sim", "policy", "learner")] == [[True], [False], [True]]
        assert [a.worker for a in sharing.moves].count("sim-0") == 1
        with sharing.phase("rollout"), pytest.raises(LeaseError, match="cannot be nested"), sharing.phase("update"):
            pass


def on_one_device(cluster, worker=Accountant, **options):
    """Two phases of a worker each, which take sharing on one device."""
    groups = {role: cluster.launch(worker, role) for role in ("first", "second")}
    claims = {f"in {role}": [Claim(f"{role}-0", ("fake:0",), 1)] for role in groups}
    return groups, DeviceSharing(Coordinator({"fake:0": 1}, claims), list(groups.values()), Timers(), **options)


ONE_EACH = [HostPlan("a", ("first",), (), 1), HostPlan("b", ("second",), (), 1)]


class Slow(Accountant):
    arrives = threading.Event()

    def onload(self):
        assert self.arrives.wait(60)
        super().onload()


def test_a_stop_does_not_leave_devices_with_a_phase_that_was_about_to_begin():
    def stop():
        raise StepGivenUp("the step was given up")

    with Cluster("inline", ONE_EACH) as cluster:
        groups, sharing = on_one_device(cluster, Slow)
        cluster.interrupt = stop
        threading.Timer(0.1, Slow.arrives.set).start()
        with sharing.phase("in first"):
            pass
        with cluster.uninterrupted(), sharing.phase("in second"):  # in which the learners save
            assert groups["second"].at_work().wait() == [True]


class Unable(Accountant):
    def onload(self):
        raise RuntimeError("no memory")


def test_a_phase_whose_part_cannot_begin_fails_with_the_cause_and_leaves_the_devices_to_others():
    with Cluster("inline", ONE_EACH) as cluster:
        groups = [cluster.launch(Unable, "first"), cluster.launch(Accountant, "second")]
        claims = {"act": [], **{name: [Claim(f"{name}-0", (f"fake:{name}",), 1)] for name in ("first", "second")}}
        coordinator = Coordinator({"fake:first": 1, "fake:second": 1}, claims, preemptible=("first", "second"))
        sharing = DeviceSharing(coordinator, groups, Timers(), parts={"act": ("first", "second")})
        with pytest.raises(WorkerFailed, match="no memory"), sharing.phase("act"):
            pass
        assert not coordinator.holding


def test_a_phase_waits_for_devices_that_another_thread_gives_back():
    with Cluster("inline", ONE_EACH) as cluster:
        groups, sharing = on_one_device(cluster)
        inside, seen = threading.Event(), []

        def other():
            with sharing.phase("in second"):
                inside.set()
                seen.extend(groups["second"].at_work().wait())
                while not sharing.coordinator.waiting:
                    pass

        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
        with sharing.phase("in first"):
            assert seen == groups["first"].at_work().wait() == [True]
            assert groups["second"].at_work().wait() == [False]
        thread.join(60)


def test_a_phase_that_gets_no_device_says_who_held_it_and_waits_no_longer():
    with Cluster("inline", ONE_EACH) as cluster:
        _, sharing = on_one_device(cluster, timeout_s=0.05)
        inside, over = threading.Event(), threading.Event()

        def other():
            with sharing.phase("in second"):
                inside.set()
                over.wait(60)

        thread = threading.Thread(target=other)
        thread.start()
        assert inside.wait(60)
        with pytest.raises(DeadlineExceeded, match=r"in first has waited 0.05 s for devices that in second still held"):
            with sharing.phase("in first"):
                pass
        over.set()
        thread.join(60)
        with sharing.phase("in first"):
            assert not sharing.coordinator.waiting


def test_a_phase_inside_another_has_its_devices_once_the_call_is_done_that_this_ends_with():
    with Cluster("inline", ONE_EACH) as cluster:
        groups, sharing = on_one_device(cluster)
        with sharing.phase("in first"):
            sharing.ends_with("in first", groups["first"].at_work())
            with sharing.phase("in second"):
                assert groups["first"].at_work().wait() + groups["second"].at_work().wait() == [False, True]
        assert not sharing.coordinator.holders


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
        sharing = share_devices(cluster, phases, Timers(), 10, sharing=[actor, trainer])
        claims = sharing.coordinator.claims
        assert [claims[f"{name}-0"].num_bytes / GB for name in ("actor", "critic", "trainer")] == [2, 2, 6]
        for name in ("guess", "judge", "learn"):
            with sharing.phase(name):
                assert {group.role for group in phases[name]} <= {
                    w.rpartition("-")[0] for w in sharing.coordinator.resident
                }
        assert sharing.coordinator.used_bytes("fake:0") <= 10 * GB
        moved = [(move.verb, move.worker) for move in sharing.moves]
        assert moved.count(("offload", "critic-0")) <= 1 and ("onload", "critic-0") not in moved
