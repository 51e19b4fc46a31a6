"""The notation of a placement: roles joined by commas on the left, the devices their workers hold on the right.

    {"sim,policy": "cpu:0-3*4", learner: "cpu:0-3"}

`gpu:0-3` is four devices with one worker each, `gpu:0*2` two workers sharing one; the same goes for `fake:0` (a name to
account for, nothing else) and for hardware that the recipe declares (`arm:0`). `cpu:0-15` is one worker with sixteen
cores, `cpu:0-15*4` four workers on disjoint quarters. Commas join several; `node1/gpu:0-3` names a node. A simulator on
cores can draw on a GPU: `sim: {devices: "cpu:0-15*8", render: "gpu:0"}`. With `policy.tensor_parallel=2`, `policy:
"gpu:0-3"` is two workers with two GPUs each.
Numbers count the devices this run may use: `cpu:0` is the first core of the process's affinity mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from embodied.placement.topology import MOST, PlacementError, number, span

MODES = ("auto", "collocated", "disaggregated", "hybrid")
DEVICES = re.compile(
    r"(?:(?P<node>[\w.-]+)/)?(?P<kind>[a-z]\w*):(?P<first>\d+)(?:-(?P<last>\d+))?(?:\*(?P<workers>\d+))?"
)
EXAMPLES = (
    "examples: cpu:0-1 (one worker, two cores), cpu:0-1*2 (two workers, one core each), gpu:0-3, gpu:0*2, node1/gpu:0"
)
MAP_EXAMPLE = '{"sim,policy": "cpu:0", learner: "cpu:0"}'  # holds everywhere
PLACE_KEYS = ("devices", "render")
PARALLEL = "policy.tensor_parallel"  # the option that gives a policy worker several GPUs


@dataclass(frozen=True)
class PlacedRole:
    """The properties of a program's role that matter for its placement."""

    name: str
    phase: str = "rollout"  # or "update": the phase in which its workers work
    network: bool = True  # True: runs where networks run, on GPUs if there are any; False: a simulator
    beside: str | None = None  # the role whose processes it shares in collocated and hybrid plans; "": own devices
    streams: bool = False  # on devices of its own it takes every unit as it comes

    @property
    def home(self) -> str:
        """The role whose processes it shares: the learner unless declared otherwise, never a simulator, which may
        crash."""
        return "learner" if self.beside is None else self.beside


EMBODIED = (
    PlacedRole("sim", network=False, beside=""),
    PlacedRole("policy", beside=""),
    PlacedRole("learner", "update", beside=""),
)


def roles_of(declared: Iterable[Any]) -> tuple[PlacedRole, ...]:
    """Converts a program's declared roles (objects with these attributes, or names) to `PlacedRole`s."""
    by_name = {role.name: role for role in EMBODIED}
    named = [PlacedRole(one) if isinstance(one, str) else one for one in declared]
    return tuple(
        by_name.get(one.name)
        or (one if isinstance(one, PlacedRole) else PlacedRole(one.name, one.phase, True, one.beside, one.streams))
        for one in named
    )


def is_loop(roles: Sequence[PlacedRole]) -> bool:
    """True if simulators, policies and learners are among the roles of a program."""
    return {*EMBODIED} <= {*roles}


def extra_roles(roles: Sequence[PlacedRole]) -> tuple[PlacedRole, ...]:
    """The roles of a program other than simulators, policies and learners."""
    names = {role.name for role in EMBODIED}
    return tuple(role for role in roles if role.name not in names)


@dataclass(frozen=True)
class Slot:
    """The devices of one worker: numbered devices of one kind on one node ("" is this machine)."""

    kind: str
    devices: tuple[int, ...]
    node: str = ""
    render: str = ""  # gpu:0: the GPU on which its simulator renders


def parse_devices(text: str) -> list[Slot]:
    """One slot per worker."""
    return [slot for word in text.split(",") for slot in _parse_part(word.strip(), text)]


