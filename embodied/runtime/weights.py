"""Versioned weights: written once by the trainer (`WeightStore`), seen by readers (`WeightReader`) only when published,
and never half-changed. The driver brings each version to all readers (`workflows/launched_workers.py`).

A reader's location decides how it gets a version:

    same process      "shared": the live tensors themselves, if training and acting take turns and nothing is sharded
    same GPU          "handles": the live tensors, copied by their CUDA handles, if the same holds (not measured)
    same machine      "snapshot": one copy in shared memory, mapped and used in place by all readers
    another machine   "buckets": pieces through a channel into memory of its own

When rollouts lag behind updates, a snapshot has two areas for the tensors that training changes: the next version is
written and sent while the previous one acts (`WeightStore(changing=...)`, `WeightReader.fetch`).

The trainer chooses a version's tensors when it calls `WeightStore.publish`: all of them first and after a load, then
only the trained ones. The loop decides how old a rollout's version may be (`workflows/rl_loop.py`); a reader has
exactly the requested version, or an error. There is at most one snapshot beside the live tensors. It is memory without
a name (memfd): readers open it through its owner's process, and the kernel frees it with its last user.
"""

from __future__ import annotations

import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np

from embodied.core.errors import DeadlineExceeded, EmbodiedError, StaleWeights
from embodied.runtime.channel import Channel, put_all
from embodied.runtime.device_memory import cpu_memory, gpu_id, synchronize
from embodied.runtime.payload import map_private, map_shared, own_device
from embodied.runtime.published_weights import (
    Blob,
    Publication,
    Spec,
    TensorBucket,
    TensorsFromBuckets,
    areas_of,
    blob_of,
    buckets_from,
    buckets_of,
    check,
    checksum,
    is_away,
    tensor_buckets,
    tensor_of,
)

SENDING_S = 600.0  # deadline for a reader to take a version of the live tensors
NONE = -1  # no version: nothing is published, or a version is being written

stores_here: weakref.WeakValueDictionary[str, WeightStore] = weakref.WeakValueDictionary()


def new_name() -> str:
    """Returns a name for a store, or for the stores of all ranks with the same weights."""
    return secrets.token_hex(8)


