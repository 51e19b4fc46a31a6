"""What a worker measures: sums, sums without what is inside, and single pieces while they are recorded."""

from time import thread_time

import pytest

from embodied.runtime import worker as module
from embodied.runtime.worker import Timers


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when the test says so."""
    now = [100.0]
    monkeypatch.setattr(module, "perf_counter", lambda: now[0])

    def pass_(seconds):
        now[0] += seconds
        return now[0]

    return pass_


def test_a_piece_counts_for_the_outer_one_but_not_as_its_own_time(clock):
    timers = Timers()
    with timers.measure("collect"):
        timers.mark("first", clock(1.0))
        with timers.measure("step"):
            clock(2.0)
        began = clock(0.0)
        clock(4.0)
        assert timers.add("wait", began) == 4.0
    before = timers.totals()
    with timers.measure("collect"):
        clock(8.0)
    assert timers.seconds_since(before, "collect", "step", "other") == [8.0, 0.0, 0.0]
    totals = timers.totals()
    assert (totals["collect"].count, totals["collect"].seconds, totals["collect"].own_s) == (2, 15.0, 9.0)
    assert totals["step"].seconds == totals["step"].own_s == 2.0
    assert (totals["wait"].own_s, totals["first"]) == (4.0, module.Total(1, 0.0, 0.0))


def test_a_piece_that_raises_is_measured_and_closed(clock):
    timers = Timers()

    def fail():
        with timers.measure("inner"):
            clock(1.0)
            raise KeyError

    with timers.measure("outer"):
        with pytest.raises(KeyError):
            fail()
        clock(2.0)
    assert timers.totals()["outer"].own_s == 2.0


def test_single_pieces_are_kept_only_while_recording_and_up_to_a_limit(clock, monkeypatch):
    monkeypatch.setattr(module, "MAX_SPANS", 2)
    timers = Timers()
    for recording in (False, True):
        for _ in range(3):
            with timers.measure("act"):
                clock(1.0)
        kept = timers.record(True)
        assert (len(kept.spans), kept.lost) == ((2, 1) if recording else (0, 0))
    assert kept.spans == [("act", 103.0, 1.0), ("act", 104.0, 1.0)]
    assert timers.record(False).spans == []
    assert timers.totals()["act"].count == 6


def test_measuring_costs_microseconds():
    """A rollout measures three pieces per decision; a decision takes hundreds of microseconds at the very least."""
    timers = Timers()
    timers.record(True)
    best = float("inf")
    for _ in range(20):
        start = thread_time()  # of a core: other programs do not count
        for _ in range(100):
            with timers.measure("act"):
                pass
        best = min(best, (thread_time() - start) / 100)
    assert best < 20e-6
