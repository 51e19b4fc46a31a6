"""New tokens per second of the engines of language policies: ours, transformers' `generate()` and, if installed, vLLM.

The same model, prompts and lengths for all. Answers are of unequal length, as reasoning is: most end early, some use
all they may. `generate()` gets one batch, padded on the left, and what it writes past an answer's end does not count.
Every contestant has a process of its own, which waits while others write; rounds of all are interleaved, and medians
count. Ours and `generate()` run with one torch thread and with one for each core, vLLM as it sets itself up: the better
of each stands in the table.

    python -m benchmarks.engines
    python -m benchmarks.engines --requests 16 64 --rounds 11 --model large
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, ROOT, code_commit, environment, machine, markdown, write_json

OURS, GENERATE, VLLM = "transformers", "generate", "vllm"
NAMES = {OURS: "ours", GENERATE: "generate()", VLLM: "vLLM"}
TOOK = "took "
SHORTEST, LONGEST, PROMPT = 4, 128, 48  # tokens of an answer, and of a prompt at most
SIZES = {"tiny": (128, 3, 4, 384, 100), "large": (512, 8, 8, 1536, 8000)}  # width, layers, heads, MLP, vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--contestant", nargs=2, metavar=("ENGINE", "THREADS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.contestant:
        write_when_asked(*options.contestant, options.model, options.requests[0])
        return
    rows = [row for count in options.requests for row in compare(options.model, count, options.rounds)]
    print(markdown([*rows[0]], [[str(cell) for cell in row.values()] for row in rows]))
    found = {"given": {"requests": options.requests, "rounds": options.rounds, "model": options.model}, "rows": rows}
    write_json(RESULTS / f"engines-{options.model}.json", found | {"machine": machine(), "commit": code_commit()})


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


class Contestant:
    """A process that writes the answers whenever it is asked to, and says how long it took."""

    def __init__(self, engine: str, threads: int, model: str, count: int) -> None:
        command = [sys.executable, "-m", "benchmarks.engines", "--model", model, "--requests", str(count)]
        env = environment() | {"OMP_WAIT_POLICY": "PASSIVE"}
        self.process = subprocess.Popen(
            [*command, "--contestant", engine, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=env,
            cwd=ROOT,
        )

    def seconds(self) -> float:
        self.process.stdin.write("write\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith(TOOK):
                return float(line.removeprefix(TOOK))
        raise SystemExit(f"{self.process.args} ended with {self.process.wait(60)}")

    def end(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def write_when_asked(engine: str, threads: str, model: str, count: int) -> None:
    """The contestant's side: a line of seconds for every line that comes in."""
    import torch

    if int(threads):
        torch.set_num_threads(int(threads))
    policy = make_policy(model)
    asked = questions(count, policy.model.config.vocab_size)
    write = by_generate(policy.model) if engine == GENERATE else by_engine(policy, count, engine)
    write(asked)  # what is compiled or allocated at first does not count
    for _ in sys.stdin:
        started = time.perf_counter()
        write(asked)
        print(f"{TOOK}{time.perf_counter() - started}", flush=True)


def compare(model: str, count: int, rounds: int) -> list[dict[str, Any]]:
    cores = len(os.sched_getaffinity(0))
    ways = {(name, threads): name for name in (OURS, GENERATE) for threads in {1, cores}}
    ways |= {(VLLM, 0): VLLM} if find_spec(VLLM) else {}
    wanted = sum(request.max_tokens for request in questions(count, SIZES[model][-1]))
    contestants = {way: Contestant(*way, model, count) for way in ways}
    rates: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, one in contestants.items():
            took = one.seconds()
            if number:
                rates[way].append(wanted / took)
    for one in contestants.values():
        one.end()
    best = {
        name: max((way for way in ways if way[0] == name), key=lambda way: median(rates[way])) for name in ways.values()
    }
    ours = median(rates[best[OURS]])
    return [
        {
            "requests": count,
            "engine": NAMES[name],
            "threads": way[1] or "its own choice",
            "new tokens/s": round(median(rates[way])),
            "lowest": round(min(rates[way])),
            "highest": round(max(rates[way])),
            "ours is faster by": round(ours / median(rates[way]), 2),
        }
        for name, way in best.items()
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
