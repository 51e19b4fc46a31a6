"""What the curve of a run is made of, and which runs are played again."""

import json

import pytest

from benchmarks.common import Cost
from benchmarks.learning import images
from benchmarks.learning.images import curve, report


def make_run(parent, name, state, versions):
    run = parent / name
    (run / "checkpoints" / "v000001").mkdir(parents=True)
    (run / "run.json").write_text(json.dumps({"state": state}))
    rows = [{"policy_version": v, "env_steps": 100 * v, "train_s": 2.0 * v, "return": 0.5} for v in versions]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for v in versions[1::2]:
        folder = run / "eval" / f"v{v:06d}"
        folder.mkdir(parents=True)
        measured = {"rate": v / 10, "interval": [0.0, 1.0]}
        (folder / "results.json").write_text(json.dumps({"policy_version": v, "overall": {"success_once": measured}}))
    return run


def test_a_curve_has_a_point_for_every_evaluation(tmp_path):
    points = curve(make_run(tmp_path, "seed-0-a", "finished", [1, 2, 3, 4]))
    assert [(point["env_steps"], point["train_s"], point["success_once"]["rate"]) for point in points] == [
        (200, 4.0, 0.2),
        (400, 8.0, 0.4),
    ]
    final = {"rate": 0.5, "interval": [0.25, 0.75]}
    seeds = [{"curve": points, "final": final, "final_at_end": final, "cpu_s": cpu_s} for cpu_s in (90.5, None)]
    table = report([("flat", seed, result) for seed, result in enumerate(seeds)])
    assert "20%, 40%" in table and "50.0% [25.0%, 75.0%]" in table
    assert [line.split("|")[-2].strip() for line in table.splitlines()[2:]] == ["2", "-"]


@pytest.mark.parametrize(("state", "continued"), [("finished", 0), ("stopped", 1)])
def test_resume_continues_what_was_stopped_and_leaves_out_what_is_finished(tmp_path, monkeypatch, state, continued):
    commands = []
    monkeypatch.setattr(images, "RUNS", tmp_path)
    monkeypatch.setattr(images, "measure", lambda command, *_: commands.append(command) or Cost(1.0, 2.0, 3))
    run = make_run(tmp_path, "flat-seed-3-a", state, [1, 2])
    assert images.train("flat", 3, {}, resume=True) == (run, None)
    assert len(commands) == continued and all(f"resume={run}" in command for command in commands)
    assert images.train("flat", 3, {}, resume=False)[1] == 2.0
    assert {"seed=3", "policy.keypoints=false", "recipe=maniskill_ppo_rgb"} <= set(commands[-1])
