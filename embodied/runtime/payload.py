"""Moves an object to another process: large buffers through anonymous shared memory, the rest as a short message.

The writer copies every buffer of 64 KiB or more once into a memory file without a name (`shared_memory.py`); its
descriptor travels with the message and the reader maps it. Arrays arrive read-only. Torch CPU tensors arrive writable,
on pages that are private to the reader, because torch knows no read-only tensors.

For a single reader on the same GPU, a handle of a GPU tensor's memory is sent, and the tensor stays. A process sees
only its own GPU, as `cuda:0`, and cannot open handles of other GPUs. So for all other readers the bytes go through the
host's memory, and arrive on the reader's GPU, or on the CPU if it has none.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from embodied.runtime.shared_memory import Segments, map_private

OUT_OF_BAND_BYTES = 64 * 1024
_ALIGNMENT = 64

segments = Segments()  # of this process


@dataclass(frozen=True)
class BufferLayout:
    """The parts of a payload in its memory file, as (offset, bytes). `body` is None if it travels inline."""

    total_bytes: int = 0
    buffers: tuple[tuple[int, int], ...] = ()
    writable: frozenset[int] = frozenset()  # indices of buffers that belong to torch tensors
    body: tuple[int, int] | None = None


class Payload:
    """An encoded object; may be sent many times. Owns the descriptor of its memory file until it is dropped."""

    __slots__ = ("body", "fd", "layout")

    def __init__(self, body: bytes | memoryview, layout: BufferLayout | None = None, fd: int = -1) -> None:
        self.body = body
        self.layout = layout
        self.fd = fd

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def encode(item: Any, reader: str = "") -> Payload:
    """`reader` is the plan's name of the GPU of the only reader, if that is on this machine."""
    body, buffers, tensors = split(item, bool(reader) and reader == own_gpu())
    if not buffers and len(body) < OUT_OF_BAND_BYTES:
        return Payload(body)
    return _write(buffers, tensors, body)


def decode(payload: Payload) -> Any:
    if payload.layout is None:
        return join(payload.body)
    memory = map_private(payload.fd, payload.layout.total_bytes)
    views = []
    for i, (offset, size) in enumerate(payload.layout.buffers):
        view = memory[offset : offset + size]
        views.append(view if i in payload.layout.writable else view.toreadonly())
    body = payload.body
    if payload.layout.body is not None:
        offset, size = payload.layout.body
        body = memory[offset : offset + size]
    return join(body, views)


def split(item: Any, gpu_handles: bool = False) -> tuple[memoryview, list[memoryview], frozenset[int]]:
    """Returns a short body, the large buffers, and the indices of buffers of torch tensors. With GPU handles an item
    must have one reader: the sender keeps the memory until the reader has released it."""
    buffers: list[pickle.PickleBuffer] = []

    def keep_inline(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < OUT_OF_BAND_BYTES:
            return True
        buffers.append(buffer)
        return False

    writable: list[pickle.PickleBuffer] = []
    if hasattr(sys.modules.get("torch"), "Tensor"):  # false while another thread still imports torch
        stream = io.BytesIO()
        _TorchPickler(stream, keep_inline, writable, gpu_handles).dump(item)
        body = stream.getbuffer()
    else:
        body = memoryview(pickle.dumps(item, protocol=5, buffer_callback=keep_inline))
    tensors = frozenset(i for i, buffer in enumerate(buffers) if any(buffer is w for w in writable))
    return body, [buffer.raw() for buffer in buffers], tensors


def join(body: bytes | memoryview, buffers: Iterable[Any] = ()) -> Any:
    """Undoes `split`; only for data of this run's own processes."""
    return pickle.loads(body, buffers=buffers)  # noqa: S301


def _write(parts: list[memoryview], tensors: frozenset[int], body: memoryview) -> Payload:
    inline_body = len(body) < OUT_OF_BAND_BYTES
    chunks = parts if inline_body else [*parts, body]
    places, end = [], 0
    for chunk in chunks:
        places.append((end, chunk.nbytes))
        end += -(-chunk.nbytes // _ALIGNMENT) * _ALIGNMENT
    fd, memory = segments.take(end)
    for (offset, size), chunk in zip(places, chunks):
        memory[offset : offset + size] = chunk
    layout = BufferLayout(end, tuple(places[: len(parts)]), tensors, None if inline_body else places[-1])
    return Payload(body if inline_body else b"", layout, fd)


class _TorchPickler(pickle.Pickler):
    """Pickles dense CPU tensors as their bytes, like arrays."""

    def __init__(self, stream: io.BytesIO, keep_inline, writable: list[pickle.PickleBuffer], gpu_handles: bool) -> None:
        super().__init__(stream, protocol=5, buffer_callback=keep_inline)
        self.tensor_type = sys.modules["torch"].Tensor
        self.writable = writable
        self.gpu_handles = gpu_handles

    def reducer_override(self, item: Any) -> Any:
        if type(item) is not self.tensor_type or item.requires_grad:
            return NotImplemented
        if is_on_gpu(item):
            return handle_of(item) if self.gpu_handles else (on_own_device, (to_host(item),))
        if item.device.type != "cpu":
            return NotImplemented
        if item.is_sparse or item.is_quantized:
            return NotImplemented
        torch = sys.modules["torch"]
        flat = item.contiguous().reshape(-1).view(torch.uint8) if item.numel() else torch.empty(0, dtype=torch.uint8)
        buffer = pickle.PickleBuffer(flat.numpy())
        self.writable.append(buffer)
        return _tensor, (buffer, str(item.dtype).removeprefix("torch."), tuple(item.shape))


def is_on_gpu(tensor: Any) -> bool:
    return tensor.device.type == "cuda"


def to_host(tensor: Any) -> Any:
    return tensor.cpu()


def handle_of(tensor: Any) -> tuple:
    from torch.multiprocessing.reductions import reduce_tensor

    return reduce_tensor(tensor)


def own_gpu() -> str:
    """The plan's name of this process's GPU, such as gpu:3; "" without a GPU."""
    device = os.environ.get("EMBODIED_DEVICE", "")
    return device if device.startswith("gpu:") else ""


def own_device() -> str:
    """The device for tensors from other GPUs: the plan's, else the GPU that this process uses, if any."""
    if os.environ.get("EMBODIED_DEVICE"):
        return "cuda" if own_gpu() else "cpu"
    return "cuda" if sys.modules["torch"].cuda.is_initialized() else "cpu"


def on_own_device(copy: Any) -> Any:
    return copy.to(own_device())


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    if isinstance(buffer, bytes):  # a small buffer, sent inside the message
        buffer = bytearray(buffer)
    if len(buffer) == 0:
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return torch.frombuffer(buffer, dtype=getattr(torch, dtype)).reshape(shape)
