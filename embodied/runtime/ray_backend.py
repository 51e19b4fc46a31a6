"""Hosts on the nodes of a Ray cluster: a cluster of the run's own on this machine, or a running cluster at an address.

On each node with hosts there is an agent, a Ray actor. It starts the hosts there and wires them to each other exactly
as the local backend does, tells the driver what they report, and passes messages on between its hosts and those of
other nodes. So Ray starts one process per node, moves messages between machines, and notices lost nodes. The rest is
the same as on the local backend.

A large message is copied into Ray's object store by the agent of its sender, and out of it by the agent of its reader.
"""

from __future__ import annotations

import itertools
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray._private import worker
from ray.exceptions import RayError, RayTaskError, RuntimeEnvSetupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from embodied.core.arrays import gather
from embodied.runtime.device_leases import SHARE
from embodied.runtime.heartbeat import BEAT_S, NOTICE_S, PROGRESS_BYTES, Progress
from embodied.runtime.host import DRIVER, Events, Host, HostPlan, Links
from embodied.runtime.local import KILL_S, WRITING_S, HostProcess, HostProcesses, LocalHosts, boot_order, check_cores
from embodied.runtime.payload import Payload, decode, encode, map_shared, segments
from embodied.runtime.ray_nodes import Connection, RayNode, Reservation, move
from embodied.runtime.worker import machine

_LOST_S = 45.0  # how long Ray may take to say that a node is lost
_DELIVERY_S = 5.0  # how long an ended call may wait for the arrival of its puts
_ONE_THREAD_EACH = {"control": 1, "channels": 1, "reports": 1}

# Ray hides all GPUs from actors that request none, but the plan decides which GPUs a host sees.
_LEAVE_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}


@dataclass
class Agent:
    """The agent of a node, for the driver."""

    node: RayNode
    actor: Any
    listener: threading.Thread = field(init=False)


@dataclass
class RayProcess(HostProcess):
    life: int = field(kw_only=True)
    agent: Agent = field(kw_only=True)


