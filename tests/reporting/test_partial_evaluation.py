"""What an evaluation that is not over leaves, and what whoever goes on makes of it."""

import json

import pytest

from embodied.core.types import EpisodeResult
from embodied.records.results import PartialEvaluation, partial_in, read_episodes
from embodied.records.transcripts import PARTS, TRANSCRIPTS
from embodied.reporting.run_page import report
from embodied.reporting.runs import read_run

ASKED = {"policy": {"sha256": "a"}, "eval": {"episodes": 10, "seed": 1}}


def over(*indices):
    return [EpisodeResult(index, "reach", -1, 7 + index, 5, 0.1 * index, True, True, False) for index in indices]


def begun(folder, *indices, asked=ASKED, clock=lambda: 0.0):
    kept = PartialEvaluation(folder, asked, {"name": "toy"}, clock)
    kept.add(over(*indices))
    kept.write()
    return kept


def test_finished_episodes_are_read_back_to_the_last_digit(tmp_path):
    begun(tmp_path, 3, 0, 7)
    again = begun(tmp_path)
    assert again.finished == {one.index: one for one in over(0, 3, 7)} and str(again) == "3 of 10 episodes"
    assert len(again.provenance()["earlier"]) == 1


@pytest.mark.parametrize("change", [{"policy": {"sha256": "b"}}, {"eval": {"episodes": 10, "seed": 2}}])
def test_a_part_of_something_else_does_not_count(tmp_path, change):
    begun(tmp_path, 1, 2)
    assert not begun(tmp_path, asked=ASKED | change).finished


@pytest.mark.parametrize("name", ["partial.json", "episodes.csv"])
@pytest.mark.parametrize("text", ["", "{", "index,task\nx,y\n", "[1]", "\xff"])
def test_a_part_that_cannot_be_read_is_played_again(tmp_path, name, text):
    begun(tmp_path, 1, 2)
    (tmp_path / name).write_text(text, encoding="latin-1")
    assert not begun(tmp_path).finished
    assert partial_in(tmp_path)["over"] == 0


def test_a_killed_evaluation_loses_about_one_second_of_results(tmp_path):
    """An episode ends every 0.4 s; it is written every second."""
    now = [0.0]
    kept = begun(tmp_path, clock=lambda: now[0])
    written = []
    for index in range(10):
        now[0] += 0.4
        kept.add(over(index))
        written.append(json.loads((tmp_path / "partial.json").read_text())["over"])
    assert written == [0, 0, 3, 3, 3, 6, 6, 6, 9, 9]
    assert [one.index for one in read_episodes(tmp_path)] == list(range(9))


def test_lines_that_say_nothing_new_become_rare_and_say_since_when(tmp_path):
    now, lines = [0.0], []
    kept = PartialEvaluation(tmp_path, ASKED, {"name": "toy"}, lambda: now[0], lines.append)
    for second in range(1, 301):
        now[0] = float(second)
        kept.add(over(0) if second == 200 else [])
    over_by_then = [int(line.split()[1]) for line in lines]
    assert over_by_then == [0, 0, 0, 1, 1, 1]  # after 15, 45, 105, 200, 215 and 245 s
    quiet = [line.rpartition("none has ended for ")[2] for line in lines if "none has ended" in line]
    assert quiet == ["45 s", "105 s", "45 s"]


def test_the_report_says_how_far_an_evaluation_is_and_gives_no_rates(tmp_path):
    (tmp_path / "run.json").write_text('{"state": "stopped"}')
    (tmp_path / "config.yaml").write_text("env: {name: pointmass}\n")
    begun(tmp_path / "eval" / "v000002", 0, 1, 2)
    (tmp_path / "eval" / "v000002" / "videos").mkdir()
    (tmp_path / "eval" / "v000002" / "videos" / "episode-001_failure_reach_seed7.mp4").touch()
    for folder in (tmp_path, tmp_path / "eval" / "v000002"):
        page = str(report(read_run(folder), folder))
        assert "Evaluation v000002 is partial: 3 of 10 episodes are over" in page and "success_once" not in page
        assert "videos/episode-001_failure_reach_seed7.mp4" in page and "'words': 'episode 1'" in page
    (tmp_path / "run.json").write_text('{"state": "running"}')
    shown = report(read_run(tmp_path), tmp_path)
    assert "evaluation v000002: 3 of 10 episodes are over" in shown["words"] and not shown["problems"]


def test_a_long_evaluation_says_every_so_often_how_far_it_is(tmp_path):
    now, told = [0.0], []
    kept = PartialEvaluation(tmp_path, ASKED, {"name": "toy"}, lambda: now[0], told.append)
    kept.add(over(0))
    assert not told
    for second, indices in ((14.0, (1,)), (16.0, (2, 3)), (20.0, (4,)), (32.0, ()), (50.0, range(5, 10))):
        now[0] = second
        kept.add(over(*indices))
    assert told == [
        "evaluation  4 of 10 episodes are over, success_once 100% of these, 0.25 a second, about 24 s left",
        "evaluation  5 of 10 episodes are over, success_once 100% of these, 0.156 a second, about 32 s left",
    ]


def test_an_evaluation_begun_anew_removes_the_old_transcripts_and_one_that_goes_on_keeps_them(tmp_path):
    parts, joined = tmp_path / PARTS, tmp_path / TRANSCRIPTS
    parts.mkdir()
    joined.touch()
    (parts / "sim-0.jsonl").touch()
    begun(tmp_path, 1)
    assert not joined.exists() and not parts.exists()
    parts.mkdir()
    begun(tmp_path)
    assert parts.exists()
