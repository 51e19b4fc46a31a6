"""The driver's connection to a Ray cluster, and the nodes there.

`actors.py` puts hosts on nodes; `run/devices.py` decides which GPUs a process sees.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray._private import auto_init_hook, ray_constants, services, worker
from ray._raylet import AuthenticationTokenLoader, Config
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.runtime.host import HostPlan
from embodied.runtime.processes import START_S
from embodied.runtime.ray.own_cluster import ENVIRONMENT, TOKEN, OwnCluster

OF_CARDS = ("CUDA_VISIBLE_DEVICES", "MUJOCO_EGL_DEVICE_ID", "EMBODIED_RENDER", "EMBODIED_RENDER_FILE")
_LIMIT_BYTES = 100_000_000  # limit for modules that are sent to nodes
_PARTS = ("envs", "policies", "placement", "recipes", "assets")  # in a checkout these folders are beside the package
_LEFT_OUT = shutil.ignore_patterns("__pycache__", ".*", "runs")
_REACH_S = 5.0  # deadline to reach an address
_LOOK_S = 60.0  # deadline to start a process on every node
_END_S = 5.0  # deadline for the exit code of an ended host


@dataclass(frozen=True)
class RayNode:
    name: str
    id: str
    cores: tuple[int, ...]  # cores that Ray may use there
    python: str
    here: bool  # True on the driver's machine, which shares files and processes
    folder: str  # where Ray keeps its logs
    num_gpus: int = 0
    num_cpus: int = 0


class Connection:
    """Joins the cluster at an address, or starts one for this run. An existing connection of the program (`ray.init`)
    is used and left open."""

    def __init__(self, address: str | None, modules: Sequence[str] = (), start_s: float = START_S) -> None:
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
                self.own = RayNode("", ray.get_runtime_context().get_node_id(), _cores(), sys.executable, True, "")
            else:
                self._look_around()
        except BaseException:
            self.close()
            raise

    def node(self, name: str) -> RayNode:
        """The node with this name; "" is the driver's node."""
        if name and name not in self._nodes:
            known = (
                f"the cluster has: {', '.join(sorted(self._nodes))}" if self._nodes else "no cluster.address is given"
            )
            raise ConfigError(f"placement names the node {name!r}, but {known}")
        return self._nodes[name] if name else self.own

    def lost(self, node: RayNode) -> bool:
        """True if Ray has noticed that this node is lost."""
        return all(known["NodeID"] != node.id or not known["Alive"] for known in ray.nodes())

    def others(self, lost: RayNode) -> list[RayNode]:
        """All nodes except the lost ones."""
        return [node for node in self._nodes.values() if node.id != lost.id and not self.lost(node)]

    def ask(self, function: Callable[[int, int], Any]) -> dict[str, Any]:
        """Calls a function on every node with Ray's numbers of GPUs and cores; returns the results, the driver's node
        first."""
        nodes = sorted(self._nodes.values(), key=lambda node: (node.id != self.own.id, node.name))
        counts = [(node.id, (node.num_gpus, node.num_cpus)) for node in nodes]
        return dict(zip([node.name for node in nodes], answers(counts, function), strict=True))

    def close(self) -> None:
        if self._ours:
            ray.shutdown()
        if self._own_cluster is not None:
            self._own_cluster.stop()

    def _look_around(self) -> None:
        own = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]
        with _secret() as secret:
            seen = answers([(node["NodeID"], secret) for node in alive], look)
        for node, (cores, python, here, folder) in zip(alive, seen):
            gpus, cpus = (int(node["Resources"].get(kind, 0)) for kind in ("GPU", "CPU"))
            ray_node = RayNode(node["NodeName"], node["NodeID"], cores[:cpus], python, here, folder, gpus, cpus)
            if node["NodeID"] == own:
                self.own = ray_node
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


def look(file: str, content: bytes) -> tuple[tuple[int, ...], str, bool, str]:
    """Returns, on a node: its cores, interpreter, True if the driver is on this machine, and Ray's log folder."""
    with suppress(OSError):
        here = Path(file).read_bytes() == content
        return _cores(), sys.executable, here, worker.global_worker.node.get_logs_dir_path()
    return _cores(), sys.executable, False, worker.global_worker.node.get_logs_dir_path()


def last_words(exit_file: str, log: str | None) -> tuple[int | None, bytes]:
    """Returns, on a node, a host's exit code and output. Removes both files."""
    until, code = time.monotonic() + _END_S, b""
    while not code.endswith(b"\n") and time.monotonic() < until:
        with suppress(FileNotFoundError):
            code = Path(exit_file).read_bytes()
        time.sleep(0.02)
    printed = Path(log).read_bytes() if log is not None and os.path.exists(log) else b""
    for path in (exit_file, log):
        if path is not None:
            Path(path).unlink(missing_ok=True)
    return int(code) if code else None, printed


# Connecting


def join(address: str, modules: Sequence[str]) -> None:
    """Joins the user's cluster with the user's token, and sends this package and the user's modules to its nodes."""
    address = address_here() if address == "auto" else address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"cluster.address={address}: write auto, or host:port as `ray start --head` prints it")
    if not _answers(host, int(port)):
        raise EmbodiedError(
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
        raise EmbodiedError("cluster.address=auto: no Ray runs on this machine; start one: `ray start --head`")
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


@contextmanager
def _secret() -> Iterator[tuple[str, bytes]]:
    """A secret file that only this user's processes on this machine can open, and its content."""
    content = secrets.token_bytes(32)
    fd = os.memfd_create("embodied-here", os.MFD_CLOEXEC)
    try:
        os.write(fd, content)
        yield f"/proc/{os.getpid()}/fd/{fd}", content
    finally:
        os.close(fd)


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
