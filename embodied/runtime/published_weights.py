"""A published version of the weights: its description, and the buckets in which it is sent, of bytes or of tensors that
stay on their GPU.

Tensors as bytes, for moving, storing and checking them without torch.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import CheckpointError, EmbodiedError
from embodied.runtime.channel import Channel

ALIGNMENT = 64
MOST_AXES, MOST_NUMBERS = 32, 2**48  # of a stored tensor
MOST_HEAD_BYTES = 100_000_000  # the limit of the safetensors library
ROW = 4096  # words per row; the checksum does not notice swaps within a row

ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
SAFETENSORS = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8",
    "BOOL": "bool",
}  # fmt: skip


@dataclass(frozen=True)
class Spec:
    """A tensor's shape and dtype, by torch's name."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True)
class Blob:
    """A tensor's bytes; `data` is uint8 and flat, often a view of borrowed memory."""

    spec: Spec
    data: np.ndarray


class StoredFile:
    """An open file with tensors."""

    def __init__(self, path: Path) -> None:
        self.path, self.descriptor = path, os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    def read(self, begin: int, end: int) -> np.ndarray:
        """Returns a copy of these bytes. The file is not mapped: if another program truncated it, the process would end
        by SIGBUS."""
        data = np.empty(end - begin, np.uint8)
        done = 0
        while done < len(data):  # the kernel reads at most 2 GiB at a time
            if not (count := os.preadv(self.descriptor, [data[done:]], begin + done)):
                raise CheckpointError(f"{self.path} is damaged: it ends at byte {begin + done} of {end}")
            done += count
        return data


class StoredBlob(Blob):
    """A tensor in a file; every access to `data` reads its bytes."""

    def __init__(self, spec: Spec, file: StoredFile, begin: int) -> None:
        object.__setattr__(self, "spec", spec)
        object.__setattr__(self, "_place", (file, begin, begin + spec.size_bytes))

    @property
    def data(self) -> np.ndarray:  # type: ignore[override]
        file, begin, end = self._place  # type: ignore[attr-defined]
        return file.read(begin, end)


def blob_of(tensor: Any) -> Blob:
    """The bytes of a torch tensor, without a copy if it is contiguous and on the CPU."""
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    # Through DLPack: after numpy() a storage could no longer be emptied for offloading.
    data = torch.from_dlpack(flat.view(torch.uint8)).numpy() if flat.numel() else np.empty(0, np.uint8)
    return Blob(spec_of(tensor), data)


def spec_of(tensor: Any) -> Spec:
    return Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def tensor_of(blob: Blob) -> Any:
    """A torch tensor that shares the memory."""
    import torch

    dtype, data = getattr(torch, blob.spec.dtype), blob.data
    if not len(data):
        return torch.empty(blob.spec.shape, dtype=dtype)
    return torch.frombuffer(data, dtype=dtype).view(blob.spec.shape)


