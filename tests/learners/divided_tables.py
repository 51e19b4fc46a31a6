"""One of several ranks that run random tables of passes: python divided_tables.py FOLDER RANK RANKS. A pass that ranks
share exchanges twice, as attention does. At the end a table is shuffled."""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch

from embodied.core.errors import EmbodiedError
from embodied.learners import divided_passes
from embodied.learners.config import LearnerConfig
from embodied.learners.divided_passes import SENT, PassTable, SharedPass
from embodied.placement.balance import order_of_passes
from embodied.runtime import Timers
from embodied.runtime.collective import Gloo, form_groups
from embodied.runtime.rendezvous import RendezvousFile

folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
meet = RendezvousFile(f"{folder}/meet", 60.0)
worker = SimpleNamespace(rank=rank, world_size=ranks, timers=Timers(), waiting=nullcontext)
groups = form_groups(meet, worker, [2, 4])
policy = SimpleNamespace(device=torch.device("cpu"), pass_cost=lambda: (1e6, 2e3), exchange_size=lambda: (50, 0))
table = PassTable(groups, LearnerConfig(sequence_degree="auto"), Gloo(meet, rank, ranks), rank, policy)


def sequences(seed: int, rank: int) -> list[dict]:
    """The inputs of this rank's sequences: none, or several of lengths from 2 to 5000."""
    draw = np.random.default_rng([seed, rank])
    lengths = np.exp(draw.uniform(0.7, 8.5, size=draw.integers(0, 5))).astype(int)
    found = [(draw.integers(0, 9, length), draw.random(length) < 0.5, [length], [0]) for length in lengths]
    return [dict(zip(SENT, map(torch.tensor, each), strict=True)) for each in found]


def run(passes: list, seed: int) -> None:
    for each in passes:
        if not isinstance(each, SharedPass):
            continue
        inputs, group = each.inputs(None), each.group
        theirs = sequences(seed, group.ranks[each.owner]) if seed >= 0 else [inputs]
        assert any(torch.equal(inputs["actions"], one["actions"]) for one in theirs)
        for _ in range(2):
            came = group.begin_exchange(torch.full((group.size, 3), each.number)).wait()
            assert (came == each.number).all()


degrees, count = set(), 60
for seed in range(count):
    mine = sequences(seed, rank)
    padding = torch.zeros(1) if seed % 2 else None
    passes = table.passes([*map(torch.tensor, range(len(mine)))], lambda at, mine=mine: mine[int(at)], padding)
    own = [int(each.items) for each in passes if each.is_own and each.counts]
    assert sorted(own) == list(range(len(mine))), "every sequence once"
    degrees.update(each.group.size if isinstance(each, SharedPass) else 1 for each in passes)
    run(passes, seed)
    if padding is not None:
        assert len({int(row[0]) for row in table.collective.gather(np.array([len(passes)]))}) == 1
everyone = np.concatenate(table.collective.gather(np.array([*degrees])))
seen = "".join(map(str, np.unique(everyone)))

# Two long sequences of rank 0, which all ranks divide
mine = [dict(zip(SENT, map(torch.tensor, ([1] * 4000, [1] * 4000, [4000], [0])), strict=True))] * (0 if rank else 2)
told = []
for shuffled in ("this rank's passes", "the table of rank 1"):
    if shuffled != "this rank's passes" and rank == 1:
        divided_passes.order_of_passes = lambda *inputs: order_of_passes(*inputs)[::-1]
    passes = table.passes([*map(torch.tensor, range(len(mine)))], lambda at: mine[int(at)], None)
    try:
        run(passes if told else passes[::-1], -1)
    except (EmbodiedError, RuntimeError) as err:  # RuntimeError: the connection to rank 1 ended
        told.append(str(err).strip().splitlines()[0].replace(",", ";"))
print(rank, count, seen, " / ".join(told), sep=",", flush=True)
os._exit(0)
