"""After how many checked answers is a server with other weights or another sampler found, and is an honest one accused?

    python -m benchmarks.proofs models/SmolLM2-135M-Instruct --dtype bfloat16
    python -m benchmarks.proofs models/SmolLM2-135M-Instruct --dtype bfloat16 --vllm    # by log-probs; needs make vllm

A server's answers are generated in a process of its own, so that it may have other kernels, and checked here as
`policy.verify=1` does. The trial of all answers is repeated in random orders. Writes results/proofs-DTYPE.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import RESULTS, code_commit, environment, machine, markdown, write_json
from embodied.core import rng
from embodied.core.types import ActionSpec, EnvSpec, SamplingRule
from embodied.policies import make_policy
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Request, make_engine
from embodied.policies.language.http_messages import ParsedAnswer
from embodied.policies.language.policy import LanguagePolicy
from embodied.policies.language.trials import Trial
from embodied.policies.language.trust import check_logprobs, check_proof

SPEC = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, has_success=True, text=True)
TOKENS, ORDERS, LIMIT_S = 40, 100, 3600.0
OTHER_KERNELS = {"ATEN_CPU_CAPABILITY": "default"}
ASK = "{} has {} {} and buys {} more. Then half of them are given away. How many {} are left?"
EXAMPLE = "Example: 17 coins and 25 more are 42, since we add the units first, and half of 42 is 21."
RULES = {"temperature 0.7": SamplingRule(0.7), "among the 20 likeliest": SamplingRule(top_k=20)}


def noisy(by: float) -> Callable[[int, Tensor], Tensor]:
    def change(number: int, weight: Tensor) -> Tensor:
        return weight * (1 + by * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))

    return change


def adapted(number: int, weight: Tensor) -> Tensor:
    """With a LoRA adapter of rank 16 (alpha 32), as after some steps at lr 1e-4: B has a deviation of 0.001."""
    draw = torch.Generator().manual_seed(number)
    a = torch.randn(16, weight.shape[1], generator=draw) / weight.shape[1] ** 0.5
    return weight + 2 * 1e-3 * torch.randn(weight.shape[0], 16, generator=draw) @ a


def in_8_bits(number: int, weight: Tensor) -> Tensor:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round() * scale


CHANGES = {
    "one step behind": None,
    "a LoRA adapter": adapted,
    "1% of noise": noisy(0.01),
    "0.1% of noise": noisy(0.001),
    "8-bit weights": in_8_bits,
}
HONEST = ("honest", "honest, batches of 5", "honest, other kernels", "honest, other kernels, long common prompt")
SERVERS = (*HONEST, *CHANGES, *RULES)


def policies(folder: Path, dtype: str, *servers: str) -> list[LanguagePolicy]:
    """Policies with the learner's weights, one AdamW step of lr 1e-5 after the folder's, or changed by a server."""

    def make(dtype: str) -> LanguagePolicy:
        config = LanguageConfig(name="language", pretrained=str(folder), dtype=dtype, max_length=1024, max_running=48)
        return make_policy(config, SPEC, 0).eval()

    exact = make("float32").requires_grad_(True)
    ids = torch.tensor([exact.tokenizer.encode_text("We add the numbers, and divide by two. The answer is 14.")])
    exact.model(input_ids=ids, labels=ids).loss.backward()
    made = []
    for server in servers:
        policy, change = make(dtype), CHANGES.get(server)
        if server != "one step behind":
            for number, (own, before) in enumerate(zip(policy.parameters(), exact.parameters(), strict=True)):
                after = before.data - 1e-5 * before.grad.sign()
                own.data.copy_(change(number, after) if change and own.ndim == 2 else after)
        made.append(policy)
    return made


def questions(policy: LanguagePolicy, count: int, is_long: bool) -> list[Request]:
    system = " ".join(["You solve problems step by step, briefly.", *[EXAMPLE] * (16 if is_long else 0)])
    names, things = ("Tom", "Anna", "Li", "Maria", "Sven"), ("apples", "coins", "books", "eggs", "cards", "pens")
    asked = []
    for n in range(count):
        text = ASK.format(names[n % 5], 3 + 7 * n % 50, things[n % 6], 2 + 5 * n % 30, things[n % 6])
        said = policy.tokenizer.encode_text(f"{system}\n{text}\n")
        asked.append(Request(n, said, TOKENS, n))
    return asked


def serve(folder: Path, dtype: str, count: int, server: str, vllm: bool, file: Path) -> None:
    """Write a server's answers."""
    (policy,) = policies(folder, dtype, server)
    asked, rule = questions(policy, count, "long" in server), RULES.get(server, SamplingRule())
    if vllm:
        return by_vllm(policy, dtype, asked, rule, file)
    config = policy.config.model_copy(update={"max_running": 5}) if "batches" in server else policy.config
    engine = make_engine(config, policy)
    engine.begin(1, 3, "train", rule)
    answers: dict[int, Any] = {}
    while len(answers) < count:
        while asked and engine.room:
            request = asked.pop(0)
            engine.add(replace(request, sampling=replace(engine.round, proves=True)))
        answers |= {
            a.key: (a.tokens.tolist(), a.logprobs.tolist(), [b.to_text() for b in a.proof]) for a in engine.step()
        }
    file.write_text(json.dumps([answers[n] for n in range(count)]))