def _parse_part(word: str, whole: str) -> list[Slot]:
    match = DEVICES.fullmatch(word)
    if not match:
        raise PlacementError(f"{whole!r} does not name devices; {EXAMPLES}")
    first = int(match["first"])
    last = first if match["last"] is None else int(match["last"])
    node, kind = match["node"] or "", match["kind"]
    if last < first:
        raise PlacementError(f"{word!r} counts down; write {kind}:{last}-{first}")
    workers = None if match["workers"] is None else int(match["workers"])
    if (largest := max(last, workers or 0)) > MOST:
        raise PlacementError(f"{word!r} counts to {largest}; at most {MOST} devices and workers can be named")
    devices = tuple(range(first, last + 1))
    if workers == 0:
        raise PlacementError(f"{word!r} asks for no worker; write {kind}:{word.split(':')[1].split('*')[0]}")
    if kind != "cpu":
        return [Slot(kind, (device,), node) for device in devices for _ in range(workers or 1)]
    return [Slot(kind, share, node) for share in split_cores(devices, workers or 1, word)]


def parse_map(
    placement: Mapping[str, Any], roles: Sequence[PlacedRole] = EMBODIED, more: bool = False
) -> dict[tuple[str, ...], list[Slot]]:
    """Returns a map from the roles of each kind of host to one slot per host. Every role has exactly one place. `more`:
    the map may also place roles that are not in `roles`."""
    hosts: dict[tuple[str, ...], list[Slot]] = {}
    by_name = {role.name: role for role in roles}
    placed = [name.strip() for key in placement for name in str(key).split(",")]
    if (wrong := not_a_role(placed, [*by_name], more)) is not None:
        declared = ", and roles that the program declares" * more
        raise PlacementError(f"{wrong!r} is not a role; roles: {', '.join(by_name)}{declared}")
    for key, place in placement.items():
        names = tuple(name.strip() for name in str(key).split(","))
        if place is None:
            raise PlacementError(f"{key!r} has no devices; roles joined by a comma need quotes: {MAP_EXAMPLE}")
        hosts[names] = drawing(key, names, by_name, place) if isinstance(place, Mapping) else parse_text(key, place)
    for name in dict.fromkeys([*by_name, *placed]):
        if placed.count(name) != 1:
            times = "has no place" if name not in placed else f"has {placed.count(name)} places"
            raise PlacementError(f"{name!r} {times}; name every role once")
    for names in hosts:
        here = [by_name[name] for name in names if name in by_name]
        if any(not role.network for role in here) and any(role.phase == "update" for role in here):
            raise PlacementError(
                f"{','.join(names)!r} puts the simulator into the learner's process, where its crash would take the "
                f"weights and the optimizer with it"
            )
    return hosts


def not_a_role(placed: Sequence[str], roles: Sequence[str], more: bool) -> str | None:
    """The unknown role name in a map. If `more` roles are allowed: the unknown name most similar to a role without a
    place."""
    unknown = [name for name in placed if name not in roles]
    if not more:
        return next(iter(unknown), None)
    missing = [name for name in roles if name not in placed]
    likest = (get_close_matches(name, unknown, 1, 0.0) for name in missing)
    bad = [name for name in unknown if not name.isidentifier()]
    return next(iter([*bad, *(names[0] for names in likest if names)]), None)


def parse_text(key: str, text: Any) -> list[Slot]:
    if not isinstance(text, str):
        raise PlacementError(f"the devices of {key!r} are {text!r}, not text; {EXAMPLES}")
    return parse_devices(text)


