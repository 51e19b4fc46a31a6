"""Time saved by dealing units to learner ranks by cost instead of in equal numbers.

    python -m benchmarks.balance            the worked example, draws of lengths, predicted update times
    python -m benchmarks.balance --measure  and updates of two learner processes, one thread each

A ratio is the maximum over the mean load of the ranks: how many times longer an update takes than with equal loads.
`neighbours`: equal numbers of units in their order; `buckets`: equal numbers of units of similar lengths; `packing`:
equal numbers of tokens; `dealt`: `deal` of `placement/balance.py`; `cut`: its `deal_groups`, which learners use and
which cuts groups of answers if that helps; `divided`: ranks compute long sequences together
(`placement/sequence_degrees.py`). An update waits for its slowest rank, so the maximum over ranks is measured: CPU
time, and on two idle cores wall-clock seconds, which include waits for each other's exchanges.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter, process_time
from types import SimpleNamespace

import numpy as np

from benchmarks.common import RESULTS, ROOT, code_commit, machine, markdown, packages, write_json
from embodied.placement.balance import PassCost, balance_ratio, blocks, deal, deal_groups
from embodied.placement.sequence_degrees import ExchangeCosts, SequenceLoad, divide_sequences

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
MEASURED = {
    **{
        f"long tail {seed}": np.random.default_rng(seed)
        .lognormal(np.log(256), 1.0, 16)
        .clip(16, 2048)
        .astype(int)
        .tolist()
        for seed in range(4)
    },
    "1x4096 4x1024": [4096, *[1024] * 4],
    "1x8192 8x1024": [8192, *[1024] * 8],
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
MEASURED_WAYS = ("neighbours", "packing", "dealt", "divided")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--measure", action="store_true")
    arguments.add_argument("--widths", type=int, nargs="+", default=[64, 128])
    arguments.add_argument("--batches", nargs="+", choices=MEASURED, default=[*MEASURED], help="to be measured")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--draws", type=int, default=200)
    arguments.add_argument("--tflops", type=float, default=400.0, help="that a rank does, for predicted seconds")
    given = arguments.parse_args()
    found = {"example": example(), "ratios": draws(given.draws, given.tflops)}
    print(
        "32K, two of 16K, eight of 8K on 4 ranks:", *(f"{way} {ratio:.2f}" for way, ratio in found["example"].items())
    )
    print(markdown(["lengths", "ranks", *NAMES, "step, neighbours", "step, cut"], table(found)))
    if given.measure:
        found["measured"] = measured(given.widths, given.batches, given.rounds)
        head = ["lengths", "width", *MEASURED_WAYS, "halves", "packing / dealt", "packing / divided"]
        head += ["halves / divided", "by the clock: packing", "divided", "packing / divided"]
        print(markdown(head, rows_of(found["measured"])))
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


# Two learner processes


def measured(widths: Sequence[int], batches: Sequence[str], rounds: int) -> list[dict]:
    """Seconds of updates, and of halves: all work divided by two."""
    found = []
    for width in widths:
        for name in batches:
            lengths = MEASURED[name]
            cost = PassCost(float(3 * (4 * width**2 + 9 * width**2)), float(3 * width))
            costs = [cost.of([length]) for length in lengths]
            ways = {way.__name__: way(costs, lengths, 2) for way in (neighbours, packing, dealt)}
            expected = {f"expected_{name}": balance_ratio(costs, ranks, 2) for name, ranks in ways.items()}
            seconds = update_seconds(width, lengths, {**ways, "divided": owners(costs, lengths)}, rounds)
            found.append({"lengths": name, "width": width, **seconds, **expected})
            print(json.dumps(found[-1]), flush=True)
    return found


def owners(costs: Sequence[float], lengths: Sequence[int]) -> list[int]:
    """The owner rank of each sequence if two ranks may compute a sequence together."""
    sequences = [SequenceLoad(*each) for each in zip(lengths, costs, strict=True)]
    return [ranks.start for ranks in divide_sequences(sequences, 2, ExchangeCosts(), (1, 2)).ranks]


def update_seconds(width: int, lengths: list[int], ways: dict[str, list[int]], rounds: int) -> dict[str, float]:
    """The fewest seconds of `rounds`, since other programs only add to them."""
    with tempfile.TemporaryDirectory() as folder:
        asked = json.dumps({"width": width, "lengths": lengths, "ways": ways, "rounds": rounds, "folder": folder})
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        program = [sys.executable, "-c", "from benchmarks import balance; balance.rank_of_two()", asked]
        ranks = [
            subprocess.Popen([*program, str(rank)], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        outputs = [rank.communicate(timeout=3600)[0] for rank in ranks]
        assert not any(rank.returncode for rank in ranks)
    times = [json.loads(output.splitlines()[-1]) for output in outputs]
    found = {}
    for clock in ("cpu", "clock"):
        pairs = {way: [*zip(*(each[clock][way] for each in times), strict=True)] for way in ways}
        after = "" if clock == "cpu" else "_by_clock"
        found |= {f"{way}{after}": min(map(max, each)) for way, each in pairs.items()}
        halves = [sum(pair) / 2 for way, each in pairs.items() if way != "divided" for pair in each]
        found |= {f"halves{after}": min(halves)}
    return found


def rank_of_two() -> None:
    """One of two learner ranks: prints its seconds in each round of each way."""
    import torch

    from embodied.algorithms.config import GRPOConfig
    from embodied.core.types import ActionSpec, BatchEnd, EnvSpec, Unit
    from embodied.learners.config import LearnerConfig
    from embodied.learners.divided_passes import PassTable
    from embodied.learners.model import Model, PolicyOptimizer
    from embodied.learners.train_batch import build_batch
    from embodied.learners.update import GradientSteps
    from embodied.policies import make_policy
    from embodied.policies.config import LanguageConfig
    from embodied.policies.language import shapes
    from embodied.runtime.collective import Gloo
    from embodied.runtime.rank_groups import form_groups
    from embodied.runtime.rendezvous import RendezvousFile
    from embodied.runtime.timers import Timers

    asked, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    shapes.DIM, shapes.MLP, shapes.POSITIONS = asked["width"], 3 * asked["width"], 16 * K
    policy = make_policy(LanguageConfig(name="language"), EnvSpec(ActionSpec(1), max_episode_steps=1, text=True), 0)
    assert policy.model.config.hidden_size == asked["width"]
    config = GRPOConfig(name="grpo", epochs=1, minibatch_size=None).model_copy(update={"group_size": 1})
    meeting = RendezvousFile(str(Path(asked["folder"]) / "meet"), 600.0)
    collective = Gloo(meeting, rank, 2)
    models = {way: Model(policy, LearnerConfig(pack_tokens=1024)) for way in asked["ways"]}
    degree = LearnerConfig(pack_tokens=16 * K, sequence_degree="auto")
    worker = SimpleNamespace(rank=rank, timers=Timers(), waiting=nullcontext)
    groups = form_groups(meeting, worker, [2])
    models["divided"].table = PassTable(groups, degree, collective, rank, policy)
    optimizer = PolicyOptimizer(policy, config, collective)
    found: dict[str, dict[str, list[float]]] = {clock: {way: [] for way in asked["ways"]} for clock in ("cpu", "clock")}
    for number in range(asked["rounds"] + 1):
        for way, ranks in asked["ways"].items():
            model, mine = models[way], np.flatnonzero(np.array(ranks) == rank)
            played = conversations(mine, asked["lengths"], policy.model.config.vocab_size)
            unit = Unit((), mine, np.ones(len(mine)), np.ones(len(mine)))
            batch = build_batch(played, unit, 0, config, collective, model)
            steps = GradientSteps(model, optimizer, config)
            divisor = batch.divisor(batch.num_units)
            collective.gather(np.zeros(1))  # both ranks begin now
            started = process_time(), perf_counter()
            steps.add(batch, batch.own_units, divisor)
            if number:
                for clock, before, now in zip(found, started, (process_time(), perf_counter()), strict=True):
                    found[clock][way].append(now - before)
            steps.step(BatchEnd(0, 10), 0, batch.num_units, batch.stats_divisor(batch.num_units))
    print(json.dumps(found), flush=True)


def conversations(ids: np.ndarray, lengths: list[int], vocabulary: int):
    """Random conversations of these lengths, each with a prompt of 8 tokens."""
    from embodied.core.types import Trajectory

    sizes = np.array([lengths[one] for one in ids])
    count, places = int(sizes.sum()), np.concatenate([np.arange(size) for size in sizes])
    none = np.zeros((count, 1), bool)
    return Trajectory(
        ids=ids,
        lengths=sizes,
        obs={},
        actions=np.random.default_rng(0).integers(3, vocabulary, (count, 1, 1)).astype(np.int32),
        logprobs=np.full((count, 1, 1), -4.0, np.float32),
        rewards=np.zeros((count, 1), np.float32),
        terminated=none,
        truncated=none,
        mask=(places >= 8)[:, None],
        versions=np.zeros(count, np.int64),
        episodes=np.repeat(ids, sizes),
    )


def rows_of(found: list[dict]) -> list[list[str]]:
    return [
        [
            one["lengths"],
            str(one["width"]),
            *(f"{one[way]:.2f} s" for way in (*MEASURED_WAYS, "halves")),
            *(f"x{one['packing'] / one[way]:.2f}" for way in ("dealt", "divided")),
            f"{one['halves'] / one['divided']:.0%}",
            *(f"{one[way]:.2f} s" for way in ("packing_by_clock", "divided_by_clock")),
            f"x{one['packing_by_clock'] / one['divided_by_clock']:.2f}",
        ]
        for one in found
    ]


if __name__ == "__main__":
    main()
