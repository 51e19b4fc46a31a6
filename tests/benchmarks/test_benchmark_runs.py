"""Running and measuring commands, naming what was measured, and the peers' environment."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
import time

import pytest

from benchmarks import common, peers
from benchmarks.common import ROOT, config_hash, markdown, measure, resolved
from benchmarks.rollout_efficiency import report, sim_shares, stepping_speed

EAT = """
import time
block = bytearray(100_000_000)
end = time.process_time() + 0.2
while time.process_time() < end:
    pass
"""


def test_the_work_and_memory_of_grandchildren_count(monkeypatch):
    monkeypatch.setattr(common, "SAMPLE_S", 0.02)
    below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {EAT!r}], check=True)"
    cost = measure([sys.executable, "-c", below], dict(os.environ), timeout_s=30)
    assert cost.cpu_s >= 0.2
    assert cost.peak_bytes > 100_000_000
    assert cost.wall_s >= 0.2


def test_the_processor_time_of_a_process_is_read():
    before = common.process_cpu_s(os.getpid())
    while time.process_time() < before + 0.05:
        pass
    assert before + 0.03 <= common.process_cpu_s(os.getpid()) <= time.process_time() + 0.05


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


def test_tables_are_aligned_markdown():
    assert markdown(["who", "s"], [["ours", "1"], ["a", "22"]]).splitlines() == [
        "| who  | s  |",
        "|------|----|",
        "| ours | 1  |",
        "| a    | 22 |",
    ]


def test_stepping_with_random_actions_uses_the_plans_sim_workers():
    shares = sim_shares(resolved("pointmass_ppo"))
    assert len({core for share in shares for core in share}) == len(shares)
    speed, cpu_ms = stepping_speed("pointmass_ppo", iterations=2, seed=0, shares=shares)
    assert speed > 0 and 0 < cpu_ms < 1


def test_the_efficiency_is_the_ratio_of_the_medians():
    cpu = {"rollouts_cpu_ms": [0.5, 0.4, 0.6], "stepping_cpu_ms": [0.45, 0.2, 0.46]}
    speeds = {"rollouts": [850.0, 900.0, 100.0], "stepping": [1000.0, 1100.0, 900.0], "simulating": [0.9, 0.97, 0.96]}
    assert report({**speeds, **cpu, "processes": 2}).endswith(
        "rollouts / stepping: 85.0%, by processor time 90.0%; 2 processes each; in the simulator: 96.0%"
    )


def test_the_peers_environment_borrows_packages(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "peers")], check=True, timeout=60)
    (tmp_path / "lent").mkdir()
    (tmp_path / "lent" / "borrowed_module.py").write_text("answer = 42")
    python = tmp_path / "peers" / "bin" / "python"
    peers.lend(python, str(tmp_path / "lent"))
    told = subprocess.run(
        [str(python), "-c", "import borrowed_module; print(borrowed_module.answer)"],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert told.stdout == "42\n"


def test_the_peers_environment_is_made_once_and_again_when_what_belongs_in_it_changes(tmp_path, monkeypatch):
    installs = []
    monkeypatch.setattr(peers, "install", installs.append)
    python = peers.peers_python(tmp_path / "peers")
    assert peers.peers_python(tmp_path / "peers") == python
    assert installs == [python]
    stamp = tmp_path / "peers" / "made-of.json"
    stamp.write_text(json.dumps(json.loads(stamp.read_text()) | {"peers": ["stable-baselines3==2.0.0"]}))
    peers.peers_python(tmp_path / "peers")
    assert installs == [python, python]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").rglob("*.py")), ids=lambda path: path.stem)
def test_what_a_benchmark_imports_from_us_is_there(path):
    """Also inside its functions, which nobody runs for months."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(("embodied", "benchmarks")):
            module = importlib.import_module(node.module)
            for alias in node.names:
                assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}"), (
                    alias.name
                )
