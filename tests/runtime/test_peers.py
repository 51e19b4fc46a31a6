"""Workers send each other items straight: in order by source and tag, and never into silence."""

import os
import signal
import time

import numpy as np
import pytest

from embodied.core.errors import ChannelClosed, DeadlineExceeded, WorkerFailed
from embodied.runtime import Budget, Cluster, HostPlan, Worker
from embodied.runtime.channel import hosts_of_runs


class Peer(Worker):
    def send_all(self, to, *items):
        for tag, item in items:
            self.send(item, to, tag)

    def recv_all(self, source, count, tag=None, **options):
        return [self.recv(source, tag, **options) for _ in range(count)]

    def wait_for_item(self, source):
        deadline = time.monotonic() + 60
        while not self._channel(f"{source[0]}-{source[1]}", self.name).qsize() and time.monotonic() < deadline:
            time.sleep(0.01)

    def recv_or_reason(self, source):
        try:
            return self.recv(source)
        except ChannelClosed as error:
            return error.peer, error.cause

    def broadcast_and_count(self, item, to):
        """-> how often the item was encoded."""
        host, count = hosts_of_runs[self.run], []
        pack, host.pack = host.pack, lambda *arguments: (count.append(1), pack(*arguments))[1]
        try:
            self.broadcast(item, to)
        finally:
            host.pack = pack
        return len(count)

    def sums(self, source):
        return float(self.recv(source).sum())

    def fail(self):
        raise RuntimeError("broken gripper")

    def die(self):
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


@pytest.fixture(scope="module")
def peers(shared_cluster):
    """a and mate live in one host, b in another."""
    return [shared_cluster.launch(Peer, role) for role in ("a", "mate", "b")]


def test_items_arrive_in_order_by_source_and_tag(peers):
    a, mate, b = peers
    sent = [a.send_all(("b", 0), *[(tag, f"{tag}{i}") for i in range(20) for tag in "xy"])]
    sent.append(mate.send_all(("b", 0), ("x", "of the mate")))
    assert b.recv_all(("a", 0), 20, "y").wait() == [[f"y{i}" for i in range(20)]]
    assert b.recv_all(("mate", 0), 1, "x").wait() == [["of the mate"]]
    assert b.recv_all(("a", 0), 20, "x").wait() == [[f"x{i}" for i in range(20)]]
    for handle in sent:
        handle.wait()


def test_workers_answer_each_other_within_and_across_hosts(peers):
    a, mate, b = peers
    for one, two in ((a, mate), (a, b)):
        expected = two.recv_all((one.role, 0), 2)
        one.send_all((two.role, 0), (None, np.arange(3)), (None, np.ones(100_000)))
        first, second = expected.wait()[0]
        assert first.tolist() == [0, 1, 2] and second.sum() == 100_000
        two.send_all((one.role, 0), (None, "thanks"))
        assert one.recv_all((two.role, 0), 1).wait() == [["thanks"]]


def test_a_broadcast_encodes_an_item_once_for_all_hosts(backend):
    hosts = [HostPlan(f"h{i}", ("peer", "judge") if i == 0 else ("peer",)) for i in range(3)]
    with Cluster(backend, hosts, timeout_s=300) as cluster:
        group, judge = cluster.launch(Peer, "peer"), cluster.launch(Peer, "judge")
        group.clock().wait()  # nobody else is being answered
        assert judge.broadcast_and_count(np.ones(50_000), "peer").wait() == [0 if backend == "inline" else 1]
        assert group.sums(("judge", 0)).wait() == [50_000] * 3
        group[1].broadcast_and_count(np.ones(3), "peer").wait()  # not to itself
        assert group[::2].sums(("peer", 1)).wait() == [3, 3]
        with pytest.raises(WorkerFailed, match=r"nothing came for 0\.05 s"):
            group[1].recv_all(("peer", 1), 1, timeout_s=0.05).wait()


def test_a_worker_that_is_not_in_the_plan_is_refused_by_name(backend):
    for to in (("reward", 0), ("a", 1), ("a", -1)):
        with Cluster(backend, [HostPlan("left", ("a",))], timeout_s=300) as cluster:
            with pytest.raises(WorkerFailed, match=rf"no worker {to[0]}-{to[1]}; it has by role: a \(1\)"):
                cluster.launch(Peer, "a").send_all(to, (None, 1)).wait()


def test_a_worker_that_failed_is_named_to_those_that_wait_for_it(cluster):
    a, b = cluster.launch(Peer, "a"), cluster.launch(Peer, "b")
    waiting = b.recv_or_reason(("a", 0))
    with pytest.raises(WorkerFailed, match="broken gripper"):
        a.fail().wait()
    peer, cause = waiting.wait()[0]
    assert peer == "a-0" and "broken gripper" in cause
    assert b.recv_or_reason(("a", 0)).wait()[0][0] == "a-0"  # who asks later hears it as well
    with pytest.raises(WorkerFailed, match=r"a-0: .*broken gripper"):
        b.send_all(("a", 0), (None, "are you there?")).wait()


def test_items_of_a_dead_peer_are_kept_and_those_of_its_successor_are_received(processes, tmp_path):
    hosts = [HostPlan("left", ("a",)), HostPlan("right", ("b",))]
    with Cluster(processes, hosts, log_dir=tmp_path, timeout_s=300) as cluster:
        a, b = cluster.launch(Peer, "a"), cluster.launch(Peer, "b")
        cluster.supervise([a], Budget(1, 60, 60))
        a.send_all(("b", 0), (None, "last words")).wait()
        b.wait_for_item(("a", 0)).wait()  # news of the death could overtake what is still on its way
        (host,) = cluster.wait_for_calls(a.die())
        assert b.recv_all(("a", 0), 1).wait() == [["last words"]]
        peer, cause = b.recv_or_reason(("a", 0)).wait()[0]
        assert peer == "a-0" and "SIGKILL" in cause
        for handle in cluster.replace(host):
            handle.wait()
        waiting = b.recv_or_reason(("a", 0))
        a.send_all(("b", 0), (None, "here again")).wait()
        assert waiting.wait() == ["here again"]


def test_waiting_for_a_peer_ends_with_the_cluster(backend):
    """Otherwise the thread is still there afterwards, which the check after every test finds."""
    with Cluster(backend, [HostPlan("left", ("a", "b"))], timeout_s=300) as cluster:
        a, _ = cluster.launch(Peer, "a"), cluster.launch(Peer, "b")
        waiting = a.recv_all(("b", 0), 1)
        with pytest.raises(DeadlineExceeded):
            waiting.wait(timeout_s=0.05)
