"""Short runs of the embodied loop in which something goes wrong on purpose."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # for the benchmark whose cases are played here, and its faults


@pytest.fixture(autouse=True)
def faulty_env(monkeypatch):
    """`faulty_env:FaultyEnv` can be named, here and in the hosts."""
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    yield
    sys.modules.pop("faulty_env", None)
