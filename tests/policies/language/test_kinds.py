"""Folders of every kind of model, as transformers writes them, score and write as they do in transformers."""

import numpy as np
import pytest
import torch
import transformers
from language_models import answers
from safetensors.torch import load_file, save_file
from tiny_language import SPEC, build, inputs_of, theirs, write
from tiny_language import answers as answers_to_score

from embodied.core.errors import CheckpointError, ConfigError
from embodied.learners.config import LearnerConfig
from embodied.learners.memory_estimate import conversations, count
from embodied.policies import load_policy, policy_class
from embodied.policies.language import folder as files
from embodied.policies.language.engine import Request, make_engine

WINDOW = 4  # tokens that layers with a sliding window see
WORDS = {"vocab_size": 100, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}
PLAIN = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
SIZES = PLAIN | {"num_key_value_heads": 2, "intermediate_size": 48}
WIDE = SIZES | {"head_dim": 16}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6}
ROUTED = EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
DEEPSEEK = SIZES | LATENT | ROUTED | {"num_key_value_heads": 4}
KINDS = {
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "GPTNeoX": PLAIN | {"intermediate_size": 48},
    "OPT": PLAIN | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Llama": SIZES,
    "Mistral": SIZES | {"sliding_window": WINDOW},
    "Qwen2": SIZES,
    "Qwen3": WIDE,
    "Phi3": SIZES,
    "Olmo2": SIZES,
    "SmolLM3": SIZES,
    "Gemma": WIDE,
    "Gemma2": WIDE | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "Gemma3Text": WIDE | {"num_hidden_layers": 7, "sliding_window": WINDOW},
    "Olmo3": SIZES | {"num_hidden_layers": 4, "sliding_window": WINDOW},
    "GptOss": WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "Granite": SIZES | {"logits_scaling": 2.0, "embedding_multiplier": 3.0},
    "Cohere": SIZES,
    "Mixtral": SIZES | {"num_local_experts": 4},
    "Qwen2Moe": SIZES | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": WIDE | EXPERTS | {"num_experts": 12},
    "DeepseekV2": DEEPSEEK,
    "DeepseekV3": DEEPSEEK,
}
# Layers of every form: learned positions, one matrix for query, key and value, windows, sinks, experts, latent keys.
EVERYDAY = "GPT2 OPT Llama Phi3 Gemma2 Gemma3Text GptOss Mixtral Qwen3Moe DeepseekV3".split()
PROMPT, ANSWER = [5, 9, 13, 40, 77], [8, 22, 31, 60]


def publish(folder, kind):
    return write(folder, getattr(transformers, f"{kind}Config")(**WORDS, **KINDS[kind]))


def stored(folder):
    return {name: tensor.shape for name, tensor in load_file(folder / "model.safetensors").items()}


@torch.no_grad()
def logprobs(policy):
    return policy(inputs_of((0, [(False, PROMPT), (True, ANSWER)]))).logprobs[len(PROMPT) :, 0, 0]


@torch.no_grad()
def expected(model, answer=tuple(ANSWER)):
    likely = model(torch.tensor([[*PROMPT, *answer]])).logits.log_softmax(-1)[0, len(PROMPT) - 1 : -1]
    return likely.gather(1, torch.tensor(answer)[:, None])[:, 0]