class WeightStore:
    """Trainer side: writes and publishes versions. One thread does that; `send` and readers may come at any time."""

    _fd = -1  # of the snapshot

    def __init__(
        self,
        specs: Mapping[str, Spec],
        snapshot: bool = True,
        live: Mapping[str, Any] | None = None,
        name: str | None = None,
        changing: Iterable[str] = (),
        gpu: str = "",
    ) -> None:
        """`live` tensors are shared with readers in this process, and copied by readers on the same `gpu`. Without a
        `snapshot` of every version, other readers get buckets, and a snapshot is written only when the live tensors are
        offloaded (`keep`). `changing` names the tensors of every publication after the first; then the previous version
        stays readable while the next one is written."""
        self.name = name or new_name()
        self.specs = dict(specs)
        self.live = live
        self.version = NONE  # last published
        self.visible = NONE  # the version of the live tensors
        self._updating = False
        self._acting = 0  # readers that use the live tensors right now
        self._sending = 0  # threads that send the live tensors right now
        self._turn = threading.Condition()
        self._writing = threading.Lock()  # no tensor is sent while it is overwritten
        self.changing = frozenset(changing)
        self._area = 0  # area of the current version
        self._publications: dict[int, Publication] = {}  # by area
        self._checksums: list[dict[str, int]] = [{}, {}]  # by area
        self._memory: np.ndarray | None = None
        self.gpu, self._writes_all = gpu, snapshot  # True: writes a snapshot of every version
        if snapshot:
            self._make_snapshot()
        stores_here.setdefault(self.name, self)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Weights may change inside. Readers of the live tensors see no version until the next `publish`."""
        with self._turn:
            assert not self._updating, "an update of these weights is open already"
            if not self._turn.wait_for(lambda: not self._sending, SENDING_S):
                raise DeadlineExceeded(
                    f"a reader did not take version {self.visible} of the weights in {SENDING_S:g} s"
                )
            if self._acting:
                raise EmbodiedError(
                    f"{self._acting} workers act with the live weights while an update begins; "
                    "acting and updating must take turns where they share storage"
                )
            self._updating, self.visible = True, NONE
        try:
            yield
        finally:
            self._updating = False

    def publish(
        self, version: int, blobs: Iterable[tuple[str, Blob]], names: Iterable[str] | None = None
    ) -> Publication:
        """Make this version the current one; it may be published again with other tensors. `blobs` are the tensors that
        changed since the last version (at first: all). They are read one by one, and only for a snapshot; without one
        `names` says which tensors changed."""
        assert not self._updating and version >= self.version, (version, self.version)
        if self.changing and self.version != NONE:
            self._area = 1 - self._area
        changed = self._write(version, blobs) if self._writes_all else tuple((self.gpu and names) or self.specs)
        publication = Publication(
            version,
            self.version,
            self.name,
            os.getpid(),
            self._fd,
            self.specs,
            dict(self._checksums[self._area]),
            changed,
            self.changing,
            self._area,
            self.gpu,
        )
        self._publications[self._area] = publication
        with self._turn:
            self.version = self.visible = version
            self._turn.notify_all()
        return publication

    def keep(self) -> None:
        """Write a snapshot of the current version, unless there is one, before the live tensors leave their device."""
        if self._writes_all or self.live is None or is_away(self.live) or self.visible == NONE:
            return
        if self._memory is None:
            self._make_snapshot()
        if int(self._head[0]) != self.visible:
            self._write(self.visible, ((name, blob_of(tensor)) for name, tensor in self.live.items()))

    def current(self) -> Publication:
        """The last published version, for a reader without a version, which takes all tensors."""
        if not self._publications:
            raise StaleWeights("no weights have been published yet")
        return self._publications[self._area]

    def send(
        self, channels: tuple[Channel, ...], whole: bool = False, version: int | None = None, handles: bool = False
    ) -> None:
        """Put this version (the current one if it has been overwritten) into these channels in buckets: the changed
        tensors, or all. `handles`: send handles of the live tensors, if they are on their device."""
        if not self._writes_all:
            with self._live_tensors() as live:
                names = self.specs if whole else self.current().changed
                if not handles or is_away(live):
                    self.keep()
                    self._send_bytes(channels, self.current(), names)
                    return
                for bucket in tensor_buckets(self.version, {name: live[name] for name in names}):
                    for channel in channels:  # each channel gets handles of its own
                        channel.put(bucket)
            return
        with self._writing:
            now = self.current()
            readable = (kept for kept in (now, *self._publications.values()) if kept.version == version)
            publication = next(readable, now)
            self._send_bytes(channels, publication, self.specs if whole else publication.changed)

    def send_aside(
        self, channels: tuple[Channel, ...], whole: bool = False, version: int | None = None, handles: bool = False
    ) -> None:
        """Sends in a separate thread; errors close the channels with their cause."""

        def work() -> None:
            try:
                self.send(channels, whole, version, handles)
            except Exception as error:
                for channel in channels:
                    channel.close(f"sending weights failed: {type(error).__name__}: {error}")

        threading.Thread(target=work, name="weights", daemon=True).start()

    @contextmanager
    def _live_tensors(self) -> Iterator[Mapping[str, Any]]:
        """Waits for a published version; the next update waits for the end of this block."""
        with self._turn:
            if not self._turn.wait_for(lambda: self.visible != NONE, SENDING_S):
                raise DeadlineExceeded(f"no version of the weights was published in {SENDING_S:g} s")
            self._sending += 1
        try:
            assert self.live is not None
            yield self.live
        finally:
            with self._turn:
                self._sending -= 1
                self._turn.notify_all()

    def _send_bytes(self, channels: tuple[Channel, ...], publication: Publication, names: Iterable[str]) -> None:
        parts = ((name, self._bytes_of(name, publication.area)) for name in names)
        for bucket in buckets_of(publication.version, parts):
            put_all(channels, bucket)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Readers that have mapped the snapshot keep it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    @contextmanager
    def acting(self, version: int) -> Iterator[None]:
        """Inside, a reader uses the live tensors."""
        with self._turn:
            if self._updating or self.visible != version:
                state = "are being updated" if self._updating else f"are version {self.visible}"
                raise StaleWeights(f"this worker acts with version {version}, but the weights it shares {state}")
            self._acting += 1
        try:
            yield
        finally:
            with self._turn:
                self._acting -= 1

    # Inside

    def _make_snapshot(self) -> None:
        self._offsets, size = areas_of(self.specs, self.changing)
        self._fd = os.memfd_create("embodied-weights", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self._memory = np.frombuffer(map_shared(self._fd, size), np.uint8)
        self._memory[:16] = np.frombuffer(self.name.encode(), np.uint8)
        self._head = self._memory[16:32].view(np.int64)
        self._head[:] = NONE

    def _bytes_of(self, name: str, area: int) -> np.ndarray:
        assert self._memory is not None
        start = self._offsets[area][name]
        return self._memory[start : start + self.specs[name].size_bytes]

    def _write(self, version: int, blobs: Iterable[tuple[str, Blob]]) -> tuple[str, ...]:
        with self._writing:
            area = self._area
            self._head[area] = NONE
            changed = []
            for name, blob in blobs:
                if blob.spec != self.specs[name]:
                    raise EmbodiedError(f"weight {name} is {blob.spec} but was announced as {self.specs[name]}")
                stored_bytes = self._bytes_of(name, area)
                stored_bytes[:] = blob.data
                for checksums in [self._checksums[area]] if name in self.changing else self._checksums:
                    checksums[name] = checksum(stored_bytes)
                changed.append(name)
            missing = (self.specs.keys() - self._checksums[area].keys()) | ({*self.changing} - {*changed})
            assert not missing, f"version {version} lacks {', '.join(sorted(missing)[:4])}"
            self._head[area] = version
        return tuple(changed)


class WeightReader:
    """Reader side: loads published versions. It must not act until it has loaded a whole version."""

    def __init__(self) -> None:
        self.version: int | None = None
        self._route = self._owner = ""
        self._store: WeightStore | None = None
        self._memory = np.empty(0, np.uint8)
        self._area = 0
        self._fetch: Fetch | None = None
        self._tensors: dict[str, Any] = {}  # copies of live tensors on this reader's GPU

    def route(self, publication: Publication) -> str:
        """Returns how this process reads a store's weights: "shared", "handles", "snapshot" or "buckets"."""
        store = stores_here.get(publication.store)
        if store is not None and store.live is not None:
            return "shared"
        if publication.gpu and publication.gpu == gpu_id():
            return "handles"
        with suppress(OSError):
            fd = open_snapshot(publication)
            os.close(fd)
            return "snapshot"
        return "buckets"

    def load(
        self, publication: Publication, route: str, channel: Channel | None = None, whole: bool = False
    ) -> dict[str, Any]:
        """Load a version: `whole`, or only the changed tensors if the previous version is here. Returns the loaded
        tensors: live tensors by name, or `Blob`s, whose memory stays the same from version to version. Buckets come
        through the channel from `WeightStore.send`. If a newer version has replaced this one, nothing is loaded and
        `version` is None: the reader waits for the newer version."""
        first = self._route != route or self._owner != publication.store
        whole = whole or first or self.version != publication.follows
        names = publication.specs if whole else publication.changed
        self.version, self._route, self._owner, self._area = None, route, publication.store, publication.area
        if route == "shared":
            self._store = stores_here[publication.store]
            assert self._store.live is not None
            self.version = publication.version
            return {name: self._store.live[name] for name in names}
        if first:
            self._memory, self._tensors = memory_for(publication, route), {}
        if route == "handles":
            assert channel is not None
            came = self._receive_tensors(publication, channel, names)
            self.version = publication.version if came else None
            return {name: self._tensors[name] for name in names} if came else {}
        blobs = self._blobs(publication, names)
        if (fetch := self._fetched(publication)) and not whole:
            came = fetch.result()
        elif route == "buckets":
            assert channel is not None
            came = self._receive(publication, channel, names)
        else:
            came = self._check(publication, blobs)
        if not came:
            return {}
        self.version = publication.version
        return blobs

    def fetch(self, publication: Publication, route: str, channel: Channel) -> None:
        """Begin to fetch the next version, in a separate thread while this reader acts: receive its buckets, or check
        its snapshot. `load` of the same version waits for the fetch and uses it."""
        work = partial(self._receive, publication, channel, publication.changed)
        if route == "snapshot":
            work = partial(self._check, publication, self._blobs(publication, publication.changed))
        self._fetch = Fetch(publication, work)

    @contextmanager
    def acting(self, version: int) -> Iterator[None]:
        """Inside, the weights stay at this version; raises StaleWeights if it is not the current version."""
        if self.version != version:
            has = "has no weights yet" if self.version is None else f"has version {self.version}"
            raise StaleWeights(f"this worker {has}, but version {version} is current, so it answers nothing")
        if self._route == "shared":
            assert self._store is not None
            with self._store.acting(version):
                yield
            return
        self._check_snapshot()
        yield
        self._check_snapshot()

    # Inside

    def _blobs(self, publication: Publication, names: Iterable[str]) -> dict[str, Blob]:
        offsets, specs = publication.places[0], publication.specs
        return {n: Blob(specs[n], self._memory[offsets[n] : offsets[n] + specs[n].size_bytes]) for n in names}

    def _fetched(self, publication: Publication) -> Fetch | None:
        """Waits for the current fetch; returns it if it is of this version."""
        fetch, self._fetch = self._fetch, None
        if fetch is not None:
            fetch.wait()
        return fetch if fetch is not None and fetch.publication.version == publication.version else None

    def _check_snapshot(self) -> None:
        """Raises if the owner has overwritten the snapshot."""
        if self._route == "snapshot" and (now := int(self._head[self._area])) != self.version:
            what = "is being overwritten" if now == NONE else f"holds version {now} by now"
            raise StaleWeights(f"this worker acts with version {self.version}, but its snapshot {what}")

    @property
    def _head(self) -> np.ndarray:
        return self._memory[16:32].view(np.int64)

    def _check(self, publication: Publication, blobs: dict[str, Blob]) -> bool:
        """True if the snapshot holds this version undamaged; False if a newer version has replaced it."""
        try:
            if not self._overwritten(publication):
                for name, blob in blobs.items():
                    check(name, blob.data, publication.checksums[name], publication.version)
        except EmbodiedError:
            if not self._overwritten(publication):
                raise
        return not self._overwritten(publication)

    def _overwritten(self, publication: Publication) -> bool:
        version = int(self._head[publication.area])
        if NONE < version < publication.version:
            raise StaleWeights(f"the snapshot holds version {version}, not {publication.version}")
        return version != publication.version

    def _receive(self, publication: Publication, channel: Channel, names: Iterable[str]) -> bool:
        """True if this whole version arrived; False if a newer one came instead."""
        tensors = {name: blob.data for name, blob in self._blobs(publication, names).items()}
        arriving = TensorsFromBuckets(publication.version, tensors)
        for bucket in buckets_from(channel, publication.version):
            if bucket is None:
                return False
            if bucket.number == 0:
                arriving = TensorsFromBuckets(publication.version, tensors)
            arriving.add(bucket)
        return True

    def _receive_tensors(self, publication: Publication, channel: Channel, names: Iterable[str]) -> bool:
        """The same, into tensors on this reader's GPU. If the live tensors have left their GPU, bytes arrive."""
        bytes_of = {name: np.empty(publication.specs[name].size_bytes, np.uint8) for name in names}
        arriving = TensorsFromBuckets(publication.version, bytes_of)
        for bucket in buckets_from(channel, publication.version):
            if bucket is None:
                return False
            if isinstance(bucket, TensorBucket):
                for name, tensor in bucket.tensors.items():
                    self._copy(name, tensor)
                synchronize()  # the sender may change its tensors from now on
                continue
            if bucket.number == 0:
                arriving = TensorsFromBuckets(publication.version, bytes_of)
            arriving.add(bucket)
            if bucket.last:
                for name, data in bytes_of.items():
                    self._copy(name, tensor_of(Blob(publication.specs[name], data)))
        return True

    def follow(self, tensors: Mapping[str, Any]) -> None:
        """Copy later versions of live tensors to where their user has moved them. It may have joined some."""
        self._tensors = {name: tensors[name] for name in self._tensors}

    def _copy(self, name: str, tensor: Any) -> None:
        if name in self._tensors:
            self._tensors[name].copy_(tensor)
        else:
            self._tensors[name] = tensor.to(own_device(), copy=True)


