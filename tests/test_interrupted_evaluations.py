"""An evaluation in training that is interrupted, in the shipped recipes as they are: on this machine, in processes."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from embodied.train import main
from embodied.workflows.rl_loop import EmbodiedLoop

TWICE = ["recipe=pointmass_ppo", "run.iterations=2", "eval.videos=0", "eval.num_envs=2"]
MANY = [*TWICE, "eval.episodes=80"]  # long enough to be caught on a busy machine


def over_in(folder):
    """The run whose second evaluation has told that an episode is over, once there is one."""
    until = time.monotonic() + 150
    while time.monotonic() < until:
        for found in folder.glob("*/eval/v000002/partial.json"):
            with suppress(OSError):
                if json.loads(found.read_text())["over"]:
                    return found.parents[2]
        time.sleep(0.02)
    raise AssertionError("no evaluation has begun")


def results(run):
    """What the results are but for where and when they came about."""
    found = json.loads((run / "eval/v000002/results.json").read_text())
    found["policy"].pop("folder")
    return found.pop("provenance"), found


@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.slow)], ids=str
)
def test_an_evaluation_that_was_interrupted_is_played_to_its_end_by_a_resumed_run(tmp_path, sent, code, capsys):
    assert main([*MANY, f"run.dir={tmp_path}/whole"]) == 0
    (whole,) = tmp_path.glob("whole/*")
    command = [sys.executable, "-m", "embodied.train", *MANY, f"run.dir={tmp_path}/struck"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = over_in(tmp_path / "struck")
    process.send_signal(sent)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == code and (code < 0 or "evaluation of v000002 stopped" in output), output
    left = json.loads((run / "eval/v000002/partial.json").read_text())
    assert left["state"] == "partial" and 0 < left["over"] < left["episodes"] == 80
    lines = (run / "eval/v000002/episodes.csv").read_text().splitlines()
    assert len(lines) - 1 >= left["over"] and not (run / "eval/v000002/results.json").exists()
    assert main([f"resume={run}"]) == 0
    told = f"evaluating v000002 on 80 episodes, of which {len(lines) - 1} were played before"
    assert told in capsys.readouterr().out
    (provenance, ours), (_, theirs) = results(run), results(whole)
    assert ours == theirs and len(provenance["earlier"]) == 1
    assert (run / "eval/v000002/episodes.csv").read_bytes() == (whole / "eval/v000002/episodes.csv").read_bytes()
    assert json.loads((run / "run.json").read_text())["state"] == "finished"
    assert not (run / "eval/v000002/partial.json").exists()


def test_an_evaluation_that_had_not_begun_when_the_run_was_stopped_is_made_up(tmp_path, monkeypatch):
    """SIGTERM in the iteration after which one was due."""
    iterate = EmbodiedLoop.iterate

    def stopped_in_the_last(loop, number, total):
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return iterate(loop, number, total)

    few = [*TWICE, "cluster.backend=inline", f"run.dir={tmp_path}", "eval.episodes=4"]
    with monkeypatch.context() as patched:
        patched.setattr(EmbodiedLoop, "iterate", stopped_in_the_last)
        assert main(few) == 143
    (run,) = tmp_path.iterdir()
    assert not (run / "eval").exists()
    assert main([*few, "resume=auto"]) == 0
    assert results(run)[1]["overall"]["episodes"] == 4
