"""When a run is saved, what stays of that, and that it goes on from whatever stayed."""

import json
import os
import shutil
import signal
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodied import evaluate
from embodied.config.recipe import load
from embodied.train import follow, main
from embodied.workflows.rl_loop import EmbodiedLoop

SHORT = ["eval.episodes=4", "eval.videos=0", "env.num_envs=8", "env.max_episode_steps=8"]
PPO = ["recipe=pointmass_ppo", *SHORT, "algo.rollout_decisions=16", "algo.minibatch_size=32", "run.env_steps=null"]


def saved(run: Path) -> list[int]:
    return sorted(int(path.name[1:]) for path in (run / "checkpoints").glob("v*"))


def weights(run: Path, version: int) -> dict:
    return load_file(run / "checkpoints" / f"v{version:06d}" / "policy" / "model.safetensors")


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)


def test_a_recipe_that_says_nothing_is_saved_every_five_minutes_of_training(tmp_path):
    """Iterations of 100 s: the third ends before 400 s would be at stake, and so on; the last is evaluated."""
    ticks = count(0, 100)
    written = []

    class Watched(EmbodiedLoop):
        def save_learners(self, draft):
            written.append(self.version)
            super().save_learners(draft)

    inline = ["cluster.backend=inline", f"run.dir={tmp_path}", "run.iterations=10"]
    given = load([*PPO, *inline])
    assert follow(given, Watched, clock=lambda: next(ticks)) == 0
    (run,) = tmp_path.iterdir()
    assert written == [3, 6, 9, 10]
    assert saved(run) == [6, 9, 10]  # run.keep=3
    assert json.loads((run / "run.json").read_text())["state"] == "finished"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that has kept all its checkpoints; the second was the best in its evaluations."""
    folder = tmp_path_factory.mktemp("whole")
    assert main([*PPO, "cluster.backend=inline", f"run.dir={folder}", *EVERY, "run.keep=null"]) == 0
    return next(folder.iterdir())


EVERY = ["run.iterations=5", "run.save_every=1"]


@pytest.mark.parametrize(("version", "damaged"), [(1, True), (3, False)])
def test_a_run_goes_on_from_any_checkpoint_that_is_left(whole, tmp_path, version, damaged, capsys):
    run = Path(shutil.copytree(whole, tmp_path / whole.name))
    assert saved(run) == [1, 2, 3, 4, 5]
    for newer in range(version + 1, 6):
        path = run / "checkpoints" / f"v{newer:06d}"
        (path / "policy" / "model.safetensors").write_bytes(b"?") if damaged else shutil.rmtree(path)
    assert main([f"resume={run}", "cluster.backend=inline", "run.keep=1"]) == 0
    assert f"checkpoints/v{version:06d}" in capsys.readouterr().out
    assert same(weights(run, 5), weights(whole, 5))
    assert saved(run) == [5]


def test_a_checkpoint_that_was_kept_for_its_evaluation_is_evaluated_like_any(whole, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path(shutil.copytree(whole, tmp_path / whole.name))
    best = {"overall": {"success_once": {"rate": 1.0}, "return": 9.0}}
    (run / "eval/v000002").mkdir()
    (run / "eval/v000002/results.json").write_text(json.dumps(best))
    first = [f"checkpoint={run}/checkpoints/v000001", "cluster.backend=inline", "eval.videos=0"]
    assert evaluate.main(first) == 0
    assert main([f"resume={run}", "cluster.backend=inline", "run.keep=1", "run.iterations=6"]) == 0
    assert saved(run) == [1, 2, 6]
    second = [f"checkpoint={run}/checkpoints/v000002", "cluster.backend=inline", "eval.videos=0"]
    assert evaluate.main(second) == 0
    assert (run / "eval/v000002-evaluate/results.json").is_file()


def test_old_checkpoints_that_cannot_be_removed_are_worth_a_line_not_the_run(tmp_path, monkeypatch, capsys):
    def refused(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(
        "embodied.run.run_folder.shutil.rmtree", lambda path, ignore_errors=False: ignore_errors or refused(path)
    )
    assert main([*PPO, "cluster.backend=inline", f"run.dir={tmp_path}", *EVERY, "run.keep=1"]) == 0
    assert "old checkpoints could not be removed: [Errno 13]" in capsys.readouterr().out


def test_a_learner_that_dies_before_the_first_save_is_told_how_to_begin_again_and_that_works(
    tmp_path, monkeypatch, capsys
):
    """Where it may not start again by itself: what the message says is true, and the run is the one that would have
    been."""
    iterate = EmbodiedLoop.iterate

    def killing(loop, number, total):
        if number == 2:
            (about,) = tmp_path.glob("ours/*/run.json")
            os.kill(json.loads(about.read_text())["processes"]["learner-0"], signal.SIGKILL)
        return iterate(loop, number, total)

    monkeypatch.setattr(EmbodiedLoop, "iterate", killing)
    local = ["cluster.backend=local", "run.iterations=9", "faults.max_restarts=0"]
    assert main([f"run.dir={tmp_path / 'ours'}", *PPO, *local]) == 1
    monkeypatch.undo()
    (run,), output = (tmp_path / "ours").iterdir(), capsys.readouterr().err
    assert "SIGKILL" in output
    assert f"nothing was saved yet; begin it again: python -m embodied.train resume={run}" in output
    here = ["cluster.backend=inline", "run.iterations=3"]
    assert main([f"resume={run}", *here]) == 0
    assert main([f"run.dir={tmp_path / 'theirs'}", *PPO, *here]) == 0
    (other,) = (tmp_path / "theirs").iterdir()
    assert same(weights(run, 3), weights(other, 3))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3]
