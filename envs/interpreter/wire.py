"""Messages between a sim host and the process of its simulator: JSON, and arrays as bytes. Nothing is unpickled.

The two processes may have different versions of Python and numpy, so this module needs numpy alone. Large arrays of an
answer go through shared memory, which has no name: nothing is left of it when both processes have ended. The reader
gets views of it, so that images are copied once. A block of memory is used again when its views are gone.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import weakref
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.arrays import is_tensor, is_text
from embodied.core.errors import DeadlineExceeded, EmbodiedError
from embodied.core.types import ActionSpec, ChunkResult, EnvSpec, EpisodeSpec
from embodied.envs.capabilities import EvaluationProtocol

VERSION = 2  # both sides must have the same
HEAD = struct.Struct("<IQ")  # bytes of the JSON, and of the arrays behind it
INLINE = 1 << 16  # bytes of arrays that go with the message
MOST_BLOCKS = 64  # that the reader holds; it copies what comes in more
TYPES = {kind.__name__: kind for kind in (ActionSpec, ChunkResult, EnvSpec, EpisodeSpec, EvaluationProtocol)}


class Ended(Exception):
    """The other process has ended."""


class Wire:
    """One end of the connection."""

    def __init__(self, connection: socket.socket, options: Any = dict) -> None:
        """`options(fields)` makes the options of an env from their fields."""
        self.connection, self.options = connection, options
        self.blocks: dict[int, mmap.mmap] = {}
        self.free: list[int] = []  # numbers of blocks that may be written
        self.unused: list[int] = []  # numbers of blocks that were read and can be returned
        self.viewed = 0  # blocks with views

    def send(self, message: Any, shared: bool = False) -> None:
        """`shared`: large arrays go through shared memory."""
        arrays: list[np.ndarray] = []
        tree = self._packed(message, arrays)
        places, size = [], 0
        for array in arrays:
            places.append(size)
            size += -(-array.nbytes // 64) * 64
        number, descriptor = self._block(size) if shared and size > INLINE else (None, None)
        body = bytearray(0 if number is not None else size)
        memory = body if number is None else self.blocks[number]
        for array, place in zip(arrays, places, strict=True):
            if array.size:
                np.copyto(np.ndarray(array.shape, array.dtype, memory, place), array)
        returned, self.unused = self.unused, []
        about = {"tree": tree, "places": places, "block": number, "size": size, "returned": returned}
        text = json.dumps({**about, "new": descriptor is not None}).encode()
        try:
            self.connection.sendall(HEAD.pack(len(text), len(body)) + text + body)
            if descriptor is not None:
                socket.send_fds(self.connection, [b"0"], [descriptor])
        except (BrokenPipeError, ConnectionResetError):
            raise Ended from None
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def receive(self, wait_s: float | None = None) -> Any:
        """The next message."""
        self.connection.settimeout(wait_s)
        try:
            length, size = HEAD.unpack(self._bytes(HEAD.size))
            about, body = json.loads(bytes(self._bytes(length))), self._bytes(size)
            if about["new"]:
                _, descriptors, _, _ = socket.recv_fds(self.connection, 1, 1)
                self.blocks[about["block"]] = mmap.mmap(descriptors[0], about["size"])
                os.close(descriptors[0])
        except TimeoutError:
            raise DeadlineExceeded(f"no answer of the simulator's process within {wait_s:g} seconds") from None
        except ConnectionResetError:
            raise Ended from None
        finally:
            self.connection.settimeout(None)
        self.free += about["returned"]
        memory = np.frombuffer(body or bytes(1), np.uint8) if about["block"] is None else self._view(about["block"])
        return self._unpacked(about["tree"], memory, about["places"])

    def close(self) -> None:
        self.connection.close()
        self.blocks.clear()

    def _bytes(self, count: int) -> bytearray:
        data = bytearray(count)
        place = memoryview(data)
        while place:
            got = self.connection.recv_into(place)
            if not got:
                raise Ended
            place = place[got:]
        return data

    def _block(self, size: int) -> tuple[int, int | None]:
        """The number of a free block of this size, and its descriptor if it is new."""
        for number in self.free:
            if len(self.blocks[number]) >= size:
                self.free.remove(number)
                return number, None
        number, descriptor = len(self.blocks), os.memfd_create("embodied")
        os.ftruncate(descriptor, size)
        self.blocks[number] = mmap.mmap(descriptor, size)
        return number, descriptor

    def _view(self, number: int) -> np.ndarray:
        """A block's memory. The block is returned when nobody has an array in it."""
        memory = np.frombuffer(self.blocks[number], np.uint8)
        if self.viewed == MOST_BLOCKS:
            self.unused.append(number)
            return memory.copy()
        self.viewed += 1
        weakref.finalize(memory, self._return, number).atexit = False
        return memory

    def _return(self, number: int) -> None:
        self.viewed -= 1
        self.unused.append(number)

    def _packed(self, value: Any, arrays: list[np.ndarray]) -> Any:
        if isinstance(value, np.ndarray) and not is_text(value):
            if value.dtype.hasobject:
                raise EmbodiedError("an array of objects cannot leave the simulator's process; give numbers")
            arrays.append(value)
            return {"array": [value.dtype.str, value.shape, len(arrays) - 1]}
        if isinstance(value, np.generic):
            return value.item()
        if is_tensor(value):
            raise EmbodiedError(
                "tensors cannot leave the simulator's process: with env.python a simulator gives numpy arrays; "
                "leave env.python out, or simulate on cores"
            )
        if isinstance(value, Path):
            return {"path": str(value)}
        if hasattr(value, "model_copy"):
            return {"options": self._packed(vars(value), arrays)}
        if type(value) in TYPES.values():
            names = [field.name for field in fields(value)] if is_dataclass(value) else value._fields
            parts = [self._packed(getattr(value, name), arrays) for name in names]
            return {"type": [type(value).__name__, parts]}
        if isinstance(value, dict):
            return {"dict": [[key, self._packed(item, arrays)] for key, item in value.items()]}
        if is_text(value) and isinstance(value, np.ndarray):
            return {"texts": value.tolist()}
        if isinstance(value, (list, tuple)):
            return {type(value).__name__: [self._packed(item, arrays) for item in value]}
        return value

    def _unpacked(self, tree: Any, memory: np.ndarray, places: list[int]) -> Any:
        if not isinstance(tree, dict):
            return tree
        ((kind, value),) = tree.items()
        if kind == "array":
            dtype, shape, number = value
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return memory[places[number] : places[number] + size].view(dtype).reshape(shape)
        if kind == "dict":
            return {key: self._unpacked(item, memory, places) for key, item in value}
        if kind in ("list", "tuple"):
            parts = [self._unpacked(item, memory, places) for item in value]
            return parts if kind == "list" else tuple(parts)
        if kind == "type":
            return TYPES[value[0]](*[self._unpacked(item, memory, places) for item in value[1]])
        if kind == "options":
            return self.options(self._unpacked(value, memory, places))
        return Path(value) if kind == "path" else np.array(value, object)
