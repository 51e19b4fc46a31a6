"""Several runs on one page: on the same episodes, over seeds, and by setting."""

from dataclasses import replace
from pathlib import Path

import pytest
from written_runs import played, write_evaluation, write_group, write_run

from embodied.reporting.comparison_page import comparison, distinct_labels
from embodied.reporting.runs import Run, read_run
from embodied.reporting.sections import curve, success_in_training
from embodied.reporting.seed_sets_page import in_order, in_words, mean_curve, places_of, sets_of, summary
from embodied.run.run_group import Member


@pytest.fixture
def page_of(tmp_path, page_checker):
    def page(*shown):
        """The page of a group, or of several folders of runs."""
        if not isinstance(shown[0], Path):
            return page_checker(comparison(sets_of(shown[0]), shown[0].folder, shown[0]))
        return page_checker(comparison([read_run(folder) for folder in shown], tmp_path))

    return page


# Single runs


def test_two_runs_are_compared_on_their_common_episodes(tmp_path, page_of):
    # both 1, only the second 3, only the first 1, neither 1: 4/6 - 2/6
    first = write_run(tmp_path / "a", played([1, 1, 0, 0, 0, 0]), config="algo: {lr: 0.001, name: ppo}")
    second = write_run(tmp_path / "bb", played([1, 0, 1, 1, 1, 0]), config="algo: {lr: 0.0003, name: ppo}")
    page = page_of(first, second)
    assert "33.3%" in page.text and "66.7%" in page.text and "2/6" in page.text and "4/6" in page.text
    assert "+33.3 pp" in page.text and "only this one 3" in page.text and "only the first 1" in page.text
    assert "algo.lr" in page.text and "algo.name" not in page.text  # only what differs
    assert "other conditions" not in page.text  # the number of envs changes no episode
    curves = page.chart("success_once over env steps")
    assert list(curves) == ["a", "a, evaluation", "bb", "bb, evaluation"] and curves["a"]["low"]
    assert curves["a"]["color"] == curves["a, evaluation"]["color"] != curves["bb"]["color"]


def test_runs_that_cannot_be_paired_say_why(tmp_path, page_of):
    run, other = write_run(tmp_path / "a", played([1, 0])), write_run(tmp_path / "b", played([1, 1], seed=10))
    page = page_of(run, other)
    assert "no episode in common" in page.text and " pp" not in page.text
    write_evaluation(other / "eval/v000005", played([1, 1]), backend="other")
    assert "under other conditions than a: backend" in page_of(run, other).text
    page = page_of(run / "eval/v000005", other / "eval/v000005")
    assert "a/eval/v000005" in page.text and "Curves" not in page.text and "+50.0 pp" in page.text
    (other / "eval/v000005/results.json").unlink()
    assert all("b has no evaluation" in page_of(*runs).text for runs in ((run, other), (other, run)))


def test_runs_get_names_that_tell_them_apart(tmp_path):
    folders = [write_run(tmp_path / parent / "toy") for parent in ("x", "y")]
    assert distinct_labels([read_run(folder) for folder in folders]) == ["x/toy", "y/toy"]
    assert len({*distinct_labels([read_run(folders[0])] * 2)}) == 2


def test_a_curve_begins_where_enough_episodes_have_ended_if_ever(tmp_path):
    """The first to end are short, since they succeed: of one episode a rate is 100%."""
    rows = [
        {"env_steps": 1, "success_once": 1.0, "return": 2.0, "steps_per_s": 5.0, "recent_episodes": 1},
        {"env_steps": 2, "success_once": 0.1, "return": 0.5, "steps_per_s": 5.0, "recent_episodes": 10},
    ]
    run, short = (Run(tmp_path, {}, {}, some, [], []) for some in (rows, rows[:1]))
    assert [curve(run, key, "").x for key in ("success_once", "return", "steps_per_s")] == [[2], [2], [1, 2]]
    assert curve(short, "success_once", "").y == [1.0] and success_in_training(run, "success_once")[0].x == [2]


# Seeds and settings


def test_a_sweep_has_the_best_first_and_names_settings_that_may_be_as_good(tmp_path, page_of):
    group = write_group(tmp_path, {1e-4: [0.1, 0.2, 0.1], 1e-3: [0.9, 1.0, 0.9], 1e-2: [0.8, 0.9, 0.7]})
    sets = sets_of(group)
    assert [one.label for one in in_order(sets)] == ["algo.lr=0.001", "algo.lr=0.01", "algo.lr=0.0001"]
    assert in_words(sets)[1] == "algo.lr=0.01: success_once 80% [70%, 90%], IQM of 3 seeds"
    assert places_of(sets) == {"algo.lr=0.001": "highest", "algo.lr=0.01": "not apart", "algo.lr=0.0001": "behind"}
    page = page_of(group)
    assert "By success_once, algo.lr=0.001 is highest, and not apart from algo.lr=0.01" in page.text
    assert "Behind: algo.lr=0.0001." in page.text and "algo.lr" in page.text.partition("What differs")[2]


def test_a_failed_seed_is_named_and_left_out(tmp_path, page_of):
    group = write_group(tmp_path, {"toy": [0.8, 0.9, None]}, swept="")
    write_run(tmp_path / "bad", played([1, 0]), state="failed", cause="sim-0 is gone", commit="def")
    group = replace(group, members=(*group.members, Member({}, 7, "mark", "../bad")))
    assert summary(sets_of(group)[0], "success_once")["seeds"] == 2
    page = page_of(group)
    assert "seed 7 failed: sim-0 is gone" in page.text and "seed 2 has not begun" in page.text
    assert "Code of 2 commits made these runs: abc, def." in page.text and "2 of 4" in page.text


def test_curves_of_runs_with_different_speeds_are_averaged_where_all_of_them_have_points(tmp_path):
    group = write_group(tmp_path, {"toy": [0.5]}, swept="")
    write_run(tmp_path / "slow", played([1] * 10), rate=1.0, slow=6.0)
    group = replace(group, members=(*group.members, Member({}, 1, "m", "../slow")))
    (found,) = sets_of(group)
    (by_time,) = mean_curve(found, "success_once", "train_s", 0, band=True)
    assert by_time.x == [6.0, 8.0, 10.0]  # from the slow one's first row to the fast one's last
    # At 6 s the fast one is at its third row of 0.1 each, the slow one at its first of 0.2.
    assert by_time.y[0] == pytest.approx((0.3 + 0.2) / 2) and by_time.low[0] == pytest.approx(0.2)
    (by_steps,) = mean_curve(found, "success_once", "env_steps", 0, band=True)
    assert by_steps.x == [100, 200, 300, 400, 500] and by_steps.y[-1] == pytest.approx(0.75)
