"""Tiny language models, and what an engine needs of a policy that has one."""

from types import SimpleNamespace

import torch
import transformers

from embodied.core.types import SamplingRule
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Request, make_engine

STOP = 1
WORDS = 50


def gpt2(dtype=torch.float64):
    """GPT-2's shape."""
    sizes = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=STOP)
    return made(transformers.GPT2LMHeadModel, config, dtype)


def llama_like(name, dtype=torch.float32, tied=False, words=WORDS, heads=4, **more):
    """Llama's or Qwen3's shape: rotary positions, and fewer heads of keys than of queries."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=words,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=STOP,
        **more,
    )
    return made(getattr(transformers, f"{name}ForCausalLM"), config, dtype)


def qwen3(dtype=torch.float32, **sizes):
    return llama_like("Qwen3", dtype, **sizes)


def qwen3_moe(dtype=torch.float32):
    """Qwen3's shape with experts."""
    experts = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return llama_like("Qwen3Moe", dtype, **experts)


def llama(dtype=torch.float32, **sizes):
    return llama_like("Llama", dtype, **sizes)


def made(kind, config, dtype):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = kind(config).to(dtype).eval()
        for parameter in model.parameters():  # unlike fresh ones, these prefer some tokens to others
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def engine_of(model, stops=(STOP,), **options):
    return make_engine(LanguageConfig(name="language", **options), policy_of(model, stops, options.get("max_length")))


def policy_of(model, stops=(STOP,), max_length=None):
    longest = max_length or model.config.max_position_embeddings
    tokenizer = SimpleNamespace(stops=frozenset(stops))
    return SimpleNamespace(model=model, tokenizer=tokenizer, max_length=longest, device=torch.device("cpu"), sight=None)


def answers(engine, requests, temperature=1.0, seed=3, stream="train", on_answer=lambda count: None, **rule):
    """All answers of a round, by key; `requests` are added as there is room."""
    engine.begin(1, seed, stream, SamplingRule(temperature, **rule))
    return drained(engine, requests, on_answer)


def drained(engine, requests, on_answer=lambda count: None):
    requests, found = list(requests), {}
    while requests or engine.running:
        while requests and engine.room:
            engine.add(requests.pop(0))
        for answer in engine.step():
            assert answer.key not in found
            found[answer.key] = answer
            on_answer(len(found))
    return found


def question(number, tokens, max_tokens=20):
    return Request(number, tokens, max_tokens, episode=number)


def logprobs_by_the_model(model, request, answer, temperature=1.0):
    """What one forward pass over the whole conversation says about the answer's tokens."""
    ids = torch.tensor([[*request.tokens, *map(int, answer.tokens)]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.tokens) - 1 : -1].double() / temperature
    scores = logits.log_softmax(-1)
    return scores.gather(1, ids[0, len(request.tokens) :, None])[:, 0].numpy()
