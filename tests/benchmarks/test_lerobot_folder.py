"""lerobot itself loads a policy that left here; LEROBOT_PYTHON names an interpreter that has it."""

import os

import pytest

from benchmarks.lerobot_folder import differences


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif("LEROBOT_PYTHON" not in os.environ, reason="python -m benchmarks.lerobot_folder says how to get it")
def test_lerobot_acts_alike_before_and_after_rl():
    before, after = differences(os.environ["LEROBOT_PYTHON"])
    assert before[1] > 0.01 and before[2] < 1e-5
    assert after[2] < 1e-5 and after[1] != before[1]
