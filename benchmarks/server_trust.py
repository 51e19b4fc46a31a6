"""The rates of false alarms and of detected cheating, by the gap of log-probs and by proofs (policy.verify).

    python -m benchmarks.server_trust runs/sft-sums_sft-DATE/checkpoints/v000100/policy
    python -m benchmarks.server_trust models/SmolLM2-135M-Instruct --answers 12

Each case generates a server's answers of 32 tokens each; both checks judge every answer separately.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import code_commit, markdown
from embodied.core import rng
from embodied.core.conversations import SamplingRule
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import LanguageConfig
from embodied.policies.language.engine import Answer, Request, Sampling
from embodied.policies.language.slots import SlotEngine
from embodied.policies.language.trust import BLOCK, LIMITS, SMALL, ProofBlock, check_answer, states_behind

SPEC = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, has_success=True, text=True)
SEED, LARGEST_GAP = 7, LanguageConfig.model_fields["gap_limit"].default
DRAWN = SamplingRule()
Prompts = list[list[int]]


def model(folder: Path, dtype: str, lora_rank: int | None = None) -> Any:
    options = {"pretrained": str(folder), "dtype": dtype, "lora_rank": lora_rank, "max_length": 256, "chat": False}
    return make_policy(LanguageConfig(name="language", **options), SPEC, 0).eval()


@torch.no_grad()
def noisy(policy: Any, deviation: Callable[[str, torch.Tensor], Any]) -> Any:
    draw = torch.Generator().manual_seed(1)
    for name, weight in policy.named_parameters():
        weight += (deviation(name, weight) * torch.randn(weight.shape, generator=draw)).to(weight.dtype)
    return policy


def stepped(policy: Any, prompts: Prompts, lr: float) -> Any:
    step = torch.optim.AdamW(policy.parameters(), lr=lr)
    for prompt in prompts[:4]:
        ids = torch.tensor([prompt])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        torch.nn.functional.cross_entropy(logits, ids[0, 1:]).backward()
    step.step()
    return policy


def write(policy: Any, prompts: Prompts, rule: SamplingRule = DRAWN, at_a_time: int = 16) -> list[Answer]:
    engine = SlotEngine(policy.config.model_copy(update={"max_running": at_a_time}), policy)
    engine.begin(0, SEED, "train", rule)
    how, found = Sampling(SEED, "act/train", rule, frozenset(), proves=True), {}
    waiting = [Request(n, prompt, BLOCK, n, how) for n, prompt in enumerate(prompts)]
    while waiting or engine.running:
        while waiting and engine.room:
            engine.add(waiting.pop(0))
        found |= {answer.key: answer for answer in engine.step()}
    return [found[n] for n in range(len(prompts))]


def told(policy: Any, prompt: list[int], answer: Answer) -> Answer:
    """Another model's answer, with log-probs and a proof by this policy."""
    with torch.no_grad():
        states = states_behind(policy, prompt, answer.tokens.tolist())
        likely = policy.head(states).to(policy.exact).log_softmax(-1)[range(BLOCK), answer.tokens.tolist()]
    return Answer(answer.key, answer.tokens, likely.numpy(), False, proof=(ProofBlock.of(states),))


def judge(policy: Any, prompts: Prompts, answers: list[Answer]) -> np.ndarray:
    """By answer: the mean gap, and the errors of proof and draws."""
    rows = []
    for prompt, answer in zip(prompts, answers):
        places = len(prompt) + np.arange(BLOCK)
        noise = rng.uniform(SEED, "act/train", np.full(BLOCK, answer.key), places, 1)[:, 0]
        gap = np.abs(told(policy, prompt, answer).logprobs - answer.logprobs).mean()
        rows.append((gap, *check_answer(policy, prompt, answer.tokens.tolist(), answer.proof, DRAWN, noise)))
    return np.array(rows)


def cases(folder: Path, dtype: str, honest: Any, prompts: Prompts) -> Iterator[tuple[str, list[Answer]]]:
    yield "is honest, 16 conversations at a time", write(honest, prompts)
    yield "is honest, one at a time", write(honest, prompts, at_a_time=1)
    if dtype == "float32":
        yield "computes in bfloat16", write(model(folder, "bfloat16"), prompts)
    for lr in (1e-6, 1e-5):
        yield f"is one AdamW step behind, lr {lr:g}", write(stepped(model(folder, dtype), prompts, lr), prompts)
    lora = noisy(model(folder, dtype, 8), lambda name, weight: 1e-3 * ("lora_B" in name))
    yield "has a LoRA adapter besides", write(lora, prompts)
    lies = write(noisy(model(folder, dtype), lambda name, weight: 0.01 * weight.float().std().nan_to_num()), prompts)
    yield "has 1% of noise on all weights", lies
    yield "the same, but told as if by the right ones", list(map(told, [honest] * len(lies), prompts, lies))
    hidden = [[*honest.tokenizer.plain("1+1=2\n"), *prompt] for prompt in prompts]
    yield "reads a hidden prefix", write(honest, hidden)
    yield "draws at temperature 0.7, tells the log-probs of 1", write(honest, prompts, SamplingRule(0.7))
    yield "draws among the 20 likeliest tokens", write(honest, prompts, SamplingRule(top_k=20))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--answers", type=int, default=48)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    asked, rows = parser.parse_args(), []
    most, draws = LIMITS[getattr(torch, asked.dtype)], np.random.default_rng(0).integers(1, 50, (asked.answers, 4))
    honest = model(asked.folder, asked.dtype)
    prompts = [honest.tokenizer.plain(f"{a}+{b}={a + b}\n{c}+{d}=") for a, b, c, d in draws.tolist()]
    for name, answers in cases(asked.folder, asked.dtype, honest, prompts):
        gap, proof, drawn = judge(honest, prompts, answers).T
        above = gap > LARGEST_GAP, gap > SMALL, proof > most.proof, drawn > most.drawn
        spread = [f"{x.min():.2g} to {x.max():.2g}" for x in (gap, proof, drawn)]
        rows.append([name, *spread, *(f"{each.mean():.0%}" for each in above)])
        print(" | ".join(rows[-1]), flush=True)
    limits = [f"gap > {LARGEST_GAP}", f"gap > {SMALL}", f"proof > {most.proof}", f"draws > {most.drawn}"]
    print(markdown(["the server", "gap", "proof", "draws", *limits], rows), asked, code_commit(), sep="\n")
