"""Messages between robots and policies over a websocket: msgpack with numpy arrays, in two spellings.

openpi's message is a request or an answer itself, and its arrays have keys of bytes. vla-eval's message names its type
(TYPES) beside the content, `{"type", "payload", "seq", "timestamp"}`; keys are text, and images may be PNG or JPEG
files. No message is trusted: only plain numbers become arrays, and every count has a limit, since objects cost more
than bytes: 30 MB of empty maps would take ten seconds and 2 GB.
"""

from __future__ import annotations

import itertools
import time
from functools import partial
from typing import Any

import numpy as np

from embodied.core.errors import EmbodiedError

TYPES = ("hello", "episode_start", "observation", "action", "episode_end", "error")
UNREAD = ("episode_start", "episode_end")  # types whose content, of any size, is skipped
KINDS = "biuf"
MOST_KEYS = 64  # keys of a map, and entries of a list
MOST_CONTAINERS = 512  # maps and lists in a message; an array is two
LONGEST_TEXT = 8192  # bytes


class BadMessage(EmbodiedError):
    """An invalid message; its sender gets the text."""


def pack(message: Any, keys: type = bytes) -> bytes:
    """`keys`: the type of the keys of arrays; openpi's are bytes."""
    import msgpack

    return msgpack.packb(message, default=partial(_pack_array, keys=keys))


def pack_typed(kind: str, payload: dict[str, Any], seq: int) -> bytes:
    """A message in vla-eval's spelling; an answer has the number `seq` of its question."""
    return pack(typed(kind, payload, seq), str)


def typed(kind: str, payload: dict[str, Any], seq: int) -> dict[str, Any]:
    return {"type": kind, "payload": payload, "seq": seq, "timestamp": time.time()}


def is_typed(message: dict) -> bool:
    """True for vla-eval's spelling."""
    return "type" in message and "payload" in message


def unpack(data: bytes, largest: int | None = None) -> dict:
    """The map in a message. `largest` limits the bytes of an array."""
    import msgpack

    containers = itertools.count(1)

    def counted(container: Any) -> Any:
        if next(containers) > MOST_CONTAINERS:
            raise BadMessage(f"more than {MOST_CONTAINERS} maps and lists")
        return container

    longest = {"str": LONGEST_TEXT, "bin": largest or len(data), "array": MOST_KEYS, "map": MOST_KEYS, "ext": 0}
    limits = {f"max_{kind}_len": most for kind, most in longest.items()} | {"max_buffer_size": len(data) + 1}
    hooks = {"object_hook": lambda fields: _unpack_array(counted(fields)), "list_hook": counted}
    unpacker = msgpack.Unpacker(strict_map_key=False, **hooks, **limits)
    unpacker.feed(data)
    message: dict[Any, Any] = {}
    where = "the message"
    try:
        if (keys := unpacker.read_map_header()) > MOST_KEYS:
            raise BadMessage(f"{keys} keys; at most {MOST_KEYS} are taken")
        for _ in range(keys):
            key = unpacker.unpack()
            where = f"{str(key)[:40]!r} in the message"
            skipped = key == "payload" and str(message.get("type")) in UNREAD
            message[key] = unpacker.skip() if skipped else unpacker.unpack()
        where = "the message"
        if unpacker.tell() != len(data):
            raise BadMessage("something follows its end")
    except BadMessage as err:
        raise BadMessage(f"{where}: {err}") from None
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, msgpack.UnpackException) as err:
        raise BadMessage(f"{where} cannot be read as msgpack: {str(err) or type(err).__name__}") from None
    return message


def _pack_array(value: Any, keys: type) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in KINDS:
        fields = {"__ndarray__": True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": value.shape}
    elif isinstance(value, np.generic) and value.dtype.kind in KINDS:
        fields = {"__npgeneric__": True, "data": value.item(), "dtype": value.dtype.str}
    else:
        raise TypeError(f"{type(value).__name__} is not sent")
    return fields if keys is str else {key.encode(): field for key, field in fields.items()}


def _unpack_array(fields: dict) -> Any:
    """The array in a map, or the bytes of an image file; numpy refuses a shape that its bytes do not fit. Only plain
    numbers are taken, since objects would be pickles."""
    named = {key.decode("latin-1") if isinstance(key, bytes) else key: field for key, field in fields.items()}
    kind = {"__ndarray__", "__npgeneric__", "__image__"} & named.keys()
    if not kind:
        return fields
    if "__image__" in kind and named["format"] != "raw":
        return named["data"]
    dtype, data = np.dtype(named["dtype"]), named["data"]
    if dtype.kind not in KINDS:
        raise BadMessage(f"arrays of type {str(named['dtype'])[:20]!r} are not taken; send numbers or bytes")
    if "__npgeneric__" in kind:
        return dtype.type(data)
    return np.frombuffer(data, dtype).reshape(named["shape"])
