"""How a placement is written: roles joined by commas on the left, the devices their workers hold on the right.

    {"sim,policy": "cpu:0-3*4", learner: "cpu:0-3"}

`gpu:0-3` is four devices with one worker each, `gpu:0*2` two workers sharing one. `cpu:0-15` is one worker with
sixteen cores, `cpu:0-15*4` four workers on disjoint quarters. Commas join several; `node1/gpu:0-3` names a node.
Numbers count the devices this run may use: `cpu:0` is the first core of the process's affinity mask.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

ROLES = ("sim", "policy", "learner")
MODES = ("auto", "collocated", "disaggregated", "hybrid")
DEVICES = re.compile(
    r"(?:(?P<node>[\w.-]+)/)?(?P<kind>cpu|gpu):(?P<first>\d+)(?:-(?P<last>\d+))?(?:\*(?P<workers>\d+))?"
)
EXAMPLES = (
    "examples: cpu:0-1 (one worker, two cores), cpu:0-1*2 (two workers, one core each), gpu:0-3, gpu:0*2, node1/gpu:0"
)
MAP_EXAMPLE = '{"sim,policy": "cpu:0-1*2", learner: "cpu:0-1"}'


class PlacementError(ValueError):
    """This placement cannot be; the text holds the arithmetic and one that can."""


@dataclass(frozen=True)
class Slot:
    """What one worker holds: numbered devices of one kind on one node ("" is the machine we are on)."""

    kind: str
    devices: tuple[int, ...]
    node: str = ""


def parse_devices(text: str) -> list[Slot]:
    """One slot per worker."""
    return [slot for part in text.split(",") for slot in _parse_part(part.strip(), text)]


def _parse_part(part: str, whole: str) -> list[Slot]:
    found = DEVICES.fullmatch(part)
    if not found:
        raise PlacementError(f"{whole!r} does not name devices; {EXAMPLES}")
    first = int(found["first"])
    last = first if found["last"] is None else int(found["last"])
    node, kind = found["node"] or "", found["kind"]
    if last < first:
        raise PlacementError(f"{part!r} counts down; write {kind}:{last}-{first}")
    devices = tuple(range(first, last + 1))
    workers = None if found["workers"] is None else int(found["workers"])
    if workers == 0:
        raise PlacementError(f"{part!r} asks for no worker; write {kind}:{part.split(':')[1].split('*')[0]}")
    if kind == "gpu":
        return [Slot(kind, (device,), node) for device in devices for _ in range(workers or 1)]
    return [Slot(kind, share, node) for share in split_cores(devices, workers or 1, part)]


def split_cores(cores: tuple[int, ...], workers: int, part: str) -> list[tuple[int, ...]]:
    """Disjoint equal parts."""
    each, rest = divmod(len(cores), workers)
    if rest or not each:
        first = cores[0]
        if not each:
            works = f"cpu:{first}-{first + workers - 1}*{workers}, or fewer workers: cpu:{span(cores)}*{len(cores)}"
        else:
            works = f"cpu:{span(cores[: each * workers])}*{workers}"
        uneven = f"{part!r} splits {number(len(cores), 'core')} among {workers} workers"
        raise PlacementError(f"{uneven}, which leaves no equal parts; try {works}")
    return [cores[i * each : (i + 1) * each] for i in range(workers)]


def parse_map(placement: dict[str, str]) -> dict[tuple[str, ...], list[Slot]]:
    """Roles of each kind of host -> one slot per host. Every role has exactly one place."""
    hosts: dict[tuple[str, ...], list[Slot]] = {}
    for key, devices in placement.items():
        roles = tuple(role.strip() for role in str(key).split(","))
        for role in roles:
            if role not in ROLES:
                raise PlacementError(f"{role!r} is no role; roles: {', '.join(ROLES)}; example: {MAP_EXAMPLE}")
        if devices is None:
            raise PlacementError(f"{key!r} has no devices; roles joined by a comma need quotes: {MAP_EXAMPLE}")
        if not isinstance(devices, str):
            raise PlacementError(f"the devices of {key!r} are {devices!r}, not text; {EXAMPLES}")
        hosts[roles] = parse_devices(devices)
    placed = [role for roles in hosts for role in roles]
    for role in ROLES:
        if placed.count(role) != 1:
            times = "has no place" if role not in placed else f"has {placed.count(role)} places"
            raise PlacementError(f"{role!r} {times}; name every role once: {MAP_EXAMPLE}")
    for roles in hosts:
        if {"sim", "learner"} <= set(roles):
            raise PlacementError(
                f"{','.join(roles)!r} puts the simulator into the learner's process, where its crash would take the "
                f"weights and the optimizer with it; try {MAP_EXAMPLE}"
            )
    return hosts


def number(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def span(numbers: tuple[int, ...]) -> str:
    """0-3,6 for (0, 1, 2, 3, 6)."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)
