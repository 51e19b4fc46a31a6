"""Several seeds or settings with one command, as docs/comparing.md shows: real runs, gone on with and compared."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import embodied
from embodied import report, sweep, train
from embodied.core.errors import ConfigError

PAGE = (Path(__file__).parents[1] / "docs" / "comparing.md").read_text()
COMMANDS = [shlex.split(line)[2:] for line in re.findall(r"^python -m embodied\..*", PAGE, re.M)]
(PYTHON,) = re.findall(r"```python\n(.*?)```", PAGE, re.S)
SHORT = ["run.iterations=2", "eval.episodes=4", "eval.videos=0", "cluster.backend=inline", "env.num_envs=4"]


@pytest.fixture(autouse=True)
def one_thread(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)


def few(words):
    """A documented command with two seeds."""
    return [re.sub(r"^seeds=.*", "seeds=0-1", word) for word in words]


def test_seeds_are_trained_gone_on_with_and_compared(capsys):
    (seeds,) = [words for module, *words in COMMANDS if module == "embodied.train" and "--dry-run" not in words]
    command = [*few(seeds), *SHORT, "algo.minibatch_size=32"]
    assert train.main(command) == 0, capsys.readouterr()
    (group,) = Path("runs").glob("pointmass_ppo-seeds-*")
    runs = {path.name: path for path in Path("runs").iterdir() if path != group}
    assert [re.sub(r"\d{8}-\d{6}", "DATE", name) for name in sorted(runs)] == [
        "pointmass_ppo-seed0-DATE",
        "pointmass_ppo-seed1-DATE",
    ]
    assert all(json.loads((path / "run.json").read_text())["state"] == "finished" for path in runs.values())
    page = (group / "report.html").read_text()
    assert "success_once, IQM" in page and "mean of 2" in page
    told = capsys.readouterr().out
    assert "2 of 2 runs finished" in told and "IQM of 2 seeds" in told and "go on" not in told

    before = {name: (path / "run.json").read_text() for name, path in runs.items()}
    assert train.main([*command[:-1], "algo.minibatch_size=32"]) == 0
    assert "which exists already" in capsys.readouterr().out
    assert {name: (path / "run.json").read_text() for name, path in runs.items()} == before

    (_, both) = [words for module, *words in COMMANDS if module == "embodied.report"]
    named = {"runs/pointmass_ppo-seeds-DATE": str(group), "runs/pointmass_ppo-DATE": str(runs[min(runs)])}
    assert report.main([named.get(word, word) for word in both]) == 0
    text = Path("both.html").read_text()
    assert min(runs) in text and f"{group.name}, seed 1" in text


def test_a_dry_run_says_how_many_go_on_at_once_and_starts_nothing(capsys):
    (words,) = [words for module, *words in COMMANDS if "--dry-run" in words]
    cores = len(os.sched_getaffinity(0))
    if cores < 2:
        pytest.skip("needs two cores")
    assert train.main(words) == 0
    told = capsys.readouterr().out
    assert "5 runs" in told and "2 at once, each on cores of its own (as at_once says; a run takes" in told
    assert not Path("runs").exists()
    assert train.main([*words, "at_once=1"]) == 2 and "at_once is given twice" in capsys.readouterr().err
    assert train.main([words[0], "seeds=0-4", f"at_once={cores + 1}"]) == 2
    assert f"needs a core for each run, and there are {cores}" in capsys.readouterr().err


@pytest.mark.slow
def test_documented_sweeps_train_every_setting(capsys):
    for module, *words in COMMANDS:
        if module == "embodied.sweep":
            assert sweep.main([*few(words), *SHORT, "algo.minibatch_size=32"]) == 0, capsys.readouterr()
    assert len(list(Path("runs").glob("pointmass_ppo-sweep-*/report.html"))) == 2
    assert len(list(Path("runs").glob("pointmass_ppo-*-seed*"))) == 3 * 2 + 2 * 2


@pytest.mark.slow
def test_the_program_of_the_page_runs(monkeypatch, capsys):
    whole = embodied.sweep
    monkeypatch.setattr(embodied, "sweep", lambda *words: whole(*words, *SHORT, "algo.minibatch_size=32"))
    exec(PYTHON, {})
    told = capsys.readouterr().out
    assert "algo.lr=0.0003, seed 0 0." in told and "algo.lr=0.001, seed 1 " in told


def test_seeds_are_a_matter_of_the_command_that_returns_them():
    with pytest.raises(ConfigError, match=r"embodied\.sweep"):
        embodied.train("pointmass_ppo", "seeds=0-1")
    with pytest.raises(ConfigError, match="for the command line"):
        embodied.sweep("pointmass_ppo", "seeds=0-1", "--dry-run")


@pytest.mark.slow
def test_ctrl_c_stops_the_runs_saves_them_and_the_same_command_finishes_them():
    words = ["recipe=pointmass_ppo", "seeds=0-1", "run.iterations=100", "run.save_every=5", "algo.minibatch_size=32"]
    command = [sys.executable, "-m", "embodied.train", *words, *SHORT[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    deadline = time.monotonic() + 120
    while not list(Path().glob("runs/*-seed0-*/checkpoints/v[0-9]*")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 130, told
    assert "seed 0 stopped" in told and "seed 1: not begun" in told, told
    assert f"go on       python -m {' '.join(command[2:])}" in told.replace("'", "")
    (first,) = Path("runs").glob("*-seed0-*")
    assert json.loads((first / "run.json").read_text())["state"] == "stopped"
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"seed 0 goes on: {first}" in done.stdout and len(list(Path("runs").glob("*-seed0-*"))) == 1
