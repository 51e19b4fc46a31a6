"""The parent's side of devices that several runs share: serves their coordinator over a local socket, in one thread.

The socket is in a separate folder and only this user can open it (mode 0600, and the kernel tells who connects). A
process that was started as a run speaks for that run only; other processes of the user may ask to add a run, or enter
as programs. `docs/share_protocol.md` describes the messages, and `runtime/shared_leases.py` is a run's side. The end of
a connection ends the run's leases and does not affect other runs.
"""

from __future__ import annotations

import json
import os
import select
import selectors
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, validate_call

from embodied.core.files import locked_folder
from embodied.runtime.device_leases import GENERATE, INITIALISE, Action, Claim, Coordinator, LeaseError
from embodied.runtime.shared_leases import BEGINNING, LOCKS
from embodied.sharing.page import LiveTable, ShareRecord
from embodied.sharing.run_turns import FORMAT, RECORD, RunTurns

MOST_BYTES = 4 << 20  # of one message
STRANGER = ""
PROTOCOL = "embodied-leases/1"
PROGRAM = "program:"  # begins the names of programs, which runs never have
checked = validate_call(config=ConfigDict(allow_inf_nan=False))  # an unfit message is a ValueError


@dataclass(eq=False)
class _Peer:
    socket: socket.socket
    run: str  # STRANGER: another process of this user
    pid: int
    came: bytes = b""
    to_send: bytes = b""
    number: int = 0  # number of its last message
    asked: bool = False  # its last message is not answered yet
    error: str = ""  # error in its messages since the last answer
    actions: list[list[str]] = field(default_factory=list)
    state: dict[str, Any] | None = None  # the last one sent
    process: int = -1  # pidfd of a program
    lease_s: float = float("inf")  # a program's longest silence while others wait for its devices
    heard_at: float = 0.0  # time of its last message


