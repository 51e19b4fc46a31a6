"""An evaluation in training that is interrupted, in the shipped recipes as they are: on this machine, in processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from embodied import evaluate
from embodied.train import main

ENV = {**os.environ, "OMP_NUM_THREADS": "1"}
TWICE = ["run.iterations=2", "eval.videos=0", "eval.num_envs=2"]
ONE_SIM = 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}'
MANY = [*TWICE, "eval.episodes=80"]  # long enough to be caught on a busy machine


def start(folder, *args, module="train"):
    command = [sys.executable, "-m", f"embodied.{module}", *map(str, args), f"run.dir={folder}"]
    return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process, code=0):
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code, output
    return output


def wait_until_some_are_over(folder, at_least=1, name="v000002"):
    """-> the run, one of whose evaluations has told that so many episodes are over."""
    until = time.monotonic() + 150
    while time.monotonic() < until:
        for found in folder.glob(f"*/eval/{name}/partial.json"):
            with suppress(OSError):
                if json.loads(found.read_text())["over"] >= at_least:
                    return found.parents[2]
        time.sleep(0.02)
    raise AssertionError("no evaluation has begun")


def results(run, name="v000002"):
    found = json.loads((run / "eval" / name / "results.json").read_text())
    found["policy"].pop("folder")
    return found


def but_provenance(found):
    return {key: value for key, value in found.items() if key != "provenance"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert main(["recipe=pointmass_ppo", *MANY, f"run.dir={folder}"]) == 0
    return next(folder.iterdir())


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow),  # the next test has a quicker one
    ],
    ids=["SIGTERM", "SIGINT", "SIGKILL"],
)
def test_an_evaluation_that_was_interrupted_is_played_to_its_end_by_a_resumed_run(whole, tmp_path, sent, code, capsys):
    process = start(tmp_path, "recipe=pointmass_ppo", *MANY)
    run = wait_until_some_are_over(tmp_path)
    process.send_signal(sent)
    if sent != signal.SIGKILL:
        wait_for_line(process, "evaluation of v000002 stopped")
    finish(process, code)
    left = json.loads((run / "eval/v000002/partial.json").read_text())
    assert left["state"] == "partial" and 0 < left["over"] < left["episodes"] == 80
    lines = (run / "eval/v000002/episodes.csv").read_text().splitlines()
    assert len(lines) - 1 >= left["over"] and not (run / "eval/v000002/results.json").exists()
    assert main([f"resume={run}"]) == 0
    output = capsys.readouterr().out
    assert f"evaluating v000002 on 80 episodes, of which {len(lines) - 1} were played before" in output
    assert but_provenance(results(run)) == but_provenance(results(whole))
    assert (run / "eval/v000002/episodes.csv").read_bytes() == (whole / "eval/v000002/episodes.csv").read_bytes()
    assert len(results(run)["provenance"]["earlier"]) == 1
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    assert not (run / "eval/v000002/partial.json").exists()


@pytest.mark.parametrize(
    ("sent", "code"),
    [pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow), (signal.SIGKILL, -9)],
    ids=["SIGTERM", "SIGKILL"],
)
def test_the_same_command_goes_on_with_an_evaluation_that_was_asked_for_by_hand(whole, tmp_path, sent, code, capsys):
    run = shutil.copytree(whole, tmp_path / whole.name)
    command = [f"checkpoint={run}", "eval.videos=0", "eval.num_envs=2"]
    process = start(tmp_path, *command, module="evaluate")
    wait_until_some_are_over(tmp_path, name="v000002-evaluate")
    process.send_signal(sent)
    output = finish(process, code)
    assert ("the same command plays the rest" in output) == (sent == signal.SIGTERM)
    assert evaluate.main([*command, f"run.dir={tmp_path}"]) == 0
    assert "episodes were over already" in capsys.readouterr().out
    assert [path.name for path in (run / "eval").iterdir() if path.name != "v000002"] == ["v000002-evaluate"]
    ours, theirs = (run / "eval" / name / "episodes.csv" for name in ("v000002-evaluate", "v000002"))
    assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.slow
def test_an_evaluation_in_the_middle_is_finished_first_when_the_run_goes_on(tmp_path, capsys):
    """It belongs to the version whose checkpoint was saved before it."""
    process = start(tmp_path, "recipe=pointmass_grpo", *MANY, "run.eval_every=1")
    run = wait_until_some_are_over(tmp_path, name="v000001")
    process.send_signal(signal.SIGTERM)
    output = finish(process, 143)
    assert "evaluation of v000001 stopped" in output and "a resumed run plays the rest" in output
    assert (run / "checkpoints/latest").read_text() == "v000001\n"
    output = finish(start(tmp_path, "resume=auto", "recipe=pointmass_grpo", *MANY, "run.eval_every=1"))
    said = [output.index(text) for text in ("evaluation of v000001:", "iteration 2/2", "evaluation of v000002:")]
    assert said == sorted(said)
    assert main([f"resume={run}", "run.iterations=2"]) == 0  # nothing is played twice
    assert "evaluating" not in capsys.readouterr().out


def test_an_evaluation_that_had_not_begun_when_the_run_was_stopped_is_made_up(tmp_path, monkeypatch):
    """SIGTERM in the iteration after which one was due."""
    from embodied.workflows.rl_loop import EmbodiedLoop

    iterate = EmbodiedLoop.iterate

    def stopped_in_the_last(loop, number, total):
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(loop, number, total)

    few = ["recipe=pointmass_ppo", "cluster.backend=inline", f"run.dir={tmp_path}", *TWICE, "eval.episodes=4"]
    with monkeypatch.context() as patched:
        patched.setattr(EmbodiedLoop, "iterate", stopped_in_the_last)
        assert main(few) == 143
    (run,) = tmp_path.iterdir()
    assert not (run / "eval").exists()
    assert main([*few, "resume=auto"]) == 0
    assert results(run)["overall"]["episodes"] == 4


@pytest.mark.slow  # with processes, another test sees it on its way
def test_an_evaluation_ends_soon_after_a_signal_on_every_backend(tmp_path, backend):
    process = start(
        tmp_path, "recipe=pointmass_ppo", *TWICE, "eval.episodes=100000", ONE_SIM, f"cluster.backend={backend}"
    )
    run = wait_until_some_are_over(tmp_path)
    process.send_signal(signal.SIGTERM)
    wait_for_line(process, "evaluation of v000002 stopped")
    output = finish(process, 143)
    assert f"resume={run}" in output
    assert json.loads((run / "eval/v000002/partial.json").read_text())["over"] < 50_000  # which take many minutes


def wait_for_line(process, text):
    assert any(text in line for line in process.stdout), f"{text!r} was not said"


@pytest.fixture(params=["local", "inline", "ray"])
def backend(request):
    return request.param
