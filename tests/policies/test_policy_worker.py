"""What the policy worker takes from a policy's `act`."""

import threading

import numpy as np
import pytest

from embodied.core.errors import WrongShape
from embodied.core.types import PolicyOutput
from embodied.policies.config import MLPConfig
from embodied.policies.openvla.config import OpenVLAConfig
from embodied.policies.policy_worker import PolicyWorker, check_output

GOOD = {"actions": np.zeros((4, 2, 3)), "logprobs": np.zeros((4, 2, 3)), "values": np.zeros(4)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"actions": np.zeros((4, 3))},
        {"actions": np.zeros((4, 2, 2))},
        {"actions": np.zeros((1, 2, 3)), "logprobs": np.zeros((1, 2, 3)), "values": np.zeros(1)},
        {"logprobs": np.zeros((4, 2))},
        {"logprobs": np.zeros((4, 1, 3))},
        {"values": np.zeros((4, 1))},
    ],
)
def test_answers_of_a_policy_that_would_broadcast_are_refused(wrong):
    check_output(PolicyOutput(**GOOD), 4, 3)
    with pytest.raises(WrongShape, match=r"they must be \[4, chunk"):
        check_output(PolicyOutput(**GOOD | wrong), 4, 3)


def test_a_forgotten_return_is_named():
    with pytest.raises(WrongShape, match="act returned NoneType"):
        check_output(None, 4, 3)


# How a policy worker shows that it is alive


def test_a_policy_that_compiles_is_not_taken_for_hung(monkeypatch):
    monkeypatch.setattr("embodied.runtime.worker.SIGN_S", 0.01)
    heard = threading.Event()
    for config, alive in ((OpenVLAConfig(name="openvla", compile=True), True), (MLPConfig(), False)):
        worker = PolicyWorker(config, seed=0)
        worker.tick = heard.set
        heard.clear()
        with worker._patience():
            assert heard.wait(10 if alive else 0.1) is alive
        heard.clear()
        assert not heard.wait(0.1), "it goes on when the work is done"
