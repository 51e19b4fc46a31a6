"""Layers that read the same input are one product, with the layers' own weights, adapters and gradients."""

import pytest
import torch
from tiny_vla import TEXTS, build, noise, observe, scored
from torch import nn
from torch.nn import functional as F

from benchmarks.operations import count
from embodied.policies.vla.layers import MLP, GatedMLP, SideBySide, lay_side_by_side, product, rms_norm, side_by_side
from embodied.policies.vla.policy import IDS, IS_WORD

SIZES, SCALES = (6, 2, 4), (0.5, 2.0, 1.0)


class Adapted(nn.Linear):
    """A linear layer with peft's names of an adapter."""

    def __init__(self, outputs, bias, rank, scale):
        super().__init__(5, outputs, bias, dtype=torch.float64)
        self.lora_A, self.lora_B = (
            nn.ModuleDict({"default": nn.Linear(*sizes, bias=False, dtype=torch.float64)})
            for sizes in ((5, rank), (rank, outputs))
        )
        self.scaling = {"default": scale}

    def forward(self, x):
        return super().forward(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


def layers(adapted, bias):
    torch.manual_seed(0)
    sizes = enumerate(zip(SIZES, SCALES, strict=True))
    return [
        Adapted(out, bias, n + 1, scale) if n in adapted else nn.Linear(5, out, bias, dtype=torch.float64)
        for n, (out, scale) in sizes
    ]


def outcome(work, inputs):
    """Outputs and all gradients."""
    y = work()
    return [y.detach(), *torch.autograd.grad((y * torch.arange(y.numel()).view_as(y).sin()).sum(), inputs)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("adapted", [(), (0, 2), (0, 1, 2)])
def test_one_product_is_the_layers_one_by_one_with_their_gradients(adapted, bias):
    made = layers(adapted, bias)
    x, add_to = (torch.randn(2, 3, width, dtype=torch.float64, requires_grad=True) for width in (5, sum(SIZES)))
    weights = [p for layer in made for p in layer.parameters()]
    wanted = outcome(lambda: add_to + torch.cat([layer(x) for layer in made], dim=-1), [x, add_to, *weights])
    before = outcome(lambda: product(x, made, add_to), [x, add_to, *weights])
    assert side_by_side([layer.weight for layer in made]) is None
    lay_side_by_side(made)
    assert torch.equal(side_by_side([layer.weight for layer in made]), torch.cat([layer.weight for layer in made]))
    after = outcome(lambda: product(x, made, add_to), [x, add_to, *weights])
    for one, two, three in zip(wanted, before, after, strict=True):
        torch.testing.assert_close(two, one, atol=1e-12, rtol=0)
        torch.testing.assert_close(three, one, atol=1e-12, rtol=0)
    with torch.no_grad():
        torch.testing.assert_close(product(x, made, add_to), wanted[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_without_gradients_is_torchs_bit_for_bit(dtype):
    draw = torch.Generator().manual_seed(0)
    for size in (1, 7, 48, 192, 384, 1000, 2048):
        x, weight = (torch.randn(*shape, generator=draw, dtype=dtype) for shape in ((4, 34, size), (size,)))
        for rows in (x, x[:1, -1:], x[:, ::2], 1e6 * x.transpose(0, 1)):
            for scale in (weight, None):
                with torch.no_grad():
                    assert torch.equal(rms_norm(rows, scale, 1e-5), F.rms_norm(rows, (size,), scale, 1e-5))


@pytest.mark.parametrize("activation", [F.silu, torch.tanh])
def test_in_place_operations_of_acting_change_no_result(activation):
    torch.manual_seed(0)
    gated, plain = GatedMLP(6, 10, activation), MLP(6, 10)
    x, add_to = torch.randn(2, 3, 6), torch.randn(2, 3, 6)
    x_before, sum_before = x.clone(), add_to.clone()
    wanted = gated(x, add_to), gated(x), plain(x)
    assert torch.equal(add_to, sum_before)
    with torch.no_grad():
        for result, other in zip((gated(x, add_to), gated(x), plain(x)), wanted, strict=True):
            torch.testing.assert_close(
                result, other, atol=1e-6, rtol=1e-6
            )  # kernels of other shapes may round otherwise
    assert torch.equal(x, x_before)


@pytest.mark.parametrize("name", ["openvla", "pi0", "smolvla"])
def test_weights_lie_side_by_side_in_all_copies_and_a_learners_stay_where_they_are(name):
    learner, actor = build(name), build(name, 1)
    actor.use_weights({name: weight.clone() for name, weight in learner.state_dict().items()})  # as from elsewhere
    sharing = build(name, 2)
    sharing.use_weights(learner.state_dict())
    groups = [
        [f"{where}.{layer}" for layer in names]
        for where, module in learner.named_modules()
        if isinstance(module, SideBySide)
        for names in module.joint
        if len({(w.shape[1:], w.requires_grad) for w in (getattr(module, layer).weight for layer in names)}) == 1
    ]
    assert groups
    for policy in (learner, actor, sharing, learner.reference()):
        for names in groups:
            assert side_by_side([policy.get_submodule(name).weight for name in names]) is not None, names
    own, shared = learner.state_dict(), sharing.state_dict()
    assert all(shared[name].data_ptr() == weight.data_ptr() for name, weight in own.items())


def test_a_decision_of_openvla_is_at_most_4000_kernels():
    assert count("openvla")["decision"].total() <= 4000


@pytest.mark.parametrize("name", ["openvla", "openvla_oft", "pi0", "pi05", "smolvla"])
def test_acting_decides_like_a_learners_pass_whose_products_are_apart_and_whose_attention_has_a_mask(name):
    """Without padding acting needs no mask, multiplies by joint weights and overwrites its own numbers."""
    policy, obs = build(name, dtype="float64"), observe(3, texts=TEXTS[:1])
    acted, seen = policy.act(obs, noise(policy, 3)), policy.as_tensors(obs)
    assert IS_WORD not in seen["instruction"]
    seen["instruction"][IS_WORD] = torch.ones_like(seen["instruction"][IDS], dtype=torch.bool)
    learned = scored(policy, seen, acted)
    for part in ("logprobs", "values"):
        torch.testing.assert_close(
            getattr(learned, part).detach(), torch.from_numpy(getattr(acted, part)), atol=1e-9, rtol=0
        )
