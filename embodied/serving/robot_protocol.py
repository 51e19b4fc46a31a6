"""openpi's messages: msgpack with numpy arrays (bytes, type and shape), and the names of observations.

No message is trusted: only plain numbers become arrays, and shape and bytes must agree. Objects cost more than bytes,
since each becomes a Python object while no other client is served: 30 MB of empty maps would take ten seconds and 2 GB.
So every count has a limit.

Images are looked up under `images/CAMERA`, `observation/CAMERA` and CAMERA; as in openpi's LIBERO example, the first
camera is `observation/image` as well and the second `observation/wrist_image`.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.core.types import EnvSpec, Observation

KINDS = "biuf"
MOST_AXES = 8
MOST_KEYS = 64  # keys of a map, and entries of a list
MOST_CONTAINERS = 512  # maps and lists in a message; an array is two
LONGEST_TEXT = 8192  # bytes


class BadMessage(EmbodiedError):
    """An invalid request; the client gets the text."""


def pack(message: Any) -> bytes:
    import msgpack

    return msgpack.packb(message, default=_pack_array)


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
    """The dtype of this name. Only plain numbers are taken, since objects would be pickles."""
    try:
        dtype = np.dtype(name if isinstance(name, str) else "")
    except (TypeError, ValueError):
        dtype = np.dtype(object)
    if dtype.kind not in KINDS or not isinstance(name, str):
        raise BadMessage(f"arrays of type {str(name)[:20]!r} are not taken; send numbers or bytes")
    return dtype


# A request as an observation of the policy

ALIASES = (("observation/image",), ("observation/wrist_image",))
LONGEST = 2000  # letters of an instruction
LARGEST = 4096  # pixels along a side
NUMBER = 8  # bytes of a number at most
OTHERS = 1_000_000  # bytes of a message for keys that the policy does not read


def array_bytes(spec: EnvSpec) -> list[int]:
    """The bytes of each image and of the state, in any number type."""
    return [NUMBER * numbers for numbers in (*map(math.prod, spec.images.values()), spec.state_dim or 0)]


def observation_of(request: dict, spec: EnvSpec, any_size: bool) -> Observation:
    """The request as an observation of one row. With `any_size` the policy scales images itself."""
    flat = {key: value for key, value in request.items() if isinstance(key, str)}
    if isinstance(images := flat.get("images"), dict):
        flat |= {f"images/{camera}": image for camera, image in images.items()}
    obs: Observation = {}
    if spec.images:
        obs["images"] = {}
        for (camera, size), alias in zip(spec.images.items(), itertools.chain(ALIASES, itertools.repeat(()))):
            image = field_of(flat, f"images/{camera}", f"observation/{camera}", camera, *alias)
            obs["images"][camera] = image_of(image, size, any_size, camera)[None]
    if spec.state_dim:
        obs["state"] = state_of(field_of(flat, "observation/state", "state"), spec.state_dim)[None]
    if spec.instruction:
        obs["instruction"] = [text_of(field_of(flat, "prompt", "instruction"))]
    return obs


def field_of(flat: dict[str, Any], *names: str) -> Any:
    for name in names:
        if name in flat:
            return flat[name]
    raise BadMessage(f"the request lacks {' or '.join(repr(name) for name in names)}")


def image_of(image: Any, size: tuple[int, int, int], any_size: bool, camera: str) -> np.ndarray:
    """The image as uint8 [H, W, 3]; like openpi's, it may have the colours first, or floats from 0 to 1."""
    if not isinstance(image, np.ndarray) or image.ndim != 3 or 3 not in (image.shape[0], image.shape[2]):
        raise BadMessage(f"the image of {camera!r} should be an array [height, width, 3]")
    if image.shape[2] != 3:
        image = np.moveaxis(image, 0, 2)
    if image.shape != tuple(size) and not any_size:
        raise BadMessage(f"the image of {camera!r} is {list(image.shape)}, this policy wants {list(size)}")
    if not 1 <= min(image.shape[:2]) <= max(image.shape[:2]) <= LARGEST:
        raise BadMessage(f"the image of {camera!r} is {list(image.shape)}; at most {LARGEST} pixels a side are taken")
    if image.dtype.kind == "f":
        image = (255 * np.clip(np.nan_to_num(image), 0, 1)).astype(np.uint8)
    if image.dtype != np.uint8:
        raise BadMessage(f"the image of {camera!r} should be of bytes, or of floats from 0 to 1")
    return np.ascontiguousarray(image)


def state_of(state: Any, width: int) -> np.ndarray:
    if not isinstance(state, np.ndarray) or state.shape != (width,):
        raise BadMessage(f"the state should be an array of {width} numbers")
    state = state.astype(np.float32)
    if not np.isfinite(state).all():
        raise BadMessage("the state holds NaN or infinity")
    return state


def text_of(text: Any) -> str:
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
        raise BadMessage(f"the instruction should be text of at most {LONGEST} letters")
    return text
