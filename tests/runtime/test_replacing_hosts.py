"""Hosts that die, hang or fail are started again, and their channels serve again. Real processes."""

import ctypes
import os
import re
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from embodied.core.errors import ChannelClosed, ConfigError, WorkerFailed
from embodied.runtime import Budget, Cluster, HostPlan, Worker


class Pupil(Worker):
    def __init__(self, start=0):
        self.total = start

    def add(self, amount):
        self.total += amount
        return self.total

    def pid(self):
        return os.getpid()

    def raise_error(self, error):
        raise error

    def leave(self):
        os._exit(0)

    def sleep(self, seconds):
        time.sleep(seconds)

    def sleep_with_the_interpreter(self, seconds):
        ctypes.PyDLL(None).sleep(seconds)

    def take(self, channel, count=1):
        return [channel.get() for _ in range(count)]

    def put(self, channel, *items):
        for item in items:
            channel.put(item)

    def put_and_die(self, channel, *items):
        self.put(channel, *items)
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(10)


class Fragile(Worker):
    def __init__(self, file):
        if file.exists():
            raise RuntimeError("no second life")
        file.touch()

    def die(self):
        os.kill(os.getpid(), signal.SIGSEGV)
        time.sleep(10)


HOSTS = [HostPlan("one", ("a",)), HostPlan("two", ("b",)), HostPlan("three", ("c",))]


@pytest.fixture
def cluster(processes, tmp_path):
    with Cluster(processes, HOSTS, log_dir=tmp_path, timeout_s=300) as cluster:
        yield cluster


def launch(cluster, max_restarts=3, hang_s=15.0):
    """Three workers; those of a and b are supervised."""
    a, b, c = cluster.launch(Pupil, "a", start=10), cluster.launch(Pupil, "b"), cluster.launch(Pupil, "c")
    for group in (a, b, c):
        group.pid().wait()
    cluster.supervise([a, b], Budget(max_restarts, 600, hang_s))
    return a, b, c


def lose(cluster, *handles):
    """The one loss that these handles end in."""
    (loss,) = cluster.wait_for_calls(*handles).items()
    return loss


def replace(cluster, host):
    handles = cluster.replace(host)
    cluster.watch_rebuilding(host, handles)
    assert cluster.wait_for_calls(*handles) == {}


def test_a_killed_host_is_started_again_with_the_same_arguments(cluster, tmp_path):
    a, b, c = launch(cluster)
    a.add(5).wait()
    (before,) = a.pid().wait()
    asleep, busy = a.sleep(30), c.sleep(0.1)
    os.kill(before, signal.SIGKILL)
    host, failure = lose(cluster, asleep, busy)
    assert host == "one" and cluster.restarts("one") == 1
    assert failure.cause.startswith("its process was killed by SIGKILL (out of memory? It held ")
    assert f"during a.sleep [pid {before}" in failure.cause and str(tmp_path / "one.log") in failure.cause
    assert cluster.wait_for_calls(busy) == {}, "the others were not disturbed, and a loss is told once"
    with pytest.raises(WorkerFailed, match="a-0: its process was killed by SIGKILL"):
        a.add(1).wait()
    replace(cluster, host)
    assert a.add(5).wait() == [15] and a.pid().wait() != [before]
    assert b.add(1).wait() == [1] and c.add(1).wait() == [1]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("bad grip"), "ValueError: bad grip"),
        pytest.param(SystemExit(0), "SystemExit: 0", marks=pytest.mark.chaos),
        pytest.param(MemoryError(), "process held ", marks=pytest.mark.chaos),
    ],
)
def test_an_exception_costs_the_host_too(cluster, error, told):
    a, _, _ = launch(cluster)
    (before,) = a.pid().wait()
    host, failure = lose(cluster, a.raise_error(error))
    assert failure.worker == "a-0" and "raise_error failed: " in failure.cause and told in failure.cause
    replace(cluster, host)
    assert a.pid().wait() != [before]


def test_a_mistake_of_the_users_is_not_tried_again(cluster):
    a, _, _ = launch(cluster)
    with pytest.raises(WorkerFailed, match="a-0: raise_error failed: no such task"):
        cluster.wait_for_calls(a.raise_error(ConfigError("no such task")))


