"""Moves an object between Ray processes: large buffers through Ray's object store, the rest inside the message.

The writer copies every buffer of 64 KiB or more once into the store. A reader on the same machine uses it in place; for
another machine Ray transfers it with the message. Arrays arrive read-only. Torch CPU tensors arrive as a writable copy,
because torch knows no read-only tensors and the store's pages are shared. Tensors from a GPU arrive on the reader's own
GPU, or on the CPU if it has none.
"""

from __future__ import annotations

import pickle
from typing import Any

import ray

from embodied.runtime.payload import OUT_OF_BAND_BYTES, Payload, join, split


class Stored(Payload):
    """An encoded object. The sender has a reference to the large parts, a receiver the parts themselves."""

    __slots__ = ("parts", "ref", "tensors")

    def __init__(
        self, body: bytes | None, tensors: frozenset[int] = frozenset(), parts: list | None = None, ref: Any = None
    ) -> None:
        super().__init__(body)  # None: a long body is the last of the parts
        self.tensors = tensors
        self.parts = parts
        self.ref = ref

    def arguments(self) -> tuple:
        """Returns arguments for a remote call, where `Stored(*arguments)` restores the object: Ray replaces the
        reference, if any, by the parts."""
        if self.parts is not None and self.ref is None:  # passed on
            self.ref = _put(self.parts)
        return (self.body, self.tensors) if self.ref is None else (self.body, self.tensors, self.ref)


def encode(item: Any, reader: str = "") -> Stored:
    """Tensors on GPUs go through the host's memory, whatever the `reader`'s GPU."""
    body, buffers, tensors = split(item)
    if len(body) >= OUT_OF_BAND_BYTES:
        return Stored(None, tensors, ref=_put([*buffers, body]))
    return Stored(bytes(body), tensors, ref=_put(buffers) if buffers else None)


def decode(payload: Stored) -> Any:
    parts = payload.parts
    if parts is None and payload.ref is not None:
        parts = payload.parts = ray.get(payload.ref)
    if parts is None:
        return join(payload.body)
    parts = [bytearray(part) if i in payload.tensors else part for i, part in enumerate(parts)]
    return join(parts.pop() if payload.body is None else payload.body, parts)


def _put(parts: list) -> Any:
    return ray.put([pickle.PickleBuffer(part) for part in parts])


def pack_message(message: tuple) -> bytes:
    """Pickles messages here: a message that Ray cannot unpickle would be lost without an error."""
    return pickle.dumps(message, protocol=5)


def unpack_message(data: bytes) -> tuple:
    return pickle.loads(data)  # noqa: S301  (sent by a process of this run)
