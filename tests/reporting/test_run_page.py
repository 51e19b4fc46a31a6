"""The report page: whole, self-contained, with every number, and safe whatever the texts in it say."""

import errno
import json
import os
import re

import pytest
from written_runs import write_evaluation

from embodied.core.types import EpisodeResult
from embodied.records.timeline import TraceWriter
from embodied.report import keep_writing, main
from embodied.reporting.page import Series, thinned
from embodied.reporting.run_page import report, report_or_say_why, write_report
from embodied.reporting.runs import read_run
from embodied.run.run_folder import RunFolder

CONFIG = "env: {name: pointmass, task: reach}\npolicy: {name: mlp}\nalgo: {name: ppo}\n"
SECONDS = {"rollout": 1.2, "step": 0.6, "reset": 0.1, "act": 0.4, "publish": 0.05}


def metrics(iteration):
    row = {
        "iteration": iteration,
        "policy_version": iteration,
        "env_steps": 1111 * iteration,
        "train_s": 2.0 * iteration,
    }
    row |= {"steps_per_s": 555.5, "episodes": 10, "recent_episodes": min(100, 10 * iteration)}
    row |= {"success_once": iteration / 10, "success_at_end": iteration / 20, "return": 1.5, "length": 30.0}
    row |= {"faults/restarts": int(iteration == 3), "faults/lost_decisions": 64 * (iteration == 3)}
    row |= {f"time/{name}_s": seconds for name, seconds in SECONDS.items()}
    return row | {"train/policy_loss": -0.01 * iteration, "train/epochs": 4.0}


def episode(index, task, success, error=""):
    return EpisodeResult(
        index, task, -1, 7 + index, 10 + index, 0.5 * index, success, success and index != 1, False, error
    )


def add_evaluation(run, version, episodes, videos=()):
    env, conditions = {"name": "pointmass", "task": "reach"}, {"seed": 1, "temperature": 0.0}
    write_evaluation(run / "eval" / f"v{version:06d}", episodes, version, videos, env=env, eval=conditions)


@pytest.fixture
def run(tmp_path):
    """A run folder as training leaves it, small."""
    run = tmp_path / "toy-1"
    run.mkdir()
    made = {"command": ["train.py", "recipe=toy"], "commit": "abc123", "packages": {"torch": "9.9"}}
    hosts = [{"name": "sim+policy-0", "roles": ["sim", "policy"], "cores": [0]}]
    hosts += [{"name": "learner-0", "roles": ["learner"], "cores": [0, 1]}]
    placement = {"mode": "auto", "reason": "collocated", "num_envs": 8, "idle": [2], "hosts": hosts}
    info = {"state": "finished", "started": "2026-01-01T00:00:00+00:00", "ended": "2026-01-01T00:01:30+00:00"}
    info |= {"cause": "", "provenance": made, "placement": placement}
    (run / "run.json").write_text(json.dumps(info))
    (run / "config.yaml").write_text(CONFIG)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps(metrics(i)) + "\n" for i in range(1, 9)) + '{"iteration": 9, "env'
    )
    writer = TraceWriter(run / "trace.json", [("driver", "driver"), ("sim-0", "sim+policy-0")])
    writer.add("driver", [("rollout", 0.0, 1.0)], 1)
    writer.add("sim-0", [("step", 0.0, 0.5), ("wait", 0.5, 0.5)], 1)
    writer.close()
    add_evaluation(run, 4, [episode(i, "reach", i > 6) for i in range(10)])
    last = [*[episode(i, "reach", i > 1) for i in range(10)], *[episode(i, "push", i % 2 == 0) for i in range(10, 14)]]
    videos = ["episode-000_failure_reach_seed7.mp4", "episode-003_success_reach_seed10.mp4"]
    add_evaluation(run, 8, [*last, episode(14, "push", None, "it broke")], videos)
    return run


