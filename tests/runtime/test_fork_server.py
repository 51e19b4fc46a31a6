"""Hosts that fork from a process which has imported torch are like those that are started fresh, but there at once."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from embodied.runtime import Budget, Cluster, HostPlan, Worker, fork_server

CORES = sorted(os.sched_getaffinity(0))


class Born(Worker):
    def about(self) -> dict:
        import torch

        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "cores": sorted(os.sched_getaffinity(0)),
            "folder": os.getcwd(),
            "mine": os.environ.get("MINE"),
            "threads": torch.get_num_threads(),
            "draw": float(np.random.random()),
        }


def plan(name: str, **changes) -> HostPlan:
    return HostPlan(name, (name,), **{"imports": ("torch",), **changes})


def born(cluster: Cluster, *roles: str) -> list[dict]:
    return [cluster.launch(Born, role).about().wait()[0] for role in roles]


def server() -> fork_server.ForkServer:
    (only,) = fork_server._servers.values()
    return only


def test_a_fork_is_a_host_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hosts = [plan("one", cores=(CORES[-1],), env={"MINE": "1"}), plan("two")]
    with Cluster("local", hosts, log_dir=tmp_path, timeout_s=60) as cluster:
        one, two = born(cluster, "one", "two")
        command = Path(f"/proc/{one['pid']}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert command == "embodied one" and Path(f"/proc/{one['pid']}/comm").read_text() == "one\n"
    assert one["parent"] == two["parent"] == os.getpid() and one["session"] == one["pid"]
    assert one["cores"] == [CORES[-1]] and two["cores"] == CORES
    assert (one["mine"], two["mine"]) == ("1", None) and one["folder"] == str(tmp_path)
    assert one["draw"] != two["draw"]
    assert not Path(f"/proc/{one['pid']}").exists()


def test_later_clusters_fork_from_the_same_server_and_others_threads_from_another(tmp_path):
    with Cluster("local", [plan("one")], timeout_s=60) as cluster:
        (first,) = born(cluster, "one")
    before = server().process.pid
    with Cluster("local", [plan("one"), plan("two", threads=2)], timeout_s=60) as cluster:
        again, two = born(cluster, "one", "two")
    assert before in {one.process.pid for one in fork_server._servers.values()} and len(fork_server._servers) == 2
    assert first["pid"] != again["pid"]
    assert (first["threads"], again["threads"], two["threads"]) == (1, 1, 2)


def test_a_killed_fork_is_reported_and_replaced_without_another_import(tmp_path):
    with Cluster("local", [plan("one"), plan("two")], log_dir=tmp_path, timeout_s=60) as cluster:
        group = cluster.launch(Born, "one")
        cluster.supervise([group], [], Budget(5, 1800.0, 180.0))
        first = group.about().wait()[0]["pid"]
        before = server().process.pid
        os.kill(first, signal.SIGKILL)
        losses = cluster.settle(group.about())
        assert "was killed by SIGKILL" in losses["one"].cause
        cluster.rebuilt_by("one", cluster.replace("one"), [])
        assert group.about().wait()[0]["pid"] != first and server().process.pid == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_without_a_server_hosts_are_started_fresh_or_by_a_new_one(how, tmp_path, monkeypatch):
    with Cluster("local", [plan("one")], timeout_s=60) as cluster:
        born(cluster, "one")
    before = server().process
    os.kill(before.pid, how)
    time.sleep(0.1)
    monkeypatch.setattr(fork_server, "FORK_S", 0.5 if how == signal.SIGSTOP else 60.0)
    with Cluster("local", [plan("one")], log_dir=tmp_path, timeout_s=60) as cluster:
        (one,) = born(cluster, "one")
    assert one["parent"] == os.getpid()
    assert before.poll() is not None and before not in [one.process for one in fork_server._servers.values()]


def test_a_module_that_is_not_there_keeps_nobody_from_starting():
    with Cluster("local", [plan("one", imports=("no_such_module_at_all", "torch"))], timeout_s=60) as cluster:
        assert born(cluster, "one")[0]["parent"] == os.getpid()


DRIVER = """
    import json, os, sys, time
    from embodied.runtime import Cluster, HostPlan, fork_server
    from tests.runtime.test_fork_server import Born, plan

    cluster = Cluster("local", [plan("one"), plan("two")], timeout_s=60)
    pids = [cluster.launch(Born, role).about().wait()[0]["pid"] for role in ("one", "two")]
    print(json.dumps([*pids, *(one.process.pid for one in fork_server._servers.values())]), flush=True)
    time.sleep(60)
"""


def test_a_driver_that_is_killed_leaves_neither_hosts_nor_the_server():
    command = [sys.executable, "-c", textwrap.dedent(DRIVER)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as driver:
        pids = json.loads(driver.stdout.readline())
        driver.kill()
    assert len(pids) == 3
    until = time.monotonic() + 10
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left
