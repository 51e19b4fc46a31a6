"""The coordinator of a run that shares its devices with other runs: asks the process that started all of them.

`EMBODIED_SHARE` names that process's socket; unset, nothing here is used. A message is a JSON object in a line. The run
sends requests (`acquire`, `release`, ...) and waits for answers. At any time the parent sends the devices that the run
holds, the devices to release, and the memory to move.

If the parent dies, the run stops itself: it ends its step, saves, and says how to resume. Until then it borrows no
device and uses no device that another run still holds: runs lock their devices, and the kernel unlocks them when their
processes have ended.

    shared = connection(os.environ["EMBODIED_SHARE"])
    shared.begin()                       # waits for the run's own devices
    shared.join(coordinator, gangs)      # instead of `coordinator` from now on, with the same methods
    shared.report_progress(0.4)          # of the batch
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from typing import Any
from zlib import crc32

from embodied.core.errors import EmbodiedError, WorkerFailed
from embodied.runtime.device_leases import SHARE, Action, Claim, Coordinator, LeaseError

ANSWER_S = 300.0  # the parent counts as dead after this; it answers at once, except while it plans a joining run
LOOK_S = 1.0
ORPHANED_S = 900.0  # time for other runs to end their step, save and stop
LOCKS = ".locks"  # suffix of the file of locks, after the socket's name
BUCKETS = 50  # steps of progress: 2% each
BEGINNING = "initialise"  # the gang of a run that builds its workers


@cache
def connection(path: str) -> SharedLeases:
    """The connection to the parent command at this socket."""
    return SharedLeases(path)


def stop_this_run() -> None:
    """Stop the run as Ctrl-C does: it ends its step, saves and says how to resume."""
    os.write(2, b"\nthe command that started this run beside others is gone\n")
    os.kill(os.getpid(), signal.SIGTERM)


class SharedLeases:
    """Has the methods of `Coordinator` that a run uses. `self.told` is the parent's last message."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(path)
            self._locks = DeviceLocks(f"{path}{LOCKS}")
        except OSError as err:
            raise EmbodiedError(
                f"{SHARE}={path}: {err.strerror or err}; unset it, or start the runs with python -m embodied.share"
            ) from None
        self.alone = False  # the parent is dead
        self._until = float("inf")  # deadline for other runs to end
        self.local: Coordinator | None = None  # decides once the parent is dead
        self.own: frozenset[str] = frozenset()  # devices of this run
        self.lent: frozenset[str] = frozenset()  # devices of other runs
        self.told: dict[str, Any] = {"granted": [], "waiting": [], "leaving": [], "in_the_way": {}, "resident": []}
        self.told["holding"] = []  # includes gangs whose memory is still moving
        self._asked = self._answered = 0
        self._problem = ""
        self._bucket: int | None = None
        self._resting: set[str] = set()
        self._actions: list[Action] = []
        self._heard = threading.Condition()
        self._news = threading.Event()
        self._follow: Callable[[list[Action]], object] = lambda actions: None
        for work in (self._listen, self._hand_on):
            threading.Thread(target=work, name=f"share{work.__name__}", daemon=True).start()

    # Hooks of a run

    def begin(self, capacity: Mapping[str, float] | None = None) -> None:
        """Wait for the run's own devices, with this memory limit, to build workers on them."""
        self._ask("begin", capacity=dict(capacity or {}))
        while not (self._lock_devices(self.own) if self.alone else BEGINNING in self.told["granted"]):
            with self._heard:
                self._heard.wait(LOOK_S)

    def join(
        self, local: Coordinator, tiers: Mapping[str, int], follow: Callable[[list[Action]], object]
    ) -> SharedLeases:
        """Registers the gangs of `local`. `follow` executes requested actions and is called after every change."""
        self.local, self._follow = local, follow
        self._ask(
            "join",
            gangs={name: [asdict(claim) for claim in claims] for name, claims in local.gangs.items()},
            tiers=dict(tiers),
            preemptible=sorted(local.preemptible),
            resident=[*local.resident],
            capacity={device: limit for device, limit in local.capacity.items() if limit < float("inf")},
        )
        return self

    def report_progress(self, fraction: float) -> None:
        """Report the collected part of the batch, in steps of 2%."""
        if (bucket := int(fraction * BUCKETS)) != self._bucket:
            self._bucket = bucket
            self._send("progress", fraction=bucket / BUCKETS)

    def clear_progress(self) -> None:
        """Report the end of an iteration."""
        self._bucket = None
        self._send("progress", fraction=None)

    def report_idle(self, gangs: Collection[str]) -> None:
        """Report the gangs that have no work in their phase for now; all other gangs have work."""
        if self._resting != {*gangs}:
            self._resting = {*gangs}
            self._send("idle", gangs=sorted(gangs))

    def report_load_time(self, seconds: float) -> None:
        """Report how long a worker took to load its weights on a device that it joined."""
        self._send("loaded", seconds=seconds)

    # As `Coordinator`

    @property
    def gangs(self) -> Mapping[str, tuple[Claim, ...]]:
        assert self.local is not None
        return self.local.gangs

    @property
    def waiting(self) -> Iterable[str]:
        return self._coordinator_alone().waiting if self.alone else self.told["waiting"]

    @property
    def resident(self) -> Iterable[str]:
        return self._coordinator_alone().resident if self.alone else self.told["resident"]

    def acquire(self, gang: str) -> list[Action]:
        return self._do("acquire", gang)

    def release(self, gang: str) -> list[Action]:
        with self._heard:
            self._locks.keep({device for other in self._holding() - {gang} for device in self._devices(other)})
            return self._do("release", gang)

    def cancel(self, gang: str) -> list[Action]:
        return self._do("cancel", gang)

    def done(self, action: Action) -> list[Action]:
        if not self._ask("done", **asdict(action)):
            return self._coordinator_alone().done(action)
        return []

    def revise(self, claims: Iterable[Claim]) -> None:
        claims = list(claims)
        self._coordinator_alone().revise(claims)  # refuses claims that would not fit even if the run were alone
        self._ask("revise", claims=[asdict(claim) for claim in claims])

    def granted(self, gang: str) -> bool:
        if not self.alone:
            return gang in self.told["granted"]
        devices = self._devices(gang)
        return self._coordinator_alone().granted(gang) and not devices & self.lent and self._lock_devices(devices)

    def leaving(self) -> set[str]:
        if not self.alone:
            return {*self.told["leaving"]}
        borrowed = {gang for gang in self._holding() if self._devices(gang) & self.lent & self._locks.held}
        return self._coordinator_alone().leaving() | borrowed

    def in_the_way(self, gang: str) -> set[str]:
        if not self.alone:
            return {*self.told["in_the_way"].get(gang, ())}
        return set() if self._coordinator_alone().granted(gang) else self._coordinator_alone().in_the_way(gang)

    # Inside

    def _coordinator_alone(self) -> Coordinator:
        assert self.local is not None, "no gang has joined yet"
        return self.local

    def _holding(self) -> set[str]:
        return {*self._coordinator_alone().holding} if self.alone else {*self.told["holding"]}

    def _devices(self, gang: str) -> set[str]:
        """The shared devices of a gang."""
        claims = self.local.gangs.get(gang, ()) if self.local else ()
        devices = {device for claim in claims for device in claim.devices} if gang != BEGINNING else self.own
        return {*devices} & (self.own | self.lent)

    def _lock_devices(self, devices: Collection[str]) -> bool:
        """Locks these devices once the parent is dead; False if another run still holds one."""
        if not (locked := self._locks.lock(devices)) and time.monotonic() > self._until:
            raise EmbodiedError(
                f"the command that started this run is gone, and {ORPHANED_S:g} s later another run still has "
                f"{', '.join(sorted(devices))}; end that run, then continue with resume="
            )
        return locked

    def _do(self, verb: str, gang: str) -> list[Action]:
        return [] if self._ask(verb, gang=gang) else getattr(self._coordinator_alone(), verb)(gang)

    def _send(self, verb: str, /, **fields: Any) -> bool:
        """Say something to the parent, which hears everything in its order; False if it is gone."""
        with self._heard:
            if not self.alone:
                self._asked += 1
                try:
                    self._socket.sendall(json.dumps({"do": verb, "n": self._asked, **fields}).encode() + b"\n")
                except OSError:
                    self._socket.close()
            return not self.alone

    def _ask(self, verb: str, /, **fields: Any) -> bool:
        """Send a message to the parent and wait for the confirmation; False if the parent is dead."""
        with self._heard:
            if not self._send(verb, **fields):
                return False
            number = self._asked
            if not self._heard.wait_for(lambda: self._answered >= number or self.alone, ANSWER_S):
                self._socket.shutdown(socket.SHUT_RDWR)  # a hanging parent counts as dead
                self._heard.wait_for(lambda: self.alone, LOOK_S)
            problem, self._problem = self._problem, ""
        if problem:
            raise LeaseError(problem)
        return not self.alone

    def _listen(self) -> None:
        """Reads the parent's messages until it is dead."""
        try:
            with self._socket.makefile("rb") as lines:
                for line in lines:
                    self._take_message(json.loads(line))
        except (OSError, ValueError):
            pass
        self._go_on_alone()

    def _take_message(self, message: dict[str, Any]) -> None:
        with self._heard:
            self._answered = message["n"]
            self._problem = message.get("error") or self._problem
            self.own, self.lent = frozenset(message["own"]), frozenset(message["lent"])
            if self._answered >= self._asked:  # otherwise it is older than a request that followed
                self.told = message["told"]
                devices = {device for gang in self._holding() for device in self._devices(gang)}
                self._locks.keep(devices)
                self._locks.lock(devices)
            self._actions += [Action(*action) for action in message.get("actions", ())]
            self._heard.notify_all()
        self._news.set()

    def _go_on_alone(self) -> None:
        with self._heard:
            if self.local is not None:
                self.local.resident = dict.fromkeys(self.told["resident"], 0)
                for gang in (*self.told["holding"], *self.told["waiting"]):
                    if gang != BEGINNING:
                        self._actions += self.local.acquire(gang)
            self.alone, self._until = True, time.monotonic() + ORPHANED_S
            self._heard.notify_all()
        self._news.set()
        with suppress(OSError):  # a killed parent leaves its socket
            os.unlink(self._path)
            os.unlink(f"{self._path}{LOCKS}")
            os.rmdir(os.path.dirname(self._path))
        stop_this_run()

    def _hand_on(self) -> None:
        """Makes the run execute the actions that the parent requested."""
        while True:
            self._news.wait()
            self._news.clear()
            with self._heard:
                actions, self._actions = self._actions, []
            with suppress(WorkerFailed):  # every caller that waits for this worker gets the error
                self._follow(actions)


class DeviceLocks:
    """Locks of a machine's devices among runs: one locked byte of a file for each device."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.held: set[str] = set()

    def lock(self, devices: Collection[str]) -> bool:
        """Lock all of these devices, or none (False) if another run holds one."""
        new = [device for device in devices if device not in self.held]
        for place, device in enumerate(new):
            try:
                self._set(device, fcntl.F_WRLCK)
            except BlockingIOError:
                for other in new[:place]:
                    self._set(other, fcntl.F_UNLCK)
                return False
        self.held |= {*new}
        return True

    def keep(self, devices: Collection[str]) -> None:
        """Unlock all other devices."""
        for device in self.held - {*devices}:
            self._set(device, fcntl.F_UNLCK)
        self.held &= {*devices}

    def _set(self, device: str, how: int) -> None:
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", how, os.SEEK_SET, crc32(device.encode()), 1, 0))
