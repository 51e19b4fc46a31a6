"""A learner that is killed in a run as users start it: the run goes on by itself from the newest checkpoint."""

import json
import os
import re
import signal

import pytest

from embodied import train
from embodied.policies.policy_folder import read_weights
from embodied.reporting.runs import read_run
from embodied.workflows.rl_loop import EmbodiedLoop

SHORT = ["recipe=pointmass_ppo", "run.env_steps=null", "run.iterations=6", "algo.epochs=2"]
SHORT += ["algo.rollout_decisions=16", "algo.minibatch_size=32", "env.num_envs=8", "eval.episodes=4", "eval.videos=0"]


@pytest.fixture
def play(tmp_path, monkeypatch, capsys):
    """Plays a whole run whose learner is killed once so many iterations are over; returns the run and its output."""

    def play(iterations, *arguments):
        iterate, struck = EmbodiedLoop.iterate, []

        def killing(loop, number, total):
            if number == iterations and not struck:
                (about,) = tmp_path.glob("struck/*/run.json")
                processes = json.loads(about.read_text())["processes"]
                struck.append(next(pid for name, pid in processes.items() if "learner" in name))
                os.kill(struck[0], signal.SIGKILL)
            return iterate(loop, number, total)

        monkeypatch.setattr(EmbodiedLoop, "iterate", killing)
        assert train.main([*SHORT, f"run.dir={tmp_path / 'struck'}", *arguments]) == 0
        (run,) = (tmp_path / "struck").iterdir()
        return read_run(run), capsys.readouterr().out

    return play


@pytest.mark.parametrize("backend", ["local", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_killed_learner_costs_the_iterations_since_the_newest_checkpoint_and_changes_no_result(
    tmp_path, backend, play
):
    """Killed in iteration 4, of which 2 are saved; the point mass can be saved, so nothing differs."""
    here = ["run.save_every=2", f"run.dir={tmp_path}/whole", "cluster.backend=inline"]
    assert train.main([*SHORT, *here]) == 0
    (whole,) = (tmp_path / "whole").iterdir()
    struck, said = play(3, "run.save_every=2", f"cluster.backend={backend}")
    (line,) = re.findall(r"^.*is started again with all workers.*$", said, re.M)
    assert re.search(r"learner\S*-0 is started .*\(restart 1, at most 5 in 1800 s\), from v000002: its process", line)
    assert "killed by SIGKILL" in line and "pid" in line and re.search(r"iteration 3.* played again$", line)
    assert [row["iteration"] for row in struck.metrics] == [1, 2, 3, 4, 5, 6]
    assert json.loads((struck.folder / "run.json").read_text())["processes"] == {}, "none when the run is over"
    ends = [read_weights(max(run.glob("checkpoints/v*")) / "policy") for run in (whole, struck.folder)]
    assert all((ends[0][name] == ends[1][name]).all() for name in ends[0])


def test_without_a_checkpoint_the_run_begins_again_from_the_beginning(play):
    run, said = play(2, "cluster.backend=local")
    assert "from the beginning: its process was killed by SIGKILL" in said
    assert [row["iteration"] for row in run.metrics] == [1, 2, 3, 4, 5, 6]
