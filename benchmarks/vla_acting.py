"""How fast the tiny OpenVLA acts, next to transformers' generate() with the same Llama weights, side by side.

All get the same embeddings of image and prompt (our towers and projector, so that only the writing differs), sample
from the 256 action tokens and give the log-probs that RL needs: ours as it is and with policy.compile=true, and
generate(). Rounds alternate, in a thread like a worker's; seconds are of the clock, with one thread of PyTorch and
with as many as there are cores.
In "writing" image and prompt are embedded already, in "deciding" both sides embed them with our towers. Both give
generate() all rows at once, which the published OpenVLA class refuses; "row by row" is what is left to its users, with
the towers' last blocks that it computes too. Beside them stand the matrix products of our writing alone, below which
no implementation gets with these weights.

The tiny preset has 1,088 words, whose logits are 2% of generate()'s products and so a larger part of them than a real
model's 32,064 are; a tiny model with 32,064 would spend a third on them. Both are measured.

    python -m benchmarks.vla_acting
    python -m benchmarks.vla_acting --rows 32 --rounds 40
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import median
from time import perf_counter

import numpy as np
import torch

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig
from embodied.policies.openvla.settings import PRESETS, TINY

SIDE, NUMBERS = 64, 7
SIDES = ("ours", "compiled", "generate")
CONTESTS = ("writing", "deciding", "row by row")
WORDS = (TINY["text_config"]["vocab_size"], 32064)
SPEC = EnvSpec(ActionSpec(NUMBERS), images={"top": (SIDE, SIDE, 3)}, instruction=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=16, help="envs that ask at once")
    arguments.add_argument("--rounds", type=int, default=30)
    given = arguments.parse_args()
    counts = sorted({1, len(os.sched_getaffinity(0))})
    found = {}
    with ThreadPoolExecutor(1) as worker:
        for words in WORDS:
            for threads in counts:
                job = worker.submit(compare, given.rows, given.rounds, words, threads)
                found[f"{words} words, {threads} threads"] = job.result()
    about = {"rows": given.rows, "rounds": given.rounds, "commit": code_commit(), "packages": packages(), **machine()}
    write_json(RESULTS / "vla_acting.json", {"by_words_and_threads": found} | about)
    rows = [line(f"{name}, {where}", one[name]) for where, one in found.items() for name in CONTESTS]
    print(markdown([f"{given.rows} rows", "ours", "compiled", "generate()", "faster", "faster, compiled"], rows))
    for where, one in found.items():
        print(f"matrix products of our writing alone, {where}: {one['products'] * 1e3:.1f} ms")


def line(name: str, found: dict[str, float]) -> list[str]:
    seconds = [f"{found[side] * 1e3:.1f} ms" for side in SIDES]
    return [name, *seconds, f"{found['ratio']:.2f}x", f"{found['compiled_ratio']:.2f}x"]


def compare(rows: int, rounds: int, words: int, threads: int) -> dict:
    torch.set_num_threads(threads)
    policy, fused = policy_with(words), policy_with(words, compile=True)
    reference, draw = reference_of(policy), np.random.default_rng(0)
    frames = draw.integers(0, 256, (rows, SIDE, SIDE, 3), np.uint8)
    obs = {"images": {"top": frames}, "instruction": ["pick up the red cup and put it on the plate"] * rows}
    alone = [{"images": {"top": frames[[row]]}, "instruction": obs["instruction"][:1]} for row in range(rows)]
    noise = draw.random((rows, NUMBERS))
    uniform = torch.as_tensor(noise)
    with torch.inference_mode():
        prefix = policy._prefix(obs)
        check_equal(policy.write(*prefix, uniform, 0.0)[0], reference(prefix, sample=False)[0])
        check_equal(fused.write(*prefix, uniform, 0.0)[0], reference(prefix, sample=False)[0])
        write = [lambda one=one: one.write(*prefix, uniform, 1.0) for one in (policy, fused)]
        decide = [lambda one=one: one.act(obs, noise) for one in (policy, fused)]
        contests = {
            "writing": (*write, lambda: reference(prefix)),
            "deciding": (*decide, lambda: reference(policy._prefix(obs))),
            "row by row": (*decide, lambda: [reference(published_prefix(policy, row)) for row in alone]),
        }
        found = {}
        for name, sides in contests.items():
            took = dict(zip(SIDES, alternate(sides, rounds), strict=True))
            theirs = took["generate"]
            found[name] = took | {"ratio": theirs / took["ours"], "compiled_ratio": theirs / took["compiled"]}
        (found["products"],) = alternate((products(policy, rows, prefix[0].shape[1]),), rounds)
    return found | {"prefix_tokens": prefix[0].shape[1]}


def policy_with(words: int, **options):
    """The tiny preset with so large a vocabulary."""
    text = TINY["text_config"] | {"vocab_size": words}
    PRESETS["tiny"] = TINY | {"text_config": text, "pad_token_id": words - 64}
    try:
        return make_policy(OpenVLAConfig(name="openvla", **options), SPEC, 0).eval()
    finally:
        PRESETS["tiny"] = TINY


def reference_of(policy) -> Callable:
    """Tokens and log-probs [N, 7] of embeddings, by transformers."""
    import transformers

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(**policy.settings.published["text_config"], pad_token_id=0, eos_token_id=None)
    llama = transformers.LlamaForCausalLM(config).eval()
    llama.load_state_dict(policy.language_model.state_dict())
    first, bins = policy.settings.first_action_id, policy.settings.bins

    def only_actions(_, logits: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(logits, -torch.inf)
        allowed[:, first : first + bins] = logits[:, first : first + bins]
        return allowed

    def write(prefix, sample: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        x, present, _ = prefix
        out = llama.generate(
            inputs_embeds=x,
            attention_mask=present.long(),
            max_new_tokens=NUMBERS,
            min_new_tokens=NUMBERS,
            **({"do_sample": True, "top_k": 0} if sample else {"do_sample": False}),
            logits_processor=[only_actions],
            output_scores=True,
            return_dict_in_generate=True,
        )
        scores = torch.stack(out.scores, 1).log_softmax(-1)
        return out.sequences - first, scores.gather(-1, out.sequences[..., None]).squeeze(-1)

    return write


def published_prefix(policy, obs) -> tuple:
    """The prefix, with what the published code computes beside and does not use: the last block of both towers."""
    settings = policy.settings
    for tower, sizes in zip(policy.vision_backbone.towers(), settings.towers, strict=True):
        tower.blocks[-1](torch.zeros(1, sizes.prefix + settings.patches, sizes.dim))
    return policy._prefix(obs)


def products(policy, rows: int, length: int) -> Callable:
    """All layers over the prompt, the last one only where it is read, and over each token but the last."""
    layers = policy.language_model.model.layers
    *first, last = [[p for p in layer.parameters() if p.ndim == 2] for layer in layers]
    attention = layers[-1].self_attn
    kept = [attention.k_proj.weight, attention.v_proj.weight]
    rest = [weight for weight in last if not any(weight is one for one in kept)]
    sizes = {weight.shape[1] for weight in last}
    inputs = {(count, size): torch.randn(count, size) for count in (rows, rows * length) for size in sizes}

    def multiply(count: int, weights: list[torch.Tensor]) -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[count, weight.shape[1]], weight)

    def all_of_them() -> None:
        multiply(rows * length, [weight for layer in first for weight in layer] + kept)
        multiply(rows, rest)
        for _ in range(NUMBERS - 1):
            multiply(rows, [weight for layer in (*first, last) for weight in layer])

    return all_of_them


def check_equal(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    if not torch.equal(ours, theirs):
        raise SystemExit("the best tokens differ: this compares two different models")


def alternate(sides: Sequence[Callable], rounds: int) -> list[float]:
    """Medians of all, taken in turns."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds + 3):
        for run, times in zip(sides, seconds, strict=True):
            started = perf_counter()
            run()
            times.append(perf_counter() - started)
    return [median(times[3:]) for times in seconds]


if __name__ == "__main__":
    main()
