"""Reusable shared memory without a name (memfd): fresh memory pages cost far more than filling them.

When is a segment free? Every message has its own open file on the segment, with a lock, and the file is sent with the
message. The kernel drops the lock when the last process with this file has closed it or died. So no release message is
needed, and nothing is left when a process is killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
import weakref

_SMALLEST_BYTES = 64 * 1024
_KEPT_BYTES = 512 << 20  # limit of address space; a segment uses only as much memory as its longest message
_KEPT = 32

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Segment:
    def __init__(self, size: int) -> None:
        self.size = size
        self._fd = os.memfd_create("embodied", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.memory = map_shared(self._fd, size)

    def claim(self) -> int:
        """Returns an open file for one message, whose owner may fill the memory; -1 while another message is in use."""
        fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return -1
        return fd

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)


class Segments:
    """The segments of one process. A dropped segment stays until its message is no longer used."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._kept: list[Segment] = []  # most recently used last
        self._lock = threading.Lock()

    def take(self, need: int) -> tuple[int, memoryview]:
        """Returns (an open file for one message, the memory to fill)."""
        size = max(1 << (need - 1).bit_length(), _SMALLEST_BYTES)
        with self._lock:
            same = (segment for segment in self._kept if segment.size == size)
            claimed = ((segment, fd) for segment in same if (fd := segment.claim()) >= 0)
            segment, fd = next(claimed, (None, -1))
            if segment is None:
                segment = Segment(size)
                fd = segment.claim()
            else:
                self._kept.remove(segment)
            self._kept.append(segment)
            while len(self._kept) > _KEPT or sum(s.size for s in self._kept) > self._kept_bytes:
                del self._kept[0]
        return fd, segment.memory

    def drop(self) -> None:
        """Drops all segments."""
        with self._lock:
            self._kept.clear()


def map_private(fd: int, size: int) -> memoryview:
    """Maps copy-on-write: local writes stay local, and unwritten pages show the file."""
    return _map(fd, size, mmap.MAP_PRIVATE)


def map_shared(fd: int, size: int) -> memoryview:
    """Maps shared: all processes see writes."""
    return _map(fd, size, mmap.MAP_SHARED)


def _map(fd: int, size: int, kind: int) -> memoryview:
    """The map ends with its last view. `mmap.mmap` would keep a descriptor open for every array."""
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, kind, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), f"cannot map {size} bytes of shared memory")
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, size).atexit = False
    return memoryview(memory).cast("B")
