"""How an object comes to another process: its encoding, the shared memory under it, and the socket pairs that carry it.

Large buffers go through anonymous shared memory, the rest as a short message. The writer copies every buffer of 64 KiB
or more once into a memory file without a name; its descriptor travels with the message and the reader maps it. Arrays
arrive read-only. Torch CPU tensors arrive writable, on pages that are private to the reader, because torch knows no
read-only tensors.

For a single reader on the same GPU, a handle of a GPU tensor's memory is sent, and the tensor stays. A process sees
only its own GPU, as `cuda:0`, and cannot open handles of other GPUs. So for all other readers the bytes go through the
host's memory, and arrive on the reader's GPU, or on the CPU if it has none.

Shared memory has no name (memfd) and is used again: fresh pages cost far more than filling them. When is a segment
free? Every message has its own open file on the segment, with a lock, and the file is sent with the message. The kernel
drops the lock when the last process with this file has closed it or died. So no release message is needed, and nothing
is left when a process is killed.

`MessageSocket` and `Loop` send messages between two processes and receive them in a thread. A socket pair has no
address: nobody else can connect, and nothing is left behind. A message is one packet: a small tuple that describes it,
and at most one payload, whose memory file is sent along. `post` never blocks, so a peer that stopped reading cannot
block a thread that serves messages.
"""

from __future__ import annotations

import array
import ctypes
import fcntl
import io
import mmap
import os
import pickle
import selectors
import socket
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

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

    __slots__ = ("body", "fd", "layout", "stored")

    def __init__(self, body: bytes | memoryview, layout: BufferLayout | None = None, fd: int = -1) -> None:
        self.body = body
        self.layout = layout
        self.fd = fd
        self.stored: Any = None  # a reference to the memory file's content in Ray's object store

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


_HEAD = struct.Struct("<I")
_MAX_MESSAGE_BYTES = OUT_OF_BAND_BYTES
_SEND_BUFFER_BYTES = 1 << 20
_ANCILLARY_BYTES = socket.CMSG_SPACE(struct.calcsize("i"))


