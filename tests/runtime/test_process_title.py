"""What the system shows of a host: its role's name; and what a cluster tells of it: the process id."""

import os
import signal
from pathlib import Path

import pytest

from embodied.core.errors import EmbodiedError
from embodied.runtime import Budget, Cluster, HostPlan, Worker


class Idle(Worker):
    def ready(self) -> int:
        return os.getpid()


def shown(pid):
    """As ps and as top show it."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode()
    return command, Path(f"/proc/{pid}/comm").read_text().strip()


def test_ps_and_top_show_hosts_by_name_and_the_cluster_tells_their_ids(processes, tmp_path):
    told = {}
    hosts = (HostPlan("left", ("a",)), HostPlan("a-long-name-that-top-cuts", ("b",)))
    with Cluster(processes, hosts, log_dir=tmp_path, timeout_s=300, on_start=told.__setitem__) as cluster:
        pids = [cluster.launch(Idle, role).ready().wait()[0] for role in "ab"]
        assert told == dict(zip(("left", "a-long-name-that-top-cuts"), pids, strict=True))
        assert shown(pids[0]) == ("embodied left", "left")
        assert shown(pids[1]) == ("embodied a-long-name-that-top-cuts", "a-long-name-tha")


def test_a_host_that_is_started_again_is_announced_with_its_new_process(tmp_path):
    told = []
    plans = (HostPlan("left", ("a",)), HostPlan("right", ("b",)))
    with Cluster("local", plans, log_dir=tmp_path, timeout_s=300, on_start=lambda *one: told.append(one)) as cluster:
        group = cluster.launch(Idle, "a")
        first = group.ready().wait()[0]
        cluster.supervise([group], Budget(5, 1800.0, 180.0))
        os.kill(first, signal.SIGKILL)
        assert list(cluster.wait_for_calls(group.ready())) == ["left"]
        again = cluster.replace("left")
        cluster.watch_rebuilding("left", again)
        second = group.ready().wait()[0]
        assert [pid for host, pid in told if host == "left"] == [first, second] and first != second
        assert shown(second) == ("embodied left", "left")


def test_ray_that_does_not_start_in_time_names_the_deadline():
    pytest.importorskip("ray")
    from embodied.runtime.ray_nodes import OwnCluster

    with pytest.raises(
        EmbodiedError, match=r"did not start .* within cluster\.start_s=0\.1 s; .* try cluster\.start_s=0\.2"
    ):
        OwnCluster(start_s=0.1)
