"""Published weights: who sees them when, on each way from the learner to the policies."""

import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch

from embodied.core.errors import EmbodiedError, StaleWeights, WorkerFailed
from embodied.runtime import Cluster, HostPlan, Worker, published_weights
from embodied.runtime import weights as module
from embodied.runtime.device_memory import Offloader
from embodied.runtime.published_weights import Blob, Bucket, Spec
from embodied.runtime.weights import WeightReader, WeightStore

SPECS = {"frozen": Spec("float32", (1000,)), "trained": Spec("float32", (300,)), "count": Spec("float64", ())}


def blobs(value, names=tuple(SPECS)):
    """All numbers of these tensors are `value`."""
    arrays = {name: np.full(SPECS[name].shape, value, SPECS[name].dtype) for name in names}
    return [(name, Blob(SPECS[name], array.reshape(-1).view(np.uint8))) for name, array in arrays.items()]


def values(found):
    """The one number in each tensor."""
    arrays = {name: blob.data.view(blob.spec.dtype) for name, blob in found.items()}
    assert all(len(set(array.tolist())) == 1 for array in arrays.values())
    return {name: array[0] for name, array in arrays.items()}


@pytest.fixture
def store():
    store = WeightStore(SPECS)
    yield store
    store.close()


@pytest.fixture
def channel():
    with Cluster("inline", [HostPlan("only", ("a",))], timeout_s=300) as cluster:
        yield cluster.channel("weights", capacity=None)


def test_a_snapshot_is_read_in_place_and_a_reader_of_the_old_version_is_stale(store):
    reader = WeightReader()
    first = store.publish(0, blobs(1.0))
    assert reader.route(first) == "snapshot"
    found = reader.load(first, "snapshot")
    assert values(found) == {"frozen": 1, "trained": 1, "count": 1}
    with reader.acting(0):
        pass
    second = store.publish(1, blobs(2.0, ["trained"]))
    assert second.changed == ("trained",)
    with pytest.raises(StaleWeights, match="holds version 1"), reader.acting(0):
        raise AssertionError("served")
    with pytest.raises(StaleWeights, match="has version 0, but version 1 is current"), reader.acting(1):
        raise AssertionError("served")
    assert values(reader.load(second, "snapshot")) == {"trained": 2}
    assert values(found) == {"frozen": 1, "trained": 2, "count": 1}  # the same memory
    with reader.acting(1):
        pass


def test_overwriting_a_snapshot_that_is_in_use_is_noticed(store):
    reader = WeightReader()
    reader.load(store.publish(0, blobs(1.0)), "snapshot")

    def publish_while_acting():
        with reader.acting(0):
            store.publish(1, blobs(2.0))

    with pytest.raises(StaleWeights, match="holds version 1 by now"):
        publish_while_acting()


def test_a_reader_that_wrote_to_its_weights_finds_out(store):
    reader = WeightReader()
    found = reader.load(store.publish(0, blobs(1.0)), "snapshot")
    found["trained"].data[0] = 7
    with pytest.raises(EmbodiedError, match="weight trained of version 1 was damaged"):
        reader.load(store.publish(1, blobs(2.0)), "snapshot")


def test_live_tensors_are_shared_and_hidden_from_update_to_publication():
    live = {name: np.zeros(spec.shape, spec.dtype) for name, spec in SPECS.items()}
    store, reader = WeightStore(SPECS, snapshot=False, live=live), WeightReader()
    first = store.publish(0, iter(()))
    assert first.fd == -1 and reader.route(first) == "shared"
    assert reader.load(first, "shared")["trained"] is live["trained"]
    with reader.acting(0), pytest.raises(EmbodiedError, match="take turns"), store.updating():
        raise AssertionError("updated")
    with store.updating(), pytest.raises(StaleWeights, match="are being updated"), reader.acting(0):
        raise AssertionError("served")
    with pytest.raises(StaleWeights, match="are version -1"), reader.acting(0):
        raise AssertionError("served")
    second = store.publish(1, iter(()))
    with pytest.raises(StaleWeights), reader.acting(1):
        raise AssertionError("served")
    reader.load(second, "shared")
    with reader.acting(1):
        pass


def test_publishing_while_an_update_is_open_raises_and_versions_never_fall(store):
    with store.updating(), pytest.raises(AssertionError):
        store.publish(0, blobs(1.0))
    store.publish(3, blobs(1.0))
    store.publish(3, blobs(2.0))  # the mean of weights, for example
    with pytest.raises(AssertionError):
        store.publish(2, blobs(1.0))
    with store.updating(), pytest.raises(AssertionError, match="open already"), store.updating():
        raise KeyError


