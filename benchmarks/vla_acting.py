"""How fast the tiny OpenVLA acts, next to transformers' generate() with the same Llama weights, side by side.

Both get the same embeddings of image and prompt (our towers and projector, so that only the writing differs), sample
from the 256 action tokens and give the log-probs that RL needs. Rounds alternate; seconds are of one thread's CPU time.
In "writing" image and prompt are embedded already, in "deciding" both sides embed them with our towers; "as published"
means that the other side computes the towers' last blocks too, which nobody uses, as the published code does. Beside
them stand the matrix products of our writing alone, below which no implementation gets with these weights.

The tiny preset has 1,088 words, whose logits are 2% of generate()'s products and so a larger part of them than a real
model's 32,064 are; a tiny model with 32,064 would spend a third on them. Both are measured.

    python -m benchmarks.vla_acting
    python -m benchmarks.vla_acting --rows 32 --rounds 40
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from statistics import median
from time import process_time

import numpy as np
import torch

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json
from embodied.data import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import OpenVLAConfig
from embodied.policies.openvla.settings import PRESETS, TINY

SIDE, NUMBERS = 64, 7
CONTESTS = ("writing", "deciding", "deciding as published")
WORDS = (TINY["text_config"]["vocab_size"], 32064)
SPEC = EnvSpec(ActionSpec(NUMBERS), images={"top": (SIDE, SIDE, 3)}, instruction=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", type=int, default=16, help="envs that ask at once")
    arguments.add_argument("--rounds", type=int, default=30)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    found = {str(words): compare(given.rows, given.rounds, words) for words in WORDS}
    about = {"rows": given.rows, "rounds": given.rounds, "commit": code_commit(), "packages": packages(), **machine()}
    write_json(RESULTS / "vla_acting.json", {"by_vocabulary": found} | about)
    rows = [line(f"{name}, {words} words", one[name]) for words, one in found.items() for name in CONTESTS]
    print(markdown([f"{given.rows} rows", "ours", "generate()", "faster"], rows))
    for words, one in found.items():
        print(f"matrix products of our writing alone, {words} words: {one['products'] * 1e3:.1f} ms")


def line(name: str, found: dict[str, float]) -> list[str]:
    return [name, f"{found['ours'] * 1e3:.1f} ms", f"{found['generate'] * 1e3:.1f} ms", f"{found['ratio']:.2f}x"]


def compare(rows: int, rounds: int, words: int) -> dict:
    policy = policy_with(words)
    reference, draw = reference_of(policy), np.random.default_rng(0)
    frames = draw.integers(0, 256, (rows, SIDE, SIDE, 3), np.uint8)
    obs = {"images": {"top": frames}, "instruction": ["pick up the red cup and put it on the plate"] * rows}
    noise = draw.random((rows, NUMBERS))
    uniform = torch.as_tensor(noise)
    with torch.inference_mode():
        prefix = policy._prefix(obs)
        check_equal(policy.write(*prefix, uniform, 0.0)[0], reference(prefix, sample=False)[0])
        contests = {
            "writing": (lambda: policy.write(*prefix, uniform, 1.0), lambda: reference(prefix)),
            "deciding": (lambda: policy.act(obs, noise), lambda: reference(policy._prefix(obs))),
            "deciding as published": (
                lambda: policy.act(obs, noise),
                lambda: (last_blocks(policy, rows), reference(policy._prefix(obs))),
            ),
        }
        found = {}
        for name, pair in contests.items():
            ours, theirs = alternate(pair, rounds)
            found[name] = {"ours": ours, "generate": theirs, "ratio": theirs / ours}
        found["products"], _ = alternate((products(policy, rows, prefix[0].shape[1]), lambda: None), rounds)
    return found | {"prefix_tokens": prefix[0].shape[1]}


def policy_with(words: int):
    """The tiny preset with so large a vocabulary."""
    text = TINY["text_config"] | {"vocab_size": words}
    PRESETS["tiny"] = TINY | {"text_config": text, "pad_token_id": words - 64}
    try:
        return make_policy(OpenVLAConfig(name="openvla"), SPEC, 0).eval()
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


def last_blocks(policy, rows: int) -> None:
    """What the published code computes beside, and does not use: the last block of both towers."""
    settings = policy.settings
    for tower, sizes in zip(policy.vision_backbone.towers(), settings.towers, strict=True):
        tower.blocks[-1](torch.zeros(rows, sizes.prefix + settings.patches, sizes.dim))


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


def alternate(pair: tuple[Callable, Callable], rounds: int) -> tuple[float, float]:
    """Medians of both, taken in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds + 3):
        for run, times in zip(pair, seconds, strict=True):
            started = process_time()
            run()
            times.append(process_time() - started)
    return median(seconds[0][3:]), median(seconds[1][3:])


if __name__ == "__main__":
    main()
