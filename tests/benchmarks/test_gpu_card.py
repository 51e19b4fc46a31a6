"""The card of a GPU, in small on a CPU: every block gives figures, and one that has them is not run again."""

import json
import math
import subprocess
import sys
import textwrap

import pytest

from benchmarks import gpu_card
from benchmarks.common import ROOT

# Writes what ManiSkill's scripts write: success after a while, and its speed.
SCRIPT = """
    import os, sys
    from torch.utils.tensorboard import SummaryWriter
    assert "--env-id=PickCube-v1" in sys.argv and "--total-timesteps=256" in sys.argv
    writer = SummaryWriter("runs/mine")
    for step, success in enumerate((0.1, 0.96, 1.0)):
        writer.add_scalar("eval/success_once", success, step)
        writer.add_scalar("charts/SPS", 1000 + step, step)
    writer.close()
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_block_gives_figures_and_the_second_time_none_is_run(tmp_path):
    (tmp_path / "ppo.py").write_text(textwrap.dedent(SCRIPT))
    scripts = [f"--ppo={tmp_path / 'ppo.py'}", f"--ppo-fast={tmp_path / 'ppo.py'}"]
    command = [sys.executable, "-m", "benchmarks.gpu_card", "--tiny", "--steps=256", f"--out={tmp_path}", *scripts]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    card = json.loads((tmp_path / "none/card.json").read_text())
    assert card["blocks"].keys() == gpu_card.BLOCKS.keys() and card["torch"] and card["commit"]
    for name, found in card["blocks"].items():
        assert "figures" in found, (name, found)
        beside = [value for value in found["figures"].values() if isinstance(value, dict)]
        values = [*found["figures"].values(), *(value for each in beside for value in each.values())]
        values = [value for value in values if isinstance(value, float | int)]
        assert values and all(math.isfinite(value) for value in values), (name, found)
    assert card["blocks"]["ppo_fast"]["figures"]["steps_per_s"] == 1002
    assert 0 < card["blocks"]["ppo_fast"]["figures"]["seconds_to_95"] < card["blocks"]["ppo_fast"]["seconds"]
    assert any("offload" in figure for figure in card["blocks"]["language"]["figures"])
    page = " ".join((tmp_path / "none/card.md").read_text().split())
    assert all(f"| {name} " in page for name in gpu_card.BLOCKS)
    assert "| block | figure | measured | bound | plan |" in page
    (tmp_path / "ppo.py").unlink()  # nothing asks for it again
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    assert json.loads((tmp_path / "none/card.json").read_text())["blocks"] == card["blocks"]


def test_a_block_that_fails_is_named_on_the_card_and_run_again_the_next_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_card", "--tiny", "--blocks", "ppo_fast", f"--out={tmp_path}"])
    gpu_card.main()
    assert "--ppo-fast is not given" in (tmp_path / "none/card.md").read_text()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--ppo-fast=nowhere.py"])
    gpu_card.main()
    page = (tmp_path / "none/card.md").read_text()
    assert "not measured" in page and not list(tmp_path.rglob("block-*"))
