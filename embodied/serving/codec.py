"""Messages as openpi's clients write and read them: msgpack, a numpy array as its bytes, type and shape.

Nothing of a message is trusted: only plain numbers become arrays, and their size must be that of their bytes. What
costs time is not bytes but things: each becomes a Python object, and meanwhile no other client is served. A message of
30 MB that holds 30 million empty maps would take ten seconds and 2 GB. So whatever can be many has a limit.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError, EmbodiedError

KINDS = "biuf"
MOST_AXES = 8
MOST_KEYS = 64  # of a map, and entries of a list
MOST_CONTAINERS = 512  # maps and lists in a message; an array is two
LONGEST_TEXT = 8192  # bytes


class BadMessage(EmbodiedError):
    """A client sent what cannot be answered; the text is told to it."""


def check_packages() -> None:
    try:
        import msgpack  # noqa: F401
        import websockets  # noqa: F401
    except ModuleNotFoundError as err:
        raise ConfigError(
            f"serving needs the package {err.name}, which is not installed: "
            "python -m pip install 'embodied-loop[serve]'"
        ) from None


def pack(message: Any) -> bytes:
    import msgpack

    return msgpack.packb(message, default=_pack_array)


def unpack(data: bytes, largest: int | None = None) -> dict:
    """The map that a message is; `largest`: bytes of an array, at most."""
    import msgpack

    count = _Count()
    limits = {"str": LONGEST_TEXT, "bin": len(data) if largest is None else largest, "array": MOST_KEYS, "ext": 0}
    unpacker = msgpack.Unpacker(
        object_hook=lambda fields: _unpack_array(count.one_more(fields)),
        list_hook=count.one_more,
        strict_map_key=False,
        max_buffer_size=len(data) + 1,
        max_map_len=MOST_KEYS,
        **{f"max_{kind}_len": most for kind, most in limits.items()},
    )
    unpacker.feed(data)
    message, where = {}, "the message"
    try:
        if (keys := unpacker.read_map_header()) > MOST_KEYS:
            raise BadMessage(f"{keys} keys; at most {MOST_KEYS} are taken")
        for _ in range(keys):
            key = unpacker.unpack()
            where = f"{str(key)[:40]!r} in the message"
            message[key] = unpacker.unpack()
        where = "the message"
        if unpacker.tell() != len(data):
            raise BadMessage("something follows its end")
    except BadMessage as err:
        raise BadMessage(f"{where}: {err}") from None
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as err:
        raise BadMessage(f"{where} cannot be read as msgpack: {str(err) or type(err).__name__}") from None
    return message


class _Count:
    """Of the maps and lists in a message."""

    def __init__(self) -> None:
        self.containers = 0

    def one_more(self, container: Any) -> Any:
        self.containers += 1
        if self.containers > MOST_CONTAINERS:
            raise BadMessage(f"more than {MOST_CONTAINERS} maps and lists")
        return container


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in KINDS:
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in KINDS:
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} is not sent")


def _unpack_array(fields: dict) -> Any:
    if b"__ndarray__" not in fields and b"__npgeneric__" not in fields:
        return fields
    data, dtype = fields.get(b"data"), _dtype(fields.get(b"dtype"))
    if b"__npgeneric__" in fields:
        if not isinstance(data, (bool, int, float)):
            raise BadMessage("a number that is none")
        return dtype.type(data)
    shape = fields.get(b"shape")
    if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise BadMessage(f"an array has the shape {str(shape)[:40]}; at most {MOST_AXES} sizes are taken")
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
        raise BadMessage(f"an array of shape {shape} and type {dtype} does not fit its bytes")
    return np.frombuffer(data, dtype).reshape(shape)


def _dtype(name: Any) -> np.dtype:
    """Plain numbers only: objects would be pickles."""
    try:
        dtype = np.dtype(name if isinstance(name, str) else "")
    except (TypeError, ValueError):
        dtype = np.dtype(object)
    if dtype.kind not in KINDS or not isinstance(name, str):
        raise BadMessage(f"arrays of type {str(name)[:20]!r} are not taken; send numbers or bytes")
    return dtype
