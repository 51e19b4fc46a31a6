"""Every test here runs on real hosts and must leave nothing behind."""

import gc
import os
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from embodied.runtime import Cluster, HostPlan
from embodied.runtime.payload import segments
from embodied.runtime.processes import ForkServers

TWO_HOSTS = (HostPlan("left", ("a", "mate")), HostPlan("right", ("b",)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Ray takes a second of processor time per host, so only the tests that share their hosts are fast there, and those
    with one of the places a channel may have."""
    for item in items:
        parameters = getattr(item, "callspec", None)
        on_ray = parameters is not None and "ray" in map(str, parameters.params.values())
        elsewhere = on_ray and bool({"at the consumer", "at the driver"} & set(map(str, parameters.params.values())))
        if on_ray and ("shared_cluster" not in item.fixturenames or elsewhere):
            item.add_marker(pytest.mark.slow)


def child_processes() -> list[str]:
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that just ended
            found += task.read_text().split()
    return found


def descriptors() -> list[str]:
    """Except the sockets of the Ray connection that all tests share: Ray keeps them for some time."""
    ray = sys.modules.get("ray")
    theirs = ("socket:", "anon_inode:") if ray is not None and ray.is_initialized() else ()
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            found.append((int(fd), os.readlink(f"/proc/self/fd/{fd}")))
    return sorted(f"{fd} {target}" for fd, target in found if not target.startswith(theirs))


def traces() -> dict[str, list[str]]:
    segments.drop()  # a process keeps some for as long as its cluster lasts
    return {
        "processes": child_processes(),
        "shared memory": ["segment"] * Path("/proc/self/maps").read_text().count("memfd:embodied ("),
        "descriptors": descriptors(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


def added(after: dict[str, list[str]], before: dict[str, list[str]]) -> list[str]:
    """What is there more often than before, of whatever kind."""
    return [f"{kind}: {one}" for kind in after for one in (Counter(after[kind]) - Counter(before[kind])).elements()]


@pytest.fixture(autouse=True, scope="module")
def seldom_looked_through():
    """Collecting garbage before every test takes half a second where it goes through all that others have made."""
    gc.collect()
    gc.freeze()


STARTS = ("test_fork_server", "test_leaving", "test_process_title")  # are about how hosts start


@pytest.fixture(autouse=True, scope="module")
def light_fork_servers(request, kept_fork_servers):
    """In some files every cluster starts and ends its own, as in a run. In the others hosts fork from a kept one, which
    is there before a test looks at what is there."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__.endswith(STARTS):
            patch.setattr("embodied.runtime.local.ForkServers", ForkServers)
        else:
            patch.setattr("embodied.runtime.local.ForkServers", kept_fork_servers(("pytest", "torch")))
            Cluster("local", [HostPlan("first", ("a",))]).close()
        yield


@pytest.fixture(autouse=True)
def nothing_left_behind():
    gc.collect()  # what earlier tests left to it
    before = traces()
    yield
    until = time.monotonic() + 60
    while (left := added(traces(), before)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not left


@pytest.fixture(scope="session")
def ray_cluster():
    """One Ray cluster that all clusters of this process join: starting one takes seconds."""
    import ray

    from embodied.runtime.ray_nodes import OwnCluster, connect_to_own

    with OwnCluster(object_store_bytes=200_000_000, start_s=800) as cluster:
        connect_to_own(cluster)
        yield cluster
        ray.shutdown()


@pytest.fixture(params=["inline", "local", "ray"], scope="module")
def backend(request) -> str:
    return ready(request)


@pytest.fixture(params=["local", "ray"], scope="module")
def processes(request) -> str:
    """The backends whose hosts are processes."""
    return ready(request)


def ready(request) -> str:
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return request.param


@pytest.fixture
def cluster(backend, tmp_path):
    """Two hosts: "left" runs the roles a and mate, "right" runs b. For tests that may break it."""
    with Cluster(backend, TWO_HOSTS, log_dir=tmp_path / "logs", timeout_s=300) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_cluster(backend, tmp_path_factory):
    """The same for all tests of a module."""
    with Cluster(backend, TWO_HOSTS, log_dir=tmp_path_factory.mktemp("logs"), timeout_s=300) as cluster:
        yield cluster