@pytest.mark.parametrize(
    "kind", [kind if kind in EVERYDAY else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_a_folder_of_any_kind_scores_writes_and_is_saved_as_in_transformers(kind, tmp_path):
    policy = build(pretrained=str(publish(tmp_path / "origin", kind)), max_tokens=6)
    model = theirs(tmp_path / "origin", attention="eager")
    torch.testing.assert_close(logprobs(policy), expected(model), atol=1e-5, rtol=0)
    counted = count(
        policy_class("language").for_memory_estimate(policy.config, SPEC), LearnerConfig(), conversations(64)
    )
    assert counted.num_weights == sum(p.numel() for p in policy.parameters()) and counted.activations > 0

    engine = make_engine(policy.config, policy)
    (answer,) = answers(engine, [Request(0, PROMPT, 6, 0)], 0.0).values()
    likely = expected(model, tuple(answer.tokens.tolist()))
    np.testing.assert_allclose(answer.logprobs, likely, atol=1e-5)

    with torch.no_grad():
        next(policy.parameters()).mul_(1.5)
    policy.save_pretrained(tmp_path / "ours")
    policy.save_published(tmp_path / "published")
    assert stored(tmp_path / "published") == stored(tmp_path / "origin")  # by names that vLLM knows
    changed = logprobs(policy)
    assert (changed - expected(model)).abs().max() > 1e-3
    for folder in ("ours", "published"):
        torch.testing.assert_close(expected(theirs(tmp_path / folder, attention="eager")), changed, atol=1e-5, rtol=0)
    assert torch.equal(logprobs(load_policy(tmp_path / "ours")), changed)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["Mistral", "Gemma2", "Gemma3Text", "Olmo3", "GptOss"])
def test_windows_caps_and_sinks_count_in_packed_rows_and_in_later_turns(kind, tmp_path):
    policy = build(pretrained=str(publish(tmp_path, kind)), max_tokens=6)
    model = theirs(tmp_path, attention="eager")
    said = [*answers_to_score([8, 22, 31, 60], [9], [7] * 9, prompt=PROMPT), (1, [(False, [5]), (True, ANSWER)])]
    inputs = inputs_of(*said)
    scores = policy(inputs).logprobs.ravel()[torch.from_numpy(inputs["mask"].ravel())]
    texts = [[token for _, tokens in parts for token in tokens] for _, parts in said]
    likely = [model(torch.tensor([text])).logits[0].log_softmax(-1) for text in texts]
    known = [
        likely[n][at - 1, text[at]] for n, text in enumerate(texts) for at in range(len(said[n][1][0][1]), len(text))
    ]
    torch.testing.assert_close(scores, torch.stack(known), atol=1e-5, rtol=0)

    engine = make_engine(policy.config, policy)
    (first,) = answers(engine, [Request(0, PROMPT, 6, 0, keep=True)], 0.0).values()
    text = [*PROMPT, *first.tokens.tolist(), 5, 9, 13]
    for request in (Request(1, text, 6, 0), Request(2, text, 6, 1)):
        engine.add(request)
    found = []
    while engine.running:
        found += engine.step()
    assert len(found) == 2
    for answer in found:
        likely = model(torch.tensor([[*text, *answer.tokens.tolist()]])).logits[0].log_softmax(-1)
        places = np.arange(len(text), len(text) + len(answer.tokens))
        np.testing.assert_allclose(answer.logprobs, likely[places - 1, answer.tokens], atol=1e-5)


def test_adapters_beside_experts_are_saved_without_these(tmp_path):
    policy = build(pretrained=str(publish(tmp_path / "origin", "Mixtral")), lora_rank=2)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            parameter.normal_(0, 0.1) if "lora_B" in name else None
    policy.save_pretrained(tmp_path / "ours")
    assert all("lora_" in name for name in stored(tmp_path / "ours"))
    assert torch.equal(logprobs(load_policy(tmp_path / "ours")), logprobs(policy))
    policy.save_published(tmp_path / "merged")
    assert stored(tmp_path / "merged") == stored(tmp_path / "origin")
    torch.testing.assert_close(
        expected(theirs(tmp_path / "merged", attention="eager")), logprobs(policy), atol=1e-5, rtol=0
    )


def test_a_folder_with_an_expert_too_few_is_refused(tmp_path):
    folder = publish(tmp_path, "Qwen3Moe")
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("model.layers.0.mlp.experts.11.up_proj.weight")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.experts\.gate_up_proj (cannot be|is) made of"):
        build(pretrained=str(folder))


@pytest.mark.parametrize(
    ("kind", "sizes", "reason"),
    [
        ("Mamba", {"hidden_size": 32, "num_hidden_layers": 2}, "a mamba cannot be run here"),
        ("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4}, "a gptj cannot be run here"),
    ],
)
def test_models_of_which_packed_rows_would_be_wrong_are_refused(kind, sizes, reason, tmp_path):
    folder = write(tmp_path, getattr(transformers, f"{kind}Config")(**WORDS, **sizes))
    with pytest.raises(ConfigError, match=reason):
        build(pretrained=str(folder))


def test_a_model_that_is_computed_otherwise_than_by_transformers_is_refused(tmp_path, monkeypatch):
    """With the embeddings of a Gemma 3 scaled by the wrong number."""
    folder, allocate = publish(tmp_path, "Gemma3Text"), files.allocate

    def forgetful(model):
        allocate(model)
        model.get_input_embeddings().embed_scale.fill_(1.0)

    monkeypatch.setattr(files, "allocate", forgetful)
    with pytest.raises(CheckpointError, match=r"gemma3_text, whose log-probs are computed otherwise .* nats apart"):
        build(pretrained=str(folder))
