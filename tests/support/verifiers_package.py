"""Which package `verifiers` there is to be tested with: none of our own interpreters has it.

python -m venv FOLDER && FOLDER/bin/python -m pip install "verifiers>=0.4,<0.5", or another version
"""

import os
import subprocess

import pytest

PYTHON = os.environ.get("EMBODIED_VERIFIERS_PYTHON")
VERSION = "from importlib.metadata import version; print(version('verifiers'))"


def needs_verifiers(wanted):
    """Skip without an interpreter, or where its version is not one of the `wanted` ones."""
    if not PYTHON:
        return pytest.mark.skip(reason="EMBODIED_VERIFIERS_PYTHON names no interpreter with verifiers")
    done = subprocess.run([PYTHON, "-c", VERSION], capture_output=True, text=True, timeout=100, check=True)
    major, minor, *_ = map(int, done.stdout.split(".")[:2])
    return pytest.mark.skipif(not wanted((major, minor)), reason=f"EMBODIED_VERIFIERS_PYTHON has {done.stdout.strip()}")
