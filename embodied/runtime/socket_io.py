"""Messages between two processes over a socket pair, and the thread that receives them.

A socket pair has no address: nobody else can connect, and nothing is left behind. A message is one packet: a small
tuple that describes it, and at most one payload, whose memory file is sent along. `post` never blocks, so a peer that
stopped reading cannot block a thread that serves messages.
"""

from __future__ import annotations

import array
import os
import pickle
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from embodied.runtime.payload import OUT_OF_BAND_BYTES, Payload

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
        """Serves the remaining messages of an ended peer; call it in the loop's thread."""
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
