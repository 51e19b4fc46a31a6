"""Several runs on one page: side by side, over each other, and on the same episodes."""

import json

import pytest

from embodied.core.types import EpisodeResult
from embodied.records.results import write_results
from embodied.records.success_stats import summarize
from embodied.report import main
from embodied.reporting.comparison_page import comparison, labels
from embodied.reporting.runs import read_run


def episode(seed, success, reward=1.0):
    return EpisodeResult(seed, "reach", -1, seed, 10, reward, success, success)


def write_run(folder, successes, first_seed=0, lr=1e-3, backend="numpy", videos=()):
    """A run whose newest evaluation had these outcomes."""
    folder.mkdir(parents=True)
    info = {
        "state": "finished",
        "started": "2026-01-01T00:00:00+00:00",
        "provenance": {"commit": "abc", "packages": {}},
    }
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "config.yaml").write_text(
        f"run: {{dir: {folder.parent}}}\nenv: {{name: toy}}\nalgo: {{lr: {lr}, name: ppo}}\n"
    )
    rows = [
        {"iteration": i, "policy_version": i, "env_steps": 100 * i, "train_s": 2.0 * i, "steps_per_s": 50.0}
        | {"success_once": i / 10, "success_at_end": i / 10, "return": 1.0, "recent_episodes": 20}
        for i in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    episodes = [episode(first_seed + i, bool(success)) for i, success in enumerate(successes)]
    protocol = {"name": "toy-v1", "env": {"name": "toy", "num_envs": len(folder.name)}, "backend": backend}
    out = folder / "eval" / "v000005"
    write_results(out, {"policy_version": 5, "protocol": protocol, **summarize(episodes), "provenance": {}}, episodes)
    for index in videos:
        (out / "videos").mkdir(exist_ok=True)
        (out / "videos" / f"episode-{index:03d}_x_reach_seed{index}.mp4").write_bytes(b"m" * 10)
    return folder


@pytest.fixture
def page_of(tmp_path, page_checker):
    def page(*folders):
        return page_checker(comparison([read_run(folder) for folder in folders], tmp_path))

    return page


def test_two_runs_are_compared_on_their_common_episodes(tmp_path, page_of):
    # both 1, only the second 3, only the first 1, neither 1: 4/6 - 2/6
    first = write_run(tmp_path / "a", [1, 1, 0, 0, 0, 0])
    second = write_run(tmp_path / "bb", [1, 0, 1, 1, 1, 0], lr=3e-4)
    page = page_of(first, second)
    assert "33.3%" in page.text and "66.7%" in page.text and "2/6" in page.text and "4/6" in page.text
    assert "+33.3 pp" in page.text and "only this one 3" in page.text and "only the first 1" in page.text
    assert "algo.lr" in page.text and "0.0003" in page.text
    assert "run.dir" not in page.text and "algo.name" not in page.text  # the same, or of no interest
    assert "other conditions" not in page.text  # the number of envs changes no episode
    curves = page.chart("success_once over env steps")
    assert list(curves) == ["a", "a, evaluation", "bb", "bb, evaluation"] and curves["a"]["low"]
    assert curves["a"]["color"] == curves["a, evaluation"]["color"] != curves["bb"]["color"]


def test_evaluations_without_a_common_episode_are_not_compared(tmp_path, page_of):
    page = page_of(write_run(tmp_path / "a", [1, 0]), write_run(tmp_path / "b", [1, 1], first_seed=10))
    assert "no episode in common" in page.text and " pp" not in page.text


def test_other_conditions_are_named(tmp_path, page_of):
    page = page_of(write_run(tmp_path / "a", [1, 0]), write_run(tmp_path / "b", [1, 1], backend="other"))
    assert "under other conditions than a: backend" in page.text


def test_the_same_episodes_stand_side_by_side_those_with_another_outcome_first(tmp_path, page_of):
    first = write_run(tmp_path / "a", [1, 1, 0], videos=(0, 1))
    second = write_run(tmp_path / "b", [1, 0, 0], videos=(0, 1, 2))
    page = page_of(first, second)
    shown = [[video["outcome"] for video in row["videos"]] for row in page.blocks("videos")]
    assert shown == [["success", "failure"], ["success", "success"]]


def test_runs_get_names_that_tell_them_apart(tmp_path):
    folders = [write_run(tmp_path / parent / "toy", [1]) for parent in ("x", "y")]
    assert labels([read_run(folder) for folder in folders]) == ["x/toy", "y/toy"]
    runs = [read_run(folders[0]), read_run(folders[0])]
    assert labels(runs)[0] != labels(runs)[1]


def test_evaluation_folders_can_be_compared(tmp_path, page_of):
    folders = [write_run(tmp_path / name, outcomes) / "eval/v000005" for name, outcomes in (("a", [1]), ("b", [0]))]
    page = page_of(*folders)
    assert "a/eval/v000005" in page.text and "Curves" not in page.text and "-100.0 pp" in page.text


def test_a_run_without_an_evaluation_is_compared_by_its_curves(tmp_path, page_of):
    first, second = write_run(tmp_path / "a", [1]), write_run(tmp_path / "b", [1])
    (second / "eval/v000005/results.json").unlink()
    assert "b has no evaluation" in page_of(first, second).text
    assert "b has no evaluation" in page_of(second, first).text


def test_the_command_writes_one_page_beside_the_first_run(tmp_path, capsys):
    first, second = write_run(tmp_path / "a", [1]), write_run(tmp_path / "b", [0])
    assert main([str(first), str(second)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "comparison.html")
    assert main([str(first), str(second), f"out={tmp_path}/pages/mine.html"]) == 0
    assert (tmp_path / "pages" / "mine.html").is_file()
    assert main([str(first), f"out={tmp_path}/one.html"]) == 0
    assert "2 runs" not in (tmp_path / "one.html").read_text()