def test_every_number_is_there(run, page_checker):
    page = page_checker(report(read_run(run), run))
    # 8 of 10 reach and 2 of 4 push succeed at some point: 10 of 14, Wilson 45.4% to 88.3%
    for number in ("71.4%", "[45.4%, 88.3%] 10/14", "80%", "8/10", "50%", "2/4", "30%", "3/10"):
        assert number in page.text, number
    for fact in ("8,888", "16.0 s", "8 iterations", "556", "v000004", "4,444", "abc123", "torch 9.9", "recipe=toy"):
        assert fact in page.text, fact
    assert "workers restarted" in page.text and "64 decisions lost" in page.text
    assert "finished" in page.text and "2026-01-01 00:00 UTC, 90.0 s" in page.text
    for host in ("sim+policy-0", "learner-0", "driver", "sim-0"):
        assert host in page.text
    success = page.chart("success_once")
    assert success["training"]["y"][-1] == 0.8 and success["evaluation"]["x"] == [4444, 8888]
    assert [success["evaluation"][bound][-1] for bound in ("low", "high")] == pytest.approx([0.454, 0.883], abs=1e-3)
    (curve,) = page.chart("policy_loss").values()
    assert curve["y"] == pytest.approx([-0.01 * i for i in range(1, 9)])
    assert "epochs 4" in page.text  # never changed: words, no chart
    assert [sum(map(len, chart["groups"].values())) for chart in page.blocks("histogram")] == [14, 14]
    (spent,) = [chart for chart in page.blocks("rows") if chart["title"].startswith("All iterations")]
    bars = {row["name"]: row["bars"][row["name"]] for row in spent["charts"][0]["rows"]}
    assert bars["step"] == [[0, pytest.approx(8 * 0.6)]] and spent["x"] == "seconds of training"
    assert "71.4% [45.4%, 88.3%] 10/14" in page.plain, "a browser without scripts shows the tables"
    assert "errors" in page.text and "neither success nor failure" in page.text


def test_videos_are_files_beside_the_page_the_mosaic_and_failures_first(run, page_checker):
    (run / "eval/v000008/videos/episode-004_success_reach_seed 11.mp4").write_bytes(b"x" * 200)
    (run / "eval/v000008/videos/mosaic.mp4").write_bytes(b"all")
    page = page_checker(report(read_run(run), run))
    (block,) = page.blocks("videos")
    names = ["mosaic", "episode-000_failure_reach_seed7", "episode-003_success_reach_seed10"]
    names.append("episode-004_success_reach_seed%2011")
    assert [video["src"] for video in block["videos"]] == [f"eval/v000008/videos/{name}.mp4" for name in names]
    assert [video.get("outcome") for video in block["videos"]] == [None, "failure", "success", "success"]
    assert "All 3 videos: green succeeds, red fails" in page.text and re.search(r"toy-v1, \d+ episodes", page.text)


def no_locks(*_):
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_run_that_was_killed_is_not_said_to_be_running(tmp_path, page_checker, monkeypatch):
    folder = RunFolder.create(tmp_path, "toy", "")
    assert "running" in page_checker(report(read_run(folder.path), folder.path)).text
    with monkeypatch.context() as without_locks:
        without_locks.setattr("fcntl.flock", no_locks)
        assert "running" in page_checker(report(read_run(folder.path), folder.path)).text
    os.close(folder._lock)  # what the kernel does when a process dies
    page = page_checker(report(read_run(folder.path), folder.path))
    assert "killed" in page.text and f"python -m embodied.train resume={folder.path}" in page.text
    folder.record(resumed=[{"provenance": {"host": "elsewhere"}}])
    assert "running" in page_checker(report(read_run(folder.path), folder.path)).text


def test_the_command_names_what_it_wrote_and_what_it_cannot_read(run, capsys):
    assert main([str(run)]) == 0 and main([str(run / "eval/v000004")]) == 0
    assert capsys.readouterr().out.split() == [str(run / "report.html"), str(run / "eval/v000004/report.html")]
    for words, told in (([str(run.parent)], "neither a run's folder"), (["no run"], "is not there"), ([], "which run")):
        assert main(words) == 2 and told in capsys.readouterr().err
    assert main(["--live", str(run.parent)]) == 2 and not capsys.readouterr().out
    report_or_say_why(run.parent / "nowhere")
    told = capsys.readouterr().err
    assert told.startswith("no report: ConfigError: ") and told.count("\n") == 1


def test_a_live_page_follows_a_run_until_it_ends_and_then_reloads_no_more(tmp_path):
    folder = RunFolder.create(tmp_path, "toy", "")
    page, shown = folder.path / "report.html", []

    def goes_on(seconds):
        write_report(folder.path)  # as the run does after an evaluation
        shown.append(page.read_text())
        with (folder.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(metrics(len(shown))) + "\n")
        if len(shown) == 2:
            folder.finish("finished")
            write_report(folder.path)
            assert '"live_s":0' in page.read_text()

    keep_writing([folder.path], None, goes_on)
    assert ["1,111" in text for text in shown] == [False, True], "env steps after an iteration"
    assert all(text.count('"live_s":5') == 1 for text in shown)
    assert main(["--live", str(folder.path)]) == 0
    assert '"live_s":0' in page.read_text() and "2,222" in page.read_text()


def test_a_long_line_becomes_means_within_a_band():
    curve = thinned(Series("return", range(10_000), [float(i % 10) for i in range(10_000)]))
    assert len(curve.x) <= 240 and curve.x[-1] == 9999
    assert {*curve.low[:-1]} == {0.0} and {*curve.high} == {9.0}
    assert sum(curve.y) / len(curve.y) == pytest.approx(4.5, 0.01)
