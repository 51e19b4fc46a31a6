"""Skips files of tests where a package is not installed, without importing it: every test worker collects all files."""

import importlib.util

import pytest


def requires(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)


def without_files(monkeypatch, folder):
    """Let ManiSkill look for the files of tasks in this folder. Modules that keep the folder's name are imported
    before."""
    import mani_skill.envs  # noqa: F401

    import embodied.envs.maniskill.bridge.put_on_plate  # noqa: F401

    monkeypatch.setattr("mani_skill.ASSET_DIR", folder)
