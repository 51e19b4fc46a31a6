"""Costs and savings of two ranks that compute one sequence together: a pass forward and back over a sequence of some
length, on one of two processes, and divided over both, which exchange over gloo.

Every length and width alone and divided in turns; the fastest round counts, since other programs can only add time.
CPU time is that of one process, of which half would be ideal, and that in which the network computes; the seconds in
exchanges are those of a clock, of which some are spent waiting for the other process. The constants of
`placement/sequence_degrees.py` come from both.

    python -m benchmarks.sequence_exchange
    python -m benchmarks.sequence_exchange --widths 128 --lengths 512 1024
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json

RANKS = 2
LAYERS, HEAD = 2, 16


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    arguments.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096])
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.rank is not None:
        work(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        for width in given.widths:
            write_model(Path(folder) / str(width), width, max(given.lengths))
        command = [sys.executable, "-m", "benchmarks.sequence_exchange", *sys.argv[1:], "--folder", folder]
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=os.environ | {"OMP_NUM_THREADS": "1"})
            for rank in range(RANKS)
        ]
        if sum(rank.wait() for rank in ranks):
            raise SystemExit("a rank failed")
        found = json.loads((Path(folder) / "found.json").read_text())
    about = {"commit": code_commit(), "packages": packages(), **machine()}
    write_json(RESULTS / "sequence_exchange.json", {**found, "rounds": given.rounds, **about})
    print(markdown(["width", "tokens", "CPU alone", "CPU divided", "saves", "in exchanges"], table(found["sequences"])))
    for one in found["exchanges"]:
        print(f"an exchange of {one['numbers']:,} float32 numbers: {one['seconds'] * 1e3:.2f} ms")


def table(found: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            str(one["width"]),
            str(one["tokens"]),
            f"{one['alone_cpu_s'] * 1e3:.0f} ms",
            f"{one['divided_cpu_s'] * 1e3:.0f} ms",
            f"x{one['alone_cpu_s'] / one['divided_cpu_s']:.2f}",
            f"{one['exchange_s'] * 1e3:.0f} ms",
        ]
        for one in found
    ]


def write_model(folder: Path, width: int, positions: int) -> None:
    """A language model of this width with fresh weights, as transformers writes it."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    from embodied.policies.language.tokenizer import of_characters

    words = of_characters().own
    shape = Qwen3Config(
        vocab_size=len(words),
        eos_token_id=1,
        bos_token_id=None,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=LAYERS,
        num_attention_heads=width // HEAD,
        num_key_value_heads=width // HEAD,
        head_dim=HEAD,
        max_position_embeddings=positions,
    )
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    words.save_pretrained(folder)


# One rank


def work(given: argparse.Namespace) -> None:
    from embodied.runtime import Timers
    from embodied.runtime.rank_groups import form_groups
    from embodied.runtime.rendezvous import RendezvousFile

    torch.set_num_threads(1)
    worker = SimpleNamespace(rank=given.rank, world_size=RANKS, timers=Timers(), waiting=nullcontext)
    group = form_groups(RendezvousFile(str(given.folder / "meet"), 600.0), worker, [RANKS], "cpu")[RANKS]
    found = {"exchanges": [time_exchange(numbers, group) for numbers in (RANKS, 2**20)]}
    found["sequences"] = [
        measure(given.folder / str(width), width, length, given.rounds, group)
        for width in given.widths
        for length in given.lengths
    ]
    if given.rank == 0:
        (given.folder / "found.json").write_text(json.dumps(found))
    group.gather(torch.zeros(1))
    sys.stdout.flush()
    os._exit(0)  # gloo aborts when its peers are gone first


def time_exchange(numbers: int, group: Any) -> dict[str, float]:
    """The fastest of a hundred exchanges; half of the numbers go to the other rank."""
    parts, seconds = torch.zeros(RANKS, numbers // RANKS), []
    for _ in range(100):
        started = perf_counter()
        group.exchange(parts)
        seconds.append(perf_counter() - started)
    return {"numbers": numbers, "seconds": min(seconds)}


def measure(folder: Path, width: int, length: int, rounds: int, group: Any) -> dict[str, Any]:
    from embodied.core.types import ActionSpec, EnvSpec
    from embodied.policies import make_policy
    from embodied.policies.config import LanguageConfig

    spec = EnvSpec(ActionSpec(1), instruction=True, max_episode_steps=1, text=True)
    policy = make_policy(LanguageConfig(name="language", pretrained=str(folder)), spec, 0).eval()
    tokens = np.random.default_rng(0).integers(3, policy.model.config.vocab_size, length)
    inputs = {
        "actions": tokens.reshape(-1, 1, 1).astype(np.int32),
        "mask": (np.arange(length) >= length // 8).reshape(-1, 1),
        "lengths": np.array([length]),
        "groups": np.array([0]),
    }
    timers, rows = group.worker.timers, []
    for _ in range(rounds + 1):
        row = {}
        for name in ("alone", "divided"):
            group.gather(torch.zeros(1))
            if name == "alone" and group.place:
                continue  # it waits for the next gather
            before, started, cpu = timers.totals(), perf_counter(), process_time()
            scores = policy(inputs | ({"ranks": (group, 0)} if name == "divided" else {}))
            (scores.logprobs.sum() * float(group.place == 0)).backward()
            policy.zero_grad(set_to_none=True)
            row |= {f"{name}_s": perf_counter() - started, f"{name}_cpu_s": process_time() - cpu}
            row["exchange_s"] = timers.seconds_since(before, "sync")[0]
        rows.append(row)
    fastest = {name: min(row[name] for row in rows[1:]) for name in rows[0]}
    return {"width": width, "tokens": length, "layers": LAYERS, **fastest}


if __name__ == "__main__":
    main()
