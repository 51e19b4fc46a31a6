"""Time saved by dealing units to learner ranks by cost instead of in equal numbers.

    python -m benchmarks.balance            the worked example, draws of lengths, predicted update times

A ratio is the maximum over the mean load of the ranks: how many times longer an update takes than with equal loads.
`neighbours`: equal numbers of units in their order; `buckets`: equal numbers of units of similar lengths; `packing`:
equal numbers of tokens; `dealt`: `deal` of `placement/balance.py`; `cut`: its `deal_groups`, which learners use and
which cuts groups of answers if that helps; `divided`: ranks compute long sequences together
(`placement/balance.py`). An update waits for its slowest rank. Updates of two learner processes were measured
by this program at commit 328a2148, with `--measure`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json
from embodied.placement.balance import (
    ExchangeCosts,
    PassCost,
    SequenceLoad,
    balance_ratio,
    blocks,
    deal,
    deal_groups,
    divide_sequences,
)

K = 1024
EXAMPLE = [32 * K, 16 * K, 16 * K, *[8 * K] * 8]  # on 4 ranks, with costs of attention only
SHAPES = {"8B": PassCost(8e9, 32 * 4096), "0.6M": PassCost(0.6e6, 3 * 128)}  # weights, layers * width
DRAWS = {  # groups, answers each, tokens of the prompt, median and deviation of an answer's logarithm, most tokens
    "maths": (16, 8, 128, 1500, 0.8, 16 * K),
    "long tail": (64, 8, 128, 2000, 1.2, 32 * K),
    "agents": (8, 8, 1024, 6000, 1.0, 64 * K),
    "video questions": (256, 1, 64, 6000, 1.3, 128 * K),
    "sums": (64, 8, 16, 4, 0.2, 32),
}


def neighbours(costs: Sequence[float], lengths: Sequence[int], ranks: int) -> list[int]:
    return blocks(len(costs), ranks)


def buckets(costs: Sequence[float], lengths: Sequence[int], ranks: int) -> list[int]:
    found = np.empty(len(costs), np.int64)
    found[np.argsort(lengths, kind="stable")] = blocks(len(costs), ranks)
    return found.tolist()


def packing(costs: Sequence[float], lengths: Sequence[int], ranks: int) -> list[int]:
    return deal([float(length) for length in lengths], ranks)


def dealt(costs: Sequence[float], lengths: Sequence[int], ranks: int) -> list[int]:
    return deal(costs, ranks)


WAYS = (neighbours, buckets, packing, dealt)
NAMES = [*(way.__name__ for way in WAYS), "cut"]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--draws", type=int, default=200)
    arguments.add_argument("--tflops", type=float, default=400.0, help="that a rank does, for predicted seconds")
    given = arguments.parse_args()
    found = {"example": example(), "ratios": draws(given.draws, given.tflops)}
    print(
        "32K, two of 16K, eight of 8K on 4 ranks:", *(f"{way} {ratio:.2f}" for way, ratio in found["example"].items())
    )
    print(markdown(["lengths", "ranks", *NAMES, "step, neighbours", "step, cut"], table(found)))
    about = {"commit": code_commit(), "packages": packages(), **machine()}
    write_json(RESULTS / "balance.json", {**found, **vars(given), **about})


def example() -> dict[str, float]:
    """Ratios of the worked example."""
    costs = [PassCost(0.0, 1.0).of([length]) for length in EXAMPLE]
    found = {way.__name__: balance_ratio(costs, way(costs, EXAMPLE, 4), 4) for way in WAYS}
    sequences = [SequenceLoad(*each) for each in zip(EXAMPLE, costs, strict=True)]
    return found | {"divided": divide_sequences(sequences, 4, ExchangeCosts(), (1, 2, 4)).imbalance}


def draws(count: int, tflops: float) -> list[dict]:
    """Ratios of random batches, and predicted seconds for an update of the 8B shape: the products of three passes, with
    two operations each."""
    found, shape = [], SHAPES["8B"]
    for name, (groups, size, prompt, middle, deviation, most) in DRAWS.items():
        for ranks in (2, 8):
            peaks: dict[str, list[float]] = {name: [] for name in NAMES}
            equal = []
            for number in range(count):
                draw = np.random.default_rng(number)
                # All answers to a hard prompt are longer: half of the deviation belongs to the group.
                spread = deviation / 2**0.5 * (draw.normal(size=(groups, 1)) + draw.normal(size=(groups, size)))
                answers = np.minimum(middle * np.exp(spread), most - prompt).astype(int) + prompt
                costs = [shape.of(group.tolist(), prompt) for group in answers]
                equal.append(sum(costs) / ranks)
                for way in WAYS:
                    place = way(costs, answers.sum(axis=1).tolist(), ranks)
                    peaks[way.__name__].append(float(np.bincount(place, costs, minlength=ranks).max()))
                peaks["cut"].append(peak_of_cut(answers, shape, prompt, ranks))
            ratios = {way: np.array(each) / equal for way, each in peaks.items()}
            mean = {way: float(each.mean()) for way, each in ratios.items()}
            high = {way: float(np.quantile(each, 0.9)) for way, each in ratios.items()}
            times = {way: 6 * float(np.mean(each)) / (tflops * 1e12) for way, each in peaks.items()}
            found.append({"lengths": name, "ranks": ranks, "ratio": mean, "p90": high, "seconds": times})
    return found


def peak_of_cut(answers: np.ndarray, shape: PassCost, prompt: int, ranks: int) -> float:
    """The load of the busiest rank if groups [G, S] may be cut."""
    members = [[(group, member) for member in range(answers.shape[1])] for group in range(len(answers))]
    rank_of = deal_groups(members, lambda part: shape.of([int(answers[one]) for one in part], prompt), ranks)
    loads = np.zeros(ranks)
    for group in members:
        for rank in {rank_of[one] for one in group}:
            loads[rank] += shape.of([int(answers[one]) for one in group if rank_of[one] == rank], prompt)
    return float(loads.max())


def table(found: dict) -> list[list[str]]:
    return [
        [
            one["lengths"],
            str(one["ranks"]),
            *(f"{one['ratio'][name]:.2f} ({one['p90'][name]:.2f})" for name in NAMES),
            *(f"{one['seconds'][name]:.3g} s" for name in ("neighbours", "cut")),
        ]
        for one in found["ratios"]
    ]


if __name__ == "__main__":
    main()