def array_of(blob: Blob) -> np.ndarray:
    """A numpy array; bfloat16, which numpy lacks, is converted to float32."""
    if blob.spec.dtype == "bfloat16":
        return (blob.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(blob.spec.shape)
    return blob.data.view(blob.spec.dtype).reshape(blob.spec.shape)


def checksum(data: np.ndarray) -> int:
    """Returns a fast checksum that finds wrong, missing and misplaced parts: 64-bit sums of rows of words, weighted by
    position."""
    words = np.ascontiguousarray(data[: len(data) // 8 * 8]).view(np.uint64)
    whole = len(words) // ROW * ROW
    rows = np.append(np.add.reduce(words[:whole].reshape(-1, ROW), axis=1), np.add.reduce(words[whole:]))
    tail = int.from_bytes(data[len(data) // 8 * 8 :].tobytes(), "little")
    weights = np.arange(1, len(rows) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (int(np.add.reduce(rows * weights)) + 31 * tail + len(data)) % 2**64


def place(specs: Mapping[str, Spec], start: int = 0) -> tuple[dict[str, int], int]:
    """Returns an offset for each tensor in one piece of memory, and the total size."""
    offsets, end = {}, start
    for name, spec in specs.items():
        offsets[name] = end
        end += -(-spec.size_bytes // ALIGNMENT) * ALIGNMENT
    return offsets, end


def read_safetensors(path: Path) -> dict[str, Blob]:
    """The tensors of a file; their bytes are read on access."""
    # The library's safe_open maps the file: copying 200 MB into weights took 203 MiB at its peak (here 11 MiB), a
    # truncated file ended the process by SIGBUS (here a CheckpointError), and its numpy reader has no bfloat16.
    try:
        file, size = StoredFile(path), path.stat().st_size
        head = int.from_bytes(file.read(0, min(8, size)).tobytes(), "little")
        if not 0 < head <= size - 8:
            raise ValueError(f"its head of {head} bytes is longer than the file")
        if head > MOST_HEAD_BYTES:
            raise ValueError(f"its head has {head} bytes, and at most {MOST_HEAD_BYTES:,} are read")
        entries = json.loads(file.read(8, 8 + head).tobytes())
        if not isinstance(entries, dict):
            raise ValueError("its head holds no mapping")
        entries.pop("__metadata__", None)
        blobs: dict[str, Blob] = {}
        for name, entry in entries.items():
            spec, (begin, end) = Spec(SAFETENSORS[entry["dtype"]], tuple(entry["shape"])), entry["data_offsets"]
            if not name.isprintable():
                raise ValueError(f"a tensor has the name {name!r:.60}")
            if not is_shape(spec.shape):
                raise ValueError(f"{name} has the shape {entry['shape']!r:.60}")
            if type(begin) is not int or type(end) is not int:
                raise ValueError(f"{name} lies at {entry['data_offsets']!r:.60}")
            num_bytes = max(min(end, size - 8 - head) - begin, 0)
            if min(begin, end) < 0 or end - begin != spec.size_bytes or num_bytes != spec.size_bytes:
                raise ValueError(f"{name} has {num_bytes} bytes instead of {spec.size_bytes}")
            blobs[name] = StoredBlob(spec, file, 8 + head + begin)
        return blobs
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError) as err:
        raise CheckpointError(f"{path} is damaged: {err}") from None


def is_shape(lengths: tuple[Any, ...]) -> bool:
    """True if every library can make a tensor of these lengths; they come from a file."""
    whole = len(lengths) <= MOST_AXES and all(type(length) is int and length >= 0 for length in lengths)
    return whole and math.prod(max(length, 1) for length in lengths) <= MOST_NUMBERS


def write_safetensors(path: Path, specs: Mapping[str, Spec], blobs: Iterable[tuple[str, Blob]]) -> None:
    """Writes a file of these tensors, one by one in any order."""
    names = {ours: theirs for theirs, ours in SAFETENSORS.items()}
    entries, end = {"__metadata__": {"format": "pt"}}, 0  # published OpenVLA code refuses other formats
    for name, spec in specs.items():
        entries[name] = {
            "dtype": names[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [end, end + spec.size_bytes],
        }
        end += spec.size_bytes
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb", buffering=0) as file:
        start = file.write(len(head).to_bytes(8, "little")) + file.write(head)
        os.posix_fallocate(file.fileno(), 0, start + end)  # fails now if the disk is full
        missing = set(specs)
        for name, blob in blobs:
            assert blob.spec == specs[name], (name, blob.spec, specs[name])
            at = start + entries[name]["data_offsets"][0]
            data, done = blob.data, 0
            while done < len(data):  # the kernel writes at most 2 GiB at a time
                done += os.pwrite(file.fileno(), data[done:], at + done)
            missing.remove(name)
        assert not missing, missing


IN_FLIGHT_BYTES = 64 << 20  # bytes of buckets in flight: one waits in the channel, one is being put
BUCKET_BYTES = IN_FLIGHT_BYTES // 2
HEAD_BYTES = 64  # the head of a snapshot: 16 bytes with its store's name, then the version of each area (int64)


@dataclass(frozen=True)
class Weights:
    """A version from a checkpoint instead of a trainer."""

    version: int
    blobs: dict[str, Blob]


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
            piece = whole[start : start + BUCKET_BYTES - size]
            parts.append((name, start, piece))
            start, size = start + len(piece), size + len(piece)
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
