"""Every fault at every place on every backend: a run recovers, or ends in a message; it never hangs."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faulty_env import FAULTS, OF_A_POLICY

from benchmarks import kill_table
from benchmarks.common import hosts
from benchmarks.fault_table import ARGUMENTS, DEADLINE_S, PLACEMENT, Case, play

ROOT = Path(__file__).parents[2]
BACKENDS = ("local", "ray")
PLACES = ("first_step", "rollout", "reset", "evaluation")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(2 * DEADLINE_S)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_run_survives_a_fault(fault, place, backend, tmp_path):
    outcome = play(Case(fault, place, backend), tmp_path)
    assert outcome.ended == "recovered", outcome


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", ["exception", "os_exit", "nan_observation", "sigkill"])
def test_a_fault_in_the_constructor_ends_the_run_with_its_cause(fault, backend, tmp_path):
    place = "constructor" if fault != "nan_observation" else "reset"
    outcome = play(Case(fault, place, backend, always=True), tmp_path)
    assert outcome.ended == "message", outcome


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("fault", ["exception", "sigsegv", "hang"])
def test_a_fault_that_always_comes_back_ends_the_run_within_its_budget(fault, place, backend, tmp_path):
    outcome = play(Case(fault, place, backend, always=True), tmp_path)
    assert outcome.ended == "message" and outcome.restarts == 2, outcome
    assert "after 2 restarts within 1800 s (faults.max_restarts=2)" in outcome.said


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", ["first_step", "rollout", "evaluation"])
@pytest.mark.parametrize("fault", OF_A_POLICY)
def test_a_run_survives_a_fault_of_its_policy(fault, place, backend, tmp_path):
    outcome = play(Case(fault, place, backend, worker="policy-0"), tmp_path)
    assert outcome.ended == "recovered", outcome


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", ["exception", "os_exit", "sigkill"])
def test_a_fault_in_the_constructor_of_a_policy_ends_the_run_with_its_cause(fault, backend, tmp_path):
    outcome = play(Case(fault, "constructor", backend, always=True, worker="policy-0"), tmp_path)
    assert outcome.ended == "message", outcome


@pytest.mark.parametrize(
    ("mode", "case", "ends"),
    [
        pytest.param(mode, case, ends, id=f"{mode}-{case.backend}-{case.worker}-{case.place}")
        for (mode, case), ends in kill_table.cases(kill_table.MODES, BACKENDS).items()
    ],
)
def test_in_every_mode_a_killed_policy_or_learner_is_answered_within_a_minute(mode, case, ends, tmp_path):
    outcome = play(case, tmp_path)
    assert not kill_table.problem(outcome, ends), outcome


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_evaluation_of_its_own_survives_a_fault(backend, tmp_path):
    given = Case("sigsegv", "evaluation", backend).arguments(tmp_path)
    of_evaluate = {key: value for key, value in given.items() if key.split(".")[0] not in ("algo", "run")}
    own = {"checkpoint": "zero", **of_evaluate}
    done = subprocess.run(
        [sys.executable, "-m", "embodied.evaluate", *(f"{key}={value}" for key, value in own.items())],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert "sim-0 is started again (restart 1," in done.stdout
    (results,) = tmp_path.glob("runs/*/results.json")
    overall = json.loads(results.read_text())["overall"]
    assert (overall["episodes"], overall["errors"]) == (6, 0)


@pytest.fixture(params=BACKENDS)
def long_run(request, tmp_path):
    """A run of many iterations of the toy env, at work."""
    changes = {"run.iterations": 200, "run.save_every": 50, "faults.hang_s": 5, "cluster.backend": request.param}
    arguments = (f"{key}={value}" for key, value in {**ARGUMENTS, "placement": PLACEMENT["policy"], **changes}.items())
    process = subprocess.Popen(
        [sys.executable, "-m", "embodied.train", *arguments],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    process.said = []
    process.until = lambda text: next(line for line in heard(process) if text in line)
    process.until("iteration 5/200")
    yield process
    process.kill()
    process.communicate()


def heard(process):
    for line in process.stdout:
        process.said.append(line)
        yield line


def host_of(folder: Path, name: str) -> int:
    """The pid of a host of the run in this folder."""
    return hosts(next(folder.glob("runs/*/logs")))[name]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("host", ["sim-0", "policy-0"])
def test_a_run_goes_on_when_a_host_is_killed_or_stopped(long_run, tmp_path, host, number):
    os.kill(host_of(tmp_path, host), number)
    told = long_run.until("is started again")
    assert told.startswith(f"{host} is started again (restart 1,")
    for _ in heard(long_run):
        pass
    assert long_run.wait(10) == 0, "".join(long_run.said)
    (run,) = (tmp_path / "runs").iterdir()
    info = json.loads((run / "run.json").read_text())
    assert (info["state"], info["restarts"]) == ("finished", 1)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == list(range(1, 201))
    assert rows[-1]["env_steps"] == 200 * 8 * 16 and sum(row["faults/restarts"] for row in rows) == 1
    assert sum(line.count("is started again") for line in long_run.said) == 1


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("victim", "learners", "options"),
    [
        ("learner-0", "cpu:1", ()),
        ("learner-1", "cpu:0-1*2", ()),
        ("learner-0", "cpu:0-1*2", ("learner.shard=true", "policy.hidden=[32,32]")),
    ],
    ids=["alone", "one_of_two", "one_of_two_halves"],
)
def test_a_dead_learner_ends_the_run_with_its_cause_and_how_to_resume(tmp_path, backend, victim, learners, options):
    changes = {"run.iterations": 5000, "run.save_every": 1, "cluster.backend": backend}
    placement = f"{{sim: 'cpu:0-1*2', policy: 'cpu:0', learner: '{learners}'}}"
    arguments = (f"{key}={value}" for key, value in {**ARGUMENTS, "placement": placement, **changes}.items())
    process = subprocess.Popen(
        [sys.executable, "-m", "embodied.train", *arguments, *options],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    next(line for line in process.stdout if "iteration 3/" in line)
    os.kill(host_of(tmp_path, victim), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    (run,) = (tmp_path / "runs").iterdir()
    assert f"error: {victim}: its process was killed by SIGKILL" in output and "Traceback" not in output, output
    assert f"python -m embodied.train resume={run.relative_to(tmp_path)}" in output
