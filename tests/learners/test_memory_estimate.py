"""What a learner needs, counted without memory, against what one holds."""

import gc
import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from embodied.algorithms.config import PPOConfig
from embodied.config.recipe import load
from embodied.core.types import ActionSpec, EnvSpec
from embodied.learners.config import LearnerConfig
from embodied.learners.memory_estimate import Memory, count, estimate, kept_by_pass, made_up, unsharded_gradient
from embodied.learners.model import Model, PolicyOptimizer
from embodied.policies import make_policy
from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
from embodied.runtime.collective import Alone

SPEC = EnvSpec(ActionSpec(7), state_dim=8, images={"top": (64, 64, 3)}, instruction=True)


def build(kind, **options):
    return make_policy(kind(**options), SPEC, 0)


def held(policy, config):
    """Bytes that a real update holds: weights, training state with the gradients on their way, kept activations."""
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in policy.parameters()}
    model, optimizer = Model(policy, config), PolicyOptimizer(policy, PPOConfig(), Alone())

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (tensor.detach(), storage.nbytes())
        return tensor.detach()  # an output that its graph kept would stay for ever

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scores = model.score(made_up(policy, 2))
    (scores.logprobs.sum() + scores.values.sum()).backward()
    grads = sum(p.numel() * (4 if p.grad is None else p.grad.element_size()) for p in optimizer.params)
    optimizer.exchange(torch.zeros(1))
    optimizer.step(torch.ones(()), (1.0, 1.0))
    state = sum(t.numel() * t.element_size() for s in optimizer.adam.state.values() for t in s.values() if t.ndim)
    copies = sum(m.numel() * 4 for m, p in zip(optimizer.masters, optimizer.params) if p.dtype == torch.bfloat16)
    return state + copies + grads + optimizer.flat.numel() * 4, sum(size for _, size in kept.values())


@pytest.mark.parametrize(
    "options",
    [
        {"kind": OpenVLAConfig, "name": "openvla"},
        {"kind": OpenVLAConfig, "name": "openvla", "dtype": "bfloat16"},
        {"kind": OpenVLAOFTConfig, "name": "openvla_oft", "chunk": 4, "head": "l1", "proprio": True},
    ],
    ids=["openvla", "bfloat16", "oft"],
)
def test_the_memory_estimate_equals_the_memory_of_a_small_learner(options):
    config = LearnerConfig()
    training, activations = held(build(**options), config)
    counted = count(build(**options), config, made_up(build(**options), 2))
    assert counted.training == pytest.approx(training, rel=0.01)
    assert 0.9 * activations <= counted.activations <= 1.25 * activations  # other kernels keep other things


def test_checkpointing_keeps_less_and_adapters_train_less():
    plain, half, language, again = (
        count(p, LearnerConfig(checkpoint_activations=which), made_up(p, 2))
        for which in (False, "half", "language", True)
        for p in (build(OpenVLAConfig, name="openvla"),)
    )
    assert again.activations < 0.5 * plain.activations and again.training == plain.training
    assert again.activations < min(half.activations, language.activations)
    assert max(half.activations, language.activations) < 0.9 * plain.activations


def test_activations_that_are_computed_again_are_counted_block_by_block():
    """As torch's allocator sees them, with the gradients that appear meanwhile."""
    policy, config = build(OpenVLAConfig, name="openvla", lora_rank=4), LearnerConfig(checkpoint_activations=True)
    model, inputs = Model(policy, config), made_up(policy, 8)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        scores = model.score(inputs)
        (scores.logprobs.sum() + scores.values.sum()).backward()
    moves = [each for each in watched.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = np.cumsum([each.nbytes() for each in sorted(moves, key=lambda each: each.start_ns())])
    counted = count(build(OpenVLAConfig, name="openvla", lora_rank=4), config, made_up(policy, 8))
    assert 0.9 * held.max() <= counted.activations + 4 * counted.num_trained <= 1.25 * held.max()


class Stack(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(count)
        )

    def blocks(self):
        return [*self.layers]

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows)
        return SimpleNamespace(logprobs=rows, values=rows[:, 0])


@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_block_counts_though_only_two_of_a_kind_are_passed_through(count):
    """A block keeps what its linear layer and its GELU read: 3 rows of 8 numbers each."""
    assert kept_by_pass(Stack(count).to("meta"), torch.zeros(3, 8, device="meta"), 0) == (
        count * 2 * 3 * 8 * 4,
        2 * 3 * 8 * 4,
    )


def test_the_memory_estimate_keeps_no_weights():
    policy = build(OpenVLAConfig, name="openvla").to("meta")
    weight = weakref.ref(next(policy.parameters()))
    kept_by_pass(policy, made_up(policy, 2), 0)
    del policy
    gc.collect()
    assert weight() is None


def test_a_reference_is_counted_as_a_copy_of_what_is_trained():
    recipe = "recipe=pointmass_grpo_openvla_oft_tiny"
    plain, compared = (estimate(load([recipe, f"algo.kl_coef={coef}"]).config) for coef in (0.0, 0.1))
    assert compared.total - plain.total == compared.reference == 4 * plain.num_trained
    assert "reference" in str(compared) and "reference" not in str(plain)


def test_memory_of_learners_with_shards_is_a_part_of_the_weights_and_the_whole_gradient():
    """10 weights of 2 bytes, 4 of them trained: two learners hold half of (20 - 8) + 5 * 4 * 4 bytes, the gradient of
    4 * 4, and 3 + 5 beside; half of the reference's 20 too."""
    memory = Memory(10, 4, weights=20, training=0, activations=5, trained=8, gathered=3, gradient=16)
    assert memory.sharded(2) == (12 + 80) // 2 + 16 + 3 + 5
    assert replace(memory, reference=20).sharded(2) == memory.sharded(2) + 10
    policy = build(OpenVLAConfig, name="openvla")
    step, each_pass = (unsharded_gradient(policy, each_pass) for each_pass in (False, True))
    assert step == 4 * sum(p.numel() for p in policy.parameters() if p.requires_grad) > each_pass > 0


@pytest.mark.slow
def test_the_full_size_is_counted_without_memory():
    found = estimate(load(["recipe=maniskill_ppo_openvla"]).config)
    assert found.num_weights == pytest.approx(7.6e9, rel=0.02) and found.num_trained < 0.15e9
    assert found.weights == pytest.approx(15.2e9, rel=0.02) and np.isfinite(found.activations)


@pytest.mark.parametrize("recipe", ["maniskill_ppo_openvla_tiny", "libero_ppo_openvla_tiny"])
def test_recipes_of_small_vlas_limit_memory_so_that_policy_and_learner_swap(recipe):
    config = load([f"recipe={recipe}"]).config
    found, limit = estimate(config), 1e9 * config.cluster.memory_gb
    alone = found.weights + 3 * 4 * found.num_trained  # with gradients and two averages
    assert alone < limit < alone + 0.233e6  # the keys and values of one env row