def by_vllm(policy: LanguagePolicy, dtype: str, asked: list[Request], rule: SamplingRule, file: Path) -> None:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with tempfile.TemporaryDirectory() as folder:
        policy.save_published(folder)
        from vllm import LLM, SamplingParams

        options = {"max_model_len": 1024, "max_num_seqs": 48, "distributed_executor_backend": "uni"}
        engine = LLM(folder, dtype=dtype, enforce_eager=True, **options)
        how = SamplingParams(
            max_tokens=TOKENS, temperature=rule.temperature, top_k=rule.top_k, logprobs=0, seed=1, ignore_eos=True
        )
        written = engine.generate([{"prompt_token_ids": list(each.tokens)} for each in asked], how)
    answers = []
    for each in written:
        tokens, told = list(each.outputs[0].token_ids), each.outputs[0].logprobs
        answers.append((tokens, [of[token].logprob for token, of in zip(tokens, told)], []))
    file.write_text(json.dumps(answers))


def judged(policy: LanguagePolicy, server: str, answers: list, vllm: bool) -> dict[str, Any]:
    """What single answers and trials of all answers show."""
    checked = []
    for request, (tokens, logprobs, proof) in zip(questions(policy, len(answers), "long" in server), answers):
        parsed, places = ParsedAnswer(tokens, logprobs, "length", None, proof=proof), np.arange(len(tokens))
        episodes = np.full(len(tokens), request.episode, np.uint64)
        noise = rng.uniform(3, "act/train", episodes, len(request.tokens) + places, 1)[:, 0]
        check = check_logprobs if vllm else check_proof
        checked.append(check(policy, request.tokens, parsed, SamplingRule(), noise))
    alone, usable = sum(bool(each.mismatch) for each in checked), [each for each in checked if not each.mismatch]
    found = []
    for order in range(ORDERS):
        trial = Trial()
        for number, place in enumerate(np.random.default_rng(order).permutation(len(usable)), 1):
            if trial.add(usable[place]):
                found.append((number, int(trial.capital.mean(1).argmax())))
                break
    return {"answers": len(checked), "alone": alone, "found": found}


def shown(server: str, of: dict[str, Any]) -> list[str]:
    numbers = [number for number, _ in of["found"]]
    after = f"{np.median(numbers):.0f} ({min(numbers)} to {max(numbers)})" if numbers else ""
    bets = ", ".join(("direction", "size", "draws")[bet] for bet in sorted({bet for _, bet in of["found"]}))
    return [server, f"{of['alone']} of {of['answers']}", f"{len(numbers)} of {ORDERS}", after, bets]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--answers", type=int, default=48)
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=SERVERS)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.write:
        return serve(asked.folder, asked.dtype, asked.answers, asked.servers[0], asked.vllm, asked.write)
    (policy,), rows = policies(asked.folder, asked.dtype, "honest"), {}
    path = RESULTS / f"proofs-{asked.dtype}{'-vllm' * asked.vllm}.json"
    for server in asked.servers:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "answers.json"
            command = [sys.executable, "-m", "benchmarks.proofs", str(asked.folder), "--write", str(file)]
            command += ["--servers", server, "--dtype", asked.dtype, "--answers", str(asked.answers)]
            kernels = OTHER_KERNELS if "other kernels" in server and not asked.vllm else {}
            log = Path(folder) / "log"
            with log.open("w") as out:
                done = subprocess.run(
                    [*command, *["--vllm"] * asked.vllm],
                    env=environment() | kernels,
                    stdout=out,
                    stderr=out,
                    timeout=LIMIT_S,
                )
            if done.returncode:
                raise SystemExit(f"{server}: {log.read_text()[-2000:]}")
            rows[server] = judged(policy, server, json.loads(file.read_text()), asked.vllm)
        print(" | ".join(shown(server, rows[server])), flush=True)
        write_json(path, {"commit": code_commit(), "machine": machine(), "servers": rows})
    header = ["the server", "refused alone", "found together", "after answers", "by"]
    print(markdown(header, [shown(server, of) for server, of in rows.items()]))


if __name__ == "__main__":
    main()
