"""Success rates, their intervals, and the two result files."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.data import EpisodeResult
from embodied.errors import EmbodiedError
from embodied.reporting.results import COLUMNS, episodes_csv, read_results, write_results
from embodied.reporting.stats import summarize, wilson


def episode(index, once=True, end=True, task="reach", **kwargs):
    given = {"length": 10, "total_reward": 1.0, "success_at_reset": None if once is None else False} | kwargs
    return EpisodeResult(index, task, -1, 100 + index, success_once=once, success_at_end=end, **given)


@pytest.mark.parametrize(
    ("count", "total", "low", "high"),
    [
        (9, 10, 0.596, 0.982),
        (0, 10, 0.0, 0.278),
        (10, 10, 0.722, 1.0),
        (1, 29, 0.006, 0.172),
        (81, 263, 0.255, 0.366),  # Newcombe 1998, table I
        (15, 148, 0.062, 0.160),
        (0, 20, 0.0, 0.161),
    ],
)
def test_wilson_equals_published_intervals(count, total, low, high):
    assert wilson(count, total) == pytest.approx((low, high), abs=5.1e-4)


@settings(deadline=None)
@given(st.integers(1, 500).flatmap(lambda total: st.tuples(st.integers(0, total), st.just(total))))
def test_the_interval_holds_the_rate_and_mirrors(pair):
    count, total = pair
    low, high = wilson(count, total)
    assert 0 <= low <= count / total <= high <= 1
    mirrored = wilson(total - count, total)
    assert (1 - high, 1 - low) == pytest.approx(mirrored)


def test_no_rate_without_episodes():
    with pytest.raises(ValueError, match="0 in 0"):
        wilson(0, 0)


def test_both_success_measures_are_counted_apart():
    """Always succeeding, never, and succeeding then dropping."""
    summary = summarize([episode(0, True, True), episode(1, False, False), episode(2, True, False)])["overall"]
    assert (summary["success_once"]["count"], summary["success_at_end"]["count"]) == (2, 1)
    assert summary["success_once"]["rate"] == pytest.approx(2 / 3)
    assert summary["success_once"]["interval"] == list(wilson(2, 3))


def test_an_env_without_success_has_null_rates():
    overall = summarize([episode(0, None, None), episode(1, None, None)])["overall"]
    assert overall["success_once"] is None
    assert overall["success_at_end"] is None
    assert overall["return"] == 1.0


def test_error_episodes_are_neither_success_nor_failure():
    overall = summarize([episode(0), episode(1, False, False, error="sim-0 died", total_reward=-50.0)])["overall"]
    assert (overall["episodes"], overall["errors"]) == (1, 1)
    assert overall["success_once"]["rate"] == 1.0
    assert overall["return"] == 1.0


def test_tasks_are_counted_apart_and_together():
    summary = summarize([episode(0, task="b"), episode(1, False, False, task="a"), episode(2, task="a")])
    assert list(summary["per_task"]) == ["a", "b"]
    assert summary["per_task"]["a"]["success_once"]["rate"] == 0.5
    assert summary["overall"]["success_once"]["of"] == 3


def test_success_at_reset_is_flagged():
    overall = summarize([episode(0, success_at_reset=True), episode(1)])["overall"]
    assert overall["success_at_reset"]["count"] == 1


def test_nothing_played_gives_no_figures():
    overall = summarize([episode(0, error="crash")])["overall"]
    assert (overall["episodes"], overall["return"], overall["success_once"]) == (0, None, None)


def test_results_come_back_as_they_were_written(tmp_path):
    episodes = [episode(0, total_reward=0.1 + 0.2), episode(1, None, None), episode(2, error='died, "badly"\nat 3')]
    results = {"policy_version": 7, **summarize(episodes)}
    write_results(tmp_path / "v000007", results, reversed(episodes))
    assert read_results(tmp_path / "v000007") == (json.loads(json.dumps(results)), episodes)
    assert sorted(path.name for path in (tmp_path / "v000007").iterdir()) == ["episodes.csv", "results.json"]


def test_the_same_episodes_give_the_same_bytes_in_any_order():
    episodes = [episode(i, total_reward=i / 3) for i in range(20)]
    assert episodes_csv(episodes) == episodes_csv(episodes[::-1])
    assert summarize(episodes) == summarize(episodes[::-1])


def test_a_line_of_episodes_csv():
    header, line = episodes_csv([episode(3, True, False, total_reward=2.5)]).splitlines()
    assert header == ",".join(COLUMNS)
    assert line == "3,reach,-1,103,10,2.5,true,false,false,"


def test_a_damaged_results_folder_is_an_error_that_names_it(tmp_path):
    write_results(tmp_path, summarize([episode(0)]), [episode(0)])
    (tmp_path / "episodes.csv").write_text("index,task\n1\n")
    with pytest.raises(EmbodiedError, match="no readable results"):
        read_results(tmp_path)
