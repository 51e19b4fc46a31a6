"""Tokens per second of one of our servers beside the same engine in this process; rounds in turns, equal tokens.

python -m benchmarks.served_tokens runs/sft-sums_sft-DATE/checkpoints/v000009/policy --requests 16 64
"""

import argparse
import os
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import code_commit, environment, markdown
from embodied.core.types import ActionSpec, EnvSpec, SamplingRule
from embodied.policies import make_policy
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Engine, Request, make_engine
from embodied.serving.config import TOKEN

SPEC = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, has_success=True, text=True)
WAYS = {  # sources of answers
    "in process": {},
    "http": {"engine": "http"},
    "http, gaps not compared": {"engine": "http", "gap_limit": None},
    "http, all answers verified": {"engine": "http", "verify": 1.0},
}


def seconds_and_tokens(engine: Engine, asked: list[Request]) -> tuple[float, dict[int, list[int]]]:
    engine.begin(1, 0, "train", SamplingRule())
    began, written = time.perf_counter(), {}
    for request in asked:
        engine.add(request)
    while engine.running:
        written |= {answer.key: answer.tokens.tolist() for answer in engine.step()}
    return time.perf_counter() - began, written


def compare(folder: Path, count: int, rounds: int) -> list[list[str]]:
    options: dict[str, Any] = {"pretrained": str(folder), "max_running": count, "max_length": 192, "chat": False}
    policy = make_policy(LanguageConfig(name="language", **options), SPEC, 0).eval()
    draws = np.random.default_rng(count)
    lengths = np.exp(draws.uniform(np.log(4), np.log(128), count)).astype(int).tolist()
    prompts = [policy.tokenizer.encode_text(f"{a}+{b}=") for a, b in draws.integers(1, 99, (count, 2)).tolist()]
    asked = [Request(n, prompt, length, n) for n, (prompt, length) in enumerate(zip(prompts, lengths))]
    policy.tokenizer.stops = frozenset()  # so that all answers have the maximum length
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    texts: dict[int, dict[int, list[int]]] = {}
    with ExitStack() as stack:
        words = [f"checkpoint={folder}", "port=0", f"policy.max_running={count}", "policy.max_length=192"]
        command = [sys.executable, "-m", "embodied.serve", *words]
        server = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment() | os.environ)
        )
        stack.callback(server.terminate)
        url = next(line.split()[1] for line in server.stdout or () if line.startswith("listening"))
        weights = stack.enter_context(tempfile.TemporaryDirectory())
        engines = {}
        for way, more in WAYS.items():
            there = {"url": url, "weights": weights} if more else {}
            engines[way] = make_engine(LanguageConfig(name="language", **options | there | more), policy)
            stack.callback(engines[way].close)
        for turn in range(rounds + 1):
            for way, engine in engines.items():
                if turn == 0:
                    engine.load(policy.model_weights(), 1)
                took, written = seconds_and_tokens(engine, asked)
                assert written == texts.setdefault(turn, written), f"{way}: other tokens"
                rates[way] += [sum(map(len, written.values())) / took] if turn else []
    rows = []
    for way, found in rates.items():
        ratios = sorted(mine / own for mine, own in zip(found, rates["in process"]))
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([str(count), way, f"{median(found):,.0f}", spread])
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    os.environ[TOKEN] = secrets.token_urlsafe()
    found = [row for count in asked.requests for row in compare(asked.folder, count, asked.rounds)]
    print(markdown(["requests", "answers are made", "tokens/s", "of in process, by pairs"], found))
    print(asked, code_commit(), sep="\n")
