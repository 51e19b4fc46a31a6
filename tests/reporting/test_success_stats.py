"""Success rates, their intervals, and the two result files."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied.core.errors import EmbodiedError
from embodied.core.types import EpisodeResult
from embodied.records.results import COLUMNS, episodes_csv, read_results, write_results
from embodied.records.success_stats import (
    compare,
    describe_tasks,
    exact_mcnemar,
    iqm,
    over_seeds,
    paired_difference,
    standings,
    summarize,
    wilson,
)


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


def test_result_files_count_tasks_measures_and_errors_separately():
    episodes = [episode(0, task="b"), episode(1, True, False, task="a"), episode(2, False, False, task="a")]
    episodes += [
        episode(3, False, False, "b", error="sim-0 died", total_reward=-50.0),
        episode(4, success_at_reset=True),
    ]
    summary = summarize(episodes)
    assert list(summary["per_task"]) == ["a", "b", "reach"]
    assert summary["per_task"]["a"]["success_once"]["rate"] == 0.5
    overall = summary["overall"]
    assert (overall["episodes"], overall["errors"], overall["return"]) == (4, 1, 1.0)
    assert (overall["success_once"]["count"], overall["success_at_end"]["count"]) == (3, 2)
    assert overall["success_once"]["interval"] == list(wilson(3, 4)) and overall["success_at_reset"]["count"] == 1
    without = summarize([episode(0, None, None)])["overall"]  # an env that knows no success
    assert (without["success_once"], without["success_at_end"], without["return"]) == (None, None, 1.0)
    nothing = summarize([episode(0, error="crash")])["overall"]
    assert (nothing["episodes"], nothing["return"], nothing["success_once"]) == (0, None, None)


def test_results_come_back_as_they_were_written(tmp_path):
    episodes = [episode(0, total_reward=0.1 + 0.2), episode(1, None, None), episode(2, error='died, "badly"\nat 3')]
    results = {"policy_version": 7, **summarize(episodes)}
    write_results(tmp_path / "v000007", results, reversed(episodes))
    assert read_results(tmp_path / "v000007") == (json.loads(json.dumps(results)), episodes)
    assert sorted(path.name for path in (tmp_path / "v000007").iterdir()) == ["episodes.csv", "results.json"]


def test_the_same_episodes_give_the_same_bytes_in_any_order():
    episodes = [episode(i, total_reward=i / 3) for i in range(20)]
    assert episodes_csv(episodes) == episodes_csv(episodes[::-1])
    assert episodes_csv(episodes).splitlines()[:2] == [",".join(COLUMNS), "0,reach,-1,100,10,0.0,true,true,false,"]
    assert summarize(episodes) == summarize(episodes[::-1])


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
    second = [played(3, True, 4.0), played(2, True, 2.0, end=False), played(1, True, 3.0)]
    second += [played(9, False, 0.0), played(4, True, 1.0)]
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


# Over seeds


def test_the_interquartile_mean_cuts_off_a_quarter_of_the_scores_at_either_end_rounded_down():
    assert iqm([3, 1, 2]) == 2  # nothing to cut
    assert iqm([0, 4, 6, 100]) == 5
    assert iqm([0, 4, 5, 6, 100]) == 5
    assert iqm(list(range(8))) == 3.5  # 2, 3, 4, 5
    assert iqm([[0, 4, 6, 100], [1, 1, 1, 1]]).tolist() == [5, 1]


def test_the_interval_over_seeds_is_a_bootstraps_of_the_iqm():
    found = over_seeds([[0.2], [0.4], [0.6], [0.8]])
    assert found["iqm"] == pytest.approx(0.5) and found["seeds"] == 4
    # The lowest two of four draws (sorted) are cut to the middle two: 2.5% lie at 0.2, as P(3 or 4 draws of 0.2) = 5%.
    assert found["interval"] == pytest.approx([0.2, 0.8])
    assert over_seeds([[0.5]])["interval"] is None
    assert over_seeds([[0.5], [0.5]])["interval"] == [0.5, 0.5]


def test_seeds_are_drawn_for_every_task_by_itself():
    # A bad seed of one task need not come with that of the other, so the four figures of a draw may be all 0 or all 1;
    # with whole rows they would always be 0, 0, 1, 1, or 0, 1, 0, 1. The IQM of four is the mean of the middle two.
    wide = over_seeds([[0.0, 1.0], [1.0, 0.0]])
    assert wide["iqm"] == 0.5 and wide["interval"] == [0.0, 1.0]  # rows as a whole would give 0.5 throughout


def test_a_setting_whose_interval_overlaps_the_best_ones_is_not_behind():
    found = standings({"a": (0.9, [0.8, 1.0]), "b": (0.7, [0.6, 0.85]), "c": (0.5, [0.4, 0.6]), "d": (0.1, None)})
    assert found == {"a": "highest", "b": "not apart", "c": "behind", "d": "not apart"}
    assert standings({"a": (0.9, [0.8, 1.0]), "b": (0.5, [0.4, 0.6])}) == {"a": "best", "b": "behind"}
    assert {*standings({"a": (1.0, [1.0, 1.0]), "b": (1.0, [1.0, 1.0])}).values()} == {"not apart"}
    assert standings({"a": (0.9, None)}) == {"a": "-"}
    assert (
        standings({"a": (0.9, None), "b": (0.5, [0.4, 0.6])})["b"] == "not apart"
    )  # nobody knows how sure the best is
