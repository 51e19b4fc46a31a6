"""Add policy workers to a running run, or take them away: python -m embodied.workers runs/NAME-DATE policy=+1

usage: python -m embodied.workers RUN [policy=+N | policy=-N] [devices=...] [--help]

  RUN       the folder of a run, on the machine where it runs. Without policy= its policy workers are listed
  policy    +1: one more policy worker, which takes part from the next rollout on; -1: the last one leaves at once: it
            takes no more requests, another one goes on with its unfinished answers, and its device is free
  devices   where added workers are placed, as in placement=: cpu:3, gpu:0,gpu:1 or node2/gpu:0 [devices that the run
            does not use, or cores that only its learners use, in turns with rollouts]

Neither changes the run's episodes, its noise or what it learns (but for rounding where requests are merged).
Simulators and learners stay. run.json and the report name the present workers; a resumed run begins with those of its
placement.
"""

# The command writes a file into the run's folder; the driver reads it within a second in a rollout, otherwise after the
# current step, and answers with another file. So whoever may write into the folder may ask, and no socket is opened.
#
#     workers.request.json   {"id": "5f0c", "change": 1, "devices": "cpu:3"}
#     workers.answer.json    {"id": "5f0c", "said": "policy-2 is built on core 3: ...", "code": 0}
#
# An added worker is built beside the run, so its failure costs the run nothing. The last worker that was added is the
# first to be taken away. Episodes and noise do not depend on the number of workers.

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from shlex import quote
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from embodied.config.recipe import RunConfig
from embodied.core.arrays import gather
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import as_path, read_object, replace_text
from embodied.placement import PlacementError, PlacementPlan, PlannedHost, Topology
from embodied.placement.grammar import Slot, join_devices, parse_devices
from embodied.placement.placement_plan import check_shares, devices_of, hosts_on, places
from embodied.placement.topology import number
from embodied.policies import slow_imports
from embodied.records.progress import timestamp
from embodied.run import launch
from embodied.run.devices import check_memory, divides_requests, host_plans, machines
from embodied.run.run_folder import ANSWER, REQUEST, RunFolder, is_held, was_killed
from embodied.runtime.device_leases import GB, SHARE

if TYPE_CHECKING:
    from embodied.workflows.rl_loop import EmbodiedLoop
    from embodied.workflows.rollout_manager import Newcomer, RolloutManager

USAGE = __doc__ or ""
ANSWER_S = 1800.0  # the run answers between steps, and an added worker is built first
LOOK_S, HINT_S = 0.2, 5.0
EXAMPLE = "python -m embodied.workers runs/NAME-DATE policy=+1"


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, USAGE)


def start(argv: Sequence[str]) -> int:
    folder, change, devices = read_words(argv)
    info = running(folder)
    if not change:
        launch.say("\n".join(present(info)))
        return 0
    said, code = ask(folder, change, devices)
    if code:
        error = EmbodiedError(said)
        error.exit_code = code
        raise error
    launch.say(said)
    return 0


def read_words(argv: Sequence[str]) -> tuple[Path, int, str]:
    """The run's folder, the change of the number of policy workers, and the named devices."""
    folders, words = [word for word in argv if "=" not in word], dict(w.split("=", 1) for w in argv if "=" in w)
    if len(folders) != 1:
        raise ConfigError(f"name the folder of one run: {EXAMPLE}")
    if unknown := sorted(words.keys() - {"policy", "devices"}):
        raise ConfigError(f"{unknown[0]}={words[unknown[0]]}: only policy workers come and go; {EXAMPLE}")
    change, devices = words.get("policy", ""), words.get("devices", "")
    if "policy" in words and not (re.fullmatch(r"[+-][1-9]\d{0,3}", change) and abs(int(change)) <= MOST):
        raise ConfigError(f"policy={change}: should be +1 or -1, +2 and so on up to {MOST}")
    if devices and not change.startswith("+"):
        raise ConfigError(f"devices={devices} is for added workers; {EXAMPLE} devices={devices}")
    return as_path(folders[0]), int(change or 0), devices


