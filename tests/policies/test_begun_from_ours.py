"""Policies that begin from a folder of ours (`policy.pretrained`), with its statistics or with others."""

import json
from dataclasses import replace

import numpy as np
import pytest

from embodied.core.errors import CheckpointError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import load_policy, make_policy
from embodied.policies.config import OpenVLAConfig, OpenVLAOFTConfig, Pi0Config, SmolVLAConfig

SPEC = EnvSpec(ActionSpec(3), state_dim=2, images={"top": (64, 64, 3)}, instruction=True)
FAMILIES = [
    OpenVLAConfig(name="openvla"),
    OpenVLAOFTConfig(name="openvla_oft", head="l1", proprio=True, chunk=2),
    Pi0Config(name="pi0", chunk=2, steps=2),
    Pi0Config(name="pi05", chunk=2, steps=2),
    SmolVLAConfig(name="smolvla", chunk=2, steps=2),
]


def dataset(folder, reach):
    """Of a dataset only its figures."""
    names = {"q01": -reach, "q99": reach, "min": -reach, "max": reach, "mean": 0.1 * reach, "std": reach}
    of = {"action": SPEC.action.dim, "observation.state": SPEC.state_dim}
    stats = {part: {name: [number] * count for name, number in names.items()} for part, count in of.items()}
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "stats.json").write_text(json.dumps(stats))
    return str(folder)


def played(policy):
    obs = {"images": {"top": np.full((1, 64, 64, 3), 99, np.uint8)}, "state": np.full((1, 2), 0.2, np.float32)}
    return policy.act(obs | {"instruction": ["go"]}, np.full((1, policy.noise_spec().width), 0.4)).actions


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config.name)
def test_what_began_with_fresh_weights_can_be_begun_from(config, tmp_path):
    narrow, wide = dataset(tmp_path / "narrow", 0.5), dataset(tmp_path / "wide", 2.0)
    first = make_policy(config.model_copy(update={"statistics": narrow}), SPEC, 1)
    first.save_pretrained(tmp_path / "first")
    begun = config.model_copy(update={"pretrained": str(tmp_path / "first")})
    second = make_policy(begun, SPEC, 2)
    assert np.array_equal(played(second), played(first))
    other = make_policy(begun.model_copy(update={"statistics": wide}), SPEC, 2)
    assert not np.allclose(played(other), played(first))
    for name, policy in (("second", second), ("third", other)):
        policy.save_pretrained(tmp_path / name)
    (tmp_path / "wide").rename(tmp_path / "gone")
    for name, policy in (("second", second), ("third", other)):
        assert np.array_equal(played(load_policy(tmp_path / name)), played(policy))


@pytest.mark.parametrize("config", [FAMILIES[0], FAMILIES[2]], ids=lambda config: config.name)
def test_a_folder_of_adapters_says_that_it_holds_some(config, tmp_path):
    make_policy(config.model_copy(update={"lora_rank": 2}), SPEC, 1).save_pretrained(tmp_path / "ours")
    begun = config.model_copy(update={"pretrained": str(tmp_path / "ours")})
    with pytest.raises(CheckpointError, match=r"it holds adapters: set policy\.lora_rank"):
        make_policy(begun, SPEC, 2)
    assert make_policy(begun.model_copy(update={"lora_rank": 2}), replace(SPEC), 2)
