"""The timeline of a run: written as it goes, read back, and summed up per group."""

import json
from time import perf_counter

import pytest

from embodied.records.timeline import TimedSpan, Timeline, TraceWriter, describe, innermost, read_trace, time_fractions
from embodied.runtime import Cluster, HostPlan, Timers, Worker
from embodied.runtime.worker import Total


class Sim(Worker):
    def collect(self):
        for _ in range(3):
            with self.timers.measure("step"):
                sum(range(2000))
        with self.timers.measure("wait"):
            pass


@pytest.mark.parametrize("backend", ["inline", "local"])
def test_the_timeline_uses_the_drivers_clock(tmp_path, backend):
    path, timers = tmp_path / "trace.json", Timers()
    with Cluster(backend, [HostPlan("left", ("sim",)), HostPlan("right", ("sim",))], timeout_s=300) as cluster:
        sims = cluster.launch(Sim, "sim")
        sims.collect().wait()  # before the timeline begins
        timeline = Timeline([sims], timers, path, iterations=2)
        for iteration in (1, 2, 3):
            with timers.measure("rollout"):
                sims.collect().wait()
            timeline.collect(iteration)
        end_s = perf_counter() - timeline.began
        told = timeline.end()
    spans = read_trace(path)
    assert {(s.worker, s.host) for s in spans} == {("driver", "driver"), ("sim-0", "left"), ("sim-1", "right")}
    assert [s.name for s in spans if s.worker == "sim-1" and s.iteration == 2] == ["collect", *["step"] * 3, "wait"]
    assert {s.iteration for s in spans} == {1, 2}
    for iteration in (1, 2):
        (rollout,) = (s for s in spans if s.name == "rollout" and s.iteration == iteration)
        inside = [s for s in spans if s.worker != "driver" and s.iteration == iteration]
        assert all(rollout.start_s <= s.start_s <= s.end_s <= rollout.end_s <= end_s for s in inside)
    assert all(event["ph"] in "MX" for event in json.loads(path.read_text()))
    assert told.startswith("sim: ") and "idle" in told


def test_a_trace_that_was_cut_short_or_saved_by_a_viewer_on_one_line_is_read(tmp_path):
    path = tmp_path / "trace.json"
    writer = TraceWriter(path, [("sim-0", "sim-0")])
    writer.add("sim-0", [("step", 0.0, 1.0), ("step", 2.0, 1.0)], 1)
    whole = path.read_bytes()
    writer.close()
    spans = read_trace(path)
    assert spans == [TimedSpan("sim-0", "sim-0", "step", at, at + 1.0, 1) for at in (0.0, 2.0)]
    path.write_text(json.dumps({"traceEvents": json.loads(path.read_text())}))
    assert read_trace(path) == spans
    path.write_bytes(whole[:-10])
    assert read_trace(path) == spans[:1]


def test_inner_pieces_replace_the_parts_of_outer_ones_they_cover():
    def span(name, start, end, worker="sim-0"):
        return TimedSpan(worker, worker, name, start, end, 1)

    whole = [
        span("collect", 0, 10),
        span("step", 2, 5),
        span("render", 3, 4),
        span("wait", 5, 6),
        span("publish", 12, 13),
        span("serve", 0, 3, "policy-0"),
        span("act", 0, 3, "policy-0"),
    ]
    cut = [(s.worker, s.name, s.start_s, s.end_s) for s in innermost(whole)]
    assert cut == [
        ("policy-0", "act", 0, 3),
        ("sim-0", "collect", 0, 2),
        ("sim-0", "step", 2, 3),
        ("sim-0", "render", 3, 4),
        ("sim-0", "step", 4, 5),
        ("sim-0", "wait", 5, 6),
        ("sim-0", "collect", 6, 10),
        ("sim-0", "publish", 12, 13),
    ]


def test_shares_are_of_all_workers_time_and_waiting_is_idle():
    before = {"sim-0": {"step": Total(1, 5.0, 5.0)}, "sim-1": {"step": Total(3, 8.0, 8.0)}}
    after = {
        "sim-0": {"step": Total(2, 9.0, 9.0), "wait": Total(1, 6.0, 6.0)},
        "sim-1": {"step": Total(1, 2.0, 2.0)},  # replaced meanwhile
    }
    # two workers, 10 s: 4 + 2 of 20 s in step; waiting and the rest are idle
    assert time_fractions(before, after, 10.0) == {"step": 0.3, "idle": 0.7}
    told = describe({"sim": {"step": 0.3, "reset": 0.004, "idle": 0.7}, "learner": {"update": 0.99, "idle": 0.005}})
    assert told == "sim: step 30%, idle 70%; learner: update 99%"
