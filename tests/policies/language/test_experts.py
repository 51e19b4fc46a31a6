"""Mixtures of experts: their loads are logged by layer, and a bias evens them out."""

import numpy as np
import pytest
import torch
import transformers
from talking_runs import Talk
from tiny_language import SIZES, answers, build, inputs_of, write

from embodied.core.errors import ConfigError
from embodied.policies.language.experts import max_violation

WORDS = {"vocab_size": 100, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, "max_position_embeddings": 64}
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
ROUTED = FEW | {"n_routed_experts": 12, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 2}
KINDS = {
    "Qwen3Moe": FEW | {"num_experts": 12, "head_dim": 16},
    "Mixtral": {"num_local_experts": 12},
    "DeepseekV3": LATENT | ROUTED | {"num_key_value_heads": 4},
}


def publish(folder, kind):
    return write(folder, getattr(transformers, f"{kind}Config")(**WORDS, **SIZES | KINDS[kind]))


def chosen_alone(policy, conversations):
    """How many tokens each expert of each layer gets where every conversation goes through the model by itself."""
    found, handles = [[] for _ in policy.experts.routers], []
    for layer, router in enumerate(policy.experts.routers):
        handles.append(router.register_forward_hook(lambda _, __, output, layer=layer: found[layer].append(output[-1])))
    with torch.no_grad():
        for _, parts in conversations:
            policy.model(torch.tensor([[token for _, some in parts for token in some]]))
    for handle in handles:
        handle.remove()
    return [np.bincount(torch.cat(each).flatten(), minlength=12) for each in found]


def test_tokens_of_experts_are_counted_without_padding_and_only_where_gradients_are_taken(tmp_path):
    policy = build(pretrained=str(publish(tmp_path / "moe", "Qwen3Moe")))
    talks = [*answers([8, 22, 31]), *answers([9] * 40, prompt=(1, 2), group=1)]  # packed, with places left over
    loads = [torch.from_numpy(each).double() for each in chosen_alone(policy, talks)]
    with torch.no_grad():
        policy(inputs_of(*talks))
    policy(inputs_of(*talks)).logprobs.sum().backward()
    expected = {f"max_violation_{layer}": max_violation(load) for layer, load in enumerate(loads)}
    assert policy.end_step(lambda counts: counts) == {"max_violation": max(expected.values())} | expected
    assert set(policy.end_step(lambda counts: counts).values()) == {0.0}, "counts begin anew"


@pytest.mark.parametrize(("dtype", "products"), [("float32", 2), ("bfloat16", 2), ("float64", 0)])
def test_a_layers_experts_are_computed_as_two_grouped_products(dtype, products, monkeypatch):
    """PyTorch has none in double precision: there experts are computed one by one."""
    product, calls = torch.nn.functional.grouped_mm, []
    monkeypatch.setattr(
        torch.nn.functional, "grouped_mm", lambda *told, **more: calls.append(0) or product(*told, **more)
    )
    policy = build(preset="tiny_moe", dtype=dtype)
    policy(inputs_of(*answers([8, 22, 31]))).logprobs.sum().backward()
    assert len(calls) == products * len(policy.experts.routers)


@pytest.mark.parametrize("kind", ["Qwen3Moe", pytest.param("Mixtral", marks=pytest.mark.slow), "DeepseekV3"])
def test_a_bias_evens_out_the_loads(kind, tmp_path):
    policy = build(pretrained=str(publish(tmp_path / "moe", kind)), expert_bias_rate=0.01)
    plain = build(pretrained=str(tmp_path / "moe"))
    talks = inputs_of(*answers(*np.random.default_rng(0).integers(4, 99, (20, 30)).tolist()))
    with torch.no_grad():
        torch.testing.assert_close(policy(talks).logprobs, plain(talks).logprobs)
    uneven = []
    for _ in range(40):
        policy(talks)
        uneven.append(policy.end_step(lambda counts: counts)["max_violation"])
    assert min(uneven[-5:]) < 0.4 * uneven[0]


def test_a_mixture_of_experts_learns_and_resumes_with_its_biases(tmp_path):
    """Qwen3-MoE's shape: acted with and scored alike, balanced on the way, MaxViolation in metrics and report."""
    options = [f"policy.pretrained={publish(tmp_path / 'moe', 'Qwen3Moe')}", "policy.preset=tiny", "algo.lr=0.003"]
    options += (
        "policy.expert_bias_rate=0.01 algo.adam_eps=1e-8 env.kwargs={} policy.max_length=40 policy.dtype=float32"
    ).split()
    with Talk(tmp_path / "run", *options) as run:
        rows = run.some(4)
        weights = run.weights()
    biases = {name: np.asarray(blob.data) for name, blob in weights.items() if name.endswith("e_score_correction_bias")}
    assert len(biases) == 2 and all(np.abs(bias).max() > 0.009 for bias in biases.values())
    numbers = [row[1] for row in rows]
    assert all(each["train/logprob_gap"] < 1e-4 for each in numbers), "the engine routes with the learner's biases"
    assert {"train/max_violation", "train/max_violation_0", "train/max_violation_1"} <= numbers[0].keys()


def test_expert_biases_are_refused_where_the_model_or_engine_cannot_use_them(tmp_path):
    dense, sparse = write(tmp_path / "dense", transformers.Qwen3Config(**WORDS, **SIZES)), publish(tmp_path, "Qwen3Moe")
    with pytest.raises(ConfigError, match="balances experts, and a qwen3 has none; leave it out"):
        build(pretrained=str(dense), expert_bias_rate=0.01)
    with pytest.raises(ConfigError, match=r"a bias that policy\.engine=vllm does not know"):
        build(pretrained=str(sparse), expert_bias_rate=0.01, engine="vllm")
    with pytest.raises(ConfigError, match="train without it to publish"):
        build(pretrained=str(sparse), expert_bias_rate=0.01).save_published(tmp_path / "theirs")
