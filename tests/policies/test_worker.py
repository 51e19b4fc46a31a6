"""What the policy worker takes from a policy's `act`."""

import numpy as np
import pytest

from embodied.core.errors import WrongShape
from embodied.core.types import PolicyOutput
from embodied.policies.worker import check_output

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
def test_what_would_broadcast_is_refused(wrong):
    check_output(PolicyOutput(**GOOD), 4, 3)
    with pytest.raises(WrongShape, match=r"they must be \[4, chunk"):
        check_output(PolicyOutput(**GOOD | wrong), 4, 3)


def test_a_forgotten_return_is_named():
    with pytest.raises(WrongShape, match="act returned NoneType"):
        check_output(None, 4, 3)