def running(folder: Path) -> dict:
    """The facts in run.json; refuses a folder whose run is not running on this machine."""
    if not (folder / "run.json").is_file():
        raise ConfigError(f"{folder} is not the folder of a run: run.json is missing; {EXAMPLE}")
    info = read_object(folder / "run.json", ConfigError)
    again = f"python -m embodied.{info.get('command', 'train')} {quote(f'resume={folder}')}"
    if (state := info.get("state")) != "running":
        raise ConfigError(f"{folder} is not running: it has {state}; it goes on with {again}")
    newest = [info, *info.get("resumed", [])][-1]
    if (host := newest.get("provenance", {}).get("host")) != platform.node():
        raise ConfigError(f"{folder} runs on {host}: give the command there")
    if was_killed(folder, info):
        raise ConfigError(f"{folder} is not running: its process was killed; it goes on with {again}")
    return info


def present(info: dict) -> list[str]:
    """A line for each policy worker's process, and its devices."""
    hosts = [host for host in info.get("placement", {}).get("hosts", ()) if "policy" in host["roles"]]
    lines = []
    for host in hosts:
        devices = host["devices"] or [f"cpu:{core}" for core in host["cores"]]
        others = " and ".join(role for role in host["roles"] if role != "policy")
        node = f" of {host['node']}" if host.get("node") else ""
        lines.append(f"{host['name']:<16}{', '.join(devices)}{node}{f', with {others}' if others else ''}")
    return lines


def ask(folder: Path, change: int, devices: str, wait: Callable[[float], None] = time.sleep) -> tuple[str, int]:
    """The run's answer to this request, and the exit code."""
    wish = {"id": secrets.token_hex(8), "change": change, "devices": devices}
    write_once(folder / REQUEST, json.dumps(wish))
    began = looked = time.monotonic()
    hinted = False
    try:
        while (answer := answer_in(folder)).get("id") != wish["id"]:
            now = time.monotonic()
            if now - looked > 1.0:
                looked = now
                if is_held(folder) is False or read_object(folder / "run.json").get("state") != "running":
                    return "the run has ended meanwhile", 1
            if now - began > ANSWER_S:
                return f"the run has not answered within {ANSWER_S:g} s; its last lines: {folder}/logs/driver.log", 1
            if now - began > HINT_S and not hinted:
                hinted = True
                launch.say("waiting     the run answers when its current step is over, and an added worker is built")
            wait(LOOK_S)
    finally:
        with suppress(OSError, EmbodiedError):  # the run has taken it
            if read_object(folder / REQUEST).get("id") == wish["id"]:
                (folder / REQUEST).unlink()
    return str(answer.get("said")), int(answer.get("code", 1))


