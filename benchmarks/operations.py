"""Counts the kernels that a GPU would launch for one decision and one gradient step of the large policies.

    python -m benchmarks.operations                       # all cases, in two minutes of a CPU
    python -m benchmarks.operations openvla smolvla_step  # some cases

The policies have their published depth and narrow layers, since the number of kernels does not depend on the width.
Kernels are counted as operations of torch that compute or copy; views and allocations are free. Attention and RMSNorm
count as one kernel in each direction, as on a GPU with torch's fused kernels.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_card import gradient_step, policy_of_size, seen
from embodied.algorithms.config import PPOConfig
from embodied.core.types import ActionSpec, EnvSpec
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.policies.config import POLICY_CONFIGS
from embodied.policies.openvla import folder as openvla
from embodied.policies.pi0 import policy as pi0
from embodied.policies.smolvla import policy as smolvla
from embodied.policies.vla import layers

FUSED = ("scaled_dot_product_attention", "rms_norm")  # functions of torch.nn.functional
FREE = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh")
FREE += ("_local_scalar_dense", "_to_cpu")
ROBOT = EnvSpec(ActionSpec(7), state_dim=8, images={"camera": (64, 64, 3)}, instruction=True)
HALF, ADAPTED = {"dtype": "bfloat16"}, {"dtype": "bfloat16", "lora_rank": 2}
STEPS = {"dtype": "bfloat16", "steps": 10}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "openvla_float32": ("openvla", {}),
    "openvla": ("openvla", HALF),
    "openvla_lora": ("openvla", ADAPTED),
    "openvla_oft": ("openvla_oft", HALF),
    "pi0": ("pi0", HALF),
    "smolvla": ("smolvla", STEPS),
    "openvla_step": ("openvla", ADAPTED),
    "openvla_oft_step": ("openvla_oft", ADAPTED),
    "pi0_step": ("pi0", ADAPTED),
    "smolvla_step": ("smolvla", HALF),
}


class Kernels(TorchDispatchMode):
    """Counts kernels by name while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name not in FUSED:
            with self:
                if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return result
        aliases = [each.alias_info for each in func._schema.returns]
        is_view = any(info is not None and not info.is_write for info in aliases)
        self.counts[name] += not (is_view or name in FREE)
        return func(*args, **kwargs)