def test_a_reader_without_weights_serves_nothing_and_takes_the_whole_current_version(store):
    reader = WeightReader()
    with pytest.raises(StaleWeights, match="no weights have been published"):
        store.current()
    store.publish(0, blobs(1.0))
    store.publish(1, blobs(2.0, ["trained"]))
    with pytest.raises(StaleWeights, match="has no weights yet"), reader.acting(1):
        raise AssertionError("served")
    found = reader.load(store.current(), "snapshot")
    assert values(found) == {"frozen": 1, "trained": 2, "count": 1}


def test_a_reader_that_missed_a_version_takes_all_of_it(store):
    reader = WeightReader()
    reader.load(store.publish(0, blobs(1.0)), "snapshot")
    store.publish(1, blobs(2.0, ["frozen"]))
    assert reader.load(store.publish(2, blobs(3.0, ["count"])), "snapshot").keys() == SPECS.keys()


@pytest.mark.parametrize("state", ["published", "being written"])
def test_a_reader_that_missed_a_version_loads_the_next_one(store, state):
    """A worker that was started again builds while learners publish: its call names a version that is gone."""
    first, reader = store.publish(0, blobs(1.0)), WeightReader()
    second = store.publish(1, blobs(2.0, ["trained"]))
    if state == "being written":
        store._head[0] = module.NONE
    assert reader.load(first, "snapshot") == {} and reader.version is None
    with pytest.raises(StaleWeights, match="has no weights yet"), reader.acting(0):
        raise AssertionError("served")
    store._head[0] = 1
    assert values(reader.load(second, "snapshot")) == {"frozen": 1, "trained": 2, "count": 1}
    with reader.acting(1):
        pass


def test_a_snapshot_overwritten_during_its_check_is_not_called_damaged(store, monkeypatch):
    first, reader, check = store.publish(0, blobs(1.0)), WeightReader(), module.check

    def overwrite_first(*args):
        monkeypatch.setattr(module, "check", check)
        store.publish(1, blobs(2.0))
        check(*args)

    monkeypatch.setattr(module, "check", overwrite_first)
    assert reader.load(first, "snapshot") == {} and reader.version is None


@pytest.mark.parametrize("sent", ["before", "after"])
def test_buckets_of_a_newer_version_end_the_wait_for_an_older_one(store, channel, monkeypatch, sent):
    monkeypatch.setattr(published_weights, "BUCKET_BYTES", 512)
    first, reader = store.publish(0, blobs(1.0)), WeightReader()
    if sent == "before":  # they wait there already, and a part of them was lost with the process before
        store.send((channel,), whole=True)
        channel.get()
    second = store.publish(1, blobs(2.0, ["trained"]))
    store.send((channel,), whole=True)
    assert reader.load(first, "buckets", channel) == {} and reader.version is None
    store.send((channel,), whole=True)
    found = reader.load(second, "buckets", channel, whole=True)
    assert values(found) == {"frozen": 1, "trained": 2, "count": 1}


