"""Learner ranks in processes of their own agree on sums and gathers."""

import pytest
from rank_processes import run_ranks

from embodied.runtime.rendezvous import listen

PROGRAM = """
import sys, numpy as np, torch
from embodied.runtime import collective
from embodied.runtime.rendezvous import RendezvousAddress, RendezvousFile
where, rank, size, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), getattr(collective, sys.argv[4])
named = {"role": "learner"} if kind is collective.SharedMemory else {}
host, _, port = where.rpartition(":")
ranks = kind(RendezvousAddress(host, int(port), 30.0) if host else RendezvousFile(where, 30.0), rank, size, **named)
for round in range(9):
    for dtype in (torch.float32, torch.float64):
        total = ranks.sum(torch.full((1000 + 100 * (round % 3),), float(rank + round), dtype=dtype))
        assert (total == sum(range(size)) + size * round).all(), (round, total)
    for rows in (rank, rank + 1, 20_000 * (rank + 1)):  # none, few, and more than a slot of shared memory holds
        parts = ranks.gather(np.full((rows, 2), float(rank), np.float32))
        wanted = [rows // (rank + 1) * (r + 1) if rows > rank else r for r in range(size)]
        assert [part.shape for part in parts] == [(count, 2) for count in wanted]
        assert all(part.dtype == np.float32 and (part == float(r)).all() for r, part in enumerate(parts))
assert [part.tolist() for part in ranks.gather(np.array([rank, 7]))] == [[r, 7] for r in range(size)]
# What lies on a disk that becomes full ends a process by SIGBUS.
assert where not in open("/proc/self/maps").read(), "the sums lie in memory"
rows = [line.split() for line in open("/proc/self/net/tcp").read().splitlines()[1:]]
import contextlib, os
links = set()
for fd in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):
        links.add(os.readlink(f"/proc/self/fd/{fd}"))
ports = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]
assert bool(ports) == (kind is collective.Gloo), "ranks of one machine have no port for strangers"
print("agreed", rank, sep=",", flush=True)
os._exit(0)  # gloo aborts when its peers are gone first
"""

# Gloo stands in for NCCL, and notes what it is made with.
ON_GPUS = """
import os, sys, torch, torch.distributed as dist
from contextlib import nullcontext
from types import SimpleNamespace
from embodied.runtime import Timers
from embodied.runtime.collective import connect_gpus, join
from embodied.runtime.collective import form_groups
from embodied.runtime.rendezvous import RendezvousFile
made, freed = [], []
class StandIn(dist.ProcessGroupGloo):
    Options = type("Options", (), {"split_from": None, "split_color": 0})
    def __init__(self, store, rank, size, options):
        super().__init__(store, rank, size, options._timeout)
        made.append([size, options.split_from, options.split_color, options._timeout.total_seconds()])
    def eager_connect_single_device(self, device):
        made[-1].append(str(device))
    def abort(self):
        freed.append(self)
zeros, dist.ProcessGroupNCCL, torch.cuda.current_device = torch.zeros, StandIn, lambda: 0
torch.zeros = lambda *size, device="cpu", **more: zeros(*size, **more)
where, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
worker = SimpleNamespace(rank=rank, world_size=size, timers=Timers(), waiting=nullcontext)
meet = RendezvousFile(where, 60.0)
gpus = connect_gpus(meet, worker, "cuda", sharded=False)
groups = form_groups(meet, worker, [2, 4], gpus)
first = rank - rank % 2
whole, half = [4, None, 0, 60.0, "cuda:0"], [2, gpus.group, first, 60.0, "cuda:0"]
assert made == [whole, half] and groups[4].group is gpus.group, made
assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
assert [int(part) for part in groups[2].gather(torch.tensor([rank]))] == [first, first + 1]
ranks, before = join(meet, worker, gpus), {gpus.group, groups[2].group}
gpus.restore(ranks)
assert len(made) == 2 and not freed  # nobody has freed anything
if rank == 1:
    gpus.free()
    assert {*freed} == before and len(freed) == 2  # by itself
gpus.restore(ranks)
assert made[2:] == [whole, [2, gpus.group, first, 60.0, "cuda:0"]] and {*freed} == before, (made, freed)
assert groups[4].group is gpus.group and before.isdisjoint({gpus.group, groups[2].group})
assert [int(part) for part in groups[2].gather(torch.tensor([rank]))] == [first, first + 1]
print("agreed", rank, sep=",", flush=True)
os._exit(0)
"""


@pytest.fixture
def agree(tmp_path_factory):
    def agree(where, ranks, program, *kind):
        path = tmp_path_factory.mktemp("program") / "program.py"
        path.write_text(program)
        assert sorted(run_ranks(path, where, ranks, *kind, cells=2)) == [["agreed", str(n)] for n in range(ranks)]

    return agree


@pytest.mark.parametrize(
    ("kind", "ranks"),
    [
        ("SharedMemory", 3),
        *(pytest.param(kind, ranks, marks=pytest.mark.slow) for kind, ranks in (("Gloo", 2), ("Gloo", 4))),
        pytest.param("SharedMemory", 2, marks=pytest.mark.slow),
    ],
)
def test_ranks_agree_and_leave_no_file(agree, tmp_path, kind, ranks):
    agree(str(tmp_path / "meet"), ranks, PROGRAM, kind)
    assert {path.name for path in tmp_path.iterdir()} == {f"meet-{'sums' if kind == 'SharedMemory' else 'gloo'}"}


def test_ranks_on_several_machines_agree_through_the_first(agree):
    server, address = listen(timeout_s=30)
    agree(f"{address.host}:{address.port}", 2, PROGRAM, "Gloo")
    del server


def test_learners_on_gpus_share_one_set_of_communicators_which_a_rank_may_free_between_updates(agree, tmp_path):
    agree(str(tmp_path / "meet"), 4, ON_GPUS)
    assert not [*tmp_path.glob("meet-nccl*")]