class OneKernel(torch.autograd.Function):
    """A function that is one kernel forwards and one backwards; its own operations are not counted."""

    @staticmethod
    def forward(ctx: Any, kernels: Kernels, name: str, work: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        ctx.kernels, ctx.name = kernels, name
        kernels.counts[name] += 1
        with uncounted(), torch.enable_grad():
            ctx.inputs = [None if each is None else each.detach().requires_grad_(each.requires_grad) for each in inputs]
            ctx.result = work(*ctx.inputs)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.kernels.counts[f"{ctx.name}_backward"] += 1
        wanted = [each for each in ctx.inputs if each is not None and each.requires_grad]
        with uncounted():
            found = iter(torch.autograd.grad(ctx.result, wanted, gradient))
        return (
            None,
            None,
            None,
            *(next(found) if each is not None and each.requires_grad else None for each in ctx.inputs),
        )


def uncounted() -> Any:
    return torch.utils._python_dispatch._disable_current_modes()


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Counts the kernels launched inside."""
    kernels, plain = Kernels(), {name: getattr(F, name) for name in FUSED}

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        work = lambda *each: plain["scaled_dot_product_attention"](*each, **options)  # noqa: E731
        return OneKernel.apply(kernels, "attention", work, q, k, v, mask)

    def rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
        work = lambda x, weight: plain["rms_norm"](x, shape, weight, eps)  # noqa: E731
        return OneKernel.apply(kernels, "rms_norm", work, x, weight)

    whole = patch.multiple(F, scaled_dot_product_attention=attention, rms_norm=rms_norm)
    with whole, patch.object(layers, "cpu_rms_norm", rms_norm), kernels:
        yield kernels.counts


@contextmanager
def published_depth() -> Iterator[None]:
    """Inside, `policy.preset=tiny` has as many layers as the published models."""
    text = openvla.TINY["text_config"] | {"num_hidden_layers": 32}
    towers = {name: replace(tower, depth=openvla.TOWERS[full].depth) for name, tower, full in zip(
        openvla.TINY["timm_model_ids"], (openvla.TOWERS[name] for name in openvla.TINY["timm_model_ids"]),
        openvla.FULL["timm_model_ids"], strict=True)}  # fmt: skip
    gemmas = {"tiny_language": "gemma_2b", "tiny_expert": "gemma_300m"}
    stacks = {tiny: replace(pi0.GEMMAS[tiny], depth=pi0.GEMMAS[full].depth) for tiny, full in gemmas.items()}
    vision, shuffle, language, vocab = smolvla.MODELS["tiny"]
    full = smolvla.MODELS[smolvla.FULL["vlm_model_name"]]
    small = replace(vision, depth=full[0].depth), shuffle, language, vocab
    with ExitStack() as patched:
        patched.enter_context(patch.dict(openvla.TOWERS, towers))
        patched.enter_context(patch.dict(openvla.PRESETS, tiny=openvla.TINY | {"text_config": text}))
        patched.enter_context(patch.dict(pi0.GEMMAS, stacks))
        patched.enter_context(patch.object(pi0, "TINY_VISION", replace(pi0.TINY_VISION, depth=pi0.SO400M.depth)))
        patched.enter_context(patch.dict(smolvla.MODELS, tiny=small))
        patched.enter_context(patch.dict(smolvla.TINY, num_vlm_layers=smolvla.FULL["num_vlm_layers"]))
        yield


def policy_for(name: str, options: dict[str, Any]) -> Any:
    """A policy of the published depth with random weights."""
    with published_depth():
        policy = policy_of_size(name, ROBOT, POLICY_CONFIGS[name](name=name, **options))
    for tensor in policy.parameters():
        tensor.detach().normal_(0, 0.01) if tensor.is_floating_point() else tensor.zero_()
    return policy.eval()


def kernels_of_decision(policy: Any, rows: int = 1) -> Counter[str]:
    obs, noise = seen(policy, rows), np.random.default_rng(1).random((rows, policy.noise_spec().width))
    policy.act(obs, noise)  # allocates the KV cache
    with counted() as counts:
        policy.act(obs, noise)
    return counts


def kernels_of_step(policy: Any, items: int) -> Counter[str]:
    """One gradient step with `items` passes of one item, with activation checkpointing."""
    learn = gradient_step(policy, items, PPOConfig(rollout_decisions=1, epochs=1, minibatch_size=items))
    model = Model(policy, LearnerConfig(micro_batch_size=1, checkpoint_activations=True))
    learn(model)
    with counted() as counts:
        learn(model)
    return counts


def count(case: str) -> dict[str, Counter[str]]:
    """The kernels of a case by name: of a decision, or of a pass and of the step around it."""
    name, options = CASES[case]
    if not case.endswith("_step"):
        return {"decision": kernels_of_decision(policy_for(name, options))}
    one, two = (kernels_of_step(policy_for(name, options), items) for items in (1, 2))
    one_pass = Counter({kernel: two[kernel] - one[kernel] for kernel in two})
    return {"pass": one_pass, "rest of the step": one - one_pass}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--most", type=int, default=6, help="kernels to name for each case")
    asked = parser.parse_args()
    print("| case | of | kernels | most frequent |\n| --- | --- | --- | --- |")
    for case in asked.cases or CASES:
        for part, kernels in count(case).items():
            named = ", ".join(f"{name} {times}" for name, times in kernels.most_common(asked.most))
            print(f"| {case} | {part} | {kernels.total()} | {named} |", flush=True)


if __name__ == "__main__":
    main()
