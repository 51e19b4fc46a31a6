"""New tokens per second of the engines of language policies: ours, transformers' `generate()` and, if installed, vLLM.

The same model, prompts and lengths for all. Answers are of unequal length, as reasoning is: most end early, some use
all they may. `generate()` gets one batch, padded on the left, and what it writes past an answer's end does not count.
Rounds of all contestants are interleaved in one process; medians count.

    python -m benchmarks.engines
    python -m benchmarks.engines --requests 16 64 --rounds 5 --model large
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, code_commit, machine, markdown, write_json

SHORTEST, LONGEST, PROMPT = 4, 128, 48  # tokens of an answer, and of a prompt at most
SIZES = {"tiny": (128, 3, 4, 384, 100), "large": (512, 8, 8, 1536, 8000)}  # width, layers, heads, MLP, vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    options = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    policy = make_policy(options.model)
    rows = [row for count in options.requests for row in compare(policy, count, options.rounds)]
    print(markdown([*rows[0]], [[str(cell) for cell in row.values()] for row in rows]))
    found = {"given": vars(options), "rows": rows, "machine": machine(), "commit": code_commit()}
    write_json(RESULTS / f"engines-{options.model}.json", found)


def make_policy(size: str) -> Any:
    """A model with fresh weights in Qwen3's shape, and what an engine asks of its policy. No token ends an answer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    width, layers, heads, mlp, words = SIZES[size]
    config = Qwen3Config(
        vocab_size=words,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=width // heads,
        intermediate_size=mlp,
        max_position_embeddings=PROMPT + LONGEST,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).eval()
    tokenizer = SimpleNamespace(stops=frozenset())
    return SimpleNamespace(model=model, tokenizer=tokenizer, max_length=PROMPT + LONGEST, device=model.device)


def questions(count: int, words: int) -> list[Any]:
    """Prompts of unequal length, and how long each one's answer becomes: the logarithm is uniform."""
    from embodied.policies.language.engine import Request

    draws = np.random.default_rng(count)
    lengths = np.exp(draws.uniform(np.log(SHORTEST), np.log(LONGEST), count)).astype(int)
    lengths[0] = LONGEST
    prompts = [draws.integers(0, words, draws.integers(8, PROMPT + 1)).tolist() for _ in range(count)]
    return [Request(i, prompt, int(length), i) for i, (prompt, length) in enumerate(zip(prompts, lengths))]


def compare(policy: Any, count: int, rounds: int) -> list[dict[str, Any]]:
    asked = questions(count, policy.model.config.vocab_size)
    ways = {"ours": by_engine(policy, count, "transformers"), "generate()": by_generate(policy.model)}
    if vllm := by_vllm(policy, count):
        ways["vLLM"] = vllm
    for write in ways.values():
        write(asked)  # what is compiled or allocated at first does not count
    wanted = sum(request.max_tokens for request in asked)
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, write in ways.items():
            started = time.perf_counter()
            write(asked)
            rates[way].append(wanted / (time.perf_counter() - started))
    ours = median(rates["ours"])
    return [
        {
            "requests": count,
            "engine": way,
            "new tokens/s": round(median(found)),
            "lowest": round(min(found)),
            "highest": round(max(found)),
            "ours is faster by": round(ours / median(found), 2),
        }
        for way, found in rates.items()
    ]


def by_engine(policy: Any, count: int, name: str) -> Callable[[list[Any]], None]:
    from embodied.policies.config import LanguageConfig
    from embodied.policies.language.engine import make_engine

    engine = make_engine(LanguageConfig(name="language", engine=name, max_running=count), policy)
    engine.load(policy.model.state_dict(), 1)

    def write(asked: list[Any]) -> None:
        engine.begin(1, 0, "train", 1.0)
        for request in asked:
            engine.add(request)
        tokens = 0
        while engine.running:
            tokens += sum(len(answer.tokens) for answer in engine.step())
        assert tokens == sum(request.max_tokens for request in asked)

    return write


def by_vllm(policy: Any, count: int) -> Callable[[list[Any]], None] | None:
    from embodied.core.errors import ConfigError

    try:
        return by_engine(policy, count, "vllm")
    except ConfigError:
        return None


def by_generate(model: Any) -> Callable[[list[Any]], None]:
    import torch

    def write(asked: list[Any]) -> None:
        width = max(len(request.tokens) for request in asked)
        ids = torch.tensor([[0] * (width - len(r.tokens)) + r.tokens for r in asked])
        mask = torch.tensor([[0] * (width - len(r.tokens)) + [1] * len(r.tokens) for r in asked])
        most = max(request.max_tokens for request in asked)
        settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": most, "pad_token_id": 0}
        with torch.inference_mode():
            assert model.generate(ids, attention_mask=mask, **settings).shape[1] == width + most

    return write


if __name__ == "__main__":
    main()
