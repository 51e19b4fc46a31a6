"""Every fault in every mode, on every backend, in every phase: a run recovers, or ends in a message; it never hangs."""

import importlib
import json
import platform
import re
import sys
from itertools import groupby, product
from pathlib import Path

import pytest
from chaos.fault_cases import BACKENDS, MODES, PHASES, RECOVERED, SCHEDULES, Case, all_cases
from chaos.struck_runs import PATIENCE_S, play

ROOT = Path(__file__).parents[2]
ARGUMENTS = {
    "recipe": "pointmass_ppo",
    "env.num_envs": 8,
    "env.max_episode_steps": 10,
    "algo.rollout_decisions": 16,
    "algo.minibatch_size": 32,
    "algo.epochs": 2,
    "run.iterations": 3,
    "run.save_every": 1,
    "eval.episodes": 6,
    "eval.videos": 0,
    "faults.hang_s": 15,
    "faults.timeout_s": 120,
    "faults.max_restarts": 2,
}
RUNS = [list(cases) for _, cases in groupby(sorted(all_cases(), key=lambda case: str(case.run)), lambda case: case.run)]

pytestmark = [pytest.mark.timeout(10 * PATIENCE_S)]
chaos = pytest.mark.chaos


def test_every_mode_schedule_backend_algorithm_and_phase_is_struck():
    cases = all_cases()
    assert len(cases) == len(set(cases))
    struck = {(case.mode, case.backend, case.algo, case.phase) for case in cases if case.fault == "sigkill"}
    phases = ("start", "rollout", "reset", "update", "publish", "evaluation", "saving")
    assert set(product(MODES, BACKENDS, ("ppo", "grpo"), phases)) <= struck
    beside = {(case.schedule, case.recipe, case.backend, case.phase) for case in cases if "sim" in case.victim}
    for schedule, recipes in SCHEDULES.items():
        assert set(product([schedule], recipes, BACKENDS, PHASES)) <= beside


@pytest.mark.slow
def test_a_gate_of_every_role_is_reached_and_its_run_goes_on():
    """One run of the table, so that it does not first break when somebody plays all of it."""
    cases = [Case("pointmass_ppo", "auto", "local", "sim+policy", phase) for phase in ("rollout", "update", "weights")]
    outcomes = []
    assert play(cases, outcomes.append) == []
    assert [outcome.ended for outcome in outcomes] == [RECOVERED] * len(cases)


@chaos
@pytest.mark.parametrize("cases", RUNS, ids=["-".join(map(str, cases[0].run)).replace(" ", "_") for cases in RUNS])
def test_a_run_goes_on_without_who_died_or_tells_why_it_cannot(cases):
    outcomes = []
    while cases:
        cases = play(cases, outcomes.append)
    assert not [outcome for outcome in outcomes if outcome.ended != outcome.case.wanted]


def faulty(folder: Path, backend: str, fault: str, place: str, **plan: object) -> dict[str, object]:
    """Arguments of a short run with this fault in `tests/support/faulty_env.py`."""
    plan = {"worker": "sim-0", "fault": fault, "place": place, **plan}
    kwargs = ", ".join(f"{key}: {value}" for key, value in plan.items())
    env = {"env.name": "faulty_env:FaultyEnv", "env.kwargs": f"{{{kwargs}}}"}
    return {**ARGUMENTS, **env, "cluster.backend": backend}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs a command in this process; returns its exit code and its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests' / 'support'}")

    def run(command: str, arguments: dict[str, object]) -> tuple[int, str]:
        main = importlib.import_module(f"embodied.{command}").main
        code = main([f"{key}={value}" for key, value in arguments.items()])
        return code, "".join(capsys.readouterr())

    return run


