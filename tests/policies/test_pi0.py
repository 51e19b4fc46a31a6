"""Pi0's steps, names and sizes by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_vla import build, noise, observe

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.learners.memory_estimate import estimate
from embodied.policies.pi0.policy import EXPERT_HEAD, FULL, TIED, WORDS, Pi0Network, in_half, own_name, settings_of
from embodied.policies.smolvla import policy as smolvla


def test_each_step_of_flow_sde_is_the_noisy_one_for_an_equal_share_of_rows():
    policy = build("pi0", steps=3)
    first = policy.act(observe(), noise(policy, 4)).replay["first"]
    many = policy._split(torch.from_numpy(noise(policy, 2000)))[2]
    assert set(first) <= {0, 1, 2} and np.allclose(np.bincount(many) / 2000, 1 / 3, atol=0.05)


def test_imitation_at_time_one_equals_noise_minus_actions_minus_the_velocity():
    policy = build("pi0", chunk=8)
    obs = observe(2)
    actions = np.random.default_rng(3).normal(size=(2, 8, 3))
    draws = np.random.default_rng(4).normal(size=(2, policy.imitation_noise().width))
    draws[:, -1] = 40.0  # a uniform number of 1, so time 1: only noise is seen
    losses = policy.imitate({"obs": obs, "actions": torch.from_numpy(actions)}, draws)
    start = draws[:, :-1].reshape(2, 8, 8)
    wanted = start - np.pad(actions, ((0, 0), (0, 0), (0, 5)))
    with torch.no_grad():
        _, velocity = policy.denoise(policy.read(obs), torch.from_numpy(start).float(), torch.ones(2))
    np.testing.assert_allclose(losses.detach().numpy(), (wanted - velocity.numpy()) ** 2, atol=1e-4, rtol=1e-4)


def test_names_of_both_layouts_become_ours():
    tower = "paligemma_with_expert.paligemma.model.vision_tower"
    assert own_name(TIED) == own_name(f"model.{TIED}") == f"model.{WORDS}"
    assert own_name(f"model.{tower}.encoder.x") == own_name(f"{tower}.vision_model.encoder.x")
    assert own_name(EXPERT_HEAD) is None


@pytest.mark.parametrize(("name", "title"), [("pi0", "Pi0"), ("pi05", "Pi0.5"), ("smolvla", "SmolVLA")])
def test_the_page_tells_the_memory_of_full_size(name, title):
    with torch.device("meta"):
        if name == "smolvla":
            network = smolvla.SmolVLANetwork(smolvla.settings_of(smolvla.FULL)).bfloat16()
        else:
            network = Pi0Network(settings_of(FULL, (), name))
            in_half(network)
    weights = list(network.named_parameters())

    def learner_gb(trained):
        """Copy, gradient twice, two moments; what is float32 needs no copy."""
        sizes = [(p.numel(), p.element_size()) for p in trained]
        return sum(count * (20 if size == 2 else 16) for count, size in sizes) / 1e9

    expert = learner_gb(p for key, p in weights if ".paligemma." not in key and ".vlm." not in key)
    everything = learner_gb(p for _, p in weights if p.requires_grad)
    count, held = (sum(p.numel() * size(p) for _, p in weights) / 1e9 for size in (lambda p: 1, lambda p: p.itemsize))
    row = f"| {title} | {count:.2f} B | {held:.1f} GB | {expert:.1f} GB | {everything:.1f} GB |"
    assert row in (Path(__file__).parents[2] / "docs" / "vla.md").read_text()


@pytest.mark.parametrize("recipe", ["libero_ppo_pi0", "maniskill_ppo_pi0"])
def test_full_size_recipes_are_whole(recipe):
    config = load([f"recipe={recipe}", "policy.pretrained=somewhere"]).config
    assert config.policy.preset == "full" and config.policy.chunk <= config.policy.horizon
    with pytest.raises(ConfigError, match=r"norms are float32; try policy\.dtype=float32"):
        load([f"recipe={recipe}", "policy.pretrained=somewhere", "learner.shard=true"])


def test_memory_of_a_recipe_is_counted_without_its_folder():
    asked = ["recipe=libero_ppo_pi0", "policy.name=pi05", "policy.pretrained=nowhere", "learner.micro_batch_size=1"]
    found = estimate(load(asked).config)
    assert found.num_weights == pytest.approx(3.36e9, rel=2e-3)
    assert 0.3e9 < found.num_trained < 0.45e9 and found.activations > 1e7
