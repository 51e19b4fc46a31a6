"""The table of faults strikes everywhere, and tells a run that lost something from one that did not."""

import json
from itertools import product
from types import SimpleNamespace

import pytest

from benchmarks import fault_table
from benchmarks.fault_cases import BACKENDS, HOSTS, MODES, PHASES, RECIPES, RECOVERED, SCHEDULES, TOLD, Case, all_cases
from embodied.config.recipe import load
from embodied.placement import make_plan
from embodied.placement.topology import one_machine
from embodied.run.launch import placed

CASES = all_cases()
ITERATIONS, STEPS = 12, 512  # of pointmass_ppo


def test_every_mode_backend_algorithm_and_phase_is_struck():
    struck = {(case.mode, case.backend, case.algo, case.phase) for case in CASES if case.fault == "sigkill"}
    phases = ("start", "rollout", "reset", "update", "publish", "evaluation", "saving")
    assert set(product(MODES, BACKENDS, ("ppo", "grpo"), phases)) <= struck
    assert len(CASES) == len(set(CASES))


def test_every_schedule_is_struck_in_every_phase_on_both_backends():
    struck = {(case.schedule, case.recipe, case.backend, case.phase) for case in CASES if "sim" in case.victim}
    for schedule, recipes in SCHEDULES.items():
        assert set(product([schedule], recipes, BACKENDS, PHASES)) <= struck


@pytest.mark.parametrize(
    ("schedule", "recipe"), [(schedule, recipe) for schedule in SCHEDULES for recipe in SCHEDULES[schedule]]
)
def test_a_schedule_is_struck_in_the_placement_that_it_gets_without_asking(schedule, recipe):
    case = next(case for case in CASES if (case.schedule, case.recipe) == (schedule, recipe))
    asked = {key: value for key, value in fault_table.options([case]).items() if key != "cluster.backend"}
    config = load([f"recipe={recipe}", *(f"{key}={value}" for key, value in asked.items())]).config
    assert config.pipeline.schedule == schedule
    hosts = placed(config, one_machine((0, 1)), learn=True)[1].hosts
    assert [host.roles for host in hosts] == [("sim", "policy"), ("learner",)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_mode_means_the_processes_that_are_struck(mode, recipe):
    config = load([f"recipe={recipe}", *([f"placement={MODES[mode]}"] if MODES[mode] else [])]).config
    hosts = make_plan(config.placement, (0, 1), config.env.num_envs, config.pipeline.stages).hosts
    assert {"+".join(host.roles) for host in hosts} == {*HOSTS[mode][0], HOSTS[mode][1]}
    sims = sum("sim" in host.roles for host in hosts)
    assert sims == {"collocated-4": 4, "hybrid": 1}.get(mode, 2)


@pytest.mark.slow
def test_a_gate_of_every_role_is_reached_and_its_run_goes_on():
    """One run of the table, so that it does not first break when somebody plays all of it."""
    phases = ("rollout", "update", "weights")
    cases = [Case("pointmass_ppo", "auto", "local", "sim+policy", phase) for phase in phases]
    outcomes = []
    assert fault_table.play(cases, outcomes.append) == []
    assert [outcome.ended for outcome in outcomes] == [RECOVERED] * len(cases)


def test_only_constructors_and_learners_may_end_a_run():
    told = [case for case in CASES if case.wanted == TOLD]
    assert told and all(case.phase == "start" or "learner" in case.victim for case in told)


@pytest.fixture
def run(tmp_path):
    """A run that was struck once and lost a quarter of one rollout."""
    rows = [{"iteration": i + 1, "env_steps": STEPS * (i + 1), "faults/lost_decisions": 0} for i in range(ITERATIONS)]
    rows[4]["faults/lost_decisions"] = STEPS // 4
    for row in rows[4:]:
        row["env_steps"] -= STEPS // 4
    write(tmp_path, rows)
    (tmp_path / "run.json").write_text(json.dumps({"state": "finished", "restarts": 1}))
    (tmp_path / "eval" / "v000012").mkdir(parents=True)
    (tmp_path / "eval" / "v000012" / "results.json").write_text('{"overall": {"episodes": 50, "errors": 0}}')
    return SimpleNamespace(path=tmp_path, recipe="pointmass_ppo", rows=rows)


def write(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_run_that_accounts_for_everything_has_no_problem(run):
    assert fault_table.problems(run, 1) == ""


def test_a_loss_that_nobody_reports_is_a_problem(run):
    run.rows[4]["faults/lost_decisions"] = 0
    write(run.path, run.rows)
    assert "env steps" in fault_table.problems(run, 1)


def test_an_iteration_played_twice_is_a_problem(run):
    write(run.path, [*run.rows, run.rows[-1]])
    assert "twice" in fault_table.problems(run, 1)


def test_a_restart_that_was_not_struck_is_a_problem(run):
    assert "1 restarts after 0 strikes" in fault_table.problems(run, 0)


def test_an_evaluation_episode_that_is_missing_is_a_problem(run):
    (run.path / "eval" / "v000012" / "results.json").write_text('{"overall": {"episodes": 49, "errors": 0}}')
    assert "49 episodes" in fault_table.problems(run, 1)


CASE = Case("pointmass_ppo", "auto", "local", "learner", "update")
ERROR = (
    "error: learner-1: its process was killed by SIGKILL [pid 7, cores 1, log: runs/a/logs/learner-1.log]\n"
    "  continue from the last checkpoint: python -m embodied.train resume=runs/a"
)


def ended(folder, error=ERROR, output=""):
    (folder / "a").mkdir()
    (folder / "a" / "run.json").write_text('{"state": "failed"}')
    return SimpleNamespace(path=folder / "a", error=error, output=output)


def test_an_end_that_tells_who_why_and_how_to_resume_is_as_it_should_be(tmp_path):
    run = ended(tmp_path)
    assert fault_table.end_problem(run, CASE, "learner-1", 1, 2.0) == ""
    assert fault_table.end_problem(run, CASE, "learner-1", 1, 99.0) == "it took 99 s"
    assert "exit code 0" in fault_table.end_problem(run, CASE, "learner-1", 0, 2.0)
    assert "neither its name" in fault_table.end_problem(run, CASE, "learner-0", 1, 2.0)


@pytest.mark.parametrize(
    ("removed", "told"), [("killed by SIGKILL", "the cause"), ("resume=runs/a", "resume"), (".log", "its log")]
)
def test_an_end_that_leaves_something_out_is_a_problem(removed, told, tmp_path):
    run = ended(tmp_path, ERROR.replace(removed, ""))
    assert told in fault_table.end_problem(run, CASE, "learner-1", 1, 2.0)


def test_cases_that_a_run_survives_share_one(tmp_path):
    runs = {case.run for case in CASES}
    assert len(runs) < len(CASES) / 2
    assert all(case.wanted == RECOVERED for case in CASES if [other.run for other in CASES].count(case.run) > 1)