@chaos
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["first_step", "rollout", "reset", "evaluation"])
@pytest.mark.parametrize("fault", ["exception", "sigsegv", "hang"])
def test_a_fault_that_always_comes_back_ends_the_run_within_its_budget(fault, place, backend, run, tmp_path):
    code, said = run("train", faulty(tmp_path, backend, fault, place) | {"run.iterations": 12})
    assert code == 1 and "Traceback" not in said, said
    (info,) = tmp_path.glob("runs/*/run.json")
    repeats = fault == "exception" and place in ("first_step", "rollout")  # the first, before anything has worked
    assert json.loads(info.read_text())["restarts"] == (1 if repeats else 2)
    reason = "so it is not tried a third time" if repeats else "after 2 restarts within 1800 s (faults.max_restarts=2)"
    assert reason in said


@chaos
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluation_of_its_own_survives_a_fault(backend, run, tmp_path):
    given = faulty(tmp_path, backend, "sigsegv", "evaluation", once=tmp_path / "struck")
    of_evaluate = {key: value for key, value in given.items() if key.split(".")[0] not in ("algo", "run")}
    code, said = run("evaluate", {"checkpoint": "zero", **of_evaluate})
    assert code == 0, said
    assert re.search(r"(sim|policy)-0 is started again \(restart 1,", said)  # both were in the process
    (results,) = tmp_path.glob("runs/*/results.json")
    overall = json.loads(results.read_text())["overall"]
    assert (overall["episodes"], overall["errors"]) == (6, 0)


APART = {"env.python": sys.executable}  # the simulator in a process of its own, in which it is the main thread
PLACES = ("first_step", "rollout", "reset", "evaluation")


def faulty_apart(folder: Path, backend: str, fault: str, place: str, worker: str = "MainThread") -> dict[str, object]:
    return faulty(folder, backend, fault, place, worker=worker, once=folder / "struck") | APART


CASES = [
    *product(["local"], PLACES, ("sigkill", "sigstop", "hang", "exit", "nan_observation")),
    *product(["ray"], PLACES, ("sigkill", "sigstop")),
    *product(["local"], ["frames"], ("sigkill", "sigstop")),
]
OFTEN = ("local", "rollout", "sigkill")


@pytest.mark.parametrize(
    ("backend", "place", "fault"), [OFTEN, *(pytest.param(*case, marks=chaos) for case in CASES if case != OFTEN)]
)
def test_a_run_survives_what_happens_to_the_process_of_its_simulator(backend, place, fault, run, tmp_path):
    films = {"eval.videos": 2} if place == "frames" else {}
    code, said = run("train", faulty_apart(tmp_path, backend, fault, place) | films)
    assert code == 0, said
    assert (tmp_path / "struck").exists()
    (info,) = tmp_path.glob("runs/*/run.json")
    record = json.loads(info.read_text())
    assert record["restarts"] in (1, 2)  # both sim workers may be struck at the same time
    assert record["interpreter"]["python"] == platform.python_version()
    (results,) = tmp_path.glob("runs/*/eval/v000003/results.json")
    assert json.loads(results.read_text())["overall"]["episodes"] == 6


@chaos
@pytest.mark.parametrize("fault", ["sigkill", "sigstop"])
@pytest.mark.parametrize("command", ["evaluate", "collect"])
def test_commands_survive_the_death_of_the_process_of_their_simulator(command, fault, run, tmp_path):
    given = faulty_apart(tmp_path, "local", fault, "evaluation" if command == "evaluate" else "rollout")
    theirs, more = {
        "evaluate": (("algo", "run"), {"checkpoint": "zero"}),
        "collect": (("algo", "run", "eval"), {"out": tmp_path / "demos", "collect.episodes": 6}),  # by the expert
    }[command]
    options = {key: value for key, value in given.items() if key.split(".")[0] not in theirs}
    code, said = run(command, {**options, **more})
    assert code == 0 and (tmp_path / "struck").exists(), said
    assert "is started again (restart 1," in said


def test_a_simulator_whose_process_dies_at_the_start_ends_the_run_with_its_last_lines(run, tmp_path):
    code, said = run("train", faulty_apart(tmp_path, "local", "sigabrt", "constructor"))
    assert code == 1 and "its process died with signal 6" in said, said