class LeaseServer:
    """Serves leases of these devices. `record` writes a line of share.jsonl; `add` starts another run and returns the
    reply to the user."""

    def __init__(
        self,
        devices: Iterable[str],
        rule: str,
        record: Callable[[dict[str, Any]], None],
        add: Callable[[list[str]], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.devices = tuple(devices)
        self.turns = RunTurns(rule, record)  # type: ignore[arg-type]
        self.coordinator = Coordinator(dict.fromkeys(self.devices, float("inf")), {}, turns=self.turns)
        self.add, self.clock, self.start = add, clock, clock()
        self.expected: dict[int, str] = {}  # process id -> run
        self.peers: list[_Peer] = []
        self._stopped: dict[str, float] = {}  # run whose process is stopped (SIGSTOP) -> since when
        self._folder, self._lock = locked_folder(Path(tempfile.gettempdir()), "embodied-share", 0o700)
        self.path = self._folder / "socket"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._socket.bind(str(self.path))
            Path(f"{self.path}{LOCKS}").touch()
        finally:
            os.umask(before)
        self._socket.listen()
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)

    @property
    def now(self) -> float:
        return self.clock() - self.start

    def expect(self, run: str, pid: int, weight: float, own: Iterable[str]) -> None:
        """This process is about to connect as a run that owns these devices."""
        self.expected[pid] = run
        self.turns.joins(run, weight, [*own], self.now)

    def end(self, run: str, how: str) -> None:
        """The run's process has ended."""
        self.expected = {pid: name for pid, name in self.expected.items() if name != run}
        for peer in [peer for peer in self.peers if peer.run == run]:
            self._drop(peer)
        self._dispatch(self.coordinator.leave(run))
        self.turns.remove_run(run, how, self.now)
        self._send_states()

    def serve(self, seconds: float) -> None:
        """Receive messages during this time, and answer them."""
        until, left_s = time.monotonic() + seconds, seconds
        while left_s >= 0:
            for key, events in self._selector.select(left_s):
                if key.fileobj is self._socket:
                    self._accept()
                elif key.data in self.peers:
                    if events & selectors.EVENT_WRITE:
                        self._flush(key.data)
                    if events & selectors.EVENT_READ:
                        self._read(key.data)
            self._dispatch(self.coordinator.pass_time(self.now))
            self._send_states()
            left_s = until - time.monotonic()

    def overdue(self, seconds: float) -> set[str]:
        """Runs that still hold a device `seconds` after they were asked to release it, or whose process has been
        stopped (SIGSTOP) for as long while other runs wait for their devices."""
        asked = [gang for gang in self.turns.gangs.values() if gang.leaves_since is not None]
        late = {gang.run for gang in asked if gang.leaves_since is not None and self.now - gang.leaves_since > seconds}
        here = {run for pid, run in self.expected.items() if is_stopped(pid)}
        self._stopped = {run: self._stopped.get(run, self.now) for run in here}
        waited_for = {
            self.turns.gangs[holder].run
            for gang in self.coordinator.waiting
            for holder in self.coordinator.in_the_way(gang)
        }
        return late | {run for run, since in self._stopped.items() if run in waited_for and self.now - since > seconds}

    @property
    def programs(self) -> list[_Peer]:
        return [peer for peer in self.peers if peer.process >= 0]

    def end_late_programs(self) -> list[str]:
        """Kill the programs that are silent for longer than their lease while other runs wait for their devices or
        memory. Returns their names."""
        gangs, moves = self.turns.gangs, self.coordinator.switching.items()
        in_the_way = {
            gangs[holder].run for gang in self.coordinator.waiting for holder in self.coordinator.in_the_way(gang)
        }
        in_the_way |= {run for gang, left in moves for _, worker in left if (run := run_of(worker)) != run_of(gang)}
        late = [
            peer
            for peer in self.programs
            if peer.run in in_the_way and self.now - peer.heard_at > peer.lease_s
            if not select.select([peer.socket], [], [], 0)[0]  # else its message is not read yet
        ]
        for peer in late:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(peer.process, signal.SIGKILL)
        return [peer.run for peer in late]

    def close(self) -> None:
        for peer in list(self.peers):
            self._drop(peer, "stopped")
        self._selector.close()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    # Connections

    def _accept(self) -> None:
        with suppress(OSError):
            theirs, _ = self._socket.accept()
            pid, uid, _ = struct.unpack("3i", theirs.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.getuid():
                theirs.close()
                return
            theirs.setblocking(False)
            peer = _Peer(theirs, self.expected.get(pid, STRANGER), pid)
            self.peers.append(peer)
            self._selector.register(theirs, selectors.EVENT_READ, peer)

    def _drop(self, peer: _Peer, how: str = "") -> None:
        with suppress(KeyError, ValueError):
            self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer in self.peers:
            self.peers.remove(peer)
            if peer.run and not any(other.run == peer.run for other in self.peers):
                held = self.coordinator.holding & self.coordinator.gangs_of.get(peer.run, set())
                self._dispatch(self.coordinator.leave(peer.run))
                if peer.process >= 0:
                    os.close(peer.process)
                    self.turns.remove_run(peer.run, how or ("failed" if held else "finished"), self.now)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data or len(peer.came) > MOST_BYTES:
            self._drop(peer)
            return
        *lines, peer.came = (peer.came + data).split(b"\n")
        for line in lines:
            if peer in self.peers:
                self._answer(peer, line)

    def _answer(self, peer: _Peer, line: bytes) -> None:
        try:
            message = json.loads(line)
            verb, peer.number, peer.heard_at = message.pop("do"), message.pop("n"), self.now
            if verb == "add" and peer.run == STRANGER:
                self._send(peer, {"said": self.add([str(word) for word in message["words"]])})
                return
            if peer.run == STRANGER:
                self._enter(peer, verb, **message)
                return
            peer.asked = True
            self._dispatch(self.coordinator.pass_time(self.now))
            getattr(self, f"_do_{verb}")(peer.run, **message)
        except LeaseError as err:
            peer.error = peer.error or str(err).replace(f"{peer.run}/", "")
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as err:  # not a message of this protocol
            self._send(peer, {"n": peer.number, "error": f"{line[:200].decode(errors='replace')}: {err}"})
            self._drop(peer)

    def _send(self, peer: _Peer, message: dict[str, Any]) -> None:
        peer.to_send += json.dumps(message).encode() + b"\n"
        self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        with suppress(BlockingIOError):
            try:
                peer.to_send = peer.to_send[peer.socket.send(peer.to_send) :]
            except ConnectionError:
                return  # `_read` handles the end of the connection
        if len(peer.to_send) > MOST_BYTES:  # the run does not read its messages
            peer.socket.shutdown(socket.SHUT_RDWR)
            return
        waits = selectors.EVENT_WRITE if peer.to_send else 0
        with suppress(KeyError, ValueError):
            self._selector.modify(peer.socket, selectors.EVENT_READ | waits, peer)

    @checked
    def _enter(
        self,
        peer: Any,
        verb: str,
        protocol: str,
        name: Annotated[str, Field(pattern=r"^[\w.-]{1,40}$")],
        devices: Annotated[list[str], Field(min_length=1)],
        lease_s: Annotated[float, Field(gt=0)],
        weight: Annotated[float, Field(gt=0)] = 1.0,
    ) -> None:
        """Another program takes part from now on as a run that owns these devices, perhaps together with others."""
        run = PROGRAM + name
        if verb != "enter" or protocol != PROTOCOL:
            raise ValueError(f"a program begins with enter, protocol {PROTOCOL}")
        if run in self.turns.runs:
            raise ValueError(f"name={name}: a program of this name takes part already")
        if unknown := {*devices} - {*self.devices}:
            raise ValueError(f"{', '.join(sorted(unknown))} is not shared: {', '.join(self.devices)}")
        peer.run, peer.lease_s, peer.process, peer.asked = run, lease_s, os.pidfd_open(peer.pid), True
        self.turns.joins(run, weight, devices, self.now)

    # Messages from runs

    @checked
    def _do_begin(self, run: str, capacity: dict[str, float]) -> None:
        """Let the run build its workers on its own devices. Other runs first offload their memory from these
        devices."""
        self._limit(capacity)
        gang, coordinator = f"{run}/{BEGINNING}", self.coordinator
        limited = {device for device in capacity if device in self.devices}
        kept = [claim for claim in coordinator.claims.values() if not claim.worker.startswith(f"{run}/")]
        room = [coordinator.capacity[d] - sum(c.kept_bytes for c in kept if d in c.devices) for d in limited]
        claim = Claim(f"{run}/all", tuple(sorted(self.turns.runs[run].own | limited)), min(room, default=0.0))
        self._dispatch(self.coordinator.join(run, {gang: [claim]}, {gang: INITIALISE}, (), [claim.worker]))
        self._dispatch(self.coordinator.acquire(gang))

    @checked
    def _do_join(
        self,
        run: str,
        gangs: dict[str, list[Claim]],
        tiers: dict[str, Annotated[int, Field(ge=INITIALISE, le=GENERATE)]],
        preemptible: list[str],
        resident: list[str],
        capacity: dict[str, float],
    ) -> None:
        if unknown := {*resident} - {claim.worker for claims in gangs.values() for claim in claims}:
            raise ValueError(f"no worker is called {', '.join(sorted(unknown))}")
        self._limit(capacity)
        named = {f"{run}/{name}": [self._claim(run, claim) for claim in claims] for name, claims in gangs.items()}
        for gang, claims in named.items():  # a gang that is not preemptible must run on devices of its own run
            if gang.removeprefix(f"{run}/") not in preemptible:
                self.turns.runs[run].own |= {device for claim in claims for device in claim.devices}
        mine = ({f"{run}/{gang}": tier for gang, tier in tiers.items()}, [f"{run}/{gang}" for gang in preemptible])
        self._dispatch(self.coordinator.join(run, named, *mine, [f"{run}/{worker}" for worker in resident]))

    def _limit(self, capacity: dict[str, float]) -> None:
        """Limit the memory of these devices to these bytes."""
        for device in capacity.keys() & self.coordinator.capacity.keys():
            self.coordinator.capacity[device] = min(self.coordinator.capacity[device], capacity[device])

    def _claim(self, run: str, claim: Claim) -> Claim:
        devices = tuple(device for device in claim.devices if device in self.devices)
        return replace(claim, worker=f"{run}/{claim.worker}", devices=devices)

    @checked
    def _do_acquire(self, run: str, gang: str) -> None:
        self._dispatch(self.coordinator.acquire(f"{run}/{gang}"))

    @checked
    def _do_release(self, run: str, gang: str) -> None:
        self._dispatch(self.coordinator.release(f"{run}/{gang}"))

    @checked
    def _do_cancel(self, run: str, gang: str) -> None:
        """The gang may have got its devices meanwhile, before the run was told."""
        waits = f"{run}/{gang}" in self.coordinator.waiting
        self._dispatch((self.coordinator.cancel if waits else self.coordinator.release)(f"{run}/{gang}"))

    @checked
    def _do_done(self, run: str, verb: str, worker: str, gang: str) -> None:
        self._dispatch(self.coordinator.done(Action(verb, f"{run}/{worker}", gang)))

    @checked
    def _do_revise(self, run: str, claims: list[Claim]) -> None:
        named = [self._claim(run, claim) for claim in claims]
        if unknown := {claim.worker for claim in named} - self.coordinator.claims.keys():
            raise ValueError(f"no worker is called {', '.join(sorted(unknown))}")
        self.coordinator.revise(named)

    @checked
    def _do_progress(self, run: str, fraction: float | None) -> None:
        self.turns.reports(run, fraction, self.now)

    @checked
    def _do_idle(self, run: str, gangs: list[str]) -> None:
        self.turns.set_idle(run, {f"{run}/{gang}" for gang in gangs}, self.now)

    @checked
    def _do_loaded(self, run: str, seconds: float) -> None:
        self.turns.note_load_time(seconds)

    def _do_alive(self, run: str) -> None:
        """Renews the lease, as every message does."""

    # Messages to runs

    def _dispatch(self, actions: Iterable[Action]) -> None:
        for action in actions:
            run, _, worker = action.worker.partition("/")
            for peer in self.peers:
                if peer.run == run:
                    peer.actions.append([action.verb, worker, action.gang])

    def _send_states(self) -> None:
        """Send each run its changed state, and confirm its messages."""
        leaving = self.coordinator.leaving()
        for gang in leaving:
            self.turns.asked_to_leave(gang, self.now)
        for peer in [peer for peer in self.peers if peer.run]:
            state = self._state_of(peer.run, leaving)
            if peer.asked or peer.actions or state != peer.state:
                own = self.turns.runs[peer.run].own & {*self.devices}
                message = {"n": peer.number, "told": state, "actions": peer.actions, "own": sorted(own)}
                message["lent"] = sorted({*self.devices} - own)
                message |= {"error": peer.error} if peer.error else {}
                peer.state, peer.actions, peer.asked, peer.error = state, [], False, ""
                self._send(peer, message)

    def _state_of(self, run: str, leaving: set[str]) -> dict[str, Any]:
        coordinator, start = self.coordinator, f"{run}/"
        gangs = sorted(coordinator.gangs_of.get(run, ()))

        def without_run(names: Iterable[str]) -> list[str]:
            return [name.removeprefix(start) for name in names if name.startswith(start)]

        waiting = [gang for gang in gangs if gang in coordinator.waiting]
        return {
            "granted": without_run(gang for gang in gangs if coordinator.granted(gang)),
            "holding": without_run(gang for gang in gangs if gang in coordinator.holding),
            "waiting": without_run(waiting),
            "leaving": without_run(sorted(leaving)),
            "in_the_way": {
                gang.removeprefix(start): [name.removeprefix(start) for name in sorted(coordinator.in_the_way(gang))]
                for gang in waiting
            },
            "resident": without_run(coordinator.resident),
        }


class RecordedLeases(LeaseServer):
    """Appends to a folder's share.jsonl, and shows which run has which device."""

    def __init__(
        self,
        folder: Path,
        devices: Iterable[str],
        rule: str,
        add: Callable[[list[str]], str],
        free: Callable[[], None] = lambda: None,
    ) -> None:
        """`free` releases the devices that were reserved for all runs."""
        self.folder, self.free = folder, free
        folder.mkdir(parents=True, exist_ok=True)
        self.record = ShareRecord()
        self.table = LiveTable(self.record)
        self._file, self._warned = (folder / RECORD).open("a"), False
        super().__init__(devices, rule, self._note, add)
        started = datetime.now(UTC).isoformat(timespec="seconds")
        self._note({"format": FORMAT, "rule": rule, "devices": list(self.devices), "started": started})

    def _note(self, line: dict[str, Any]) -> None:
        self.record.add(line)
        try:  # what cannot be written now is written with the next line
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()
        except OSError as err:
            if not self._warned:
                print(f"warning: {self.folder / RECORD} cannot be written ({err}); the runs go on", flush=True)
            self._warned = True

    def close(self) -> None:
        super().close()
        with suppress(OSError):
            self._file.close()
        self.free()


def run_of(gang: str) -> str:
    """The run of a gang or worker: a of a/update."""
    return gang.partition("/")[0]


def is_stopped(pid: int) -> bool:
    """True if a process exists and is stopped (SIGSTOP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):
        return False
