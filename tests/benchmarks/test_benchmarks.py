"""What benchmarks measure and compare: the runs themselves take too long for a test."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from benchmarks import common, learning, pairs
from benchmarks.common import ROOT, config_hash, measure, resolved
from embodied.config.recipe import load

EAT = """
import time, sys
from pathlib import Path
block = bytearray(100_000_000)
Path(sys.argv[1]).touch()
end = time.process_time() + 0.2
while time.process_time() < end or Path(sys.argv[1]).exists():
    pass
"""


def test_the_work_and_memory_of_grandchildren_count(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "SAMPLE_S", 0.02)
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {EAT!r}, sys.argv[1]], check=True)"
    held, looks = tmp_path / "held", []

    def let_go_once_it_was_measured():
        if any(looks):
            held.unlink(missing_ok=True)
        looks.append(held.exists())

    command = [sys.executable, "-c", below, str(held)]
    cost = measure(command, dict(os.environ), 60, let_go_once_it_was_measured)
    assert cost.cpu_s >= 0.2
    assert cost.peak_bytes > 100_000_000
    assert cost.wall_s >= 0.2


def test_a_failing_command_ends_the_benchmark_with_its_output():
    failing = [sys.executable, "-c", "print('no driver'); raise SystemExit(3)"]
    with pytest.raises(SystemExit, match="ended with 3:\nno driver"):
        measure(failing, dict(os.environ), timeout_s=30)


def test_a_command_that_hangs_is_ended(monkeypatch):
    monkeypatch.setattr(common, "SAMPLE_S", 0.02)
    started = time.perf_counter()
    with pytest.raises(SystemExit, match="not done after 0 s"):
        measure([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), timeout_s=0.1)
    assert time.perf_counter() - started < 20


def test_the_hash_names_the_recipe_but_not_the_seed_or_the_place():
    plain = config_hash(resolved("pointmass_ppo"))
    assert config_hash(resolved("pointmass_ppo", "seed=7", "run.dir=/elsewhere", "run.name=x")) == plain
    assert config_hash(resolved("pointmass_ppo", "algo.lr=1e-4")) != plain
    assert config_hash(resolved("pointmass_ppo", "run.env_steps=30000")) != plain


def test_new_results_leave_the_commit_as_it_is_and_changed_code_does_not(tmp_path, monkeypatch):
    def git(*arguments):
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *arguments], check=True, capture_output=True, timeout=30)

    code, result = tmp_path / "code.py", tmp_path / "benchmarks" / "results" / "seed-0.json"
    result.parent.mkdir(parents=True)
    code.write_text("1")
    result.write_text("{}")
    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    monkeypatch.setattr(common, "ROOT", tmp_path)
    clean = common.code_commit()
    result.write_text('{"better": true}')
    assert common.code_commit() == clean
    code.write_text("2")
    once = common.code_commit()
    code.write_text("3")
    assert len({clean, once, common.code_commit()}) == 3
    assert once.startswith(f"{clean}-dirty-")


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_every_name_that_a_benchmark_imports_exists(path):
    """Also inside its functions, which nobody runs for months."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("embodied", "benchmarks")):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), (
                    alias.name
                )


def test_the_gain_is_paired_and_its_interval_holds_what_chance_allows():
    before = [True] * 50 + [False] * 150
    after = [True] * 40 + [False] * 10 + [True] * 60 + [False] * 90  # 10 lost, 60 won: +50 of 200
    found = learning.paired_gain(before, after)
    assert found["mean"] == pytest.approx(0.25)
    # differences +1 (60), -1 (10), 0 (130): variance 0.35 - 0.0625 = 0.2875, error sqrt(0.2875 / 200) = 0.0379
    expected = 0.25 + np.array([-1.96, 1.96]) * 0.0379
    assert found["bootstrap_interval"] == pytest.approx(expected, abs=0.01)
    assert learning.paired_gain(before, before) == {"mean": 0.0, "bootstrap_interval": [0.0, 0.0]}


TALKING = (
    "sums_grpo",
    "sort_grpo",
    "sums_ppo",
    "sums_ppo_critic",
    "sums_judge",
    "calc_grpo",
    "pictures_grpo",
    "search_grpo",
    "python_grpo",
)
ROBOTS = {"libero_grpo": "libero_sft", "libero_ppo_from_sft": "libero_sft", "pickcube_grpo": "pickcube_sft"}


@pytest.mark.parametrize("recipe", [*TALKING, *ROBOTS])
def test_rl_begins_with_what_imitation_leaves(recipe):
    going_on = load([f"recipe={recipe}"]).config
    start = [f"recipe={ROBOTS.get(recipe, going_on.run.start_from)}", *["sft.data=demos"] * (recipe in ROBOTS)]
    imitating = load(start, entry="sft").config
    same = {"value_head": imitating.policy.value_head} if recipe in TALKING else {}  # PPO's is new
    assert imitating.policy == going_on.policy.model_copy(update=same)
    assert imitating.eval.protocol == going_on.eval.protocol
    tasks = [part["task"] for part in getattr(imitating.env, "mixture", {}).values()]
    env, other = going_on.env, imitating.env
    assert env.task == other.task if recipe in ROBOTS else other == env or env.task in tasks


def test_pairs_compare_the_iterations_that_both_runs_played_at_the_same_time(tmp_path):
    rows = [{"train_s": at, "engine/tokens": tokens} for at, tokens in ((1, 9), (3, 10), (7, 10), (13, 20), (14, 20))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert pairs.seconds(tmp_path) == 0.3  # of 0.2, 0.4 and 0.3; the last iteration may have been alone
