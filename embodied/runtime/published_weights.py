"""A published version of the weights: its description, and the buckets in which it is sent, of bytes or of tensors that
stay on their GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.runtime.channel import Channel
from embodied.runtime.tensor_bytes import Spec, checksum, place

IN_FLIGHT_BYTES = 64 << 20  # bytes of buckets in flight: one waits in the channel, one is being put
BUCKET_BYTES = IN_FLIGHT_BYTES // 2
HEAD_BYTES = 64  # the head of a snapshot: 16 bytes with its store's name, then the version of each area (int64)


@dataclass(frozen=True)
class Publication:
    """The description of a published version: its tensors and where to find them. It does not contain the bytes."""

    version: int
    follows: int  # the previous version; its readers need only the changed tensors
    store: str  # the store's name
    pid: int
    fd: int  # descriptor of the snapshot in that process; -1: none
    specs: dict[str, Spec]
    checksums: dict[str, int]  # of the snapshot's tensors
    changed: tuple[str, ...]
    changing: frozenset[str] = frozenset()  # tensors with two areas in the snapshot
    area: int = 0  # the area of this version
    gpu: str = ""  # GPU with the live tensors; readers on it copy them there

    @property
    def places(self) -> tuple[dict[str, int], int]:
        """Returns the offset of every tensor of this version in a snapshot, and the snapshot's size."""
        areas, size = areas_of(self.specs, self.changing)
        return areas[self.area], size

    @property
    def size_bytes(self) -> int:
        return sum(self.specs[name].size_bytes for name in self.changed)


def areas_of(specs: Mapping[str, Spec], changing: frozenset[str]) -> tuple[list[dict[str, int]], int]:
    """Returns the offsets of all tensors by area, and the total size. There are two areas if there are `changing`
    names.

    With tensors `frozen` and `trained` of 64 bytes each, and trained changing: [{frozen: 64, trained: 128},
    {frozen: 64, trained: 192}], 256.
    """
    first, size = place(specs, HEAD_BYTES)
    if not changing:
        return [first], size
    second, size = place({name: spec for name, spec in specs.items() if name in changing}, size)
    return [first, {**first, **second}], size


@dataclass(frozen=True)
class Bucket:
    version: int
    number: int
    parts: tuple[tuple[str, int, np.ndarray], ...]  # (tensor, offset in it, bytes)
    checksums: tuple[int, ...]
    last: bool


@dataclass(frozen=True)
class TensorBucket:
    """Live tensors on a GPU, whose handles are sent to a reader on the same GPU."""

    version: int
    number: int
    tensors: dict[str, Any]
    last: bool


def tensor_buckets(version: int, tensors: Mapping[str, Any]) -> Iterator[TensorBucket]:
    """A version's tensors in buckets of up to BUCKET_BYTES. Two empty buckets follow: the channel's capacity is one, so
    when the second one is put, the reader has copied all tensors."""
    groups: list[dict[str, Any]] = [{}]
    room = BUCKET_BYTES
    for name, tensor in tensors.items():
        if groups[-1] and tensor.nbytes > room:
            groups.append({})
            room = BUCKET_BYTES
        groups[-1][name] = tensor
        room -= tensor.nbytes
    groups += [{}, {}]
    for number, group in enumerate(groups):
        yield TensorBucket(version, number, group, last=number == len(groups) - 1)


def is_away(tensors: Mapping[str, Any]) -> bool:
    """True if the tensors have left their device (`device_memory.Offloader`)."""
    return any(tensor.numel() and not tensor.untyped_storage().nbytes() for tensor in tensors.values())


def buckets_of(version: int, tensors: Iterable[tuple[str, np.ndarray]]) -> Iterator[Bucket]:
    """A version's tensors, given as bytes, in pieces of BUCKET_BYTES."""
    parts: list[tuple[str, int, np.ndarray]] = []
    size = number = 0
    for name, whole in tensors:
        start = 0
        while start < len(whole):
            part = whole[start : start + BUCKET_BYTES - size]
            parts.append((name, start, part))
            start, size = start + len(part), size + len(part)
            if size == BUCKET_BYTES:
                yield Bucket(version, number, tuple(parts), sums_of(parts), last=False)
                parts, size, number = [], 0, number + 1
    yield Bucket(version, number, tuple(parts), sums_of(parts), last=True)


class TensorsFromBuckets:
    """Assembles a version's tensors from buckets that arrive in order."""

    def __init__(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """`tensors` are the bytes to be filled."""
        self.version, self.tensors = version, tensors
        self.missing = {name: len(data) for name, data in tensors.items()}

    def add(self, bucket: Bucket) -> None:
        """Raises EmbodiedError if a part is damaged, or if parts are missing after the last bucket."""
        for (name, start, data), expected in zip(bucket.parts, bucket.checksums, strict=True):
            check(name, data, expected, self.version)
            if (whole := self.tensors.get(name)) is None or start + len(data) > len(whole):
                raise EmbodiedError(f"version {self.version} came with a part of {name} that is no part of it")
            whole[start : start + len(data)] = data
            self.missing[name] -= len(data)
        if bucket.last and (short := [name for name, left in self.missing.items() if left]):
            raise EmbodiedError(f"version {self.version} arrived without parts of {', '.join(short[:4])}")


def sums_of(parts: Iterable[tuple[str, int, np.ndarray]]) -> tuple[int, ...]:
    return tuple(checksum(data) for _, _, data in parts)


def buckets_from(channel: Channel, version: int) -> Iterator[Any]:
    """Yields the buckets of a version in order; yields None and stops if buckets of a newer version arrive. A sender
    that restarts begins with number 0."""
    number, last = 0, False
    while not last:
        bucket = channel.get()
        if bucket.version > version:
            yield None
            return
        if bucket.version < version or (bucket.number and bucket.number != number):
            continue  # of an earlier version that is no longer needed
        yield bucket
        number, last = bucket.number + 1, bucket.last


def check(name: str, data: np.ndarray, expected: int, version: int) -> None:
    if checksum(data) != expected:
        raise EmbodiedError(f"weight {name} of version {version} was damaged on its way: its checksum differs")
