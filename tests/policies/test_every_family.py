"""What every policy keeps: it scores as it acted, in any company; its gradients, its best actions and its folder."""

import copy
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from tiny_vla import ROBOT, TEXTS, noise, observe, scored, shallow

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import export_program, load_policy, make_policy
from embodied.policies.base import Policy
from embodied.policies.config import CNNConfig, MLPConfig
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.smolvla.config import SmolVLAConfig

STATES, CHOICES = EnvSpec(ActionSpec(3), state_dim=4), EnvSpec(ActionSpec(1, num_choices=4), state_dim=4)
EYES = {"name": "cnn", "channels": (4, 4), "kernels": (4, 3), "strides": (2, 1), "hidden": (16,), "chunk": 2}
OFT = {"name": "openvla_oft", "chunk": 2, "proprio": True, "film": True}
WITHOUT = pytest.mark.skipif(not find_spec("onnxruntime"), reason="the extra onnx is missing")
FAMILIES = {
    "mlp": (MLPConfig(hidden=(16, 16), chunk=3, normalize_observations=True), STATES),
    "mlp that chooses": (MLPConfig(hidden=(16, 16), chunk=3), CHOICES),
    "cnn": (CNNConfig(**EYES, features=6), ROBOT),
    "cnn of keypoints": (CNNConfig(**EYES, features=128, keypoints=True), ROBOT),
    "cnn of colors": (CNNConfig(name="cnn", encoder="colors", hidden=(16,), chunk=2), ROBOT),
    "openvla": (OpenVLAConfig(name="openvla", camera="top", temperature=1.6), ROBOT),
    "oft": (OpenVLAOFTConfig(**OFT, temperature=1.6), ROBOT),
    "oft that regresses": (OpenVLAOFTConfig(**OFT, head="l1"), ROBOT),
    "pi0": (Pi0Config(name="pi0", steps=2, exploration="flow_noise"), ROBOT),
    "pi0 whose expert learns": (Pi0Config(name="pi0", steps=2, train="expert"), ROBOT),
    "pi05": (Pi0Config(name="pi05", steps=2, exploration="flow_noise"), ROBOT),
    "smolvla": (SmolVLAConfig(name="smolvla", steps=2, exploration="flow_noise"), ROBOT),
    "smolvla whose expert learns": (SmolVLAConfig(name="smolvla", steps=2, train="expert"), ROBOT),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    config, spec = FAMILIES[request.param]
    policy = make_policy(config, spec, 0).eval()
    if getattr(policy, "normalizer", None):
        policy.normalizer.merge(np.array([[10.0, *[0.5] * 4, *[40.0] * 4]]))
    with torch.no_grad():
        for name, module in policy.named_modules():
            if hasattr(module, "dense"):
                module.dense.bias.fill_(0.1)  # gates begin closed
            if name.endswith("lm_head"):
                module.weight.mul_(5)  # probabilities that differ
    return request.param, policy


def test_the_learner_scores_a_decision_as_the_actor_did_whatever_its_company(family):
    _, policy = family
    obs, draws = observe(), noise(policy)
    output = policy.act(obs, draws)
    assert output.actions.shape == output.logprobs.shape == (4, policy.config.chunk, policy.spec.action.dim)
    tensors = {"images": {name: torch.from_numpy(frames) for name, frames in obs["images"].items()}}
    seen = obs | tensors | {"state": torch.from_numpy(obs["state"])}
    scores = scored(policy, seen, output)
    np.testing.assert_allclose(scores.logprobs.detach().numpy(), output.logprobs, atol=1e-5)
    np.testing.assert_allclose(scores.values.detach().numpy(), output.values, atol=1e-5)
    np.testing.assert_allclose(policy.value(obs), output.values, atol=1e-5)
    assert output.logprobs.std() > 1e-3 and output.values.std() > 0
    one = {"images": {name: frames[1:2] for name, frames in obs["images"].items()}, "state": obs["state"][1:2]}
    alone = policy.act(one | {"instruction": ["go"]}, draws[1:2])
    np.testing.assert_allclose(alone.actions[0], output.actions[1], atol=1e-5)
    np.testing.assert_allclose(alone.logprobs[0], output.logprobs[1], atol=1e-5)


def test_gradients_reach_every_weight_that_is_trained(family):
    name, policy = family
    output = policy.act(observe(2), noise(policy, 2))
    scores = scored(policy, observe(2), output)
    (scores.logprobs.sum() + scores.values.sum()).backward()
    assert not [name for name, p in policy.named_parameters() if p.requires_grad and p.grad is None]
    frozen = [name for name, p in policy.named_parameters() if not p.requires_grad]
    if "expert" in name:
        assert frozen and all(".paligemma." in name or ".vlm." in name for name in frozen)
    policy.zero_grad()


def test_the_best_actions_depend_on_no_noise_but_that_which_a_flow_begins_with(family):
    name, policy = family
    one, other = noise(policy), noise(policy, seed=2)
    if name.startswith(("pi", "smol")):
        begun = policy.horizon * 8
        other[:, :begun] = one[:, :begun]
    found, again = (policy.act(observe(), draws, temperature=0.0).actions for draws in (one, other))
    np.testing.assert_allclose(found, again, atol=1e-5)
    assert not np.allclose(found, policy.act(observe(), one).actions, atol=1e-3)


def test_a_saved_policy_needs_nothing_but_its_folder(family, tmp_path):
    _, policy = family
    policy.save_pretrained(tmp_path / "saved")
    again = load_policy((tmp_path / "saved").rename(tmp_path / "moved"))
    one, two = (each.act(observe(), noise(policy)) for each in (policy, again))
    assert np.array_equal(one.actions, two.actions) and np.array_equal(one.values, two.values)


@pytest.mark.parametrize("family", ["mlp", "openvla", "oft", "pi0"], indirect=True)
def test_a_saved_policy_is_refused_with_any_bit_flipped_and_taken_without_its_checksums(family, tmp_path):
    _, policy = family
    policy.save_pretrained(tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    rng = np.random.default_rng(0)
    for path in files:
        content = bytearray(path.read_bytes())
        flipped = content.copy()
        flipped[rng.integers(len(content))] ^= 1 << int(rng.integers(7))
        path.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=str(tmp_path)):
            load_policy(tmp_path)
        path.write_bytes(content)
    (tmp_path / "config.json").write_text((tmp_path / "config.json").read_text() + "\n")
    with pytest.raises(CheckpointError, match=r"config\.json does not match.*take a copy of the folder without"):
        load_policy(tmp_path)
    (tmp_path / "checksums.json").unlink()
    load_policy(tmp_path)


EXPORTED = [name for name in FAMILIES if not name.endswith("expert learns")]
VLAS = ("openvla", "oft", "oft that regresses", "pi0", "smolvla")  # half a minute each


@pytest.mark.parametrize(
    ("family", "kind"),
    [(name, "torch") for name in EXPORTED]
    + [pytest.param(name, "onnx", marks=[WITHOUT, *[pytest.mark.slow] * (name in VLAS)]) for name in EXPORTED],
    indirect=["family"],
)
def test_a_program_of_its_best_actions_acts_as_it_does(family, kind, tmp_path):
    name, policy = family
    if name == "pi05":
        with pytest.raises(ConfigError, match="writes each state into the prompt"):
            export_program.describe(policy, observe(), [*TEXTS])
        return
    policy = shallow(copy.deepcopy(policy), 1 if name.startswith(("openvla", "oft")) else 2)  # others alternate
    reads = type(policy).prompt_tokens is not Policy.prompt_tokens
    description = {"program": export_program.describe(policy, observe(2), [*TEXTS] if reads else [])}
    runner = export_program.write(tmp_path, kind, description, policy, observe(2))
    for rows in (1, 3):  # it was recorded with two
        obs, draws = observe(rows, seed=rows), noise(policy, rows)
        found = runner.act(obs, draws[:, : policy.starting_noise])
        np.testing.assert_allclose(found, policy.act(obs, draws, temperature=0.0).actions, atol=1e-5, rtol=1e-5)