def write_once(path: Path, text: str) -> None:
    """Write a file that does not exist yet, in one step."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        draft.write_text(text)
        os.link(draft, path)
    except FileExistsError:
        raise ConfigError(f"another command asks this run for a change just now ({path}); try again") from None
    finally:
        draft.unlink(missing_ok=True)


def answer_in(folder: Path) -> dict:
    with suppress(EmbodiedError):
        return read_object(folder / ANSWER)
    return {}


MOST = 1000  # workers in a request
ROLE = "policy"


@dataclass(frozen=True)
class WorkerRequest:
    """The wish of a user: so many policy workers more, or fewer, perhaps on these devices."""

    id: str
    change: int
    devices: str = ""

    @classmethod
    def read(cls, content: dict[str, Any]) -> WorkerRequest:
        """Raises ValueError if it is none."""
        wish = cls(str(content.get("id")), content.get("change", 0), content.get("devices", ""))
        if not (isinstance(wish.change, int) and 0 < abs(wish.change) <= MOST and isinstance(wish.devices, str)):
            raise ValueError(f"no number of workers from 1 to {MOST}")
        return wish


class Requested(Protocol):
    """The run of which a user asks something."""

    config: RunConfig
    folder: RunFolder
    plan: PlacementPlan  # always of the present workers
    updating: Collection[str]  # roles that work in updates
    say: Callable[[str], None]


class WorkerChanges:
    """The driver's side: follows one request at a time, during rollouts and between iterations."""

    def __init__(self, run: Requested) -> None:
        self.run, self.config, self.updating = run, run.config, {*run.updating}
        self.folder, self.say = run.folder, run.say
        self.request: WorkerRequest | None = None
        self.newcomers: dict[str, tuple[PlannedHost, Newcomer]] = {}  # by name, until they have joined
        self.building: list[str] = []  # newcomers of the request
        self.remaining = 0  # workers that the request still takes away
        self.leaving: list[str] = []  # hosts of workers that it has taken away
        self.until = 0.0  # when the workers of the request must be built

    @property
    def plan(self) -> PlacementPlan:
        return self.run.plan

    def begin(self, loop: EmbodiedLoop) -> None:
        """All workers of the plan work. An earlier request was lost with the workers before them."""
        self.rollouts: RolloutManager = loop.rollouts
        named = {*self.rollouts.policies.workers, *(host.name for host in self.plan.hosts)}
        self.names = {name for name in named if name.startswith(f"{ROLE}-")}
        self.newcomers, self.building, self.remaining = {}, [], 0
        if self.request:
            self._answer("all workers of the run were started again meanwhile; ask again", 1)

    def go_on(self) -> None:
        """Look for a request, and for the progress of the current one."""
        self._forget_newcomers()
        try:
            if self.request is None and (wish := self._read()):
                self.request = wish
                refuse_changes(self.config)
                (self._add if wish.change > 0 else self._take_away)(wish)
            if self.building:
                self._follow_building()
            elif self.request and not self.rollouts.is_leaving:
                self._go_on_leaving()
        except (EmbodiedError, ValueError, OSError) as err:  # it cannot be placed or started; the run goes on
            self._answer(str(err), getattr(err, "exit_code", ConfigError.exit_code))

    # Requests and answers

    def _read(self) -> WorkerRequest | None:
        path = self.folder.path / REQUEST
        if not path.exists():
            return None
        try:
            return WorkerRequest.read(read_object(path))
        except (EmbodiedError, ValueError) as err:
            self.say(f"workers     {REQUEST} is not understood: {err}")
            return None
        finally:
            path.unlink(missing_ok=True)

    def _answer(self, said: str, code: int = 0) -> None:
        assert self.request is not None
        if code:
            for name in self.building:
                self.rollouts.drop(self.newcomers.pop(name)[1])
            self._forget_processes()
        wish, self.request, self.building, self.remaining = self.request, None, [], 0
        self.say(f"workers     {said if not code else f'policy={wish.change:+d}: {said}'}")
        with suppress(OSError):  # a full disk
            replace_text(self.folder.path / ANSWER, json.dumps({"id": wish.id, "said": said, "code": code}))

    def _record(self, hosts: tuple[PlannedHost, ...], **change: Any) -> None:
        """The workers are on these hosts from now on."""
        cores = {*self.plan.idle, *(core for host in self.plan.hosts for core in host.cores)}
        idle = cores - {core for host in hosts for core in host.cores}
        on_cores = not any(host.node or host.device for host in hosts)
        self.run.plan = replace(self.plan, hosts=hosts, idle=tuple(sorted(idle)) if on_cores else ())
        changes = [*self.folder.info().get("worker_changes", []), {"at": timestamp(), **change}]
        self.folder.record(placement=asdict(self.plan), worker_changes=changes)
        self._forget_processes()

    def _forget_processes(self) -> None:
        self.folder.forget_processes(self.names - {host.name for host in self.plan.hosts} - self.newcomers.keys())

    def _count(self) -> str:
        return number(self.plan.count(ROLE), "policy worker")

    # Adding

    def _add(self, wish: WorkerRequest) -> None:
        check_work(self.config, self.plan, wish.change)
        topology = machines(self.config)
        hosts = place(self.config, self.plan, topology, self.updating, wish.change, wish.devices)
        first = 1 + max(int(name.removeprefix(f"{ROLE}-")) for name in self.names)
        hosts = [replace(host, name=f"{ROLE}-{first + place}") for place, host in enumerate(hosts)]
        check_memory(self.config, replace(self.plan, hosts=(*self.plan.hosts, *hosts)), topology, True)
        limit, imports = self.config.cluster.memory_gb, slow_imports(self.config.policy)
        for host, launched in zip(hosts, host_plans(replace(self.plan, hosts=tuple(hosts)), [ROLE], imports)):
            launched = launched if limit is None else replace(launched, device_bytes=limit * GB)
            self.names.add(host.name)
            self.newcomers[host.name] = host, self.rollouts.add_policy(launched)
            self.building.append(host.name)
        self.until = monotonic() + self.config.faults.timeout_s

    def _follow_building(self) -> None:
        """Answer once every worker of the request is built, or cannot be built."""
        late = f"it was not built within {self.config.faults.timeout_s:g} s (faults.timeout_s)"
        built, failed = [], {}
        for name in self.building:
            newcomer = self.newcomers[name][1]
            if newcomer.is_built():
                built.append(name)
            elif why := newcomer.failure() or (late if monotonic() > self.until else ""):
                failed[name] = why
        if len(built) + len(failed) < len(self.building):
            return
        for name in failed:
            self.rollouts.drop(self.newcomers.pop(name)[1])
        self.building = []
        said = [f"{name} could not be built: {why}" for name, why in failed.items()]
        if built:
            hosts = [self.newcomers[name][0] for name in built]
            self._record(
                (*self.plan.hosts, *hosts), added=built, devices=[d for host in hosts for d in host.device_names]
            )
            verb = "is built and takes" if len(built) == 1 else "are built and take"
            said.append(f"{' and '.join(built)} {verb} part from the next rollout on, on {where(hosts)}")
        self._answer(f"{'; '.join(said)}: {self._count()}", int(bool(failed)))

    def _forget_newcomers(self) -> None:
        """Newcomers that have joined are workers like others. One that was left out after all leaves the plan."""
        for name in [name for name in self.newcomers if name not in self.building]:
            if self.newcomers[name][1] not in self.rollouts.newcomers:
                del self.newcomers[name]
                if name not in self.rollouts.policies.workers:
                    self._record(tuple(host for host in self.plan.hosts if host.name != name), left_out=[name])

    # Taking away

    def _take_away(self, wish: WorkerRequest) -> None:
        workers, hosts = self.rollouts.policies.workers, self.rollouts.policies.hosts
        if len(workers) + wish.change < 1:
            raise ConfigError(f"the run has {self._count()}, and one has to stay")
        self._check_alone(hosts[wish.change :])
        self.leaving, self.remaining = [], -wish.change

    def _check_alone(self, hosts: Collection[str]) -> None:
        """Refuse to end processes in which other roles work, too."""
        for host in self.plan.hosts:
            if host.name in hosts and len(host.roles) > 1:
                others = " and ".join(role for role in host.roles if role != ROLE)
                raise ConfigError(
                    f"the policy worker of {host.name} shares its process with {others}, which stays: env rows and "
                    "learner ranks are never distributed anew; in placement=disaggregated policy workers have "
                    "processes of their own, and so have added ones"
                )

    def _go_on_leaving(self) -> None:
        """Let the next worker leave, or answer: all have left."""
        if self.remaining:
            self.remaining -= 1
            self.leaving.append(self.rollouts.policies.hosts[-1])
            self.rollouts.is_leaving = True
            return
        gone = [host for host in self.plan.hosts if host.name in self.leaving]
        left = tuple(host for host in self.plan.hosts if host.name not in self.leaving)
        self._record(left, taken_away=self.leaving, devices=[d for host in gone for d in host.device_names])
        has = "has left, which was" if len(gone) == 1 else "have left, which were"
        self._answer(f"{' and '.join(self.leaving)} {has} on {where(gone)}: {self._count()}")


