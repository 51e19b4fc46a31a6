"""Grants devices to gangs of workers, and tracks whose memory is on them; a state machine without threads.

A gang gets all its devices at once, for a phase. Memory residency is separate: a worker keeps its memory after its turn
until another worker's does not fit beside it. Then idle residents offload, longest idle first. Gangs without common
devices never wait for each other, and their memory never moves.

Waiting gangs are served by tier, and within a tier in the order of the workflow, producers before consumers. A
preemptible gang should give way to a gang of an earlier tier that waits for its devices: stop, release, and ask again.
For several runs (`join`), `sharing/run_turns.py` has the rules for the order.

`device_sharing.py` executes the coordinator's actions; `device_memory.py` moves memory.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from embodied.core.errors import EmbodiedError

GB = 1e9
SHARE = "EMBODIED_SHARE"  # names the socket of the process that shares devices among several runs
INITIALISE, TRAIN, VALUES, GENERATE = range(4)  # tiers of gangs when several runs share devices


class LeaseError(EmbodiedError):
    """Raised if a demand can never be met; the text shows the arithmetic."""


@dataclass(frozen=True)
class Claim:
    """A worker's demand while it works: devices, and bytes on each of them."""

    worker: str
    devices: tuple[str, ...]
    num_bytes: float = 0.0
    kept_bytes: float = 0.0  # bytes that stay after offloading
    gives_back: bool = True


@dataclass(frozen=True)
class Action:
    """A worker's `onload` or `offload`, to be executed before `gang` gets its devices."""

    verb: str
    worker: str
    gang: str


class Turns:
    """The rules for one run: waiting gangs by tier, then in the order of the workflow."""

    def __init__(self, tiers: Mapping[str, int], order: Iterable[str]) -> None:
        self.tiers = dict(tiers)
        self.place = {gang: place for place, gang in enumerate(order)}

    def tier(self, gang: str) -> int:
        return self.tiers.get(gang, 0)

    def order(self, waiting: Collection[str]) -> list[str]:
        """The waiting gangs in the order in which they are served."""
        return sorted(waiting, key=lambda gang: (self.tier(gang), self.place[gang]))

    def gives_way(self, holder: str, waiting: str) -> bool:
        """True if the preemptible gang `holder` gives way to `waiting`."""
        return self.tier(holder) > self.tier(waiting)

    def may_begin(self, gang: str) -> bool:
        """True if the gang may get its devices when they are free."""
        return True

    def moves(self, waiting: Collection[str], held: Mapping[str, str]) -> set[str]:
        """Gangs that should give way to gangs of the same tier. `held`: preemptible gangs by device."""
        return set()

    # Events; `now` in seconds

    def note_request(self, gang: str, now: float) -> None:
        """A gang requests its devices."""

    def begins(self, gang: str, now: float) -> None:
        """A gang gets its devices."""

    def asked_to_leave(self, gang: str, now: float) -> None:
        """A gang should release its devices; called repeatedly until it does."""

    def ends(self, gang: str, now: float) -> None:
        """A gang has released its devices, or stopped waiting."""

    def passes(self, now: float) -> None:
        """Advances the time."""

    def set_gangs(self, run: str, devices: Mapping[str, Collection[str]], tiers: Mapping[str, int]) -> None:
        """Sets the gangs of a run, in the order of its workflow; replaces its earlier gangs."""
        raise NotImplementedError("these are the turns of one run")


