"""The driver's connection to a Ray cluster, and the nodes there.

`actors.py` puts hosts on nodes; `run/devices.py` decides which GPUs a process sees.

A Ray cluster for one run: `ray start` on this machine, ended with the driver, however the driver ends.

Everything listens on the loopback interface only and asks for a token that is never written to disk. There is no
dashboard, usage report or autoscaler; the cluster's folder, readable only by its owner, is deleted at the end.

A run's reservation on a Ray cluster: a bundle of cores and GPUs for each node of its plan.

Hosts take turns on devices, so they request none from Ray; the placement group holds the devices of all hosts. Ray
gives a device to only one reservation, shows it in `ray status`, and frees it when the run's driver ends. Ray counts
cores without naming them, but it names GPUs: a plan for another program's GPU is refused.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private import auto_init_hook, ray_constants, services, worker
from ray._private.state import available_resources_per_node
from ray._raylet import AuthenticationTokenLoader, Config
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.runtime.host import HostPlan

OF_CARDS = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "EMBODIED_RENDER", "EMBODIED_RENDER_FILE")
_LIMIT_BYTES = 100_000_000  # limit for modules that are sent to nodes
_PARTS = ("envs", "policies", "placement", "recipes", "assets")  # in a checkout these folders are beside the package
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "runs")
_REACH_S = 5.0  # deadline to reach an address
_LOOK_S = 60.0  # deadline to start a process on every node


@dataclass(frozen=True)
class RayNode:
    name: str
    id: str
    cores: tuple[int, ...]  # cores that Ray may use there
    num_gpus: int = 0
    num_cpus: int = 0


class Connection:
    """Joins the cluster at an address, or starts one for this run. An existing connection of the program (`ray.init`)
    is used and left open."""

    def __init__(self, address: str | None, modules: Sequence[str] = (), start_s: float = 300.0) -> None:
        self._own_cluster: OwnCluster | None = None
        self._ours = not ray.is_initialized()
        self._nodes: dict[str, RayNode] = {}
        try:
            if self._ours and address is None:
                self._own_cluster = OwnCluster(start_s=start_s)
                connect_to_own(self._own_cluster)
            elif self._ours:
                join(address, modules)
            if address is None:
                self.driver_node = RayNode("", ray.get_runtime_context().get_node_id(), _cores())
            else:
                self._look_around()
        except BaseException:
            self.close()
            raise

    def node(self, name: str) -> RayNode:
        """The node with this name; "" is the driver's node."""
        if name and self._nodes and name not in self._nodes:
            self._look_around()  # it may have joined the cluster since
        if name and name not in self._nodes:
            known = (
                f"the cluster has: {', '.join(sorted(self._nodes))}" if self._nodes else "no cluster.address is given"
            )
            raise ConfigError(f"placement names the node {name!r}, but {known}")
        return self._nodes[name] if name else self.driver_node

    def is_lost(self, node: RayNode) -> bool:
        """True if Ray has noticed that this node is lost."""
        return all(entry["NodeID"] != node.id or not entry["Alive"] for entry in ray.nodes())

    def nodes_without(self, lost: RayNode) -> list[RayNode]:
        """All nodes except the lost ones."""
        return [node for node in self._nodes.values() if node.id != lost.id and not self.is_lost(node)]

    def ask(self, function: Callable[[int, int], Any]) -> dict[str, Any]:
        """Calls a function on every node with Ray's numbers of GPUs and cores; returns the results, the driver's node
        first."""
        nodes = sorted(self._nodes.values(), key=lambda node: (node.id != self.driver_node.id, node.name))
        counts = [(node.id, (node.num_gpus, node.num_cpus)) for node in nodes]
        return dict(zip([node.name for node in nodes], answers(counts, function), strict=True))

    def close(self) -> None:
        if self._ours:
            ray.shutdown()
        if self._own_cluster is not None:
            self._own_cluster.stop()

    def _look_around(self) -> None:
        this_node = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]
        seen, self._nodes = answers([(node["NodeID"], ()) for node in alive], _cores), {}
        for node, cores in zip(alive, seen):
            gpus, cpus = (int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU"))
            ray_node = RayNode(node["NodeName"], node["NodeID"], cores[:cpus], gpus, cpus)
            if node["NodeID"] == this_node:
                self.driver_node = ray_node
            if ray_node.name in self._nodes:
                raise ConfigError(
                    f"two nodes of the Ray cluster are called {ray_node.name!r}; "
                    "start them with ray start --node-name=..."
                )
            self._nodes[ray_node.name] = ray_node


def move(plan: HostPlan, nodes: Sequence[RayNode], busy: Mapping[tuple[str, int], int]) -> HostPlan:
    """The same host on the least busy of these nodes, with equally many cores, the least used ones."""
    if any("gpu:" in device for device in plan.devices):
        raise EmbodiedError(f"node {plan.node} is lost, and {plan.name} needs a GPU of it")
    node = min(nodes, key=lambda node: sum(busy.get((node.name, core), 0) for core in node.cores) / len(node.cores))
    free_first = sorted(node.cores, key=lambda core: busy.get((node.name, core), 0))
    # A host that only rendered on a GPU renders on cores now.
    env = {key: value for key, value in plan.env.items() if key not in OF_CARDS}
    return replace(plan, node=node.name, cores=tuple(sorted(free_first[: len(plan.cores)])), env=env)


def answers(nodes: Sequence[tuple[str, tuple]], function: Callable) -> list[Any]:
    """Calls a function on each of these nodes with its arguments; returns the results."""
    try:
        return ray.get([run_on(node_id, function, *arguments) for node_id, arguments in nodes], timeout=_LOOK_S)
    except RayError as err:
        raise EmbodiedError(f"a node of the Ray cluster cannot run our code: {_last_line(err)}") from None


def run_on(node_id: str, function: Any, *arguments: Any) -> Any:
    task = ray.remote(num_cpus=0, max_retries=0)(function)
    return task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)).remote(*arguments)


