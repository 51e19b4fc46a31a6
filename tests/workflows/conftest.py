"""Short runs of the embodied loop in which something goes wrong on purpose."""

import sys
from pathlib import Path

import pytest

from embodied.learners import learner_worker

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def faulty_env(monkeypatch):
    """`faulty_env:FaultyEnv` can be named, here and in the hosts."""
    monkeypatch.syspath_prepend(str(SUPPORT))
    yield
    sys.modules.pop("faulty_env", None)


@pytest.fixture(autouse=True)
def short_measurement(monkeypatch):
    """Every learner of conversations measures its device's peak rate, which takes longer than these runs learn."""
    monkeypatch.setitem(learner_worker.SIDES, "cpu", 32)
