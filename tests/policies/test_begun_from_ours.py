"""Policies that begin from a folder of ours (`policy.pretrained`), with its statistics or with others."""

import json

import numpy as np
import pytest
from tiny_vla import ROBOT, build, observe

from embodied.core.errors import CheckpointError
from embodied.policies import load_policy

FAMILIES = {
    "openvla": {},
    "openvla_oft": {"head": "l1", "proprio": True, "chunk": 2},
    **{family: {"chunk": 2, "steps": 2} for family in ("pi0", "pi05", "smolvla")},
}


def dataset(folder, reach):
    """Of a dataset only its figures."""
    names = {"q01": -reach, "q99": reach, "min": -reach, "max": reach, "mean": 0.1 * reach, "std": reach}
    of = {"action": ROBOT.action.dim, "observation.state": ROBOT.state_dim}
    stats = {part: {name: [number] * count for name, number in names.items()} for part, count in of.items()}
    (folder / "meta").mkdir(parents=True)
    (folder / "meta" / "stats.json").write_text(json.dumps(stats))
    return str(folder)


def played(policy):
    return policy.act(observe(1), np.full((1, policy.noise_spec().width), 0.4)).actions


@pytest.mark.parametrize("family", FAMILIES)
def test_a_policy_can_begin_from_a_folder_that_began_with_fresh_weights(family, tmp_path):
    narrow, wide = dataset(tmp_path / "narrow", 0.5), dataset(tmp_path / "wide", 2.0)
    first = build(family, 1, **FAMILIES[family], statistics=narrow)
    first.save_pretrained(tmp_path / "first")
    begun = FAMILIES[family] | {"pretrained": str(tmp_path / "first")}
    second, other = build(family, 2, **begun), build(family, 2, **begun, statistics=wide)
    assert np.array_equal(played(second), played(first)) and not np.allclose(played(other), played(first))
    for name, policy in (("second", second), ("third", other)):
        policy.save_pretrained(tmp_path / name)
    (tmp_path / "wide").rename(tmp_path / "gone")
    for name, policy in (("second", second), ("third", other)):
        assert np.array_equal(played(load_policy(tmp_path / name)), played(policy))


@pytest.mark.parametrize("family", ["openvla", "pi0"])
def test_a_folder_of_adapters_says_that_it_holds_some(family, tmp_path):
    build(family, 1, lora_rank=2).save_pretrained(tmp_path / "ours")
    with pytest.raises(CheckpointError, match=r"it holds adapters: set policy\.lora_rank"):
        build(family, 2, pretrained=str(tmp_path / "ours"))
    assert build(family, 2, pretrained=str(tmp_path / "ours"), lora_rank=2)