# Connecting


def join(address: str, modules: Sequence[str]) -> None:
    """Joins the user's cluster with the user's token, and sends this package and the user's modules to its nodes."""
    address = address_here() if address == "auto" else address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address={address}: write auto, or host:port as `ray start --head` prints it")
    if not _answers(host, int(port)):
        raise ConfigError(
            f"cluster.address={address}: nothing answers there; is `ray start --head` running, and is the port open?"
        )
    with pack_modules(modules) as folder:
        with _loopback(not _answers(services.get_node_ip_address(), int(port)) and host in ("127.0.0.1", "localhost")):
            _connect(address, {"working_dir": str(folder)})


def address_here() -> str:
    """The address of the Ray that runs on this machine."""
    try:
        address = services.canonicalize_bootstrap_address("auto")
    except (ConnectionError, ValueError):
        address = None
    if address is None:
        raise ConfigError("cluster.address=auto: no Ray runs on this machine; start one: `ray start --head`")
    return address


def connect_to_own(cluster: OwnCluster) -> None:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=TOKEN, RAY_TMPDIR=str(cluster.folder))
    try:
        with _loopback(True):
            _connect(cluster.address, None)
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


@contextmanager
def _loopback(only: bool) -> Iterator[None]:
    """Inside, Ray uses 127.0.0.1 if its nodes listen only there; otherwise it would choose another address."""
    anywhere = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = anywhere and not only
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = anywhere


def _connect(address: str, runtime_env: dict | None) -> None:
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:  # of `ray job submit`, which may send a folder of its own
        os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    auto_init_hook.enable_auto_connect = False  # otherwise a late Ray call would start another cluster
    Config.initialize("")  # Ray has read the environment when it was imported
    AuthenticationTokenLoader.instance().reset_cache()
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    print_errors, worker.listen_error_messages = (
        worker.listen_error_messages,
        lambda *_: None,
    )  # we report deaths ourselves
    try:
        ray.init(address=address, runtime_env=runtime_env, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, RayError) as err:
        raise EmbodiedError(f"cluster.address={address}: {_why(err)}") from err
    finally:
        worker.listen_error_messages = print_errors
        if main:
            signal.signal(signal.SIGTERM, handler)  # Ray's handler would exit


def _why(error: BaseException) -> str:
    text = f"{error}\n{error.__cause__}\n{error.__context__}"
    if "Authentication" in text or "InvalidAuthToken" in text:
        return (
            "the cluster does not take this token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to what its nodes were "
            "started with"
        )
    if "node_ip_address" in text or "raylet" in text.lower():
        return f"this machine is not a node of the cluster; run `ray start --address` here first ({_last_line(error)})"
    return _last_line(error)


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), _REACH_S):
            return True
    except OSError:
        return False


def _cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


# Code for nodes on other machines: this package, and the user's modules that a recipe names


@contextmanager
def pack_modules(modules: Sequence[str]) -> Iterator[Path]:
    """Yields a temporary folder for the import path, to be uploaded."""
    with tempfile.TemporaryDirectory(prefix="embodied-ship-") as folder:
        target = Path(folder)
        _copy_package("embodied", target / "embodied")
        for part in _PARTS:
            _copy_package(f"embodied.{part}", target / "embodied" / part)
        for name in sorted({module.partition(".")[0] for module in modules} - {"embodied"}):
            _copy_own(name, target)
        size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
        if size > _LIMIT_BYTES:
            raise ConfigError(
                f"the modules {', '.join(modules)} and what lies beside them are {size / 1e6:.0f} MB, too much to send "
                "to every node; install them there, or keep them in a folder without data"
            )
        yield target


