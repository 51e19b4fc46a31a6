"""The commands of docs/images.md: the toy runs, the recipes are planned or refused with the reason."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from embodied.train import main

PAGE = (Path(__file__).parents[1] / "docs" / "images.md").read_text()
COMMANDS = re.findall(r"^    python -m embodied.train (.*)", PAGE, re.M)


def test_there_are_commands():
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_does_what_the_page_says(command, tmp_path, capsys):
    if "maniskill" not in command:
        assert main([*shlex.split(command), f"run.dir={tmp_path}", "cluster.backend=inline", "eval.episodes=2"]) == 0
        (metrics,) = tmp_path.glob("*/metrics.jsonl")
        errors = [json.loads(line)["train/estimate_loss"] for line in metrics.read_text().splitlines()]
        assert errors == sorted(errors, reverse=True) and 0 < errors[-1] < errors[0]
        return
    if importlib.util.find_spec("mani_skill") is None:
        pytest.skip("needs ManiSkill")
    assert main([*shlex.split(command), "cluster.machines=1xGPU", "--dry-run"]) == 0
    if "gpu" in command:
        assert main([*shlex.split(command), "cluster.machines=2xCPU", "--dry-run"]) == 2
        assert "needs an NVIDIA GPU" in capsys.readouterr().err
