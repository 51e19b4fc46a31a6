"""What people see of runs that share devices: from share.jsonl to a table and a page."""

import io
import json

import pytest

from benchmarks.shared_replay import RunWork, SteadyBatch, replay
from embodied.core.errors import EmbodiedError
from embodied.report import keep_writing
from embodied.reporting.run_page import REPORT, write_report
from embodied.sharing.page import PREDICTED, SHARE, LiveTable, read_share, record_of, share_page, table_lines
from embodied.sharing.run_turns import FORMAT, RECORD

HEADER = {"format": FORMAT, "rule": "lend", "devices": ["cpu:0", "cpu:1"], "started": "2026-11-26T03:00:00+00:00"}


def joins(run, own, at=0.0):
    return {"at": at, "run": run, "joins": {"weight": 1.0, "own": own}}


def has(device, run, phase, at):
    return {"at": at, "device": device, "run": run, "phase": phase}


# a updates from 1 to 4 and from 6 on; it waits from 4 to 6 for b, which has borrowed cpu:0 and has cpu:1 from 0 on.
LINES = [
    HEADER,
    joins("a", ["cpu:0"]),
    joins("b", ["cpu:1"]),
    has("cpu:1", "b", "rollout", 0.0),
    {"at": 0.5, "run": "b", "waits": "rollout of policy-0"},  # that b waits for more devices is no waiting
    {"at": 1.0, "run": "a", "waits": "update"},
    has("cpu:0", "a", "update", 1.0),
    has("cpu:0", None, None, 4.0),
    has("cpu:0", "b", "rollout of policy-0", 4.0),
    {"at": 4.0, "run": "a", "waits": "update"},
    {"at": 4.5, "run": "b", "leaves": "rollout of policy-0"},
    has("cpu:0", None, None, 6.0),
    {"at": 6.0, "run": "b", "waits": "rollout of policy-0"},
    has("cpu:0", "a", "update", 6.0),
    {"at": 7.0, "run": "b", "progress": 0.42},
    {"at": 8.0, "run": "b", "waits_no_more": "rollout of policy-0"},
    has("cpu:1", None, None, 8.0),
]


def test_a_record_says_who_had_what_how_long_and_who_waited():
    record = record_of(LINES)
    assert record.device_seconds() == {"a": 3 + 2, "b": 8 + 2}
    assert (record.waited_s("a"), record.waited_s("b")) == (2.0, 0.0)
    assert record.targets() == {"a": 0.5, "b": 0.5} and record.utilisation() == 15 / (2 * 8)
    again = record_of(
        [*LINES, HEADER, joins("a", ["cpu:0"], at=1.0), has("cpu:0", "a", "update", 2.0), has("cpu:0", None, None, 3.0)]
    )
    assert again.device_seconds()["a"] == 5 + 1 and again.now_s == 11.0 and again.waited_s("a") == 2.0  # resumed
    ended = record_of([*LINES, {"at": 10.0, "run": "b", "ends": "finished"}])
    assert ended.makespan_s() == 10.0 and ended.device_seconds()["a"] == 3 + 4  # a goes on


def test_iterations_are_counted_from_when_a_run_has_built_its_workers():
    late = [has("cpu:1", "b", "initialise", 3.0), has("cpu:1", None, None, 5.0), has("cpu:1", "b", "update", 5.5)]
    late += [has("cpu:1", None, None, 7.0), {"at": 8.0, "run": "b", "progress": None}]
    early = [has("cpu:0", "a", "initialise", 1.0), has("cpu:0", None, None, 2.0)]
    record = record_of([HEADER, joins("a", ["cpu:0"]), joins("b", ["cpu:1"]), *early, *late])
    assert (record.begun_s("a"), record.begun_s("b"), record.begun_s()) == (2.0, 5.0, 2.0)
    assert (record.trained_s("b"), record.trained_s()) == (3.0, 6.0)


def test_the_table_in_the_terminal_shows_who_holds_what_and_how_far_everybody_is(tmp_path):
    rows = [{"iteration": 2, "steps_per_s": 10.0}, {"iteration": 3, "steps_per_s": 1234.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"iteration": 4, "st')
    record = record_of(LINES[:-2])
    assert table_lines(record, 7.0, {"a": tmp_path}) == [
        "7 s, 2 devices, rule lend",
        "run  holds          share  target  waits  batch  iteration  steps/s",
        "a    cpu:0 update   29%    50%     2 s           3          1,234",
        "b    cpu:1 rollout  64%    50%     0 s    42%    -          -",
    ]
    now_s = 0.0
    stream = io.StringIO()
    table = LiveTable(record, stream, lambda: now_s)
    shown = []
    for now_s in range(300):
        table.show(now_s)
        if stream.getvalue().count("2 devices") > len(shown):
            shown.append(now_s)
    assert shown == [8, 23, 53, 113, 173, 233, 293]  # after 7.5 s, then twice as long each time, at most 60 s
    table.say("b has ended")
    assert stream.getvalue().endswith("\nb has ended\n")


def test_the_page_holds_the_measured_and_the_predicted_course(tmp_path, page_checker):
    works = [
        RunWork(name, 2, lambda i: SteadyBatch(lambda n: 3 / n, 2), lambda n: 1 / n, wait)
        for name, wait in (("a", 4.0), ("b & c", 0.0))
    ]
    own = {"a": ["cpu:0"], "b & c": ["cpu:1"]}
    for name, rule in ((RECORD, "lend"), (PREDICTED, "split")):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in replay(works, own, rule)))
    page = page_checker(share_page(tmp_path))
    assert "a, b & c on 2 devices" in page.text and "measured; " in page.text and "predicted; 16 s" in page.text
    (drawing,) = page.blocks("rows")
    assert [[row["name"] for row in chart["rows"]][:2] for chart in drawing["charts"]] == 2 * [["cpu:0", "cpu:1"]]
    assert {*drawing["charts"][0]["rows"][0]["bars"]} >= {"a", "a update"} and drawing["x"] == "seconds"
    assert page_checker(write_report(tmp_path)).data == page.data
    (tmp_path / PREDICTED).unlink()
    assert "predicted" not in page_checker(share_page(tmp_path)).text


def test_a_live_page_follows_runs_until_the_command_that_serves_them_ends(tmp_path):
    socket, shown = tmp_path / "socket", []
    socket.touch()
    (tmp_path / SHARE).write_text(json.dumps({"socket": str(socket)}))
    (tmp_path / RECORD).write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def goes_on(seconds):
        shown.append((tmp_path / REPORT).read_text())
        socket.unlink()

    keep_writing([tmp_path], None, goes_on)
    assert len(shown) == 1 and shown[0].count('"live_s":5') == 1


def test_a_record_that_was_cut_short_is_read_and_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / RECORD
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES) + '{"at": 9.0, "ru')
    assert read_share(tmp_path).now_s == 8.0
    for text in (
        "no json\n",
        json.dumps(LINES[1]) + "\n" + json.dumps(has("cpu:0", "x", "update", 0.0)) + "\n",
        '{"format": 1}\n',
    ):
        path.write_text(text)
        with pytest.raises(EmbodiedError, match=r"share\.jsonl cannot be read"):
            read_share(tmp_path)
