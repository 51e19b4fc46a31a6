"""Every evaluation command of docs/evaluation.md runs, and its protocols are those the envs have."""

import re
from pathlib import Path

import numpy as np
import pytest

from embodied import evaluate, train
from embodied.envs import env_class
from embodied.envs.config import GymConfig, ManiSkillConfig, PointMassConfig
from embodied.reporting.results import COLUMNS

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "evaluation.md").read_text()
COMMANDS = re.findall(r"^python -m embodied.evaluate .*", PAGE, re.M)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run in it."""
    folder = tmp_path_factory.mktemp("evaluations")
    short = ["run.iterations=1", "eval.episodes=1", "eval.videos=0", "cluster.backend=inline", f"run.dir={folder}/runs"]
    assert train.main(["recipe=pointmass_ppo", *short]) == 0
    return folder


def slow_if_real(command):
    return pytest.param(command, marks=[pytest.mark.slow] * ("maniskill" in command))


@pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
@pytest.mark.parametrize("command", [slow_if_real(command) for command in COMMANDS])
def test_a_documented_command_runs(folder, command, monkeypatch, capsys):
    if "maniskill" in command:
        pytest.importorskip("mani_skill")
    if "eval.dataset" in command:
        pytest.importorskip("pyarrow")
    monkeypatch.chdir(folder)
    (name,) = (path.name for path in Path("runs").glob("pointmass_ppo-*"))
    words = re.sub(r"eval.episodes=\d+", "", command.replace("pointmass_ppo-DATE", name)).split()[3:]
    assert evaluate.main([*words, "eval.episodes=4", "eval.videos=1", "cluster.backend=inline"]) == 0
    assert "results.json" in capsys.readouterr().out


def test_the_table_of_protocols_is_complete():
    named = set(re.findall(r"`([a-z-]+-v\d+)` \|", PAGE)) - {"libero-v1", "libero-pro-v1"}
    envs = [ManiSkillConfig(), PointMassConfig(name="pointmass"), GymConfig(name="gym:CartPole-v1")]
    assert named == {protocol.name for config in envs for protocol in env_class(config).protocols(config)}


def test_the_columns_are_those_of_the_file():
    listed = re.search(r"has the columns `([^`]*)`", PAGE)[1]
    assert tuple(listed.replace("\n", " ").split(", ")) == COLUMNS


def test_the_python_examples_on_datasets_run(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    read, write = (code for code in re.findall(r"```python\n(.*?)```", PAGE, re.S) if "datasets" in code)
    exec(write, {"image": np.zeros((64, 64, 3), np.uint8)})
    exec(read.replace('"dataset"', '"mine"'), {})
