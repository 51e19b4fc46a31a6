"""Messages as openpi's clients write and read them: msgpack, a numpy array as its bytes, type and shape.

Nothing of a message is trusted: only plain numbers become arrays, and their size must be that of their bytes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from embodied.errors import ConfigError, EmbodiedError

KINDS = "biuf"
MOST_AXES = 8


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


def unpack(data: bytes) -> Any:
    import msgpack

    try:
        return msgpack.unpackb(data, object_hook=_unpack_array, strict_map_key=False, max_ext_len=0)
    except BadMessage:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as err:
        raise BadMessage(f"the message is not msgpack that can be read ({type(err).__name__})") from None


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
            raise BadMessage("a number in the message is none")
        return dtype.type(data)
    shape = fields.get(b"shape")
    if not isinstance(shape, list) or len(shape) > MOST_AXES or not all(type(n) is int and n >= 0 for n in shape):
        raise BadMessage(f"an array in the message has the shape {str(shape)[:40]}")
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