@pytest.mark.parametrize("way", [pytest.param("sleep", marks=pytest.mark.chaos), "sleep_with_the_interpreter"])
def test_a_hung_worker_is_killed_and_a_waiting_one_is_not(cluster, way, tmp_path):
    a, b, _ = launch(cluster, hang_s=4.0)
    channel = cluster.channel("to b", home=b)
    waiting = b.take(channel)
    host, failure = lose(cluster, getattr(a, way)(30), waiting)
    assert host == "one" and re.search(r"hung: no sign of life for \d+ s during a.sleep", failure.cause)
    assert "(faults.hang_s=4), so it was killed; its log says where" in failure.cause
    assert f"in {way}" in (tmp_path / "one.log").read_text()
    replace(cluster, host)
    a.put(channel, "late").wait()
    assert waiting.wait() == [["late"]]


def test_a_stopped_process_is_found_even_where_it_only_waits(cluster):
    _, b, _ = launch(cluster, hang_s=4.0)
    channel = cluster.channel("to b", home=b)
    (pid,) = b.pid().wait()
    waiting = b.take(channel)
    os.kill(pid, signal.SIGSTOP)
    host, failure = lose(cluster, waiting)
    assert host == "two" and "hung" in failure.cause
    replace(cluster, host)
    channel.put(1)
    assert b.take(channel).wait() == [[1]]


def test_a_channel_at_home_on_a_dead_host_begins_anew(cluster):
    a, b, c = launch(cluster)
    channel = cluster.channel("to b", home=b)
    a.put(channel, "of the first life", "of the first life").wait()
    asleep = b.sleep(30)
    os.kill(pids(cluster, "two"), signal.SIGKILL)
    host, _ = lose(cluster, asleep)
    for producer in (a, c):
        producer.put(channel, *["put while nobody is there"] * 100).wait()  # more than its capacity: it is not kept
    with pytest.raises(ChannelClosed, match="SIGKILL"):
        channel.get()
    replace(cluster, host)
    taking = b.take(channel, 101)
    for i in range(100):
        a.put(channel, i).wait()
    channel.put("from the driver")
    (taken,) = taking.wait()
    assert [item for item in taken if item != "from the driver"] == list(range(100))


def pids(cluster, host):
    return int(cluster._backend.describe_host(host).split(",")[0].removeprefix("pid "))


def test_items_that_a_host_put_before_its_death_arrive(cluster):
    a, b, _ = launch(cluster)
    to_driver, to_b = cluster.channel("to the driver", capacity=None), cluster.channel("to b", home=b)
    items = [b"x" * 10_000] * 50  # what a socket holds without being read
    dying = a.put_and_die(to_driver, *items)
    host, _ = lose(cluster, dying)
    assert to_driver.qsize() == 50, "all was here before the death was told"
    replace(cluster, host)
    host, _ = lose(cluster, a.put_and_die(to_b, 1, 2))
    replace(cluster, host)
    a.put(to_b, 3).wait()
    assert b.take(to_b, 3).wait() == [[1, 2, 3]]


def test_items_of_a_finished_call_outlive_its_host(cluster):
    a, b, _ = launch(cluster)
    to_driver, to_b = cluster.channel("to the driver", capacity=None), cluster.channel("to b", home=b)
    for channel in (to_driver, to_b):
        a.put(channel, *[b"x" * 10_000] * 20).wait()
    replace(cluster, lose(cluster, a.put_and_die(to_b, "perhaps"))[0])
    a.put(to_b, "last").wait()
    assert to_driver.qsize() == 20
    taken = [item for item in b.take(to_b, 21).wait()[0] if item != "perhaps"]
    assert taken[:20] == [b"x" * 10_000] * 20 and taken[20:] in ([], ["last"])


def test_several_deaths_of_one_host_end_the_run_with_the_last_cause(cluster):
    a, _, c = launch(cluster, max_restarts=1)
    replace(cluster, lose(cluster, a.leave())[0])
    asleep = c.sleep(1)
    with pytest.raises(WorkerFailed, match=r"a-0: its process exited .*after 1 restarts within 600 s \(faults.max_res"):
        cluster.wait_for_calls(a.leave(), asleep)


def test_other_hosts_still_end_the_run(cluster):
    a, _, c = launch(cluster)
    with pytest.raises(WorkerFailed, match="c-0: its process exited with code 0"):
        cluster.wait_for_calls(a.sleep(1), c.leave())


