"""What it saves that a group's prompt goes through the network once: passes over groups of answers, forward and back.

Prompts and answers of several lengths, in groups; shared and separate in turns, seconds of one thread's CPU time.
Beside the ratio stands that of the tokens: all that could be saved if a token cost the same anywhere.

    python -m benchmarks.shared_prompt
    python -m benchmarks.shared_prompt --model FOLDER --train-layers 10
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from statistics import median
from time import process_time
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import LanguageConfig

SPEC = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, text=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", help="folder of a published model; else the tiny one")
    arguments.add_argument("--train-layers", type=int, help="as policy.train_layers")
    arguments.add_argument("--group-size", type=int, default=8)
    arguments.add_argument("--groups", type=int, default=2, help="in one pass")
    arguments.add_argument("--prompts", type=int, nargs="+", default=[8, 64, 256], help="tokens")
    arguments.add_argument("--answers", type=int, nargs="+", default=[8, 32, 128], help="tokens")
    arguments.add_argument("--rounds", type=int, default=5)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    config = LanguageConfig(name="language", pretrained=given.model, train_layers=given.train_layers)
    policy = make_policy(config, SPEC, 0).eval()
    sizes = [(prompt, answer) for prompt in given.prompts for answer in given.answers]
    found = [compare(policy, given.groups, given.group_size, *size, given.rounds) for size in sizes]
    about = {"commit": code_commit(), "packages": packages(), **machine()}
    write_json(RESULTS / "shared_prompt.json", {"sizes": found, **vars(given), **about})
    print(markdown(["prompt", "answer", "separate", "shared", "time saved", "tokens saved"], table(found)))


def table(found: Sequence[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            str(one["prompt"]),
            str(one["answer"]),
            *(f"{one[name] * 1e3:.0f} ms" for name in ("separate", "shared")),
            f"x{one['separate'] / one['shared']:.2f}",
            f"x{one['tokens_separate'] / one['tokens_shared']:.2f}",
        ]
        for one in found
    ]


def compare(policy, groups: int, group_size: int, prompt: int, answer: int, rounds: int) -> dict[str, Any]:
    inputs = inputs_of(policy.model.config.vocab_size, groups, group_size, prompt, answer)
    apart = inputs | {"groups": np.arange(groups * group_size)}  # nothing is shared between groups
    seconds: dict[str, list[float]] = {"separate": [], "shared": []}
    for _ in range(rounds + 1):
        for name, times in seconds.items():
            started = process_time()
            policy(inputs if name == "shared" else apart).logprobs.sum().backward()
            times.append(process_time() - started)
            policy.zero_grad(set_to_none=True)
    one, other = group_size * (prompt + answer), prompt + group_size * answer
    times = {name: median(each[1:]) for name, each in seconds.items()}
    about = {"prompt": prompt, "answer": answer, **times}
    return about | {"tokens_separate": groups * one, "tokens_shared": groups * other}


def inputs_of(vocabulary: int, groups: int, group_size: int, prompt: int, answer: int) -> dict[str, np.ndarray]:
    """Random conversations: the groups one after the other."""
    draw, count = np.random.default_rng(0), groups * group_size
    prompts = np.repeat(draw.integers(3, vocabulary, (groups, prompt)), group_size, axis=0)
    tokens = np.concatenate([prompts, draw.integers(3, vocabulary, (count, answer))], axis=1)
    mask = np.broadcast_to(np.arange(prompt + answer) >= prompt, tokens.shape)
    return {
        "actions": tokens.reshape(-1, 1, 1).astype(np.int32),
        "mask": mask.reshape(-1, 1),
        "lengths": np.full(count, prompt + answer),
        "groups": np.repeat(np.arange(groups), group_size),
    }


if __name__ == "__main__":
    main()
