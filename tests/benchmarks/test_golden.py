"""What `benchmarks.golden` compares. Its runs take minutes; here it takes runs that are already there."""

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from benchmarks import golden, pairs
from benchmarks.common import PINNED
from embodied.config.recipe import load
from embodied.config.recipe_files import recipe_file


def made(folder, name, loss=0.5, weight=1.0):
    """A finished run, as `golden` finds it."""
    run = folder / name / "run-1"
    (run / "checkpoints" / "v000003" / "policy").mkdir(parents=True)
    (run / "run.json").write_text("{}")
    (run / "metrics.jsonl").write_text(json.dumps({"iteration": 1, "train/loss": loss, "time/rollout_s": 3.0}) + "\n")
    save_file({"w": np.full(3, weight)}, run / "checkpoints" / "v000003" / "policy" / "model.safetensors")


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """Every entry's runs: those of the stored numbers, and those of today."""
    monkeypatch.setattr(golden.subprocess, "run", lambda command, **options: None)
    for name in (*golden.ENTRIES, *golden.NEAR):
        made(tmp_path, name)
    return tmp_path


def test_golden_runs_differ_by_a_digit_of_a_loss_or_a_weight_but_not_by_a_time(ready, tmp_path_factory):
    kept = golden.learned_by("sums_judge", ready)
    assert kept["metrics"] == [{"iteration": 1, "train/loss": 0.5}]
    for change, what in (({}, ""), ({"loss": 0.5 + 1e-16}, ""), ({"loss": 0.5 + 1e-15}, "train/loss was 0.5")):
        other = tmp_path_factory.mktemp("other")
        made(other, "sums_sft")
        made(other, "sums_judge", **change)
        assert what in golden.difference(kept, golden.learned_by("sums_judge", other))
    other = tmp_path_factory.mktemp("weights")
    made(other, "sums_sft")
    made(other, "sums_judge", weight=1.0 + 1e-15)
    assert golden.difference(kept, golden.learned_by("sums_judge", other)) == "same metrics, other weights"


def test_periodic_is_measured_by_the_weights_of_sync(tmp_path):
    made(tmp_path, "text_grpo_exact", weight=2.0)
    made(tmp_path, "text_grpo_periodic", weight=2.0 + 4e-9)
    assert golden.distance(tmp_path, "text_grpo_periodic", "text_grpo_exact") == pytest.approx(2e-9, rel=1e-3)


def test_golden_runs_come_after_the_runs_that_they_need():
    assert golden.in_order(["sums_judge"]) == ["sums_sft", "sums_judge"]
    assert golden.in_order(["text_grpo_periodic"]) == ["text_grpo_exact", "text_grpo_periodic"]
    assert golden.in_order(["libero_ppo"]) == ["libero_ppo"]


@pytest.mark.parametrize("name", [*golden.ENTRIES, *golden.NEAR])
def test_every_entry_is_a_run_that_can_be_planned(ready, name):
    entry = golden.ENTRIES[golden.NEAR[name].entry if name in golden.NEAR else name]
    _, _, module, *words = golden.command_of(name, ready)
    config = load(words, entry=module.removeprefix("embodied.")).config
    schedule = "async" if "async" in name else "periodic" if "periodic" in name else "sync"
    assert config.pipeline.schedule == schedule
    assert entry.command == "sft" or config.run.iterations == (4 if schedule == "async" else 3)


@pytest.mark.parametrize("path", sorted(PINNED.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_pinned_recipe_names_no_shipped_one(path):
    """It extends copies only; and pairs take it where they are asked for the shipped one."""
    assert recipe_file(path.stem).is_file()
    bases = [line.split()[1] for line in path.read_text().splitlines() if line.startswith("extends:")]
    assert all(base.startswith("./") and (PINNED / base).is_file() for base in bases)
    assert pairs.pinned(path.stem) == str(path)
    assert pairs.pinned("another") == "another"
