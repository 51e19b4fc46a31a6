import threading
import time
from contextlib import nullcontext

import numpy as np
import pytest

from embodied.core.errors import ChannelClosed, DeadlineExceeded, WorkerFailed
from embodied.runtime import Channel, Worker, served_while_busy
from embodied.runtime.channel import Remote
from embodied.runtime.payload import decode, encode


class Peer(Worker):
    """Does with channels what a test asks for."""

    working = False

    def put_all(self, channel, items, **options):
        for item in items:
            channel.put(item, **options)

    def put_lock(self, channel):
        channel.put(threading.Lock())

    def put_keyed(self, channel, pairs):
        for key, item in pairs:
            channel.put(item, key=key)

    def get_all(self, channel, count, **options):
        return [channel.get(**options) for _ in range(count)]

    def put_until_full(self, channel, most):
        for i in range(most):
            try:
                channel.put(i, timeout_s=0.2)
            except DeadlineExceeded as error:
                return i, str(error)
        return most, ""

    def ping(self, out, back, count):
        return [out.put(i) or back.get() for i in range(count)]

    def pong(self, inbox, out, count):
        for _ in range(count):
            out.put(inbox.get() * 10)

    def is_handed_over(self, channel):
        item = np.zeros(100_000)
        channel.put(item)
        return channel.get() is item

    def look_at(self, channel):
        received = channel.get()
        return {name: (array.sum(), array.flags.writeable) for name, array in received.items()}

    def get_through(self, carrier):
        return carrier.get().get()

    def work_until_two_wait(self, channel):
        self.working = True
        while channel.qsize() < 2:
            time.sleep(0.001)
        return [channel.get(), channel.get()]

    @served_while_busy
    def is_working(self):
        return self.working

    def close_channel(self, channel, error=None):
        channel.close(error)


@pytest.fixture(scope="module")
def peers(shared_cluster):
    return shared_cluster.launch(Peer, "a"), shared_cluster.launch(Peer, "b")


@pytest.fixture(scope="module")
def mate(shared_cluster):
    """Lives in the same host as a."""
    return shared_cluster.launch(Peer, "mate")


@pytest.fixture
def name(request):
    return request.node.name


@pytest.fixture(params=["at the producer", "at the consumer", "at the driver"])
def channel(request, shared_cluster, peers, name):
    home = {"at the producer": peers[0], "at the consumer": peers[1], "at the driver": None}[request.param]
    return shared_cluster.channel(name, home=home, capacity=8)


def closed(channel) -> str:
    """What a put is told once the closing has reached this host."""
    try:
        while True:
            channel.put(0, timeout_s=300)
    except ChannelClosed as told:
        return str(told)


def test_items_arrive_in_the_order_they_were_put(peers, channel):
    a, b = peers
    sent = a.put_all(channel, list(range(100)))
    assert b.get_all(channel, 100).wait() == [list(range(100))]
    sent.wait()


def test_a_key_gets_only_what_was_put_under_it(peers, channel):
    a, b = peers
    a.put_keyed(channel, [("x", 1), ("y", 2), ("x", 3), (None, 4)]).wait()
    assert b.get_all(channel, 1, key="y").wait() == [[2]]
    assert b.get_all(channel, 2, key="x").wait() == [[1, 3]]
    assert b.get_all(channel, 1).wait() == [[4]]


def test_a_get_that_gave_up_takes_no_later_item(peers, channel):
    a, b = peers
    a.put_keyed(channel, [("x", 1)]).wait()
    with pytest.raises(WorkerFailed, match=r"nothing came under key 'y' for 0\.05 s"):
        b.get_all(channel, 1, key="y", timeout_s=0.05).wait()
    assert "b-0" in closed(channel)  # it was given the channel, so its failure closed it


def test_an_item_that_comes_after_a_get_gave_up_waits_for_the_next_get(shared_cluster, peers, name):
    channel = shared_cluster.channel(name, home=peers[1])
    with pytest.raises(DeadlineExceeded, match="nothing came under key 'y'"):
        channel.get("y", timeout_s=0.05)
    channel.put(1, key="y")
    assert channel.get("y") == 1


class LateAnswer:
    """A consumer's host. The home of its channel answers a get only when that is cancelled: both were on their way."""

    timeout_s, driver, run = 60.0, None, "run"

    def post(self, host, message, payload=None):
        kind, _, number, *_ = message
        if kind == "cancel":
            self.end.on_answer(host, encode("late"), number, None, None)

    def caller(self):
        return "b-0"

    def waiting(self):
        return nullcontext()

    def unpack(self, payload):
        return decode(payload)


def test_an_item_that_was_on_its_way_when_a_get_gave_up_is_taken():
    host = LateAnswer()
    host.end = Remote(Channel("run", "late", "home", None), host)
    assert host.end.get(None, 0.05) == "late"


