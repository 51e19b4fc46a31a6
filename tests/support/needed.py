"""Skips files of tests where a package is not installed, without importing it: every test worker collects all files."""

import importlib.util

import pytest


def requires(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}", allow_module_level=True)
