"""What signals ask of a run."""

import os
import signal

import pytest

from embodied.core.errors import StepGivenUp
from embodied.run import ending
from embodied.run.ending import Interrupted, Interruption


def test_a_step_is_given_up_when_the_grace_after_a_signal_is_over():
    with Interruption(stop_s=600) as interruption:
        interruption.check()
        os.kill(os.getpid(), signal.SIGTERM)
        interruption.check()
        interruption.since -= 600
        with pytest.raises(StepGivenUp, match=r"given up 600 s after SIGTERM \(run.stop_s\)"):
            interruption.check()
    assert interruption.exit_code == 143


def test_the_same_signal_twice_within_a_second_is_one_request():
    with Interruption() as interruption:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
        interruption.since -= ending.AGAIN_S
        with pytest.raises(Interrupted, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
