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

from embodied.runtime import Cluster, HostPlan, Worker, processes

CORES = sorted(os.sched_getaffinity(0))


class Born(Worker):
    def about(self) -> dict:
        return {
            "pid": os.getpid(),
            "parent": os.getppid(),
            "session": os.getsid(0),
            "cores": sorted(os.sched_getaffinity(0)),
            "folder": os.getcwd(),
            "mine": os.environ.get("MINE"),
            "threads": os.environ["OMP_NUM_THREADS"],
            "imported": sys.modules.keys() & {"torch", "fractions"},
            "draw": float(np.random.random()),
        }


def plan(name: str, **changes) -> HostPlan:
    """`fractions` stands for torch, which takes seconds, where any module will do."""
    return HostPlan(name, (name,), **{"imports": ("fractions",), **changes})


def born(cluster: Cluster, *roles: str) -> list[dict]:
    return [cluster.launch(Born, role).about().wait()[0] for role in roles]


def test_a_fork_is_a_host_like_any_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    hosts = [plan("one", cores=(CORES[-1],), env={"MINE": "1"}), plan("two")]
    with Cluster("local", hosts, log_dir=tmp_path, timeout_s=300) as cluster:
        one, two = born(cluster, "one", "two")
        command = Path(f"/proc/{one['pid']}/cmdline").read_bytes().rstrip(b"\0").decode()
        assert command == "embodied one" and Path(f"/proc/{one['pid']}/comm").read_text() == "one\n"
    assert one["parent"] == two["parent"] == os.getpid() and one["session"] == one["pid"]
    assert one["cores"] == [CORES[-1]] and two["cores"] == CORES
    assert (one["mine"], two["mine"]) == ("1", None) and one["folder"] == str(tmp_path)
    assert one["draw"] != two["draw"] and one["imported"] == two["imported"] == {"fractions"}
    assert not Path(f"/proc/{one['pid']}").exists()


def test_a_host_on_a_gpu_is_started_fresh_on_every_node():
    hosts = [plan("one", devices=("gpu:0",)), plan("two", devices=("node2/gpu:0",)), plan("three", devices=("cpu:0",))]
    with Cluster("local", hosts, timeout_s=300) as cluster:
        imported = [about["imported"] for about in born(cluster, "one", "two", "three")]
    assert imported == [set(), set(), {"fractions"}]


def test_hosts_of_other_threads_come_from_another_server_and_none_stays(monkeypatch):
    servers, start = [], processes.ForkServer.__init__

    def noted(self, *arguments):
        start(self, *arguments)
        servers.append(self)

    monkeypatch.setattr(processes.ForkServer, "__init__", noted)
    with Cluster("local", [plan("one"), plan("two", threads=2), plan("three")], timeout_s=300) as cluster:
        assert len(servers) == 2 and all(one.process.poll() is not None for one in servers)
        assert [about["threads"] for about in born(cluster, "one", "two", "three")] == ["1", "2", "1"]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_where_the_server_fails_hosts_are_started_fresh(how, monkeypatch):
    servers, start = [], processes.ForkServer.__init__

    def struck(self, *arguments):
        start(self, *arguments)
        servers.append(self)
        os.kill(self.process.pid, how)

    monkeypatch.setattr(processes.ForkServer, "__init__", struck)
    started = time.monotonic()
    with Cluster("local", [plan("one")], timeout_s=300) as cluster:
        (one,) = born(cluster, "one")
    assert one["parent"] == os.getpid() and servers[0].process.poll() is not None
    assert time.monotonic() - started < processes.FORK_S, "a stopped server is not waited for as a slow one is"


def test_a_missing_module_does_not_keep_a_host_from_starting():
    with Cluster("local", [plan("one", imports=("no_such_module_at_all", "fractions"))], timeout_s=300) as cluster:
        assert born(cluster, "one")[0]["parent"] == os.getpid()


DRIVER = """
    import json, os, sys, time
    from embodied.runtime import Cluster
    from tests.runtime.test_fork_server import Born, plan

    cluster = Cluster("local", [plan("one"), plan("two")], timeout_s=300)
    print(json.dumps([cluster.launch(Born, role).about().wait()[0]["pid"] for role in ("one", "two")]), flush=True)
    time.sleep(60)
"""


SERVER = """
    import os, sys, time
    from embodied.runtime.processes import ForkServer
    server = ForkServer(dict(os.environ), ["fractions"], sys.path)
    while "fork server" not in open(f"/proc/{server.process.pid}/cmdline").read():
        time.sleep(0.01)
    os.kill(server.process.pid, 19)
    print([server.process.pid], flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("program", [DRIVER, SERVER], ids=["forks", "a stopped server"])
def test_a_driver_that_is_killed_leaves_none_of_its_forks(program):
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as driver:
        pids = json.loads(driver.stdout.readline())
        driver.kill()
    until = time.monotonic() + 60
    while (left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left