class RayBackend(HostProcesses):
    name = "ray"
    notice_s = _LOST_S + NOTICE_S  # ranks hear of a lost node at once, Ray later
    pack, unpack = staticmethod(encode), staticmethod(decode)

    def __init__(
        self,
        run: str,
        log_dir: Path | None,
        timeout_s: float,
        events: Events,
        address: str | None,
        modules: Sequence[str],
        start_s: float,
        plans: Sequence[HostPlan],
        reserves: bool,
    ) -> None:
        super().__init__()
        self._log_dir, self._events = log_dir and log_dir.absolute(), events
        self._lives = itertools.count(1)
        self._stopping = False
        self._agents: dict[str, Agent] = {}  # by node id
        self._connection = Connection(address, modules, start_s)
        self._reservations: list[Reservation] = []
        try:
            self._planned = {plan.name for plan in plans}
            self._first = gather((self._connection.node(plan.node).id, plan.name) for plan in plans)
            # The run's own cluster has no other programs, and shared devices are reserved for all runs that share them.
            if reserves and address is not None and SHARE not in os.environ:
                self._reservations.append(Reservation(plans, self._connection.node))
        except BaseException:
            self._connection.close()
            raise
        links = Links(encode, decode, self._post, lambda *report: events.on_report(DRIVER, *report))
        self.host = Host(run, [DRIVER], links, Progress(bytearray(PROGRESS_BYTES)), timeout_s)
        here = {"path": sys.path, "folder": os.getcwd(), "log_dir": self._log_dir, "process": identity(os.getpid())}
        self._order = {"boot": boot_order(run, timeout_s, os.getpid()), **here}

    def spawn(self, plan: HostPlan) -> None:
        before = self.processes.get(plan.name)
        if before is not None:
            plan = self._plan_of_next(before)
        elif self._reservations and plan.name not in self._planned:
            self._reserve(plan)
        node, life = self._connection.node(plan.node), next(self._lives)
        check_cores(plan, node.cores, f"node {node.name}" if plan.node else "this process")
        log = str(self._log_dir / f"{plan.name}.log") if self._log_dir is not None else None
        agent, progress = self._agent_on(node), Progress(bytearray(PROGRESS_BYTES))
        self.processes[plan.name] = RayProcess(plan, log, progress, None, node.name, life=life, agent=agent)
        if before is not None:
            before.progress.release()
        for other in list(self._agents.values()):  # a listener removes those that are lost
            other.actor.place.remote({plan.name: (life, agent.actor)})
        agent.actor.spawn.remote(plan)

    def call(self, host: str, message: tuple, packed: Payload | None = None) -> None:
        self.processes[host].agent.actor.call.remote(host, pack_message(message), *carried(packed))

    def write_stacks(self, host: str) -> bool:
        process = self.processes[host]
        asked = process.log is not None and not process.ended.is_set()
        if asked:
            process.agent.actor.write_stacks.remote(host)
            time.sleep(WRITING_S)
        return asked

    def kill(self, host: str) -> None:
        self.processes[host].agent.actor.kill.remote(host)

    def stop(self, seconds: float) -> None:
        self._stopping = True
        agents = list(self._agents.values())
        try:
            for agent in agents:
                agent.actor.stop.remote(seconds)
            until = time.monotonic() + seconds + 2 * KILL_S
            for agent in agents:
                agent.listener.join(max(until - time.monotonic(), 0))
        finally:
            for agent in agents:
                with suppress(RayError):
                    ray.kill(agent.actor)
            for agent in agents:
                agent.listener.join(KILL_S)
            self.host.stop(0)
            for reservation in self._reservations:
                with suppress(RayError):
                    reservation.free()
            self._connection.close()
            segments.drop()
            for process in self.processes.values():
                process.progress.release()

    # Inside

    def _agent_on(self, node: RayNode) -> Agent:
        if node.id not in self._agents:
            once = {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
            actor = ray.remote(**once, concurrency_groups=_ONE_THREAD_EACH)(NodeAgent)
            strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
            placed = actor.options(scheduling_strategy=strategy, runtime_env={"env_vars": _LEAVE_DEVICES})
            agent = Agent(node, placed.remote({**self._order, "first": self._first.pop(node.id, [])}))
            agent.actor.place.remote({name: (one.life, one.agent.actor) for name, one in self.processes.items()})
            name = f"ray-{node.name}"
            agent.listener = threading.Thread(target=self._listen, args=(agent,), name=name, daemon=True)
            agent.listener.start()
            self._agents[node.id] = agent
        return self._agents[node.id]

    def _plan_of_next(self, before: RayProcess) -> HostPlan:
        """The plan of a host that is started again: the same, or moved if its node is lost."""
        if not self._connection.is_lost(before.agent.node):
            return before.plan
        cores = [(process.node, core) for process in self.processes.values() for core in process.plan.cores]
        return move(before.plan, self._connection.nodes_without(before.agent.node), Counter(cores))

    def _reserve(self, plan: HostPlan) -> None:
        """Reserve the devices of an added host that this run has not reserved yet."""
        plans = [process.plan for process in self.processes.values() if process.plan.node == plan.node]
        cores = {*plan.cores} - {core for other in plans for core in other.cores}
        devices = {*plan.devices} - {device for other in plans for device in other.devices}
        if cores or devices:
            new = replace(plan, cores=tuple(cores), devices=tuple(devices))
            self._reservations.append(Reservation([new], self._connection.node))

    def _post(self, host: str, message: tuple, payload: Payload | None = None) -> None:
        self.call(host, ("channel", DRIVER, message), payload)  # in order with calls and news of deaths

    def _listen(self, agent: Agent) -> None:
        """A thread per agent: receives its messages, until its end."""
        failed, of_agent = "", False
        try:
            for sent in agent.actor.listen.remote():
                self._take(*ray.get(sent))
        except RayError as error:
            failed, of_agent = str(error).strip(), raised_by_actor(error)
        if self._stopping:
            return
        lost = not of_agent and self._is_lost(agent.node)
        cause = f"could not run: {failed}"
        if lost:
            cause = f"was lost with node {agent.node.name} of the cluster, which Ray no longer reaches"
        self._agents.pop(agent.node.id, None)
        with suppress(RayError):
            ray.kill(agent.actor)  # if only its messages were lost, its hosts still run
        for process in [process for process in self.processes.values() if process.agent is agent]:
            if not process.ended.is_set():
                self._end(process, cause)

    def _is_lost(self, node: RayNode) -> bool:
        """True if Ray notices that this node is lost; it takes its time for another machine."""
        until = time.monotonic() + (_LOST_S if node.id != self._connection.driver_node.id else 0)
        while not self._stopping:
            with suppress(Exception):  # of Ray, which may not reach its own tables
                if self._connection.is_lost(node):
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.5)
        return False

    def _take(self, kind: str, host: str, life: int, message: bytes, *arguments: Any) -> None:
        process, content, payload = self.processes[host], unpack_message(message), received(*arguments)
        if process.life != life:
            return
        if kind == "report":
            self._events.on_report(host, content, payload)
        elif kind == "channel":
            self.host.serve_channel(host, content, payload)
        elif kind == "progress":
            process.progress.note(content)
        elif kind == "up":
            process.pid = content
            self._events.on_start(host, content)
        elif kind == "died":
            self._end(process, *content)

    def _end(self, process: RayProcess, cause: str, printed: bytes | None = None) -> None:
        """`printed`: the log of a host on another machine."""
        if printed is not None and process.log is not None:
            with suppress(OSError):  # a full disk must not hide the death
                Path(process.log).parent.mkdir(parents=True, exist_ok=True)
                with open(process.log, "ab") as log:
                    log.write(printed)
        process.ended.set()
        if not self._stopping:
            self._events.on_death(process.plan.name, cause)