def test_a_producer_waits_when_capacity_items_are_waiting(peers, channel):
    a, b = peers
    ((count, message),) = a.put_until_full(channel, 20).wait()
    assert count == 8
    assert channel.name in message
    assert "8 items waiting" in message
    assert b.get_all(channel, 8).wait() == [list(range(8))]
    assert a.put_until_full(channel, 20).wait()[0][0] == 8


def test_each_producer_has_its_own_room(peers, mate, channel):
    a, b = peers
    a.put_until_full(channel, 20).wait()
    assert mate.put_until_full(channel, 5).wait() == [(5, "")]
    assert len(b.get_all(channel, 13).wait()[0]) == 13
    assert channel.qsize() == 0


def test_an_unbounded_channel_never_blocks(shared_cluster, peers, name):
    a, b = peers
    channel = shared_cluster.channel(f"all {name}", home=b, capacity=None)
    a.put_all(channel, list(range(3000))).wait()
    assert b.get_all(channel, 3000).wait() == [list(range(3000))]


def test_a_get_of_an_item_that_cannot_be_sent_names_the_cause(backend, shared_cluster, peers, name):
    channel = shared_cluster.channel(name, home=peers[1])
    peers[1].put_lock(channel).wait()
    if backend == "inline":
        assert channel.get()
    else:
        with pytest.raises(ChannelClosed, match="TypeError: cannot pickle"):
            channel.get(timeout_s=300)


def test_two_workers_in_a_cycle_across_hosts(shared_cluster, peers, name):
    a, b = peers
    out = shared_cluster.channel(f"out {name}", home=b, capacity=1)
    back = shared_cluster.channel(f"back {name}", home=a, capacity=1)
    ping, pong = a.ping(out, back, 200), b.pong(out, back, 200)
    assert ping.wait() == [[i * 10 for i in range(200)]]
    pong.wait()


def test_two_workers_in_a_cycle_within_a_host(shared_cluster, peers, mate, name):
    a, _ = peers
    out, back = (
        shared_cluster.channel(f"out {name}", home=mate, capacity=1),
        shared_cluster.channel(f"back {name}", home=a, capacity=1),
    )
    ping, pong = a.ping(out, back, 200), mate.pong(out, back, 200)
    assert ping.wait() == [[i * 10 for i in range(200)]]
    pong.wait()


def test_within_a_host_the_object_itself_is_handed_over(shared_cluster, peers, name):
    channel = shared_cluster.channel(f"here {name}", home=peers[0])
    assert peers[0].is_handed_over(channel).wait() == [True]


def test_large_arrays_from_another_host_are_read_only(backend, peers, channel):
    a, b = peers
    a.put_all(channel, [{"large": np.ones(100_000), "small": np.ones(10)}]).wait()
    (received,) = b.look_at(channel).wait()
    assert received["large"] == (100_000, backend == "inline")
    assert received["small"] == (10, True)


def test_a_put_is_served_while_the_consumer_is_busy(shared_cluster, peers, name):
    a, b = peers
    channel = shared_cluster.channel(name, home=b, capacity=2)
    busy = b.work_until_two_wait(channel)
    while not b.is_working().wait()[0]:
        time.sleep(0.005)
    a.put_all(channel, ["now", "later"]).wait()
    assert busy.wait() == [["now", "later"]]


def test_after_close_consumers_still_get_what_waits(peers, channel):
    a, b = peers
    a.put_all(channel, [1, 2]).wait()
    a.close_channel(channel).wait()
    assert b.get_all(channel, 2).wait() == [[1, 2]]
    with pytest.raises(WorkerFailed, match="closed by a-0: no more items"):
        b.get_all(channel, 1).wait()


def test_closing_with_an_error_reaches_everybody_at_once(peers, channel):
    a, b = peers
    waiting = b.get_all(channel, 1)
    a.close_channel(channel, "the simulator is on fire").wait()
    with pytest.raises(WorkerFailed, match="closed by a-0: the simulator is on fire"):
        waiting.wait()
    assert "on fire" in closed(channel)


def test_closing_wakes_a_producer_that_waits_for_room(peers, channel):
    a, b = peers
    full = a.put_all(channel, list(range(100)))
    b.get_all(channel, 1).wait()
    b.close_channel(channel, "enough").wait()
    with pytest.raises(WorkerFailed, match="closed by b-0: enough"):
        full.wait()


def test_a_channel_may_travel_through_a_channel(shared_cluster, peers, name):
    a, b = peers
    carrier = shared_cluster.channel(f"carrier {name}", home=b)
    inner = shared_cluster.channel(f"inner {name}", home=a)
    inner.put("found")
    carrier.put(inner)
    assert b.get_through(carrier).wait() == ["found"]
