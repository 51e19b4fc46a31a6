"""A published version of the weights: what it consists of, and the pieces in which it travels, bytes or tensors that
stay on their GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.runtime.channel import Channel
from embodied.runtime.tensor_bytes import Spec, checksum, place

IN_FLIGHT_BYTES = 64 << 20  # of buckets: one that was put and one being put
BUCKET_BYTES = IN_FLIGHT_BYTES // 2
HEAD_BYTES = 64  # of a snapshot: 16 bytes that name its store, then the version in each of its areas (int64)


@dataclass(frozen=True)
class Publication:
    """One published version: what it consists of and where to find it. Short; the bytes are elsewhere."""

    version: int
    follows: int  # the version before; readers of that one need only what has changed
    store: str  # names it
    pid: int
    fd: int  # of the snapshot there; -1: none
    specs: dict[str, Spec]
    checksums: dict[str, int]  # of the snapshot
    changed: tuple[str, ...]
    changing: frozenset[str] = frozenset()  # names that have two areas in the snapshot
    area: int = 0  # that holds this version's
    gpu: str = ""  # that has the live tensors; readers that hold it copy them there

    @property
    def places(self) -> tuple[dict[str, int], int]:
        """The offset of every tensor of this version in a snapshot, and the snapshot's size."""
        areas, size = areas_of(self.specs, self.changing)
        return areas[self.area], size

    @property
    def size_bytes(self) -> int:
        return sum(self.specs[name].size_bytes for name in self.changed)


def areas_of(specs: Mapping[str, Spec], changing: frozenset[str]) -> tuple[list[dict[str, int]], int]:
    """The offsets of all tensors, by area, and the size of the memory: two areas where there are `changing` names.

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
    """Live tensors on a GPU, whose handles travel to a reader that holds the same one."""

    version: int
    number: int
    tensors: dict[str, Any]
    last: bool


def tensor_buckets(version: int, tensors: Mapping[str, Any]) -> Iterator[TensorBucket]:
    """A version's tensors, as many at a time as fit into BUCKET_BYTES. Two empty buckets follow: where a channel holds
    one, whoever could put the second knows that the reader has copied all tensors."""
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
    """A version's tensors, put together from buckets that come in order."""

    def __init__(self, version: int, tensors: Mapping[str, np.ndarray]) -> None:
        """`tensors` are the bytes to be filled."""
        self.version, self.tensors = version, tensors
        self.missing = {name: len(data) for name, data in tensors.items()}

    def add(self, bucket: Bucket) -> None:
        """Raises EmbodiedError where a part is damaged, or with the last bucket where a part has not come."""
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
    """The buckets of a version, in order, up to the last one; None, and no more, where those of a newer one come. A
    sender that begins again begins with number 0."""
    number, last = 0, False
    while not last:
        bucket = channel.get()
        if bucket.version > version:
            yield None
            return
        if bucket.version < version or (bucket.number and bucket.number != number):
            continue  # of an earlier version, which nobody waits for any more
        yield bucket
        number, last = bucket.number + 1, bucket.last


def check(name: str, data: np.ndarray, expected: int, version: int) -> None:
    if checksum(data) != expected:
        raise EmbodiedError(f"weight {name} of version {version} was damaged on its way: its checksum differs")
