"""The state machine alone: no process, no thread, and time is a number."""

import pytest

from embodied.runtime.heartbeat import AwakeClock, Pulse, Sign
from embodied.runtime.supervision import Budget, Call, Failure, Repetitions, Supervisor, Watchdog
from embodied.runtime.worker import Handle

BUDGET = Budget(max_restarts=2, window_s=100, hang_s=10)


def test_a_death_at_work_is_a_restart():
    machine = Supervisor(BUDGET, ["sims", "policy"])
    assert machine.at_work("sims") and machine.died("sims", now=5) is None
    assert not machine.at_work("sims") and machine.restarts("sims") == 1
    machine.constructed("sims")
    assert machine.at_work("sims") and machine.restarts("policy") == 0


class Building:
    """A backend with one host whose first life took 40 s to build. Its second has beaten or not, its worker not."""

    def __init__(self):
        self.now, self.beat_at, self.killed_at = 0.0, None, None

    def pulse(self, host):
        return Pulse(float("inf") if self.beat_at is None else self.now - self.beat_at, 0)

    def progress(self, host, slot):
        return Sign(0, float("inf"), False)

    def kill(self, host):
        self.killed_at = self.now

    def write_stacks(self, host):
        return False

    def describe_host(self, host):
        return "pid 7"


@pytest.mark.parametrize(
    ("beats_until", "killed_at"), [(None, 120), (3, 13), (1000, 120)], ids=["never starts", "stopped", "worker hangs"]
)
def test_a_successor_has_hang_s_to_beat_and_three_times_its_first_life_to_be_built(beats_until, killed_at):
    backend = Building()
    machine = Supervisor(BUDGET, ["sims"])
    watchdog = Watchdog(backend, machine, AwakeClock(lambda: backend.now), {"sims": 40.0})
    machine.died("sims", now=0)
    building = Handle(None, "sim.__init__", ["sim-0"])
    watchdog.watch_rebuilding("sims", [building])
    while backend.killed_at is None and backend.now < 500:
        backend.now += 1
        if beats_until and backend.now <= beats_until:
            backend.beat_at = backend.now
        watchdog.check([Call("sim-0", "sims", 0, building, sent_at=0.0)])
    assert backend.killed_at == killed_at
    failure, again = watchdog.died("sims", Failure("sim-0", "its process was killed"))
    assert again and "hung: no sign of life for" in failure.cause and machine.restarts("sims") == 2


def test_the_death_of_a_host_that_is_being_rebuilt_counts_as_another_restart():
    machine = Supervisor(BUDGET, ["sims"])
    assert machine.died("sims", now=0) is None and machine.died("sims", now=1) is None
    assert not machine.at_work("sims") and machine.restarts("sims") == 2
    assert "after 2 restarts" in machine.died("sims", now=2)


def test_a_unique_host_is_watched_and_has_no_second_life():
    machine = Supervisor(BUDGET, ["sims"], unique=["learner"])
    assert machine.hosts == ("sims", "learner")
    assert machine.replaces("sims") and not machine.replaces("learner")
    assert machine.died("learner", now=5) == "" and not machine.at_work("learner")


def dies_and_returns(machine, now) -> str | None:
    reason = machine.died("sims", now)
    machine.constructed("sims")
    return reason


def test_the_budget_counts_restarts_of_one_host_within_the_window():
    machine = Supervisor(BUDGET, ["sims", "policy"])
    assert [dies_and_returns(machine, now) for now in (0, 60)] == [None, None]
    reason = dies_and_returns(machine, 100)
    assert reason == "this was after 2 restarts within 100 s (faults.max_restarts=2)"
    assert machine.died("policy", 100) is None


def test_restarts_before_the_window_are_forgotten():
    machine = Supervisor(BUDGET, ["sims"])
    assert [dies_and_returns(machine, now) for now in (0, 60, 101, 161)] == [None] * 4
    assert machine.restarts("sims") == 4
    assert dies_and_returns(machine, 200) is not None


def test_no_restarts_allowed_means_that_the_first_death_ends_the_run():
    machine = Supervisor(Budget(0, 100, 10), ["sims"])
    assert "after 0 restarts" in machine.died("sims", 0)


def test_the_same_error_twice_of_a_worker_that_never_came_through_a_round_is_the_codes():
    errors = Repetitions()
    assert errors.count_error("sim-0", "paid.py:3", "KeyError: 'x'") == ""
    assert errors.count_error("sim-1", "paid.py:3", "KeyError: 'x'") == "", "another worker has not been started again"
    errors.came_through(["sim-2"])
    assert "not tried a third time" in errors.count_error("sim-0", "paid.py:3", "KeyError: 'x'")


def test_other_errors_of_such_a_worker_are_tried_three_times_at_a_line():
    errors = Repetitions()
    assert errors.count_error("sim-0", "scene.py:7", "NotFinite: row 1") == ""
    assert errors.count_error("sim-0", "paid.py:3", "NotFinite: row 1") == ""
    assert errors.count_error("sim-0", "scene.py:7", "NotFinite: row 5") == ""
    assert "three times in a row" in errors.count_error("sim-0", "scene.py:7", "NotFinite: row 2")


def test_a_worker_that_has_worked_may_fail_with_the_same_error_twice_in_a_row():
    errors = Repetitions()
    errors.came_through(["sim-0"])
    told = [errors.count_error("sim-0", "scene.py:7", "RuntimeError: contact lost") for _ in range(3)]
    assert told[:2] == ["", ""] and "three times in a row" in told[2]


def test_a_round_that_a_worker_came_through_forgets_its_errors():
    errors = Repetitions()
    for _ in range(4):
        assert errors.count_error("sim-0", "scene.py:7", "RuntimeError: contact lost") == ""
        errors.came_through(["sim-0"])
