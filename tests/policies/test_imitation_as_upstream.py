"""Imitation as the published models were trained: all words and the stop token, and openpi's random pictures."""

import math

import numpy as np
import pytest
import torch
from tiny_vla import observe
from torch.nn import functional as F

from embodied.core.types import ActionSpec, EnvSpec
from embodied.learners.imitation import mean_of_items
from embodied.policies import make_policy
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.pi0.policy import DRAWS, augmented

transformers = pytest.importorskip("transformers")

SPEC = EnvSpec(ActionSpec(3), state_dim=4, images={"top": (32, 32, 3), "wrist": (32, 32, 3)}, instruction=True)
ONE = EnvSpec(ActionSpec(3), images={"top": (32, 32, 3)}, instruction=True)
STOP = 2
TOLD = ("lift it", "go on")  # of one length


def actions(chunk):
    return torch.from_numpy(np.random.default_rng(1).uniform(-1, 1, (2, chunk, 3)).astype(np.float32))


def there(chunk):
    mask = torch.ones(2, chunk, dtype=torch.bool)
    mask[1, chunk // 2 + 1 :] = False
    return mask


def llama_of(policy):
    settings = policy.settings.llama
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=settings.vocab,
            hidden_size=settings.dim,
            intermediate_size=settings.mlp,
            num_hidden_layers=settings.depth,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            rms_norm_eps=settings.eps,
        )
    )
    model.load_state_dict(policy.language_model.state_dict())
    return model.eval()


def test_openvlas_loss_is_that_of_its_finetune_script():
    """transformers' own loss, with labels on the seven action tokens and the stop token."""
    policy = make_policy(OpenVLAConfig(name="openvla", sft_loss="vocabulary"), ONE, 0)
    obs, shown = observe(2, ONE, TOLD), actions(1)
    losses = policy.imitate({"obs": obs, "actions": shown, "mask": there(1)}, None)
    assert losses.shape == (2, 1, 4)
    x, _, padded = policy._prefix(obs)
    assert not padded
    ids = policy.tokens_of({"actions": shown})[:, 0] + policy.settings.first_action_id
    ids = torch.cat([ids, torch.full((2, 1), STOP)], dim=1)
    embeddings = torch.cat([x, policy.language_model.model.embed_tokens(ids)], dim=1)
    labels = torch.cat([torch.full(x.shape[:2], -100), ids], dim=1)
    wanted = llama_of(policy)(inputs_embeds=embeddings, labels=labels).loss
    torch.testing.assert_close(losses.mean(), wanted, atol=1e-5, rtol=0)
    assert (mean_of_items(losses, there(1)) / 2).item() == pytest.approx(wanted.item(), abs=1e-5)


def test_oft_learns_all_words_where_actions_are_read_and_the_stop_token_behind_them():
    policy = make_policy(OpenVLAOFTConfig(name="openvla_oft", chunk=3, sft_loss="vocabulary"), SPEC, 0)
    obs, shown, mask = observe(2, SPEC, TOLD), actions(3), there(3)
    inputs = {"obs": obs, "actions": shown, "mask": mask}
    losses = policy.imitate(inputs, None)
    assert losses.shape == (2,)
    hidden = policy._states(obs, more=1)
    assert hidden.shape[1] == 10 and torch.allclose(hidden[:, :-1], policy._states(obs), atol=1e-5)
    ids = policy.tokens_of(inputs).flatten(1) + policy.settings.first_action_id
    logps = policy.language_model.lm_head(hidden).log_softmax(-1)
    for row, numbers in enumerate((9, 6)):  # of the second demonstration one action is not there
        each = [-logps[row, n, ids[row, n]] for n in range(numbers)] + [-logps[row, 9, STOP]]
        assert losses[row].item() == pytest.approx(torch.stack(each).mean().item(), abs=1e-5)
    losses.sum().backward()
    assert policy.language_model.lm_head.weight.grad[:100].any(), "words that are no actions become less likely"
    without = make_policy(policy.config.model_copy(update={"stop_token": False}), SPEC, 0)
    assert without.imitate(inputs, None).shape == (2,)


def test_with_adapters_words_are_learned_by_that_of_their_weights():
    config = OpenVLAConfig(name="openvla", sft_loss="vocabulary", lora_rank=2, lora_targets="reference")
    policy = make_policy(config, ONE, 0)
    (policy.imitate({"obs": observe(2, ONE, TOLD), "actions": actions(1), "mask": there(1)}, None)).sum().backward()
    head = policy.language_model.lm_head
    assert head.lora_B["default"].weight.grad[:100].any() and head.weight.grad is None


def openpis(image, uniform, base):
    """One picture [3, S, S] as openpi's PyTorch preprocessing changes it, step by step."""
    image, size = image[None] / 2 + 0.5, image.shape[-1]
    if base:
        part = int(size * 0.95)
        top, left = (int(u * (size - part + 1)) for u in uniform[:2])
        image = image[:, :, top : top + part, left : left + part]
        image = F.interpolate(image, size=(size, size), mode="bilinear", align_corners=False)
        angle = float(uniform[2]) * 10 - 5
        if abs(angle) > 0.1:
            cos, sin = math.cos(angle * math.pi / 180), math.sin(angle * math.pi / 180)
            y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
            grid = torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1)[None]
            image = F.grid_sample(image, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    image = image * (0.7 + 0.6 * uniform[3])
    image = (image - image.mean()) * (0.6 + 0.8 * uniform[4]) + image.mean()
    grey = image.mean(dim=1, keepdim=True)
    return (grey + (image - grey) * (0.5 + uniform[5])).clamp(0, 1)[0] * 2 - 1


def test_pictures_are_changed_as_openpi_changes_them():
    draw = torch.Generator().manual_seed(0)
    pixels = torch.rand(4, 2, 3, 40, 40, generator=draw) * 2 - 1
    uniform = torch.rand(4, 2, DRAWS, generator=draw)
    uniform[1, 0, 2] = 0.505  # hardly turned: not at all
    uniform[2, 0, :2] = 0.999
    found = augmented(pixels, uniform)
    for row in range(4):
        for view in range(2):
            wanted = openpis(pixels[row, view], uniform[row, view], base=view == 0)
            torch.testing.assert_close(found[row, view], wanted, atol=2e-5, rtol=0)


def test_pi0_imitates_changed_pictures_where_asked_and_acts_on_unchanged_ones():
    options = {"name": "pi0", "chunk": 4}
    plain, changed = (make_policy(Pi0Config(**options, augment=flag), SPEC, 0) for flag in (False, True))
    obs, shown = observe(2, SPEC, TOLD), actions(plain.horizon)
    width = plain.imitation_noise().width
    assert changed.imitation_noise().width == width + 2 * DRAWS
    noise = np.random.default_rng(2).normal(size=(2, width + 2 * DRAWS))
    inputs = {"obs": obs, "actions": shown}
    losses = [p.imitate(inputs, noise[:, :wide]).detach() for p, wide in ((plain, width), (changed, width + 2 * DRAWS))]
    assert losses[0].shape == losses[1].shape and not torch.allclose(*losses)
    noise[0, width:] = 3.0  # another draw changes the first row only
    again = changed.imitate(inputs, noise).detach()
    assert not torch.allclose(again[0], losses[1][0]) and torch.allclose(again[1], losses[1][1], atol=1e-5)
    acting = np.random.default_rng(3).normal(size=(2, plain.noise_spec().width))
    assert np.array_equal(plain.act(obs, acting).actions, changed.act(obs, acting).actions)