class Coordinator:
    """`capacity` in bytes by device; `gangs` in the order of the workflow."""

    def __init__(
        self,
        capacity: Mapping[str, float],
        gangs: Mapping[str, Sequence[Claim]],
        resident: Iterable[str] = (),
        tiers: Mapping[str, int] | None = None,
        preemptible: Iterable[str] = (),
        turns: Turns | None = None,
    ) -> None:
        """`resident` workers have their memory already. `tiers` by gang: 0 comes first and is the default.
        `preemptible` gangs give way to gangs of an earlier tier. `turns`: the rules for the order."""
        self.capacity = dict(capacity)
        self.gangs = {name: tuple(claims) for name, claims in gangs.items()}
        self.claims = {claim.worker: claim for claims in self.gangs.values() for claim in claims}
        self.turns = turns or Turns(tiers or {}, self.gangs)
        self.preemptible = {*preemptible}
        self.gangs_of: dict[str, set[str]] = {}  # run -> its gangs
        self.now = 0.0  # current time, if set
        self.resident = dict.fromkeys(resident, 0)  # worker -> when it last worked, counted in grants
        self.holders: dict[str, str] = {}  # device -> gang
        self.holding: set[str] = set()  # gangs that hold their devices, also gangs without devices
        self.waiting: list[str] = []
        self.switching: dict[str, set[tuple[str, str]]] = {}  # chosen gangs -> unfinished (verb, worker)
        self.turn = 0
        self._check()

    def _check(self) -> None:
        """Checks that every gang fits when all other workers have offloaded."""
        if unknown := {d for claim in self.claims.values() for d in claim.devices} - set(self.capacity):
            raise LeaseError(f"{', '.join(sorted(unknown))}: no such device; there are {', '.join(self.capacity)}")
        for name, claims in self.gangs.items():
            for device, limit in self.capacity.items():
                claimed = {c.worker: c.num_bytes for c in claims if device in c.devices}
                others = {
                    c.worker: c.kept_bytes if c.gives_back else c.num_bytes
                    for c in self.claims.values()
                    if device in c.devices and c.worker not in claimed
                }
                if claimed and sum(claimed.values()) + sum(others.values()) > limit:
                    parts = [f"{worker} {num / GB:.3g} GB" for worker, num in {**claimed, **others}.items() if num]
                    raise LeaseError(
                        f"{name} does not fit on {device}: {' + '.join(parts)} are more than its {limit / GB:.3g} GB, "
                        "even when all other workers are offloaded; use more devices or smaller batches, "
                        "or raise cluster.memory_gb if that is the limit"
                    )

    # What a run tells the coordinator of several runs (`shared_leases.py`); alone, nobody listens

    def report_progress(self, fraction: float) -> None:
        """Report the collected part of the batch."""

    def clear_progress(self) -> None:
        """Report the end of an iteration."""

    def report_idle(self, gangs: Collection[str]) -> None:
        """Report the gangs that have no work in their phase for now; all other gangs have work."""

    def report_load_time(self, seconds: float) -> None:
        """Report how long a worker took to load its weights on a device that it joined."""

    # Acquire and release

    def acquire(self, gang: str) -> list[Action]:
        """Requests a gang's devices. Returns the actions needed first, for it or for other gangs that can begin now."""
        if gang not in self.gangs:
            raise LeaseError(f"{gang} asks for devices, but no such gang has joined")
        if gang in self.waiting or gang in self.holding:
            raise LeaseError(f"{gang} asks for devices that it has or waits for already")
        self.waiting.append(gang)
        self.turns.note_request(gang, self.now)
        return self._go_on()

    def release(self, gang: str) -> list[Action]:
        """A gang releases its devices. Memory stays where it is."""
        if gang not in self.holding:
            raise LeaseError(f"{gang} gives back devices that it does not hold")
        self._free(gang)
        return self._go_on()

    def cancel(self, gang: str) -> list[Action]:
        """A waiting gang stops waiting."""
        self.waiting.remove(gang)
        self.turns.ends(gang, self.now)
        return self._go_on()

    def leaving(self) -> set[str]:
        """Returns the gangs that should give way now: only preemptible gangs hold the devices that a waiting gang
        lacks."""
        able = {device: gang for device, gang in self.holders.items() if gang in self.preemptible}
        return self.turns.moves(self.waiting, able) | {
            gang
            for waiting, _, holders in self._next()
            if all(holder in self.preemptible and self.turns.gives_way(holder, waiting) for holder in holders)
            for gang in holders
        }

    def in_the_way(self, gang: str) -> set[str]:
        """Returns the gangs that hold devices of a waiting gang, or of gangs that are served before it."""
        order = self.turns.order(self.waiting)
        earlier = order[: order.index(gang)] if gang in order else order
        lacking = self._devices(gang)
        for other in reversed(earlier):
            if lacking & self._devices(other):
                lacking |= self._devices(other)
        return {holder for device, holder in self.holders.items() if device in lacking}

    def granted(self, gang: str) -> bool:
        return gang in self.holding and gang not in self.switching

    def done(self, action: Action) -> list[Action]:
        """An action has been executed."""
        self._moved(action.verb, action.worker)
        return self._after(action.gang, (action.verb, action.worker))

    def revise(self, claims: Iterable[Claim]) -> None:
        """Updates workers' claims; LeaseError if they cannot fit."""
        new = {claim.worker: claim for claim in claims}
        self.gangs = {
            name: tuple(new.get(c.worker, c) for c in gang_claims) for name, gang_claims in self.gangs.items()
        }
        self.claims |= new
        self._check()

    def add(self, gang: str, claim: Claim, limit: float) -> None:
        """One more worker of a gang, which has its memory. Its devices, which have this limit, are not held by another
        gang now. LeaseError if it does not fit."""
        before = self.capacity, self.gangs, self.claims
        self.capacity = dict.fromkeys(claim.devices, limit) | self.capacity
        self.gangs = self.gangs | {gang: (*self.gangs[gang], claim)}
        self.claims = self.claims | {claim.worker: claim}
        try:
            self._check()
        except LeaseError:
            self.capacity, self.gangs, self.claims = before
            raise
        self.resident[claim.worker] = self.turn
        if gang in self.holding:
            self.holders |= dict.fromkeys(claim.devices, gang)

    def remove(self, worker: str) -> None:
        """A worker with its memory is gone; devices that only it used are free."""
        del self.claims[worker]
        self.resident.pop(worker, None)
        self.gangs = {name: tuple(c for c in claims if c.worker != worker) for name, claims in self.gangs.items()}
        self.holders = {device: gang for device, gang in self.holders.items() if device in self._devices(gang)}

    # Several runs

    def join(
        self,
        run: str,
        gangs: Mapping[str, Sequence[Claim]],
        tiers: Mapping[str, int],
        preemptible: Iterable[str] = (),
        resident: Iterable[str] = (),
    ) -> list[Action]:
        """Sets or replaces the gangs of a run, whose names must differ from other runs' names. LeaseError if its
        workers do not fit beside other runs' workers. Returns the actions that are possible now."""
        actions = self.leave(run)
        self.gangs |= {name: tuple(claims) for name, claims in gangs.items()}
        self.claims |= {claim.worker: claim for name in gangs for claim in self.gangs[name]}
        self.preemptible |= {*preemptible}
        self.gangs_of[run] = {*gangs}
        try:
            self._check()
        except LeaseError:
            self.leave(run)
            raise
        self.turns.set_gangs(run, {name: self._devices(name) for name in gangs}, tiers)
        self.resident |= dict.fromkeys(resident, self.turn)
        return actions

    def leave(self, run: str) -> list[Action]:
        """A run has left all devices."""
        gone = self.gangs_of.pop(run, set())
        workers = {claim.worker for name in gone for claim in self.gangs[name]}
        for name in gone:
            if name in self.waiting or name in self.holding:
                self.waiting = [other for other in self.waiting if other != name]
                self._free(name)
            del self.gangs[name]
        for worker in workers:
            del self.claims[worker]
            self.resident.pop(worker, None)
        self.preemptible -= gone
        moving = [(gang, move) for gang, moves in self.switching.items() for move in moves if move[1] in workers]
        return [action for gang, move in moving for action in self._after(gang, move)] + self._go_on()

    def pass_time(self, now: float) -> list[Action]:
        """Advances the time. Returns the actions that are possible now."""
        self.now = now
        self.turns.passes(now)
        actions = self._go_on()
        for gang in self.leaving():
            self.turns.asked_to_leave(gang, now)
        return actions

    # Memory

    def used_bytes(self, device: str) -> float:
        claims = [claim for claim in self.claims.values() if device in claim.devices]
        if self.turn == 0:  # only residents have begun
            claims = [claim for claim in claims if claim.worker in self.resident]
        return sum(claim.num_bytes if claim.worker in self.resident else claim.kept_bytes for claim in claims)

    def _go_on(self) -> list[Action]:
        """Chooses the waiting gangs that can get their devices now."""
        actions: list[Action] = []
        for gang, devices, holders in self._next():
            if not holders:
                self.waiting.remove(gang)
                self.holders |= dict.fromkeys(devices, gang)
                self.holding.add(gang)
                self.turns.begins(gang, self.now)
                actions += self._switch(gang)
        return actions

    def _next(self) -> Iterator[tuple[str, set[str], set[str]]]:
        """Yields each waiting gang whose devices no earlier gang waits for: the gang, its devices, and the gangs that
        hold some of these."""
        kept: set[str] = set()  # devices for which an earlier gang waits
        for gang in self.turns.order(self.waiting):
            devices = self._devices(gang)
            if not self.turns.may_begin(gang):
                continue
            if not devices & kept:
                yield gang, devices, {self.holders[device] for device in devices & self.holders.keys()}
            kept |= devices

    def _free(self, gang: str) -> None:
        self.holding.discard(gang)
        self.switching.pop(gang, None)
        self.holders = {device: holder for device, holder in self.holders.items() if holder != gang}
        self.turns.ends(gang, self.now)

    def _devices(self, gang: str) -> set[str]:
        return {device for claim in self.gangs[gang] for device in claim.devices}

    def _switch(self, gang: str) -> list[Action]:
        """Returns the memory moves before this gang works: other workers offload first, then its workers onload."""
        self.turn += 1
        workers = {claim.worker for claim in self.gangs[gang]}
        out = [Action("offload", worker, gang) for worker in self._leaving(gang, workers)]
        absent = [claim.worker for claim in self.gangs[gang] if claim.worker not in self.resident]
        for worker in workers & set(self.resident):
            self.resident[worker] = self.turn
        self.switching[gang] = {(action.verb, action.worker) for action in out}
        self.switching[gang] |= {("onload", worker) for worker in absent}
        if not self.switching[gang]:
            del self.switching[gang]
            return []
        return out or self._onloads(gang)

    def _leaving(self, gang: str, workers: set[str]) -> list[str]:
        """Idle residents that have to offload, longest idle first."""
        out: list[str] = []
        for device, limit in self.capacity.items():
            needed = sum(c.num_bytes for c in self.gangs[gang] if device in c.devices)
            if not needed:
                continue
            others = [c for c in self.claims.values() if device in c.devices and c.worker not in workers]
            idle = [c for c in others if c.worker in self.resident and c.gives_back]
            used = needed + sum(
                c.num_bytes if c.worker in self.resident and c.worker not in out else c.kept_bytes for c in others
            )
            for claim in sorted(idle, key=lambda c: self.resident[c.worker]):
                if used > limit and claim.worker not in out:
                    out.append(claim.worker)
                    used -= claim.num_bytes - claim.kept_bytes
        return out

    def _onloads(self, gang: str) -> list[Action]:
        return [Action("onload", worker, gang) for verb, worker in sorted(self.switching[gang]) if verb == "onload"]

    def _after(self, gang: str, what: tuple[str, str]) -> list[Action]:
        left = self.switching.get(gang)
        if left is None or what not in left:
            return []
        left.remove(what)
        if not left:
            del self.switching[gang]
            return []
        room_was_made = what[0] == "offload" and all(verb == "onload" for verb, _ in left)
        return self._onloads(gang) if room_was_made else []

    def _moved(self, verb: str, worker: str) -> None:
        if verb == "onload":
            self.resident[worker] = self.turn
        else:
            self.resident.pop(worker, None)
