"""Several runs on the same devices: each device is held once, borrowers give way, and nobody starves."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from share_record import check_record

from embodied.runtime.device_leases import GENERATE, INITIALISE, TRAIN, Claim, Coordinator, LeaseError
from embodied.sharing.run_turns import RunTurns

STEP_S = 0.25


class FakeRun:
    """A run that generates on its own devices and those that it borrows, then trains on its own, so many times."""

    def __init__(self, coordinator, name, own, borrowed, generate_s, train_s, iterations, drain_s, begins=0.0):
        self.coordinator, self.name, self.own, self.borrowed = coordinator, name, own, borrowed
        self.generate_s, self.train_s, self.left = generate_s, train_s, iterations
        self.drain_s, self.begins = drain_s, begins
        self.phase, self.draining, self.gone, self.end = "", {}, False, None

    def gang(self, name):
        return f"{self.name}/{name}"

    @property
    def parts(self):
        return [self.gang(f"policy on {device}") for device in self.borrowed]

    def join(self):
        turns = self.coordinator.turns
        turns.joins(self.name, 1.0, self.own, self.coordinator.now)
        on = {"rollout": self.own, "update": self.own} | {f"policy on {d}": [d] for d in self.borrowed}
        gangs = {self.gang(name): [Claim(self.gang(f"{name}-0"), tuple(on[name]))] for name in on}
        tiers = {gang: TRAIN if gang.endswith("update") else GENERATE for gang in gangs}
        self.coordinator.join(self.name, gangs, tiers, self.parts, [f"{gang}-0" for gang in gangs])
        self.begin("rollout")

    def begin(self, phase):
        self.phase, self.spent, self.asked = phase, 0.0, phase != "rollout"
        self.coordinator.acquire(self.gang(phase))

    def give_back(self, gang):
        coordinator = self.coordinator
        (coordinator.cancel if gang in coordinator.waiting else coordinator.release)(gang)
        self.draining.pop(gang, None)

    def step(self):
        coordinator, now = self.coordinator, self.coordinator.now
        if self.gone or (not self.phase and now < self.begins):
            return
        if not self.phase:
            self.join()
            return
        if not coordinator.granted(self.gang(self.phase)):
            return
        if not self.asked:  # for devices that it borrows, when it has its own
            self.asked = True
            for part in self.parts:
                coordinator.acquire(part)
        if self.phase == "rollout":
            for gang in coordinator.leaving() & {*self.parts}:
                if self.draining.setdefault(gang, now + self.drain_s) <= now:
                    self.give_back(gang)
                    coordinator.acquire(gang)
        helping = sum(coordinator.granted(part) for part in self.parts) if self.phase == "rollout" else 0
        self.spent += STEP_S * (len(self.own) + helping)
        wanted = self.generate_s if self.phase == "rollout" else self.train_s * len(self.own)
        coordinator.turns.reports(self.name, min(self.spent / wanted, 1.0), now)
        if self.spent >= wanted:
            self.finish_phase(now)

    def finish_phase(self, now):
        for gang in (*(self.parts if self.phase == "rollout" else ()), self.gang(self.phase)):
            self.give_back(gang)
        if self.phase == "rollout":
            self.begin("update")
            return
        self.coordinator.turns.reports(self.name, None, now)
        self.left -= 1
        if self.left:
            self.begin("rollout")
        else:
            self.leave()

    def leave(self):
        self.gone, self.end = True, self.coordinator.now
        self.coordinator.leave(self.name)
        self.coordinator.turns.remove_run(self.name, "finished", self.coordinator.now)


def play(coordinator, runs, most_s=500.0, each=lambda: None):
    now = 0.0
    while not all(run.gone for run in runs):
        now += STEP_S
        assert now < most_s, "somebody starves"
        coordinator.pass_time(now)
        for run in runs:
            run.step()
        each()
    return now


DEVICES = [f"fake:{i}" for i in range(4)]
some_devices = st.sets(st.sampled_from(DEVICES), min_size=1).map(sorted)
duration = st.sampled_from([0.25, 0.5, 2.0, 7.0])
a_run = st.tuples(
    some_devices, st.sets(st.sampled_from(DEVICES)), duration, duration, st.integers(1, 4), duration, duration
)


@settings(max_examples=200, deadline=None)
@given(st.lists(a_run, min_size=1, max_size=4), st.sampled_from(["lend", "remaining"]), st.data())
def test_no_device_is_held_twice_and_nobody_starves_whoever_comes_and_goes(described, policy, data):
    lines = []
    coordinator = Coordinator(dict.fromkeys(DEVICES, 0.0), {}, turns=RunTurns(policy, lines.append))
    runs = [
        FakeRun(coordinator, f"run-{i}", own, sorted(borrowed - {*own}), generate, train, count, drain, begins)
        for i, (own, borrowed, generate, train, count, drain, begins) in enumerate(described)
    ]
    killed = data.draw(st.sampled_from([None, *runs]))
    killed_at = data.draw(st.floats(0, 20))

    def check():
        held = {gang: {d for c in claims for d in c.devices} for gang, claims in coordinator.gangs.items()}
        working = [gang for gang in held if coordinator.granted(gang)]
        counts = Counter(device for gang in working for device in held[gang])
        assert all(count == 1 for count in counts.values())
        if killed and not killed.gone and killed.phase and coordinator.now > killed_at:
            killed.leave()
            assert not any(gang.startswith(killed.name + "/") for gang in coordinator.holders.values())

    play(coordinator, runs, each=check)
    assert not coordinator.holders and not coordinator.waiting
    check_record(lines, {run.name for run in runs})


def two_runs(**options):
    coordinator = Coordinator(dict.fromkeys(DEVICES[:2], 0.0), {}, turns=RunTurns(**options))
    waits = FakeRun(coordinator, "waits", DEVICES[:1], DEVICES[1:2], 2.0, 2.0, 6, 0.25)
    works = FakeRun(coordinator, "works", DEVICES[1:2], DEVICES[:1], 30.0, 1.0, 2, 0.25)
    return coordinator, waits, works


def alone(own, generate_s, train_s, iterations):
    coordinator = Coordinator(dict.fromkeys(DEVICES, 0.0), {}, turns=RunTurns())
    return play(coordinator, [FakeRun(coordinator, "alone", own, [], generate_s, train_s, iterations, 0.25)])


def test_a_run_that_lends_is_as_fast_as_on_its_own_devices_and_the_other_one_is_faster():
    coordinator, waits, works = two_runs()
    play(coordinator, [waits, works])
    assert waits.end <= alone(DEVICES[:1], 2.0, 2.0, 6) * 1.02
    assert works.end < alone(DEVICES[:1], 30.0, 1.0, 2) * 0.8  # from when the other one has ended, on both devices


def test_a_device_that_is_soon_wanted_again_is_not_lent():
    coordinator, waits, works = two_runs()
    coordinator.turns.drain_s = 60.0  # a change of hands takes long, as far as anybody knows
    lent = {True: 0, False: 0}  # whether its owner had ended -> how often it was seen lent

    def look():
        lent[waits.gone] += works.parts[0] in coordinator.holders.values()

    play(coordinator, [waits, works], each=look)
    assert lent[False] == 0 < lent[True]


def test_rlix_rule_moves_generation_to_the_run_with_more_work_left_and_leaves_each_one_a_device():
    devices = dict.fromkeys(DEVICES, 0.0)
    coordinator = Coordinator(devices, {}, turns=RunTurns("remaining"))
    turns, gangs = coordinator.turns, {}
    for run in ("small", "large"):
        turns.joins(run, 1.0, DEVICES, 0.0)
        gangs[run] = [f"{run}/policy on {device}" for device in DEVICES]
        claims = {gang: [Claim(f"{gang}-0", (gang.rpartition(" ")[2],))] for gang in gangs[run]}
        coordinator.join(run, claims, dict.fromkeys(claims, GENERATE), claims, [f"{gang}-0" for gang in claims])
    turns.runs["small"].batch_s, turns.runs["large"].batch_s = 10.0, 90.0
    for gang in gangs["small"] + gangs["large"]:
        coordinator.acquire(gang)
    for now in range(20):
        coordinator.pass_time(float(now))
        for gang in sorted(coordinator.leaving()):
            coordinator.release(gang)
            coordinator.acquire(gang)
    assert (turns.generates_on("small"), turns.generates_on("large")) == (1, 3)


@pytest.mark.parametrize("rests", [False, True])
def test_by_rlix_rule_a_run_keeps_the_device_on_which_it_writes_its_last_answer(rests):
    """Its other device gives way by itself where there is nothing to do on it, and one is left then."""
    coordinator = Coordinator(dict.fromkeys(DEVICES[:2], 0.0), {}, turns=RunTurns("remaining"))
    turns = coordinator.turns
    for run in ("ends", "large"):
        turns.joins(run, 1.0, DEVICES[:2], 0.0)
        claims = {f"{run}/{device}": [Claim(f"{run}/on {device}", (device,))] for device in DEVICES[:2]}
        coordinator.join(run, claims, dict.fromkeys(claims, GENERATE), claims, [f"{run}/on {d}" for d in DEVICES[:2]])
        for gang in claims:
            coordinator.acquire(gang)
    turns.runs["ends"].batch_s, turns.runs["large"].batch_s = 16.0, 64.0
    turns.reports("ends", 0.98, 1.0)
    turns.set_idle("ends", {f"ends/{DEVICES[1]}"} if rests else (), 1.0)
    coordinator.pass_time(2.0)
    assert len(coordinator.leaving()) == 1 and (not rests or coordinator.leaving() == {f"ends/{DEVICES[1]}"})


def test_a_run_that_waits_longer_than_its_last_iteration_moves_up_a_tier():
    turns = RunTurns()
    turns.joins("a", 1.0, DEVICES, 0.0)
    turns.set_gangs("a", {"a/rollout": DEVICES, "a/update": DEVICES}, {"a/rollout": GENERATE, "a/update": TRAIN})
    turns.reports("a", None, 0.0)
    turns.reports("a", None, 5.0)
    turns.note_request("a/rollout", 10.0)
    assert turns.tier("a/rollout") == GENERATE
    turns.passes(15.1)
    assert turns.tier("a/rollout") == GENERATE - 1


def test_training_takes_lent_devices_back_and_a_run_that_dies_frees_its_own_at_once():
    coordinator, waits, works = two_runs()
    waits.join()
    works.join()
    works_borrows, update = works.parts[0], waits.gang("update")
    coordinator.release(waits.gang("rollout"))
    coordinator.acquire(works_borrows)
    coordinator.pass_time(50.0)
    assert coordinator.granted(works_borrows)
    coordinator.acquire(update)
    assert coordinator.leaving() == {works_borrows} and not coordinator.granted(update)
    for now in (51.0, 53.0):
        coordinator.pass_time(now)
    coordinator.leave("works")
    assert coordinator.granted(update) and coordinator.turns.drain_s == 1.5, "it took 2 s, where 1 s was expected"


def test_workers_that_do_not_fit_beside_those_of_other_runs_are_refused_with_the_arithmetic():
    coordinator = Coordinator({"gpu:0": 10e9}, {}, turns=RunTurns())
    for run, kept in (("a", 6e9), ("b", 5e9)):
        coordinator.turns.joins(run, 1.0, ["gpu:0"], 0.0)
        claims = {f"{run}/update": [Claim(f"{run}/learner-0", ("gpu:0",), 8e9, kept)]}
        if run == "a":
            coordinator.join(run, claims, {}, ())
            continue
        with pytest.raises(LeaseError, match=r"b/learner-0 8 GB .* 10 GB|a/learner-0 8 GB .* b/learner-0 5 GB"):
            coordinator.join(run, claims, {}, ())
    assert "b/learner-0" not in coordinator.claims and INITIALISE < TRAIN


def test_a_worker_that_has_nothing_to_do_lends_its_device_until_it_has():
    coordinator = Coordinator(dict.fromkeys(DEVICES[:1], 0.0), {}, turns=RunTurns())
    turns, owner, borrower = coordinator.turns, "a/policy", "b/policy"
    turns.drain_s = 0.5
    for run, own in (("a", DEVICES[:1]), ("b", DEVICES[1:2])):
        turns.joins(run, 1.0, own, 0.0)
        gang = f"{run}/policy"
        coordinator.join(run, {gang: [Claim(f"{run}/p", (DEVICES[0],))]}, {gang: GENERATE}, [gang], [f"{run}/p"])
        coordinator.acquire(gang)

    def leaving(now):
        coordinator.pass_time(now)
        found = coordinator.leaving()
        for gang in found:
            coordinator.release(gang)
            coordinator.acquire(gang)
        return found

    assert not leaving(1.0) and coordinator.granted(owner)
    turns.set_idle("a", {owner}, 10.0)
    assert not leaving(11.0)  # idle for 1 s, and a change of hands takes 0.5 s
    assert leaving(12.0) == {owner} and coordinator.granted(borrower)
    turns.set_idle("a", (), 20.0)
    assert leaving(20.0) == {borrower} and coordinator.granted(owner)
    turns.set_idle("a", {owner}, 30.0)  # as long as last time
    assert leaving(30.1) == {owner}