def socket_pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class MessageSocket:
    """One end of a socket pair."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._sock = sock
        self._outbox: deque[tuple[list, list]] = deque()
        self._lock = threading.Lock()
        self.loop: Loop | None = None  # flushes the outbox

    def fileno(self) -> int:
        return self._sock.fileno()

    def post(self, message: tuple, payload: Payload | None = None, fd: int = -1) -> None:
        """Sends now, or later if the peer's buffer is full. A dead peer is silently skipped: the process that watches
        it reports its death. `fd` is a descriptor to send besides a payload's."""
        layout = payload.layout if payload is not None else None
        head = pickle.dumps((message, payload is not None, layout), protocol=5)
        if len(head) > _MAX_MESSAGE_BYTES:
            raise ValueError(f"a message head of {len(head)} bytes is too long; keys and names must be short")
        parts = [_HEAD.pack(len(head)), head]
        if payload is not None:
            parts.append(payload.body)
            fd = max(fd, payload.fd)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd))] if fd >= 0 else []
        with self._lock:
            if self._outbox or not self._send(parts, ancillary):
                # The duplicate outlives the caller's descriptor.
                if fd >= 0:
                    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", os.dup(fd)))]
                self._outbox.append((parts, ancillary))
                if self.loop is not None:
                    self.loop.wake()

    def flush(self) -> bool:
        """Sends waiting messages; True when none is left."""
        with self._lock:
            while self._outbox and self._send(*self._outbox[0]):
                for _, _, data in self._outbox.popleft()[1]:
                    os.close(struct.unpack("i", data)[0])
            return not self._outbox

    def backed_up(self) -> bool:
        return bool(self._outbox)

    def _send(self, parts: list, ancillary: list) -> bool:
        try:
            self._sock.sendmsg(parts, ancillary)
        except BlockingIOError:
            return False
        except OSError as error:
            if not isinstance(error, ConnectionError) and self._sock.fileno() >= 0:
                raise
        return True

    def receive(self) -> tuple[tuple, Payload | None, int]:
        """Returns (message, payload, descriptor or -1). Raises BlockingIOError if there is no message, EOFError at the
        end."""
        try:
            data, ancillary, _, _ = self._sock.recvmsg(3 * OUT_OF_BAND_BYTES, _ANCILLARY_BYTES, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError as error:  # raised once when the peer ended; its earlier messages can still be read
            raise BlockingIOError from error
        if not data:
            raise EOFError
        fds = array.array("i")
        for _, _, cmsg in ancillary:
            fds.frombytes(cmsg)
        fd = fds[0] if fds else -1
        (size,) = _HEAD.unpack_from(data)
        view = memoryview(data)
        start = _HEAD.size + size
        message, has_payload, layout = pickle.loads(view[_HEAD.size : start])  # noqa: S301  (from our own process)
        if not has_payload:
            return message, None, fd
        return message, Payload(view[start:], layout, fd), -1

    def close(self) -> None:
        with self._lock:
            for _, ancillary in self._outbox:
                for _, _, data in ancillary:
                    os.close(struct.unpack("i", data)[0])
            self._outbox.clear()
            self._sock.close()


class Loop:
    """Serves any number of sockets in the thread that calls `run`. Callbacks run there and must not block."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._waker, selectors.EVENT_READ, None)
        self._requests: deque[Callable[[], None]] = deque()
        self._sockets: dict[MessageSocket, int] = {}
        self._stopped = False

    def add(self, peer: MessageSocket, on_message: Callable[..., None], on_end: Callable[[], None]) -> None:
        """Calls `on_message(message, payload, fd)` for messages, and `on_end()` once when the peer has ended."""
        peer.loop = self

        def register() -> None:
            self._sockets[peer] = selectors.EVENT_READ
            self._selector.register(peer, selectors.EVENT_READ, (peer, on_message, on_end))

        self.submit(register)

    def submit(self, task: Callable[[], None]) -> None:
        """Runs a task in the loop's thread, in order."""
        self._requests.append(task)
        self.wake()

    def watch(self, fd: int, on_ready: Callable[[], None]) -> None:
        """Calls `on_ready` once when the descriptor becomes readable, then closes it."""
        self.submit(lambda: self._selector.register(fd, selectors.EVENT_READ, (fd, on_ready)))

    def drain(self, peer: MessageSocket) -> None:
        """Serves the messages that a peer has sent before it ended or failed; call it in the loop's thread."""
        misses = 0  # a reset connection counts as a miss; if a grandchild keeps the socket open, the end never comes
        while peer in self._sockets and misses < 2:
            misses += not self._serve(*self._selector.get_key(peer).data, selectors.EVENT_READ)

    def wake(self) -> None:
        with suppress(OSError):  # already closed
            os.eventfd_write(self._waker, 1)

    def stop(self) -> None:
        self._stopped = True
        self.wake()

    def run(self) -> None:
        while not self._stopped:
            for key, events in self._selector.select():
                if key.data is None:
                    os.eventfd_read(self._waker)
                    self._serve_requests()
                elif len(key.data) == 2:
                    self._selector.unregister(key.fileobj)
                    os.close(key.data[0])
                    key.data[1]()
                elif key.data[0] in self._sockets:  # not removed by a callback just now
                    self._serve(*key.data, events)
        self._close()

    def _serve_requests(self) -> None:
        while self._requests:
            self._requests.popleft()()
        for peer in list(self._sockets):
            self._set_events(peer)

    def _serve(
        self, peer: MessageSocket, on_message: Callable[..., None], on_end: Callable[[], None], events: int
    ) -> bool:
        """True if a message or the end was read."""
        if events & selectors.EVENT_WRITE:
            peer.flush()
            self._set_events(peer)
        if events & selectors.EVENT_READ:
            try:
                message = peer.receive()
            except BlockingIOError:
                return False
            except EOFError:
                self._selector.unregister(peer)
                del self._sockets[peer]
                peer.close()
                on_end()
                return True
            on_message(*message)
        return True

    def _set_events(self, peer: MessageSocket) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.backed_up() else 0)
        if self._sockets[peer] != events:
            self._sockets[peer] = events
            self._selector.modify(peer, events, self._selector.get_key(peer).data)

    def _close(self) -> None:
        self._serve_requests()
        for key in list(self._selector.get_map().values()):
            if key.data is not None and len(key.data) == 3:
                key.data[0].flush()
                key.data[0].close()
            elif key.data is not None:
                os.close(key.data[0])
        self._selector.close()
        waker, self._waker = self._waker, -1
        os.close(waker)
