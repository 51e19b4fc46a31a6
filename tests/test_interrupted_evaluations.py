"""An evaluation in training that is interrupted, in the shipped recipes as they are: on this machine, in processes."""

import json
import os
import signal

from embodied.records.results import PartialEvaluation
from embodied.train import main
from embodied.workflows.rl_loop import EmbodiedLoop

SMALL = ["env.num_envs=8", "algo.rollout_decisions=16", "algo.minibatch_size=32", "run.env_steps=null"]
TWICE = ["recipe=pointmass_ppo", "run.iterations=2", "eval.videos=0", "eval.num_envs=2", *SMALL]
FEW = [*TWICE, "eval.episodes=8"]


def results(run):
    """What the results are but for where and when they came about."""
    found = json.loads((run / "eval/v000002/results.json").read_text())
    found["policy"].pop("folder")
    return found.pop("provenance"), found


def test_an_evaluation_that_was_interrupted_is_played_to_its_end_by_a_resumed_run(tmp_path, monkeypatch, capsys):
    """Asked to stop once an episode of the second evaluation is over."""
    assert main([*FEW, f"run.dir={tmp_path}/whole", "cluster.backend=inline"]) == 0
    (whole,) = tmp_path.glob("whole/*")
    capsys.readouterr()
    add = PartialEvaluation.add

    def stopped(partial, episodes):
        add(partial, episodes)
        if partial.finished and partial.folder.name == "v000002":
            partial.write()
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(PartialEvaluation, "add", stopped)
        assert main([*FEW, f"run.dir={tmp_path}/struck"]) == 143
    (run,) = tmp_path.glob("struck/*")
    assert "evaluation of v000002 stopped" in capsys.readouterr().out
    left = json.loads((run / "eval/v000002/partial.json").read_text())
    assert left["state"] == "partial" and 0 < left["over"] < left["episodes"] == 8
    lines = (run / "eval/v000002/episodes.csv").read_text().splitlines()
    assert len(lines) - 1 >= left["over"] and not (run / "eval/v000002/results.json").exists()
    assert main([f"resume={run}"]) == 0
    told = f"evaluating v000002 on 8 episodes, of which {len(lines) - 1} were played before"
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
