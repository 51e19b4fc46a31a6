"""Commands under every schedule whose driver is stopped, killed or paused: nothing is lost that was saved. They run in
processes of their own, unless the test itself holds the simulator that the driver waits for."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from embodied import train
from embodied.policies.policy_folder import read_weights
from embodied.run import ending
from embodied.workflows.rl_loop import EmbodiedLoop

STRUCK, MORE = 3, 3  # iterations before a driver is stopped, and after it
GRPO = ["recipe=pointmass_grpo", "algo.epochs=1", "algo.minibatch_size=null"]
SCHEDULES = {
    "sync": ["recipe=pointmass_ppo"],
    "periodic": [*GRPO, "pipeline.schedule=periodic"],
    "async": ["recipe=pointmass_ppo", "pipeline.schedule=async"],
}


class Command:
    """A training run as a user starts it."""

    def __init__(self, folder, *arguments):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "embodied.train", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        self.said = ""

    def __enter__(self):
        return self

    def __exit__(self, *args):
        self.process.kill()
        self.process.wait()

    def reach(self, iteration):
        for line in self.process.stdout:
            self.said += line
            if f"iteration {iteration}/" in line:
                return
        raise AssertionError(self.said)

    def everybody(self):
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        return [pid, *map(int, children)]

    def end(self):
        output, _ = self.process.communicate(timeout=120)
        return self.process.returncode, self.said + output


def arguments(schedule, *more):
    return [*SCHEDULES[schedule], "eval.episodes=4", "eval.videos=0", "run.save_every=1", *more]


def weights(run, total):
    return read_weights(run / "checkpoints" / f"v{total:06d}" / "policy")


@pytest.mark.parametrize(
    ("schedule", "number"),
    [
        pytest.param("sync", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("sync", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("periodic", signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param("periodic", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("async", signal.SIGTERM, marks=pytest.mark.slow),
        ("async", signal.SIGKILL),
    ],
)
def test_a_run_whose_driver_was_paused_and_stopped_or_killed_goes_on_from_its_newest_checkpoint(
    schedule, number, tmp_path, monkeypatch
):
    """First all of it is paused, as a container is: whoever looks at the clock then finds everybody silent for as long,
    and calls nobody hung."""
    monkeypatch.chdir(tmp_path)
    impatient = ["faults.hang_s=8", "faults.max_restarts=0"]  # more than a busy machine needs between two signs
    with Command(tmp_path, *arguments(schedule, *impatient, "run.iterations=100000", "run.name=struck")) as run:
        run.reach(1)
        everybody = run.everybody()
        for paused in (signal.SIGSTOP, signal.SIGCONT):
            for pid in everybody:
                os.kill(pid, paused)
            time.sleep(10 if paused is signal.SIGSTOP else 0)
        run.reach(STRUCK)
        os.kill(everybody[0], number)
        code, output = run.end()
    assert "Traceback" not in output and "started again" not in output, output
    assert code == (143 if number == signal.SIGTERM else -number), output
    await_the_end_of(everybody[1:])
    (folder,) = tmp_path.glob("runs/struck-*")
    total = len(rows_of(folder)) + MORE
    assert train.main([f"resume={folder}", f"run.iterations={total}"]) == 0
    rows = rows_of(folder)
    assert [row["iteration"] for row in rows] == list(range(1, total + 1))
    assert json.loads((folder / "run.json").read_text())["state"] == "finished"
    staleness = [row["train/staleness"] for row in rows]
    if schedule == "async":
        resumed = next(row for row in range(1, total) if staleness[row] == 0)
        assert resumed >= STRUCK - 1
        assert staleness == [0, *[1] * (resumed - 1), 0, *[1] * (total - resumed - 1)]
        return
    assert staleness == [0] * total
    assert train.main(arguments(schedule, f"run.iterations={total}", "run.name=whole")) == 0
    ended, expected = weights(folder, total), weights(next(tmp_path.glob("runs/whole-*")), total)
    for name in expected:
        if schedule == "sync":
            assert np.array_equal(ended[name], expected[name])
        else:  # float32, added up in the order in which groups come
            np.testing.assert_allclose(ended[name], expected[name], rtol=0, atol=2e-3)


def train_held(folder, signals, *words):
    """Train, hold the simulator in the third rollout, and then send these signals to the driver. Returns the exit code
    and the run; the simulator is still held when the run ends."""
    hold, heard, handle, iterate = folder / "hold", [], ending.Interruption._handle, EmbodiedLoop.iterate
    held = ["env.name=held:HeldPoint", "env.task=reach", f"env.kwargs={{hold: {hold}}}", "run.save_minutes=null"]

    def noted(interruption, *signal):
        heard.append(signal)
        handle(interruption, *signal)

    def held_in_the_third(loop, number, total):
        if number == 2:
            hold.touch()
        return iterate(loop, number, total)

    def strike():
        wait_until(hold.with_suffix(".waits").exists)
        for number in signals:
            os.kill(os.getpid(), number)
            wait_until(lambda: heard)
            time.sleep(0.1)  # longer than two signals that count as one

    threading.Thread(target=strike, daemon=True).start()
    words = [*held, "run.name=held", "run.iterations=5", "eval.episodes=4", "eval.videos=0", *words]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending.Interruption, "_handle", noted)
        patch.setattr(EmbodiedLoop, "iterate", held_in_the_third)
        code = train.main(["recipe=pointmass_ppo", *words])
    assert hold.exists()
    hold.unlink()
    (run,) = folder.glob("runs/held-*")
    return code, run


def wait_until(true):
    until = time.monotonic() + 300
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def rows_of(run):
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("schedule", ["sync", pytest.param("async", marks=pytest.mark.slow)])
def test_a_rollout_that_does_not_end_after_a_signal_is_given_up_and_what_is_learned_is_saved(
    schedule, tmp_path, monkeypatch, capsys
):
    """In the synchronous run a policy and a learner do not fit beside each other on a core: to save, the memory of a
    policy is freed whose process stands still."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ending, "AGAIN_S", 600.0)
    asked = ["pipeline.schedule=async" if schedule == "async" else "cluster.memory_gb=0.00016", "run.stop_s=0.5"]
    code, run = train_held(tmp_path, [signal.SIGTERM, signal.SIGTERM], *asked)
    told = capsys.readouterr().out
    assert code == 143 and json.loads((run / "run.json").read_text())["state"] == "stopped"
    (saved,) = (run / "checkpoints").glob("v*")
    learned = rows_of(run)[-1]["iteration"] + (schedule == "async")  # with the update in progress
    assert saved.name == f"v{learned:06d}" and learned >= 2
    assert "the step in progress was given up 0.5 s after SIGTERM (run.stop_s)" in told
    assert f"python -m embodied.train resume=runs/{run.name}" in told
    assert train.main([f"resume={run}"]) == 0
    assert [row["iteration"] for row in rows_of(run)][-1] == 5


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_second_signal_stops_at_once(number, code, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ending, "AGAIN_S", 0.05)
    ended, run = train_held(tmp_path, [signal.SIGTERM, number], "run.stop_s=600")
    assert ended == code and "stopped at once; the training after the last" in capsys.readouterr().err
    info = json.loads((run / "run.json").read_text())
    assert info["state"] == "stopped" and info["cause"].startswith("second ")
    assert not (run / "checkpoints").exists()


def await_the_end_of(pids):
    until = time.monotonic() + 30
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, f"{left} outlived their driver"
        time.sleep(0.1)
