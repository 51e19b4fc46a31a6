"""Runs that differ in their seed on one page: means with intervals, which settings are apart, and what went wrong."""

import json
from pathlib import Path

import pytest

from embodied.core.types import EpisodeResult
from embodied.records.results import write_results
from embodied.records.success_stats import iqm, over_seeds, standings, summarize
from embodied.report import main
from embodied.reporting.comparison_page import comparison
from embodied.reporting.run_page import write_report
from embodied.reporting.runs import Run
from embodied.reporting.sections import curve, success_in_training
from embodied.reporting.seed_sets_page import in_order, in_words, mean_curve, places_of, sets_of, summary, verdict
from embodied.run.ending import Interruption
from embodied.sweeps.children import GroupChildren
from embodied.sweeps.run_group import Member, RunGroup


def write_run(folder, rate, state="finished", cause="", commit="abc", tasks=("reach",), lr=0.001, seed=0, slow=1.0):
    """A run whose final evaluation of ten episodes of each task had this success rate."""
    folder.mkdir(parents=True)
    made = {"commit": commit, "packages": {}, "host": "desk", "platform": "Linux", "cores": 2}
    info = {"state": state, "cause": cause, "started": "2026-01-01T10:20:30+00:00", "provenance": made}
    (folder / "run.json").write_text(json.dumps(info))
    (folder / "config.yaml").write_text(f"seed: {seed}\nrun: {{name: n{seed}}}\nalgo: {{lr: {lr}, name: ppo}}\n")
    rows = [
        {"iteration": i, "policy_version": i, "env_steps": 100 * i, "train_s": slow * i, "steps_per_s": 50.0}
        | {"success_once": rate * i / 5, "success_at_end": rate * i / 5, "return": rate * i, "recent_episodes": 20}
        for i in range(1, 6)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    episodes = [
        EpisodeResult(i, task, -1, i, 10, rate, i < 10 * rate, i < 10 * rate) for task in tasks for i in range(10)
    ]
    protocol = {"name": "toy-v1", "env": {"name": "toy"}}
    if rate is not None:
        out = folder / "eval" / "v000005"
        write_results(
            out, {"policy_version": 5, "protocol": protocol, **summarize(episodes), "provenance": {}}, episodes
        )
    return folder


def write_group(parent, rates, swept="algo.lr", **more):
    """A group of these rates: by setting, a seed each."""
    members = []
    for value, of_seeds in rates.items():
        for seed, rate in enumerate(of_seeds):
            setting = {swept: value} if swept else {}
            name = f"{value}-{seed}"
            if rate is not None:
                write_run(parent / name, rate, seed=seed, lr=value, **more)
            members.append(Member(setting, seed, "mark", f"../{name}" if rate is not None else ""))
    group = RunGroup(
        parent / "group", "toy", {"recipe": "toy"}, (swept,) if swept else (), tuple(members), ("embodied.sweep", "x=1")
    )
    group.folder.mkdir(parents=True)
    group.write()
    return group


@pytest.fixture
def page_of(page_checker):
    def page(group):
        return page_checker(comparison(sets_of(group), group.folder, group))

    return page


def test_a_curve_begins_where_enough_episodes_have_ended_if_ever(tmp_path):
    """The first to end are short, since they succeed: of one episode a rate is 100%."""
    rows = [
        {"env_steps": 1, "success_once": 1.0, "return": 2.0, "steps_per_s": 5.0, "recent_episodes": 1},
        {"env_steps": 2, "success_once": 0.1, "return": 0.5, "steps_per_s": 5.0, "recent_episodes": 10},
    ]
    run, short = (Run(tmp_path, {}, {}, some, [], []) for some in (rows, rows[:1]))
    assert [curve(run, key, "").x for key in ("success_once", "return", "steps_per_s")] == [[2], [2], [1, 2]]
    assert curve(short, "success_once", "").y == [1.0] and success_in_training(run, "success_once")[0].x == [2]


# Statistics


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


# Pages


def test_a_page_of_seeds_tells_iqm_intervals_curves_and_every_run(tmp_path, page_of):
    group = write_group(tmp_path, {"toy": [0.8, 0.9, 1.0]}, swept="")
    page = page_of(group)
    assert "success_once, IQM" in page.text and "90%" in page.text and "[80%, 100%], 3 seeds" in page.text
    assert "Of so few seeds" in page.text and "python -m embodied.sweep x=1" in page.text
    curves = page.chart("success_once over env steps")
    assert {"seed 0", "seed 1", "seed 2", "mean of 3", "seed 0, evaluation"} <= {*curves}
    assert curves["mean of 3"]["y"][-1] == pytest.approx(0.9) and curves["seed 0"]["faint"]
    assert "mean of 3" in page.chart("success_once over seconds")
    assert "8/10" in page.text and "[49%, 94.3%]" in page.text  # Wilson of seed 0
    assert "abc" in page.text and "desk Linux, 2 cores" in page.text and "2026-01-01\u00a010:20" in page.text
    assert "What differs" not in page.text


def test_a_sweep_has_the_best_first_and_says_what_is_not_apart(tmp_path, page_of):
    group = write_group(tmp_path, {1e-4: [0.1, 0.2, 0.1], 1e-3: [0.9, 1.0, 0.9], 1e-2: [0.8, 0.9, 0.7]})
    sets = sets_of(group)
    assert [one.label for one in in_order(sets)] == ["algo.lr=0.001", "algo.lr=0.01", "algo.lr=0.0001"]
    assert in_words(sets)[1] == "algo.lr=0.01: success_once 80% [70%, 90%], IQM of 3 seeds"
    assert places_of(sets) == {"algo.lr=0.001": "highest", "algo.lr=0.01": "not apart", "algo.lr=0.0001": "behind"}
    page = page_of(group)
    assert (
        "By success_once, algo.lr=0.001 is highest, and not apart from algo.lr=0.01: their 95% intervals" in page.text
    )
    assert "Behind: algo.lr=0.0001." in page.text
    assert "algo.lr" in page.text.partition("What differs")[2]


def test_one_seed_each_has_intervals_over_episodes_and_is_compared_on_the_same_ones(tmp_path, page_of):
    page = page_of(write_group(tmp_path, {1e-4: [0.5], 1e-3: [0.9]}))
    assert "another seed may change the order" in page.text and "On the same episodes" in page.text
    assert "+40.0 pp" in page.text and "[59.6%, 98.2%]" in page.text


def test_settings_of_other_tasks_have_no_order(tmp_path, page_of):
    group = write_group(tmp_path, {"a": [0.5, 0.4]}, swept="env.task")
    other = write_run(tmp_path / "b", 0.9, tasks=("push",))
    more = Member({"env.task": "b"}, 0, "mark", f"../{other.name}")
    group = RunGroup(group.folder, "toy", {}, ("env.task",), (*group.members, more), ("embodied.sweep",))
    assert "different tasks" in verdict(sets_of(group))
    page = page_of(group)
    assert "different tasks" in page.text and "best" not in page.blocks("table")[0]["rows"][0]


def test_several_tasks_of_one_run_are_strata(tmp_path):
    group = write_group(tmp_path, {"toy": [0.5, 1.0]}, swept="", tasks=("reach", "push"))
    (found,) = sets_of(group)
    assert summary(found, "success_once")["iqm"] == 0.75  # of 0.5, 0.5, 1, 1 the middle two


def test_a_failed_seed_is_named_and_left_out(tmp_path, page_of):
    group = write_group(tmp_path, {"toy": [0.8, 0.9, None]}, swept="")
    failed = write_run(tmp_path / "bad", 0.1, state="failed", cause="sim-0 is gone", commit="def")
    more = Member({}, 7, "mark", f"../{failed.name}")
    group = RunGroup(group.folder, "toy", {}, (), (*group.members, more), ("embodied.train",))
    (found,) = sets_of(group)
    assert summary(found, "success_once")["seeds"] == 2
    page = page_of(group)
    assert "seed 7 failed: sim-0 is gone" in page.text and "seed 2 has not begun" in page.text
    assert "Code of 2 commits made these runs: abc, def." in page.text and "2 of 4" in page.text


def test_a_group_that_has_just_begun_has_a_page(tmp_path, page_of):
    page = page_of(write_group(tmp_path, {1e-4: [None], 1e-3: [None]}))
    assert "No run has come to its end yet" in page.text
    assert "has not begun" in page_of(write_group(tmp_path / "b", {"toy": [None]}, swept="")).text


def test_the_mean_goes_as_far_as_all_seeds_have_come(tmp_path):
    group = write_group(tmp_path, {"toy": [0.5]}, swept="")
    slow = write_run(tmp_path / "slow", 1.0, seed=1, slow=3.0)
    group = RunGroup(group.folder, "toy", {}, (), (*group.members, Member({}, 1, "m", f"../{slow.name}")), ())
    (found,) = sets_of(group)
    (by_time,) = mean_curve(found, "success_once", "train_s", 0, band=True)
    assert by_time.x == [3.0, 4.0, 5.0]  # from the slow one's first row to the fast one's last
    # At 3 s the fast one is at its third row of 0.1 each, the slow one at its first of 0.2.
    assert by_time.y[0] == pytest.approx((0.3 + 0.2) / 2) and by_time.low[0] == pytest.approx(0.2)
    (by_steps,) = mean_curve(found, "success_once", "env_steps", 0, band=True)
    assert by_steps.x == [100, 200, 300, 400, 500] and by_steps.y[-1] == pytest.approx(0.75)


def test_groups_and_runs_are_compared_by_the_command(tmp_path, capsys, page_checker):
    one = write_group(tmp_path / "one", {"toy": [0.8, 0.9]}, swept="")
    run = write_run(tmp_path / "run", 0.3, commit="xyz")
    assert main([str(run), str(one.folder), f"out={tmp_path}/page.html"]) == 0
    page = page_checker(tmp_path / "page.html")
    assert "By success_once, group is best" in page.text or "group is highest" in page.text
    assert "xyz" in page.text and "group, seed 1" in page.text
    assert main([str(one.folder)]) == 0
    assert Path(capsys.readouterr().out.splitlines()[-1]) == one.folder / "report.html"
    assert write_report(one.folder).read_text().count("<html") == 1


def test_the_end_of_a_sweep_names_a_run_of_the_best_setting(tmp_path, capsys):
    group = write_group(tmp_path, {1e-3: [0.2], 3e-4: [0.9], 1e-4: [0.5]})
    (group.folder / "logs").mkdir()
    GroupChildren(group, ["recipe=toy"], tmp_path).say_results(group.members, Interruption())
    told = capsys.readouterr().out
    assert f"checkpoint={tmp_path / '0.0003-0'}" in told and f"resume={tmp_path / '0.0003-0'}" in told