# Where a worker can be added


def refuse_changes(config: RunConfig) -> None:
    """Refuse runs whose policy workers come and go in another way, or not at all."""
    if config.cluster.backend == "inline":
        raise ConfigError("cluster.backend=inline has one process, in which no worker comes or goes")
    if os.environ.get(SHARE):
        raise ConfigError("embodied.share gives this run its devices, and moves its policy workers by itself")
    if config.policy.speaks and config.policy.engine == "http":
        raise ConfigError("the answers come from the servers of policy.url, which may join and leave by themselves")


def check_work(config: RunConfig, plan: PlacementPlan, count: int) -> None:
    """Refuse more policy workers than can be asked."""
    more = tuple(PlannedHost("", (ROLE,), (), 1) for _ in range(count))
    shared = divides_requests(config)
    try:
        check_shares(replace(plan, hosts=(*plan.hosts, *more)), config.pipeline.stages, shared)
    except PlacementError as err:
        advice = "" if shared else "; in a run with pipeline.merge_rows=64, for example, several share a request"
        raise ConfigError(f"{err}{advice}") from None


def place(
    config: RunConfig, plan: PlacementPlan, topology: Topology, updating: Collection[str], count: int, named: str
) -> list[PlannedHost]:
    """Hosts for so many more policy workers, on the `named` devices or on free ones. Raises ConfigError."""
    acting = [host for host in plan.hosts if ROLE in host.roles]
    kind = acting[0].device.partition(":")[0] or "cpu"
    gpus = config.policy.worker_gpus
    users = gather((device, host) for host in plan.hosts for device in held_by(host, topology))
    overlap = config.pipeline.schedule != "sync" or config.pipeline.granularity
    if named:
        slots = parse_devices(named)
        slots = join_devices(slots, gpus) if gpus > 1 else slots
        if len(slots) != count:
            raise ConfigError(f"devices={named} is for {number(len(slots), 'worker')}, and policy={count:+d} is asked")
    else:
        size = gpus if kind == "gpu" else max(1, len(acting[0].cores))
        lent_by = {*updating} if kind == "cpu" and not overlap else set()
        slots = free_slots(topology, kind, size, count, users, lent_by)
        if len(slots) < count:
            raise ConfigError(lack(kind, users, topology))
    hosts = hosts_on((ROLE,), slots, topology)
    for host in hosts:
        others = [user for device in held_by(host, topology) for user in users.get(device, ())]
        check_place(host, kind, others, {*updating} if overlap else set())
    return hosts


