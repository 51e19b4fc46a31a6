"""Tests marked `gpu` run where there is an NVIDIA card, those of the bridge tasks where these tasks' files are: in the
folder that MS_ASSET_DIR names, or beside the checkout."""

import gc
import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for what tests of several folders share

BESIDE = Path(__file__).parents[2] / "shared" / "assets"  # other people's files: read where they are, never copied
if (BESIDE / "data").is_dir():
    os.environ.setdefault("MS_ASSET_DIR", str(BESIDE))


def pytest_collection_finish():
    """What is imported by now stays to the end: nobody need look through it for garbage, time and again."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    if not Path("/dev/nvidiactl").exists():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