def drawing(key: str, names: tuple[str, ...], known: Mapping[str, PlacedRole], place: Mapping[str, Any]) -> list[Slot]:
    """Slots of simulators on cores that render on GPUs; the GPUs are assigned to workers in order."""
    example = f'{key}: {{devices: "cpu:0", render: "gpu:0"}}'
    if unknown := set(map(str, place)) - set(PLACE_KEYS):
        raise PlacementError(f"{key!r} has {', '.join(sorted(unknown))}; keys: {', '.join(PLACE_KEYS)}: {example}")
    if "devices" not in place:
        raise PlacementError(f"{key!r} has no devices; write {example}")
    slots = parse_text(key, place["devices"])
    if place.get("render") is None:
        return slots
    if all(name in known and known[name].network for name in names):
        raise PlacementError(f"{key!r} has a render device, but only simulators draw; leave out render")
    cards = parse_text(key, place["render"])
    if any(card.kind != "gpu" or card.node for card in cards) or any(slot.kind != "cpu" for slot in slots):
        raise PlacementError(
            f"{key!r} on {place['devices']} draws on {place['render']}: render is a GPU of the same machine, for a "
            f"simulator on CPU cores; write {example}"
        )
    beside = {slot.node: [other for other in slots if other.node == slot.node] for slot in slots}
    shared = [
        cards[at * len(cards) // len(slots_of_node)]
        for slots_of_node in beside.values()
        for at in range(len(slots_of_node))
    ]
    ordered = [slot for slots_of_node in beside.values() for slot in slots_of_node]
    return [replace(slot, render=f"gpu:{card.devices[0]}") for slot, card in zip(ordered, shared)]


def join_devices(slots: Sequence[Slot], count: int) -> list[Slot]:
    """Slots with `count` devices of one machine each, from slots with one device."""
    together: list[Slot] = []
    for node in dict.fromkeys(slot.node for slot in slots):
        slots_of_node = [slot for slot in slots if slot.node == node]
        devices = [device for slot in slots_of_node for device in slot.devices]
        given = f"{PARALLEL}={count}: a policy worker has {count} GPUs of one machine"
        if len({*devices}) < len(devices):
            raise PlacementError(f"{given}, of which none can have another policy worker; name every GPU once")
        if len(devices) % count:
            on = f" of {node}" if node else ""
            raise PlacementError(f"{given}, and {len(devices)} GPUs{on} cannot be divided so; name a multiple")
        parts = [tuple(devices[first : first + count]) for first in range(0, len(devices), count)]
        together += [replace(slots_of_node[0], devices=devices_of_worker) for devices_of_worker in parts]
    return together


def text_of(devices: Sequence[tuple[str, str, int]]) -> str:
    """The devices in this notation, for example node0/gpu:0-7,node1/gpu:0 for nine GPUs."""
    runs: list[list[tuple[str, str, int]]] = []
    for node, kind, at in devices:
        if runs and runs[-1][-1] == (node, kind, at - 1):
            runs[-1].append((node, kind, at))
        else:
            runs.append([(node, kind, at)])
    parts = []
    for run in runs:
        node, kind, first = run[0]
        several = f"-{run[-1][2]}{f'*{len(run)}' if kind == 'cpu' else ''}" if len(run) > 1 else ""
        parts.append(f"{node}{'/' if node else ''}{kind}:{first}{several}")
    return ",".join(parts)


def split_cores(cores: tuple[int, ...], workers: int, quoted: str) -> list[tuple[int, ...]]:
    """Divides cores into equal, disjoint parts, one for each worker. A remainder is refused; `quoted` is the text to
    quote."""
    cores_of_worker, rest = divmod(len(cores), workers)
    if rest or not cores_of_worker:
        first = cores[0]
        if not cores_of_worker:
            works = f"cpu:{first}-{first + workers - 1}*{workers}, or fewer workers: cpu:{span(cores)}*{len(cores)}"
        else:
            works = f"cpu:{span(cores[: cores_of_worker * workers])}*{workers}"
        uneven = f"{quoted!r} splits {number(len(cores), 'core')} among {workers} workers"
        raise PlacementError(f"{uneven}, which leaves no equal parts; try {works}")
    return [cores[i * cores_of_worker : (i + 1) * cores_of_worker] for i in range(workers)]