def _copy_package(name: str, target: Path) -> None:
    if not target.exists():
        (source,) = importlib.util.find_spec(name).submodule_search_locations
        shutil.copytree(source, target, ignore=_LEFT_OUT)


def _copy_own(name: str, target: Path) -> None:
    """Copies a package, or a module with the modules and packages beside it. Installed packages are not copied: they
    must be installed on the nodes."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ConfigError(f"there is no module {name!r} to send to the nodes of the cluster")
    origin = Path(spec.origin)
    installed = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib", "stdlib")]
    if any(origin.is_relative_to(folder) for folder in installed):
        return
    if spec.submodule_search_locations:
        shutil.copytree(origin.parent, target / name, ignore=_LEFT_OUT, dirs_exist_ok=True)
        return
    for beside in origin.parent.iterdir():
        if beside.suffix == ".py":
            shutil.copy(beside, target)
        elif (beside / "__init__.py").is_file() and beside.name != "embodied":
            shutil.copytree(beside, target / beside.name, ignore=_LEFT_OUT, dirs_exist_ok=True)


_STOP_S = 10.0

# Ray reads the token once per process, so all clusters of this process have the same token.
TOKEN = secrets.token_hex(32)

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # keeps Ray on the loopback interface
    "RAY_memory_monitor_refresh_ms": "0",  # the kernel decides which process to kill, as on the local backend
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_prestart_worker_first_driver": "0",  # hosts have environments of their own
    "RAY_enable_worker_prestart": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
_START = [
    *("start", "--head", "--block", "--port=0", "--node-name=node1", "--num-gpus=0", "--no-monitor"),
    *("--include-dashboard=false", "--include-log-monitor=false", "--dashboard-agent-listen-port=0"),
    *("--min-worker-port=0", "--max-worker-port=0"),
]
_STARTED = "will now block forever"  # printed once its address is in a file
_SLOW = "timed out during startup"  # printed after half a minute, which a busy machine may need
# Ends all processes of its session and the folder when standard input ends, and at no signal that the whole job gets:
# the driver saves first. In `/proc/PID/stat` state, parent, group and session follow the name.
_WATCH = """
trap '' INT TERM HUP
folder=$1; shift
"$@" 2>&1 &
exec > /dev/null 2>&1
cat
end_all() {
  ended=1
  for each in /proc/[0-9]*; do
    read -r line < $each/stat || continue
    set -- ${line##*) }
    [ "$4" = $$ ] && [ "$1" != Z ] && [ $each != /proc/$$ ] && kill -KILL ${each#/proc/} && ended=0
  done
  return $ended
}
while end_all; do sleep 0.1; done
until rm -rf "$folder"; do sleep 0.1; done
"""


class OwnCluster:
    """A Ray node on this machine. Use it as a context manager or call `stop`."""

    def __init__(self, object_store_bytes: int | None = None, start_s: float = 300.0) -> None:
        memory = [] if object_store_bytes is None else [f"--object-store-memory={object_store_bytes}"]
        ray = [sys.executable, "-P", "-m", "ray.scripts.scripts", *_START, f"--num-cpus={os.cpu_count()}", *memory]
        until = time.monotonic() + start_s
        while failed := self._start(ray, until):
            self.stop()
            expired = time.monotonic() >= until
            if expired or _SLOW not in failed:
                within = f" within cluster.start_s={start_s:g} s" if expired else ""
                advice = f"; is the machine busy? try cluster.start_s={2 * start_s:g}" if expired else ""
                raise EmbodiedError(f"Ray did not start on this machine{within}{advice}; {failed}")
        self.address = (self.folder / "ray/ray_current_cluster").read_text().strip()

    def stop(self) -> None:
        self._watch.stdin.close()
        try:
            self._watch.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._watch.pid, signal.SIGKILL)
            self._watch.wait(_STOP_S)
        self._watch.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> OwnCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, command: list[str], until: float) -> str:
        """Starts Ray; returns "" or, if it failed, its output."""
        # A short path: Ray puts sockets below it, and their paths must stay below 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="embodied-", dir="/tmp"))
        self._watch = subprocess.Popen(
            ["sh", "-c", _WATCH, "sh", str(self.folder), *command],
            env={**os.environ, **ENVIRONMENT, "RAY_AUTH_TOKEN": TOKEN, "RAY_TMPDIR": str(self.folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        late = threading.Timer(until - time.monotonic(), self._watch.stdin.close)
        late.daemon = True
        late.start()
        lines = []
        try:
            for line in self._watch.stdout:
                lines.append(line)
                if _STARTED in line:
                    return ""
        except BaseException:  # Ctrl-C
            self.stop()
            raise
        finally:
            late.cancel()
            late.join(_STOP_S)
        return f"it said:\n{''.join(lines)[-2000:].strip()}" if lines else "it said nothing"


_RESERVE_S = 15.0  # time to wait for devices: Ray frees an ended run's devices late
_UNITS = {"CPU": "cores", "GPU": "GPUs"}


class Reservation:
    """Reserves the devices of these plans; EmbodiedError if another program of the cluster has some of them."""

    def __init__(self, plans: Sequence[HostPlan], node_of: Callable[[str], RayNode]) -> None:
        self.devices: dict[str, tuple[RayNode, set[int], set[int]]] = {}  # node id -> (node, cores, GPUs)
        for plan in plans:
            node = node_of(plan.node)
            _, cores, gpus = self.devices.setdefault(node.id, (node, set(), set()))
            cores.update(plan.cores)
            names = [name.rpartition("/")[2] for name in plan.devices]
            gpus.update(int(name.removeprefix("gpu:")) for name in names if name.startswith("gpu:"))
        self._groups: list[PlacementGroup] = []
        try:
            for node_id, (node, cores, gpus) in self.devices.items():
                self._take(node_id, {"CPU": max(1, len(cores)), "GPU": len(gpus)})
                if gpus and (given := self._gpus_of(self._groups[-1], len(gpus))) != gpus:
                    remove_placement_group(self._groups.pop())
                    self._take(node_id, {"CPU": max(1, len(cores))})
                    self._take_named(node, gpus, given)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        for group in self._groups:
            remove_placement_group(group)

    def _take(self, node_id: str, bundle: dict[str, int]) -> None:
        group = placement_group([bundle], bundle_label_selector=[{"ray.io/node-id": node_id}])
        self._groups.append(group)
        if not group.wait(_RESERVE_S):
            raise EmbodiedError(self._why_not())

    def _take_named(self, node: RayNode, gpus: set[int], offered: set[int]) -> None:
        """Reserve the node's free GPUs one by one until all of `gpus` are reserved, and release the rest."""
        spare = []
        try:
            for _ in range(node.num_gpus):
                if not gpus:
                    return
                try:
                    self._take(node.id, {"GPU": 1})
                except EmbodiedError:
                    break
                named = self._gpus_of(self._groups[-1], 1)
                if not named <= gpus:
                    spare.append(self._groups.pop())
                gpus = gpus - named
        finally:
            for group in spare:
                remove_placement_group(group)
        if gpus:
            taken, free = (", ".join(f"gpu:{number}" for number in sorted(of)) for of in (gpus, offered))
            raise EmbodiedError(
                f"{taken} of {node.name} belongs to another program of the cluster, and {free} is free: name that in "
                "the placement, or wait (`ray status` shows what is reserved)"
            )

    @staticmethod
    def _gpus_of(group: PlacementGroup, count: int) -> set[int]:
        strategy = PlacementGroupSchedulingStrategy(group, 0)
        task = ray.remote(num_cpus=0, num_gpus=count, max_retries=0)(reserved_gpus)
        return set(ray.get(task.options(scheduling_strategy=strategy).remote(), timeout=_LOOK_S))

    def _why_not(self) -> str:
        """The missing devices, by node."""
        free = available_resources_per_node()
        lacking = [
            f"{len(wanted)} {_UNITS[kind]} of {node.name}, of which {free.get(node_id, {}).get(kind, 0):g} are free"
            for node_id, (node, *both) in self.devices.items()
            for kind, wanted in zip(_UNITS, both, strict=True)
            if len(wanted) > free.get(node_id, {}).get(kind, 0)
        ]
        return (
            f"the plan takes {'; '.join(lacking) or 'devices that Ray does not give'}: other programs of the cluster "
            "have reserved the rest (`ray status` shows it); wait for them, or let the placement name fewer devices"
        )


def reserved_gpus() -> list[int]:
    """In a task that holds GPUs of a node: their indices among the GPUs of the node's Ray, as in plans."""
    gpus = [str(name) for name in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
    started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="replace").split("\0")
    seen: Any = dict(line.partition("=")[::2] for line in started_with).get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    return [names.index(name) if names else int(name) for name in gpus]