def raised_by_actor(error: RayError) -> bool:
    """True if an actor could not start, or raised an error: its node is not lost."""
    return isinstance(error, RayTaskError | RuntimeEnvSetupError) or getattr(error, "actor_init_failed", False)


@contextmanager
def _ending_the_process_on_error() -> Iterator[None]:
    """End the process when the agent cannot pass on a message, so that its hosts do not look alive."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(1)


class NodeAgent:
    """The actor: the parent of a node's hosts. One of Ray's threads receives what the driver sends, one what other
    agents send, and one sends to the driver."""

    def __init__(self, order: dict[str, Any]) -> None:
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()  # (messages to wait for, message to the driver)
        self._places: dict[str, tuple[int, Any]] = {}  # host of any node -> (its life, its agent)
        self._started: dict[str, int] = {}  # host of this node -> its life
        self._changed = threading.Condition()  # a host was started here, or placed on any node
        self._sent: dict[str, dict[str, Any]] = {}  # host -> by destination, the last message that it sent there
        boot, log_dir = order["boot"], order["log_dir"]
        self._timeout_s = boot["timeout_s"]
        self._is_elsewhere = identity(boot["driver"]) != order["process"]
        if self._is_elsewhere:
            boot["driver"] = None
            log_dir = log_dir and Path(worker.global_worker.node.get_logs_dir_path()) / f"embodied-{boot['run']}"
        else:
            sys.path[:] = order["path"]
            os.chdir(order["folder"])
        events = Events(self._on_report, lambda host, pid: self._send_event("up", host, pid), self._on_death)
        self._hosts = LocalHosts(boot, order["first"], log_dir, events, self._relay)
        if boot["driver"]:
            self._hosts.control.watch(os.pidfd_open(boot["driver"]), lambda: os._exit(1))
        threading.Thread(target=self._report_progress, name="progress", daemon=True).start()

    # Called by the driver

    @ray.method(concurrency_group="control", num_returns=0)
    def place(self, hosts: dict[str, tuple[int, Any]]) -> None:
        """These hosts are new, here or on other nodes."""
        with self._changed:
            self._places |= hosts
            self._changed.notify_all()

    @ray.method(concurrency_group="control", num_returns=0)
    def spawn(self, plan: HostPlan) -> None:
        try:
            self._hosts.spawn(plan)
        except Exception as error:
            traceback.print_exc()
            self._send_event("died", plan.name, (f"could not be started: {type(error).__name__}: {error}",))
        with self._changed:
            self._started[plan.name] = self._life_of(plan.name)
            self._changed.notify_all()

    @ray.method(concurrency_group="control", num_returns=0)
    def call(self, host: str, message: bytes, *payload: Any) -> None:
        if host in self._hosts.processes:
            with _ending_the_process_on_error():
                self._hosts.call(host, unpack_message(message), received(*payload))

    @ray.method(concurrency_group="control", num_returns=0)
    def write_stacks(self, host: str) -> None:
        self._hosts.write_stacks(host)

    @ray.method(concurrency_group="control", num_returns=0)
    def kill(self, host: str) -> None:
        self._hosts.kill(host)

    @ray.method(concurrency_group="control", num_returns=0)
    def stop(self, seconds: float) -> None:
        self._hosts.end(seconds)
        self._outbox.put(None)

    @ray.method(concurrency_group="reports", num_returns="streaming")
    def listen(self) -> Iterator[tuple]:
        """Yields the messages to the driver, in order. A report comes after the messages that its host sent before."""
        while (item := self._outbox.get()) is not None:
            sent, message = item
            if sent:
                ray.wait(sent, num_returns=len(sent), timeout=_DELIVERY_S)
            yield message

    # Called by other agents

    @ray.method(concurrency_group="channels")
    def deliver(self, sender: str, life: int, host: str, of_life: int, message: bytes, *payload: Any) -> None:
        with _ending_the_process_on_error():
            with self._changed:  # hosts of other nodes may be at work before this one has the driver's news of them
                self._changed.wait_for(
                    lambda: self._started.get(host, 0) >= of_life and self._life_of(sender) >= life, self._timeout_s
                )
            # Neither from nor for an earlier life. A host that could not be started has no process.
            lives = self._life_of(sender), self._started.get(host)
            if lives == (life, of_life) and host in self._hosts.processes:
                self._hosts.call(host, ("channel", sender, unpack_message(message)), received(*payload))

    def _life_of(self, host: str) -> int:
        return self._places.get(host, (0, None))[0]

    # Messages of the hosts here

    @_ending_the_process_on_error()
    def _relay(self, host: str, destination: str, message: tuple, payload: Payload | None) -> None:
        if destination == DRIVER:
            self._send_event("channel", host, message, payload)
            return
        (life, _), (of_life, agent) = self._places[host], self._places[destination]
        sent = agent.deliver.remote(host, life, destination, of_life, pack_message(message), *carried(payload))
        self._sent.setdefault(host, {})[destination] = sent

    @_ending_the_process_on_error()
    def _on_report(self, host: str, message: tuple, payload: Payload | None) -> None:
        """If this node is lost, the puts of an ended call are not: they are sent before its end is reported."""

        @_ending_the_process_on_error()
        def tell() -> None:
            self._hosts.channels.drain(self._hosts.processes[host].channels)
            self._send_event("report", host, message, payload)

        self._hosts.channels.submit(tell)

    @_ending_the_process_on_error()
    def _on_death(self, host: str, cause: str) -> None:
        log, printed = self._hosts.processes[host].log, None
        if self._is_elsewhere and log is not None:
            with suppress(OSError):
                printed = Path(log).read_bytes()
                os.unlink(log)
        self._send_event("died", host, (cause, printed))

    def _send_event(self, kind: str, host: str, message: Any, payload: Payload | None = None) -> None:
        sent = list(self._sent.pop(host, {}).values()) if kind in ("report", "died") else []
        life = self._places[host][0]
        self._outbox.put((sent, (kind, host, life, pack_message(message), *carried(payload))))

    @_ending_the_process_on_error()
    def _report_progress(self) -> None:
        """Sends the hosts' signs of life."""
        seen: dict[str, dict[int, tuple[int, int]]] = {}
        while True:
            time.sleep(BEAT_S)
            for host, process in list(self._hosts.processes.items()):
                reported = seen.setdefault(f"{host} {process.pid}", {})
                with suppress(ValueError):  # released, since the host has been started again
                    if not process.ended.is_set() and (news := process.progress.changed_slots(reported)):
                        reported |= news
                        self._send_event("progress", host, news)