def test_a_constructor_that_fails_in_the_second_life_ends_the_run(processes, tmp_path):
    with Cluster(processes, HOSTS, timeout_s=300) as cluster:
        a = cluster.launch(Fragile, "a", tmp_path / "born")
        cluster.supervise([a], Budget(3, 600, 15))
        lose(cluster, a.die())
        handles = cluster.replace("one")
        cluster.watch_rebuilding("one", handles)
        with pytest.raises(WorkerFailed, match="a-0: constructor failed: RuntimeError: no second life"):
            cluster.wait_for_calls(*handles)


@pytest.mark.chaos
def test_restarts_leave_nothing_open(cluster, processes):
    """The driver's Ray opens connections when it first needs them, at any time: a socket that was left open shows as
    one more for each restart."""
    a, b, _ = launch(cluster, max_restarts=100)
    channel = cluster.channel("to b", home=b)

    def descriptors():
        return [open_in(pid) for pid in ("self", pids(cluster, "two"), pids(cluster, "three"))]

    for attempt in range(6):
        a.put(channel, attempt).wait()
        assert b.take(channel).wait() == [[attempt]]
        replace(cluster, lose(cluster, a.leave())[0])
        b.add(0).wait()
        if attempt == 1:
            before = descriptors()
    for was, now in zip(before, descriptors(), strict=True):
        assert now["file"] == was["file"]
        assert now["socket"] - was["socket"] <= (3 if processes == "ray" else 0)  # after four restarts more


def open_in(pid):
    """The numbers of a process's open files, shared memory among them, and of its sockets with what watches them."""
    found = Counter(file=0, socket=0)
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # the folder itself, which was open while it was read
            found["socket" if os.readlink(descriptor).startswith(("socket:", "anon_inode:")) else "file"] += 1
    return found


def test_the_inline_backend_replaces_no_failed_worker(tmp_path):
    with Cluster("inline", HOSTS, timeout_s=300) as cluster:
        a = cluster.launch(Pupil, "a")
        cluster.supervise([a], Budget(3, 600, 1))
        with pytest.raises(WorkerFailed, match="bad grip"):
            cluster.wait_for_calls(a.raise_error(ValueError("bad grip")))


def test_a_host_that_dies_before_the_others_are_there_ends_the_run_with_its_cause(tmp_path):
    def kill_the_first(host, pid):
        if host == "one":
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.5)  # its death is known when the next host is started

    with Cluster("local", HOSTS, timeout_s=300, on_start=kill_the_first) as cluster:
        a = cluster.launch(Pupil, "a")
        with pytest.raises(WorkerFailed, match=r"(one|a-0): its process was killed by SIGKILL"):
            a.add(1).wait()


def test_a_group_gets_one_more_worker_which_is_replaced_like_others_and_dismissed(cluster, processes):
    """Its failures before it joins are nobody else's, and messages to it are lost once it is gone."""
    a, b, _ = launch(cluster)
    newcomer, made = cluster.add(a, HostPlan("a-5", ("a",)))
    broken, made_too = cluster.add(b, HostPlan("b-5", ("b",)))
    inbox = cluster.channel("inbox", home=newcomer, capacity=1)
    cluster.wait_for_calls(made, made_too)
    assert newcomer.add(1).wait() == [11], "made with the same arguments"
    failing = broken.raise_error(RuntimeError("no room"))
    until = time.monotonic() + 60
    while not failing.failed and time.monotonic() < until:
        time.sleep(0.01)
    assert "no room" in failing.failed["b-5"].cause
    cluster.dismiss(broken, "b-5")
    assert cluster.join(a, newcomer, made.seconds()) and a.workers == ("a-0", "a-5")
    assert a.add(1).wait() == [11, 12]

    pid = a[1].pid().wait()[0]
    os.kill(pid, signal.SIGKILL)
    assert lose(cluster, a[1].sleep(60))[0] == "a-5"
    replace(cluster, "a-5")
    taking = a[1].take(inbox)
    b.put(inbox, "to its successor").wait()
    assert taking.wait() == [["to its successor"]] and a.add(1).wait() == [12, 11]

    gone = a[1].pid().wait()[0]
    cluster.dismiss(a, "a-5")
    b.put(inbox, 1, 2, 3).wait()
    assert a.workers == ("a-0",) and a.add(1).wait() == [13]
    while os.path.exists(f"/proc/{gone}") and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{gone}")
    late, made = cluster.add(a, HostPlan("a-6", ("a",)))
    cluster.wait_for_calls(made)
    assert cluster.join(a, late, made.seconds()) and a.add(0).wait() == [13, 10]