class Fetch:
    """A fetch of a version, in a separate thread."""

    def __init__(self, publication: Publication, work: Callable[[], bool]) -> None:
        """`work` returns True if this version arrived, False if a newer one came instead."""
        self.publication, self._work = publication, work
        self._came: bool | Exception = False
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> bool:
        if isinstance(self._came, Exception):
            raise self._came
        return self._came

    def _run(self) -> None:
        try:
            self._came = self._work()
        except Exception as error:  # `result` raises it
            self._came = error


def memory_for(publication: Publication, route: str) -> np.ndarray:
    _, size = publication.places
    if route == "handles":
        return np.empty(0, np.uint8)
    if route == "buckets":
        return cpu_memory(size)
    fd = open_snapshot(publication)
    try:
        return np.frombuffer(map_private(fd, size), np.uint8)
    finally:
        os.close(fd)


def open_snapshot(publication: Publication) -> int:
    """A descriptor of the snapshot; OSError if this process cannot reach it."""
    if publication.fd < 0:
        raise FileNotFoundError("this store has no snapshot")
    fd = os.open(f"/proc/{publication.pid}/fd/{publication.fd}", os.O_RDONLY | os.O_CLOEXEC)
    if os.pread(fd, 16, 0) != publication.store.encode():
        os.close(fd)
        raise FileNotFoundError("another machine's or another user's file")
    return fd
