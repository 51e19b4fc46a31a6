"""GRPO as a user runs it: it learns, and it says when there is nothing to learn from."""

import json

import pytest

from embodied.train import main

SHORT = ["cluster.backend=inline", "eval.videos=0", "policy.hidden=[16,16]"]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_has_nothing_to_learn_from_saves_and_says_why(tmp_path, capsys):
    hopeless = ["env.reward=success", "env.max_episode_steps=1", "env.num_envs=8", "algo.groups=2", "eval.episodes=2"]
    given = ["recipe=pointmass_grpo", f"run.dir={tmp_path}", "algo.max_empty=3", "algo.filter=resample", *hopeless]
    assert main([*given, "algo.max_rounds=2", "seed=2", *SHORT]) == 1
    told = capsys.readouterr().err
    assert "nothing to learn from in the last 3 iterations (algo.max_empty)" in told
    assert "equal, mean return" in told and "start from a policy that sometimes succeeds" in told
    (run,) = tmp_path.iterdir()
    record = json.loads((run / "run.json").read_text())
    assert record["state"] == "stopped" and "nothing to learn" in record["cause"]
    rows = metrics(run)
    assert (run / "checkpoints" / f"v{len(rows):06d}" / "manifest.json").is_file()
    assert [row["groups/used"] for row in rows[-3:]] == [0, 0, 0]
    assert all(row["groups/rounds"] == 2 and row["groups/dropped_equal"] >= 3 for row in rows[-3:])
    assert list(run.glob("eval/*/results.json"))


def test_a_run_in_which_every_episode_succeeds_is_finished_early(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("embodied.envs.pointmass.env.REACH", 10.0)
    easy = ["env.reward=success", "env.num_envs=8", "algo.groups=2", "algo.max_empty=2", "eval.episodes=2"]
    assert main(["recipe=pointmass_grpo", f"run.dir={tmp_path}", *easy, *SHORT]) == 0
    (run,) = tmp_path.iterdir()
    assert json.loads((run / "run.json").read_text())["state"] == "finished" and len(metrics(run)) == 2
    assert "every episode of the last iterations succeeded" in capsys.readouterr().out


@pytest.mark.slow
def test_the_point_mass_learns_to_reach_its_target(tmp_path):
    assert main(["recipe=pointmass_grpo", f"run.dir={tmp_path}", *SHORT[:2]]) == 0
    (run,) = tmp_path.iterdir()
    (found,) = run.glob("eval/*/results.json")
    assert json.loads(found.read_text())["overall"]["success_once"]["rate"] > 0.8
    assert metrics(run)[0]["success_once"] < 0.3
