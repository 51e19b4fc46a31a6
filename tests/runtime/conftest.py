"""Every test here runs on real hosts and must leave nothing behind."""

import gc
import os
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from embodied.runtime import Cluster, HostPlan

TWO_HOSTS = (HostPlan("left", ("a", "mate")), HostPlan("right", ("b",)))


def child_processes() -> list[str]:
    found = []
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that just ended
            found += task.read_text().split()
    return found


def traces() -> dict[str, list[str]]:
    return {
        "processes": child_processes(),
        "shared memory": Path("/proc/self/maps").read_text().count("memfd:embodied ("),
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "threads": sorted(thread.name for thread in threading.enumerate()),
    }


@pytest.fixture(autouse=True)
def nothing_left_behind():
    gc.collect()  # what earlier tests left to it
    before = traces()
    yield
    until = time.monotonic() + 5
    while (after := traces()) != before and time.monotonic() < until:
        time.sleep(0.02)
    assert after == before


@pytest.fixture(params=["inline", "local"], scope="module")
def backend(request) -> str:
    return request.param


@pytest.fixture
def cluster(backend, tmp_path):
    """Two hosts: "left" runs the roles a and mate, "right" runs b. For tests that may break it."""
    with Cluster(backend, TWO_HOSTS, log_dir=tmp_path / "logs", timeout_s=20) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def shared_cluster(backend, tmp_path_factory):
    """The same for all tests of a module."""
    with Cluster(backend, TWO_HOSTS, log_dir=tmp_path_factory.mktemp("logs"), timeout_s=20) as cluster:
        yield cluster