def until(true):
    for _ in range(6000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within a minute")


@pytest.fixture
def live_store():
    """Of tensors on a GPU, in another process. Here they are on the CPU."""
    live = {name: torch.ones(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in SPECS.items()}
    store = WeightStore(SPECS, snapshot=False, live=live, gpu="GPU-a")
    module.stores_here.pop(store.name)
    yield store
    store.close()


def numbers(tensors):
    assert all(len(set(tensor.reshape(-1).tolist())) == 1 for tensor in tensors.values())
    return {name: tensor.reshape(-1)[0].item() for name, tensor in tensors.items()}


@pytest.mark.parametrize(("snapshot", "gpu", "route"), [
    (False, "GPU-a", "handles"), (True, "GPU-a", "handles"), (False, "GPU-b", "buckets"), (True, "GPU-b", "snapshot"),
    (False, "", "buckets"),
])  # fmt: skip
def test_only_a_reader_on_the_same_gpu_copies_the_live_tensors(live_store, monkeypatch, snapshot, gpu, route):
    store = WeightStore(SPECS, snapshot, live_store.live, gpu="GPU-a")
    publication = store.publish(0, blobs(1.0))
    assert WeightReader().route(publication) == "shared"
    module.stores_here.pop(store.name)
    monkeypatch.setattr(module, "gpu_id", lambda: gpu)
    assert WeightReader().route(publication) == route
    store.close()


def test_live_tensors_are_copied_and_later_versions_into_the_same_memory(live_store, channel, monkeypatch):
    monkeypatch.setattr(published_weights, "BUCKET_BYTES", 512)
    reader, live = WeightReader(), live_store.live
    publication = live_store.publish(0, iter(()))
    live_store.send((channel,), handles=True)
    assert channel.qsize() == 3 + 2
    found = reader.load(publication, "handles", channel)
    assert numbers(found) == {"frozen": 1, "trained": 1, "count": 1}
    with live_store.updating():
        live["trained"].fill_(2.0)
    publication = live_store.publish(1, iter(()), ["trained"])
    live_store.send((channel,), handles=True)
    assert numbers(reader.load(publication, "handles", channel)) == {"trained": 2}
    assert numbers(found) == {"frozen": 1, "trained": 2, "count": 1}
    with reader.acting(1):
        pass


@pytest.mark.parametrize("way", ["handles", "buckets"])
def test_where_live_tensors_have_left_their_gpu_readers_get_the_bytes_that_were_kept(live_store, channel, way):
    publication = live_store.publish(0, iter(()))
    live_store.keep()
    Offloader().offload(live_store.live.values())
    live_store.send((channel,), whole=True, handles=way == "handles")
    found = WeightReader().load(publication, way, channel)
    assert (numbers if way == "handles" else values)(found) == {"frozen": 1, "trained": 1, "count": 1}


def test_an_update_waits_until_the_live_tensors_were_taken(live_store, monkeypatch):
    monkeypatch.setattr(published_weights, "BUCKET_BYTES", 512)
    with Cluster("inline", [HostPlan("only", ("a",))], timeout_s=300) as cluster:
        channel = cluster.channel("weights", capacity=1)
        publication = live_store.publish(0, iter(()))

        def update():
            with live_store.updating():
                for tensor in live_store.live.values():
                    tensor.fill_(9.0)

        live_store.send_aside((channel,), True, 0, True)
        until(lambda: channel.qsize() == 1)  # the first of three
        updating = threading.Thread(target=update)
        updating.start()
        found = WeightReader().load(publication, "handles", channel)
        updating.join(60)
        assert numbers(found) == {"frozen": 1, "trained": 1, "count": 1}
        assert numbers(live_store.live) == {"frozen": 9, "trained": 9, "count": 9}


def test_the_first_version_must_be_whole_and_tensors_as_announced(store):
    with pytest.raises(AssertionError, match="lacks count"):
        store.publish(0, blobs(1.0, ["frozen", "trained"]))
    with pytest.raises(EmbodiedError, match="trained is"):
        store.publish(0, [("trained", Blob(Spec("float32", (2,)), np.zeros(8, np.uint8)))])
    reader = WeightReader()
    with pytest.raises(StaleWeights):
        reader.load(replace(store.publish(1, blobs(1.0)), version=2), "snapshot")


def test_buckets_bring_what_changed_in_small_pieces(store, channel, monkeypatch):
    monkeypatch.setattr(published_weights, "BUCKET_BYTES", 512)
    reader = WeightReader()
    publication = store.publish(0, blobs(1.0))
    store.send((channel,))
    assert channel.qsize() == 11  # 4000 + 1200 + 8 bytes
    found = reader.load(publication, "buckets", channel)
    assert values(found) == {"frozen": 1, "trained": 1, "count": 1}
    publication = store.publish(1, blobs(2.0, ["count", "trained"]))
    store.send((channel,))
    assert channel.qsize() == 3
    assert values(reader.load(publication, "buckets", channel)) == {"trained": 2, "count": 2}
    assert values(found) == {"frozen": 1, "trained": 2, "count": 2}
    with reader.acting(1):
        pass


def test_a_new_reader_takes_whole_buckets_and_skips_those_of_an_aborted_sending(store, channel, monkeypatch):
    monkeypatch.setattr(published_weights, "BUCKET_BYTES", 512)
    store.publish(0, blobs(1.0))
    store.publish(1, blobs(2.0, ["count"]))
    store.send((channel,), whole=True)
    for _ in range(4):
        channel.get()
    store.send((channel,), whole=True)
    found = WeightReader().load(store.current(), "buckets", channel)
    assert values(found) == {"frozen": 1, "trained": 1, "count": 2}


@pytest.mark.parametrize("fault", ["flipped", "missing"])
def test_damaged_and_missing_parts_are_refused_and_leave_no_version(store, channel, fault):
    reader = WeightReader()
    publication = store.publish(0, blobs(1.0))
    store.send((channel,))
    bucket: Bucket = channel.get()
    (name, start, data), *others = bucket.parts
    spoilt = data.copy()
    spoilt[5] ^= 1
    parts = ((name, start, spoilt), *others) if fault == "flipped" else tuple(others)
    channel.put(replace(bucket, parts=parts, checksums=bucket.checksums[-len(parts) :]))
    with pytest.raises(EmbodiedError, match="checksum differs" if fault == "flipped" else "without parts of frozen"):
        reader.load(publication, "buckets", channel)
    with pytest.raises(StaleWeights, match="has no weights"), reader.acting(0):
        raise AssertionError("served")


class Owner(Worker):
    def __init__(self):
        self.store = WeightStore(SPECS)

    def publish(self, version, value, names=tuple(SPECS)):
        return self.store.publish(version, blobs(value, names))

    def send(self, channels):
        self.store.send(channels)


class Reader(Worker):
    def __init__(self):
        self.reader = WeightReader()
        self.found = {}

    def route(self, publication):
        return self.reader.route(publication)

    def load(self, publication, route, channel):
        self.found |= self.reader.load(publication, route, channel)
        return values(self.found)

    def act(self, version):
        with self.reader.acting(version):
            return values(self.found)

    def mappings(self):
        with open("/proc/self/maps") as maps:
            return sum("memfd:embodied-weights" in line for line in maps)


@pytest.mark.parametrize("route", ["snapshot", "buckets"])
def test_processes_of_one_machine_take_the_same_snapshot_or_buckets(tmp_path, route, monkeypatch):
    hosts = [
        HostPlan(name, (role,), imports=("torch",))
        for name, role in (("learner", "owner"), ("one", "reader"), ("two", "reader"))
    ]
    with Cluster("local", hosts, log_dir=tmp_path, timeout_s=300) as cluster:
        owner, readers = cluster.launch(Owner, "owner"), cluster.launch(Reader, "reader")
        channels = tuple(cluster.channel(f"weights-{i}", home=readers[i], capacity=1) for i in range(2))
        for version, value, names in ((0, 1.0, tuple(SPECS)), (1, 2.0, ("trained",))):
            (publication,) = owner.publish(version, value, names).wait()
            assert readers.route(publication).wait() == ["snapshot"] * 2
            sent = owner.send(channels) if route == "buckets" else None
            loaded = readers.load.each([(publication, route, channel) for channel in channels]).wait()
            if sent:
                sent.wait()
            expected = {"frozen": 1.0, "trained": value, "count": 1.0}
            assert loaded == readers.act(version).wait() == [expected] * 2
        assert readers.mappings().wait() == [int(route == "snapshot")] * 2
        owner.publish(2, 3.0).wait()
        if route == "snapshot":
            with pytest.raises(WorkerFailed, match="snapshot holds version 2 by now"):
                readers.act(1).wait()


MIB = 1 << 20
LARGE = {f"layer-{i}": Spec("uint8", (16 * MIB,)) for i in range(8)}


class Large(Worker):
    """Weights of 128 MiB, and how much more memory than now this process has had meanwhile."""

    def __init__(self):
        self.live = {name: np.ones(spec.shape, np.uint8) for name, spec in LARGE.items()}
        self.reader = WeightReader()

    def offer(self):
        self.store = WeightStore(LARGE)
        return self.store.publish(0, ((name, Blob(LARGE[name], array)) for name, array in self.live.items()))

    def send(self, channel):
        return grown(lambda: self.store.send((channel,)))

    def load(self, publication, route, channel):
        self.live.clear()
        return grown(lambda: self.reader.load(publication, route, channel))


def grown(work):
    """MiB that the peak of this process's memory is above what it has now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts from here
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) / 1024


def resident(what):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(what))


@pytest.mark.parametrize(("route", "sender", "reader"), [("buckets", 112, 128 + 80), ("snapshot", 8, 128 + 8)])
def test_memory_stays_within_one_snapshot_and_what_is_in_flight(tmp_path, route, sender, reader):
    """A snapshot that is mapped counts in every process that maps it, so the reader may show those 128 MiB as well. A
    sender keeps the memory of three buckets: one is read, one waits, one is written."""
    hosts = [HostPlan(name, (role,), imports=("torch",)) for name, role in (("a", "owner"), ("b", "reader"))]
    with Cluster("local", hosts, tmp_path, timeout_s=300) as cluster:
        owner, actor = cluster.launch(Large, "owner"), cluster.launch(Large, "reader")
        channel = cluster.channel("weights", home=actor, capacity=1)
        (publication,) = owner.offer().wait()
        sending = owner.send(channel) if route == "buckets" else None
        assert actor.load(publication, route, channel).wait()[0] < reader
        if sending:
            assert sending.wait()[0] < sender