def identity(pid: int) -> tuple[str, str]:
    """The machine and the time at which this process was started: the same for nobody who cannot see it."""
    try:
        return machine(), Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except FileNotFoundError:
        return "", ""


def carried(payload: Payload | None) -> tuple:
    """Arguments for a remote call, where `received` makes a payload of them: Ray replaces the reference, if any, by the
    bytes of the memory file."""
    if payload is None:
        return ()
    if payload.fd < 0:
        return bytes(payload.body), None
    if payload.stored is None:
        assert payload.layout is not None
        payload.stored = ray.put(np.frombuffer(map_shared(payload.fd, payload.layout.total_bytes), np.uint8))
    return bytes(payload.body), payload.layout, payload.stored


def received(body: bytes | None = None, layout: Any = None, content: Any = None) -> Payload | None:
    if body is None or content is None:
        return None if body is None else Payload(body)
    content = ray.get(content) if isinstance(content, ray.ObjectRef) else content
    fd, memory = segments.take(len(content))
    memory[: len(content)] = memoryview(content)
    return Payload(body, layout, fd)


def pack_message(message: Any) -> bytes:
    """Pickles messages here: a message that Ray cannot unpickle would be lost without an error."""
    return pickle.dumps(message, protocol=5)


def unpack_message(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  (sent by a process of this run)
