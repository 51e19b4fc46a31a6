"""A tiny OpenVLA, what it sees, and the noise of its decisions."""

import numpy as np

from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig

SPEC = EnvSpec(ActionSpec(2), images={"top": (16, 16, 3)}, instruction=True)
OBS = {
    "images": {"top": np.arange(2 * 16 * 16 * 3, dtype=np.uint8).reshape(2, 16, 16, 3)},
    "instruction": ["go", "a b"],
}
NOISE = np.random.default_rng(1).random((2, 2))


def build(**options):
    return make_policy(OpenVLAConfig(name="openvla", **options), SPEC, 0)
