"""Systems that nobody here has: recipes of texts and of Gymnasium are planned there, and a run says what it needs."""

import subprocess
import sys
from pathlib import Path

import pytest

from embodied.train import main

AS_MACOS = Path(__file__).parents[1] / "support" / "as_macos.py"
LIBRARIES = "torch psutil huggingface_hub.hf_api"
QUICK = ("gym_ppo", "pointmass_ppo")


def on_macos(folder, libraries, *commands):
    words = [sys.executable, str(AS_MACOS), libraries, *commands]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=600)


def test_recipes_are_planned_on_macos_and_a_run_says_that_it_needs_linux(tmp_path):
    dry = [f"recipe={name} --dry-run" for name in QUICK]
    done = on_macos(tmp_path, "", *dry, "recipe=pointmass_ppo cluster.backend=inline")
    assert done.stdout.count("placement   auto") == len(QUICK), done.stderr
    assert done.returncode == 2 and done.stderr.startswith("error: runs need Linux")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_recipe_of_texts_is_planned_on_macos(tmp_path):
    done = on_macos(tmp_path, LIBRARIES, "recipe=sums_grpo --dry-run")
    assert done.returncode == 0 and "placement   auto" in done.stdout, done.stderr


@pytest.mark.parametrize("recipe", [*QUICK, pytest.param("sums_grpo", marks=pytest.mark.slow)])
def test_with_pytorch_for_rocm_recipes_are_planned_on_cores(recipe, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("torch.version.hip", "7.0")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("PATH", "/nowhere")  # no nvidia-smi
    monkeypatch.chdir(tmp_path)
    assert main([f"recipe={recipe}", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "on core" in printed and "gpu" not in printed
