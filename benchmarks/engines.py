"""New tokens per second of our engine beside transformers' `generate()`: the same model, prompts and lengths.

    python -m benchmarks.engines
    python -m benchmarks.engines --model FOLDER --requests 64 --rounds 21

Answers are of equal length, or have a long tail, as reasoning has: most end early, some use all they may. `generate()`
gets one batch, padded on the left, and what it writes past an answer's end does not count. Both write in turns, with
one torch thread and with one for each core; the better of each stands in the table.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.common import code_commit, machine, markdown
from embodied.core.types import ActionSpec, EnvSpec, SamplingRule
from embodied.policies import make_policy
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Engine, Request, make_engine

SPEC = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, has_success=True, text=True)
SHORTEST, EQUAL, LONGEST, PROMPT = 4, 64, 128, 48  # tokens of an answer, and of a prompt at most
HEADER = ["answers", "requests", "ours, tokens/s", "generate(), tokens/s", "ours is faster by (each round)"]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--model", type=Path, help="folder of a language model; else a tiny one with fresh weights")
    ask.add_argument("--answers", choices=("equal", "tail"), nargs="+", default=["equal", "tail"])
    ask.add_argument("--requests", type=int, nargs="+", default=[16, 64])
    ask.add_argument("--rounds", type=int, default=11)
    asked = ask.parse_args()
    print(machine(), code_commit(), flush=True)
    rows, threads = [], sorted({1, len(os.sched_getaffinity(0))})
    for answers in asked.answers:
        for count in asked.requests:
            found = rates(make_model(asked.model, count), answers, count, asked.rounds, threads)
            rows.append(row(answers, count, found))
            print(markdown(HEADER, rows[-1:]), flush=True)
    print(markdown(HEADER, rows))


def make_model(folder: Path | None, count: int) -> Any:
    """A language policy with room for that many conversations. No token ends an answer."""
    which: dict[str, Any] = {"pretrained": str(folder)} if folder else {"preset": "tiny"}
    config = LanguageConfig(name="language", max_running=count, max_length=PROMPT + LONGEST, chat=False, **which)
    policy = make_policy(config, SPEC, 0).eval()
    policy.tokenizer.stops = frozenset()
    policy.model.generation_config.eos_token_id = None
    return policy


def questions(answers: str, count: int, words: int) -> list[Request]:
    """Prompts of unequal length, and how long each answer becomes: in a tail the logarithm is uniform."""
    draws = np.random.default_rng(count)
    tail = np.exp(draws.uniform(np.log(SHORTEST), np.log(LONGEST), count)).astype(int).tolist()
    lengths = [EQUAL] * count if answers == "equal" else [LONGEST, *tail[1:]]
    prompts = [draws.integers(0, words, draws.integers(8, PROMPT + 1)).tolist() for _ in range(count)]
    return [Request(i, prompt, length, i) for i, (prompt, length) in enumerate(zip(prompts, lengths))]


def rates(
    policy: Any, answers: str, count: int, rounds: int, threads: Sequence[int]
) -> dict[tuple[str, int], list[float]]:
    """Tokens per second of each round, by writer and number of torch threads."""
    asked = questions(answers, count, policy.model.config.vocab_size)
    config = LanguageConfig(name="language", max_running=count, max_length=PROMPT + LONGEST)
    engine, wanted = make_engine(config, policy), sum(request.max_tokens for request in asked)
    writers = {"ours": lambda: write(engine, asked), "generate": lambda: generate(policy.model, asked)}
    ways = [(name, number) for number in threads for name in writers]
    found: dict[tuple[str, int], list[float]] = {way: [] for way in ways}
    before = torch.get_num_threads()
    try:
        for turn in range(rounds + 1):  # what is allocated in the first does not count
            for name, number in ways:
                torch.set_num_threads(number)
                began = time.perf_counter()
                assert writers[name]() == wanted, f"{name} wrote other lengths"
                found[name, number] += [wanted / (time.perf_counter() - began)] if turn else []
    finally:
        torch.set_num_threads(before)
    return found


def write(engine: Engine, asked: list[Request]) -> int:
    """The number of tokens that our engine wrote."""
    engine.begin(1, 0, "train", SamplingRule())
    for request in asked:
        engine.add(request)
    tokens = 0
    while engine.running:
        tokens += sum(len(answer.tokens) for answer in engine.step())
    return tokens


def generate(model: Any, asked: list[Request]) -> int:
    """The number of tokens that `generate()` wrote and somebody asked for."""
    width, most = (max(sizes) for sizes in zip(*((len(request.tokens), request.max_tokens) for request in asked)))
    ids = torch.tensor([[0] * (width - len(request.tokens)) + list(request.tokens) for request in asked])
    mask = torch.tensor([[0] * (width - len(request.tokens)) + [1] * len(request.tokens) for request in asked])
    settings = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": most, "pad_token_id": 0}
    with torch.inference_mode():
        written = model.generate(ids, attention_mask=mask, **settings).shape[1] - width
    return sum(min(written, request.max_tokens) for request in asked)


def row(answers: str, count: int, found: dict[tuple[str, int], list[float]]) -> list[str]:
    """Medians of each writer with its better number of threads, and the ratio of each round."""
    best = {name: max((found[way] for way in found if way[0] == name), key=median) for name in ("ours", "generate")}
    ratios = sorted(ours / theirs for ours, theirs in zip(best["ours"], best["generate"]))
    spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return [answers, str(count), f"{median(best['ours']):,.0f}", f"{median(best['generate']):,.0f}", spread]


if __name__ == "__main__":
    main()
