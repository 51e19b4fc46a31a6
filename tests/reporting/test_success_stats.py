"""Success rates, their intervals, and the two result files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied.core.errors import EmbodiedError
from embodied.core.types import EpisodeResult
from embodied.records.results import COLUMNS, describe_tasks, episodes_csv, read_results, write_results
from embodied.records.success_stats import compare, exact_mcnemar, paired_difference, summarize, wilson


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


def test_several_suites_have_a_rate_each():
    tasks = {"libero_goal/0": True, "libero_goal/1": False, "libero_goal_swap/0": False, "my/task.bddl": True}
    found = summarize([episode(index, once, task=task) for index, (task, once) in enumerate(tasks.items())])
    rates = {suite: figures["success_once"]["rate"] for suite, figures in found["per_suite"].items()}
    assert rates == {"libero_goal": 0.5, "libero_goal_swap": 0.0}
    assert describe_tasks(found).splitlines()[-2].split()[:3] == ["libero_goal", "success_once", "50.0%"]
    assert "per_suite" not in summarize([episode(0, task="libero_goal/0"), episode(1, task="libero_goal/1")])


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
    write_results(tmp_path, {"policy_version": 1, **summarize([episode(0)])}, [episode(0)])
    assert read_results(tmp_path)[1] == [episode(0)]
    (tmp_path / "episodes.csv").write_text("index,task\n1\n")
    with pytest.raises(EmbodiedError, match=r"episodes\.csv cannot be read"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    ("table", "published"),
    [
        ((36, 12, 2, 0), (0.2000, 0.0569, 0.3404)),  # Newcombe 1998
        ((20, 12, 2, 16), (0.2000, 0.0562, 0.3292)),  # Newcombe 1998
        ((14, 5, 0, 22), (0.1220, 0.0115, 0.2265)),  # Altman et al. 2000, table 6.2
        ((1, 1, 7, 12), (-0.2857, -0.5069, -0.0256)),  # Bentur et al. 2009, in Fagerland et al. 2017
    ],
)
def test_paired_differences_equal_published_ones(table, published):
    assert paired_difference(*table) == pytest.approx(published, abs=6e-5)


@given(st.tuples(*[st.integers(0, 40)] * 4).filter(sum))
def test_a_paired_difference_lies_in_its_interval_and_turns_round(table):
    both, one, other, neither = table
    difference, low, high = paired_difference(*table)
    assert -1 - 1e-9 <= low <= difference <= high <= 1 + 1e-9
    assert paired_difference(both, other, one, neither) == pytest.approx((-difference, -high, -low), abs=1e-12)


def test_policies_are_compared_on_the_episodes_both_played():
    def played(seed, once, reward, error="", end=None):
        return EpisodeResult(seed, "a", -1, seed, 1, reward, once, once if end is None else end, False, error)

    first = [played(1, False, 0.0), played(2, True, 1.0), played(3, True, 2.0), played(4, True, 9.0, "broke")]
    second = [
        played(3, True, 4.0),
        played(2, True, 2.0, end=False),
        played(1, True, 3.0),
        played(9, False, 0.0),
        played(4, True, 1.0),
    ]
    told = compare(first, second)
    assert told["episodes"] == 3
    assert told["success_once"]["difference"] == pytest.approx(1 / 3)
    assert [told["success_once"][k] for k in ("both", "only_first", "only_second", "neither")] == [2, 0, 1, 0]
    assert [told["success_at_end"][k] for k in ("both", "only_first", "only_second", "neither")] == [1, 1, 1, 0]
    # differences 3, 1, 2: mean 2, deviation 1, half 1.96 / sqrt(3)
    assert told["return"]["difference"] == 2.0
    assert told["return"]["interval"] == pytest.approx([2 - 1.1316, 2 + 1.1316], abs=1e-4)
    assert compare(first, [])["success_once"] is None and compare([], second)["return"] is None


@pytest.mark.parametrize(
    ("one", "other", "p"),
    [
        (2, 12, 0.0129),  # Armitage and Berry 1994, p. 127, as StatsDirect gives it
        (2, 10, 158 / 4096),  # 2 * (1 + 12 + 66) / 2^12
        (0, 1, 1.0),
        (3, 3, 1.0),
        (0, 0, 1.0),
    ],
)
def test_exact_mcnemar_equals_published_and_hand_values(one, other, p):
    assert exact_mcnemar(one, other) == exact_mcnemar(other, one) == pytest.approx(p, abs=5e-5)
