"""Nothing is left behind however a run ends. (conftest.py checks the same after every test here.)"""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from embodied.core.errors import ChannelClosed, WorkerFailed
from embodied.runtime import Budget, Cluster, HostPlan, Worker
from embodied.runtime.payload import segments
from embodied.runtime.processes import shorten

HOSTS = [HostPlan("one", ("a",)), HostPlan("two", ("b",))]


class Stuck(Worker):
    def __init__(self, folder=None):
        self.folder = folder

    def close(self):
        if self.folder is not None:
            (self.folder / self.name).write_text("closed")

    def start_program(self):
        return subprocess.Popen(["sleep", "1000"]).pid

    def start_daemon(self):
        return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def get(self, channel):
        return channel.get()

    def ignore_everything(self, seconds, begun):
        begun.put(True)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            pass

    def echo(self, inbox, out, count):
        for _ in range(count):
            out.put(inbox.get() * 2)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int]) -> bool:
    until = time.monotonic() + 120
    while any(is_running(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return not any(is_running(pid) for pid in pids)


def test_workers_are_closed_once(backend, tmp_path):
    with Cluster(backend, HOSTS) as cluster:
        for role in ("a", "b"):
            cluster.launch(Stuck, role, tmp_path).onload().wait()  # they are up
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-0", "b-0"]


def test_closing_wakes_those_who_wait(backend):
    with Cluster(backend, HOSTS) as cluster:
        a, b = cluster.launch(Stuck, "a"), cluster.launch(Stuck, "b")
        here, there = cluster.channel("here"), cluster.channel("there", home=a)
        for group in (a, b):
            group.onload().wait()
        handles = [a.get(here), b.get(there)]
    for handle in handles:
        with pytest.raises((WorkerFailed, ChannelClosed), match="clos"):
            handle.wait()
    with pytest.raises(ChannelClosed):
        here.put(1)
    cluster.close()


def test_a_host_that_does_not_stop_is_killed_with_what_it_started(processes, tmp_path):
    with Cluster(processes, HOSTS) as cluster:
        a, b = cluster.launch(Stuck, "a", tmp_path), cluster.launch(Stuck, "b", tmp_path)
        (program,) = b.start_program().wait()
        keep_busy(cluster, a, b)
        cluster.close(seconds=0.2)
    assert gone([program])
    assert not [*tmp_path.iterdir()], "nobody waited until they were done"


def keep_busy(cluster, *groups):
    """They ignore everything for some minutes from now on."""
    begun = cluster.channel("begun")
    for group in groups:
        group.ignore_everything(300, begun)
        begun.get()


def test_a_program_in_a_session_of_its_own_ends_with_its_host_and_with_no_other(processes):
    hosts = [HostPlan(name, (role,), imports=("fractions",)) for name, role in (("one", "a"), ("two", "b"))]
    with Cluster(processes, hosts, timeout_s=300) as cluster:
        a, b = cluster.launch(Stuck, "a"), cluster.launch(Stuck, "b")
        (of_a,), (of_b,) = a.start_daemon().wait(), b.start_daemon().wait()
        cluster.supervise([a, b], Budget(1, 600, 60))
        assert list(cluster.wait_for_calls(a.die())) == ["one"]
        assert gone([of_a]) and is_running(of_b)
        assert b.start_daemon().wait() != [of_b]
    assert gone([of_b])


def test_a_long_log_loses_its_beginning_while_it_is_written(tmp_path):
    log = tmp_path / "one.log"
    with log.open("ab", buffering=0) as writer:
        for line in range(100_000):
            writer.write(b"%06d " % line + b"x" * 32 + b"\n")
        shorten(log, most=1 << 20)
        writer.write(b"and on\n")
    first, *others, last = log.read_text().splitlines()
    assert first == "[a log holds at most 1 MiB: earlier lines were dropped]" and last == "and on"
    assert log.stat().st_size < 1 << 20 and [int(line[:6]) for line in others][-1] == 99_999


def test_a_failing_program_does_not_wait_for_its_workers(processes, tmp_path, monkeypatch):
    monkeypatch.setattr("embodied.runtime.cluster.CLOSE_S", 600.0)  # which a program that ends well would wait

    def program():
        with Cluster(processes, HOSTS) as cluster:
            keep_busy(cluster, cluster.launch(Stuck, "a", tmp_path))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()
    assert not [*tmp_path.iterdir()]


def open_segments() -> int:
    """Files of shared memory that this process has open. Ray opens and closes files of its own."""
    found = 0
    for file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            found += "memfd:embodied" in os.readlink(file)
    return found


def test_large_arrays_flow_without_growing_anything(processes):
    with Cluster(processes, HOSTS, timeout_s=300) as cluster:
        a = cluster.launch(Stuck, "a")
        inbox, out = cluster.channel("in", home=a), cluster.channel("out")
        work = a.echo(inbox, out, 40)
        for i in range(40):
            inbox.put(np.full(100_000, i))
            assert out.get()[0] == 2 * i
            if i == 5:
                early = open_segments()
        work.wait()
        assert open_segments() <= early
        segments.drop()
        assert "memfd:embodied (" not in Path("/proc/self/maps").read_text()


DRIVER = """
import ctypes, os, signal, subprocess, sys, time
import numpy as np
from embodied.runtime import Cluster, HostPlan, Worker

class Held(Worker):  # of the main program itself
    def pid(self): return os.getpid()
    def start_daemon(self): return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
    def hold(self, channel, item):
        channel.put(item)
        if self.rank == 0:
            ctypes.PyDLL(None).sleep(1000)  # like a render that never lets other threads run
        time.sleep(1000)

print("main is run as", __name__, file=sys.stderr)
if __name__ == "__main__":
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs the tests may ignore these two
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Cluster(sys.argv[2], [HostPlan("one", ("a",)), HostPlan("two", ("a",))], log_dir=sys.argv[1]) as cluster:
        workers = cluster.launch(Held, "a")
        pids = workers.pid().wait()
        daemons = workers.start_daemon().wait()
        channel = cluster.channel("large")
        handle = workers.hold(channel, np.ones(1_000_000))
        for _ in pids:
            channel.get()
        print(*pids, *daemons, flush=True)
        handle.wait()
"""


@pytest.fixture(params=["local", "ray"])
def driver(tmp_path, request):
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    command = [sys.executable, str(tmp_path / "driver.py"), str(tmp_path / "logs"), request.param]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(process.pids) == 4, process.stderr.read()
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    "number",
    [signal.SIGKILL, *(pytest.param(number, marks=pytest.mark.slow) for number in (signal.SIGTERM, signal.SIGHUP))],
)
def test_hosts_and_their_programs_end_with_a_killed_driver(driver, number, tmp_path):
    # What they share has no name that could outlive them.
    for pid in driver.pids[:2]:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "memfd:embodied" in maps
        assert "/dev/shm" not in maps
    os.kill(driver.pid, number)
    driver.wait(120)
    assert gone(driver.pids)
    assert "main is run as __mp_main__" in (tmp_path / "logs" / "one.log").read_text()


def test_ctrl_c_reaches_the_driver_while_it_waits(driver):
    for pid in driver.pids:
        os.kill(pid, signal.SIGINT)  # hosts ignore it
    os.kill(driver.pid, signal.SIGINT)
    _, errors = driver.communicate(timeout=120)
    assert "KeyboardInterrupt" in errors
    assert gone(driver.pids)