def where(hosts: Sequence[PlannedHost]) -> str:
    """The devices of hosts in words."""
    by_node = gather((host.node, host) for host in hosts)
    return " and ".join(places(on_node) + f" of {node}" * bool(node) for node, on_node in by_node.items())


def held_by(host: PlannedHost, topology: Topology) -> list[str]:
    """The devices of a host; on several machines with the machine's name."""
    node = host.node or (topology.nodes[0].name if len(topology.nodes) > 1 else "")
    return [*replace(host, node=node).device_names]


def free_slots(
    topology: Topology, kind: str, size: int, count: int, users: dict[str, list[PlannedHost]], lent_by: set[str]
) -> list[Slot]:
    """At most so many places of `size` devices of one machine, smaller ones on cores if need be: devices that nobody
    uses, then devices that only the roles `lent_by` use."""
    nodes = {node.name: node for node in topology.nodes} | {"": topology.nodes[0]}

    def rank(node: str, place: int) -> int:
        core = nodes[node].core_numbers[place] if kind == "cpu" else place
        its = users.get(f"{node}/{kind}:{core}" if node else f"{kind}:{core}", [])
        return 0 if not its else 1 if {role for host in its for role in host.roles} <= lent_by else 2

    ranked = [(rank(node, place), node, place) for node, _, place in devices_of(topology, kind)]
    usable = sorted((slot for slot in ranked if slot[0] < 2), key=lambda slot: slot[0])
    for share in (size, 1) if kind == "cpu" else (size,):
        by_node = gather((node, place) for _, node, place in usable)
        slots = [
            Slot(kind, tuple(sorted(numbers[at : at + share])), node)
            for node, numbers in by_node.items()
            for at in range(0, len(numbers) // share * share, share)
        ]
        if len(slots) >= count:
            return slots[:count]
    return []


def lack(kind: str, users: dict[str, list[PlannedHost]], topology: Topology) -> str:
    """Says that too few devices are free, and what can be done."""
    what = {"cpu": "core", "gpu": "GPU"}.get(kind, kind)
    total = len(devices_of(topology, kind)) if kind in ("cpu", "gpu") else 0
    used = sum(device.rpartition("/")[2].startswith(f"{kind}:") for device in users)
    share = "; devices=cpu:0 shares a core" if kind == "cpu" else ""
    return f"too few free devices: the run uses {used} of {number(total, what)}{share}"


def check_place(host: PlannedHost, kind: str, users: Collection[PlannedHost], busy: set[str]) -> None:
    """Refuse devices of another kind than the other policy workers', GPUs that others use, and devices of roles that
    are `busy` during rollouts."""
    its = host.device.partition(":")[0] or "cpu"
    if its != kind:
        raise ConfigError(f"{places([host])}: the run's policy workers are on {kind}s, and all must answer alike")
    if users and kind == "gpu":
        raise ConfigError(f"{host.device} is used by {next(iter(users)).name}; an added worker needs a GPU of its own")
    if names := [user.name for user in users if busy & {*user.roles}]:
        raise ConfigError(f"{places([host])}: {names[0]} works there during rollouts; name another device")


if __name__ == "__main__":
    raise SystemExit(main())
