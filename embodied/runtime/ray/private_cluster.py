"""A Ray cluster for one run, started by a reaper process that ends it all with the driver, however the driver ends.

Everything listens on the loopback interface only and asks for a token that is never written to disk. No dashboard, no
usage reports, no autoscaler; its folder, readable by its owner alone, goes with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import suppress
from pathlib import Path

from embodied.core.errors import EmbodiedError
from embodied.runtime.processes import START_S

_STOP_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36

# Ray reads the token once per process, so every cluster that this process starts has the same one.
TOKEN = secrets.token_hex(32)

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # what makes Ray stay on the loopback interface
    "RAY_memory_monitor_refresh_ms": "0",  # the kernel decides which process to kill, as on the local backend
    "RAY_worker_niceness": "0",
    "RAY_worker_oom_score_adjustment": "0",
    "RAY_prestart_worker_first_driver": "0",  # hosts have environments of their own
    "RAY_enable_worker_prestart": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}


class PrivateCluster:
    """A Ray node on this machine. Use it as a context manager or call `stop`."""

    def __init__(self, object_store_bytes: int | None = None, start_s: float = START_S) -> None:
        # A short path: Ray puts sockets below it, and their paths must stay below 108 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="embodied-", dir="/tmp"))
        self._start_s = start_s
        order = {"folder": str(self.folder), "object_store_bytes": object_store_bytes, "start_s": start_s}
        with (self.folder / "reaper.log").open("wb") as log:
            self._reaper = subprocess.Popen(
                [sys.executable, "-P", "-c", _REAPER, json.dumps({"path": sys.path, **order})],
                env={**os.environ, **ENVIRONMENT, "RAY_AUTH_TOKEN": TOKEN, "RAY_TMPDIR": str(self.folder)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.address = self._wait_for_address()

    def stop(self) -> None:
        self._reaper.stdin.close()
        try:
            self._reaper.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._reaper.pid, signal.SIGKILL)
            self._reaper.wait(_STOP_S)
        self._reaper.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> PrivateCluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _wait_for_address(self) -> str:
        late = threading.Timer(self._start_s, self._reaper.kill)
        late.daemon = True
        late.start()
        try:
            line = self._reaper.stdout.readline()
        except BaseException:  # Ctrl-C
            self.stop()
            raise
        finally:
            expired = late.finished.is_set()
            late.cancel()
            late.join(_STOP_S)
        if not line:
            said = (self.folder / "reaper.log").read_text(errors="replace").strip()[-2000:]
            self.stop()
            within = f" within cluster.start_s={self._start_s:g} s" if expired else ""
            advice = f"; is the machine busy? try cluster.start_s={2 * self._start_s:g}" if expired else ""
            words = f"; it said:\n{said}" if said else "; it said nothing"
            raise EmbodiedError(f"Ray did not start on this machine{within}{advice}{words}")
        return line.decode().strip()


_REAPER = """
import json, sys
order = json.loads(sys.argv[1])
sys.path[:] = order["path"]
from embodied.runtime.ray.private_cluster import run_reaper
run_reaper(order)
"""


def run_reaper(order: dict) -> None:
    """Starts the cluster, prints its address, and ends everything when its standard input ends."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the cluster become children of this process
    threading.Thread(target=_end_with_driver, args=(order["folder"],), daemon=True).start()
    try:
        print(_start(order), flush=True)
    except Exception:
        traceback.print_exc()
        os.close(sys.stdout.fileno())  # tells the driver, which then ends what has started
    threading.Event().wait()


def _end_with_driver(folder: str) -> None:
    sys.stdin.buffer.read()
    while children := _children():
        for pid in children:
            with suppress(ProcessLookupError, ChildProcessError):  # Ray's own thread may have waited for it
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def _children() -> list[int]:
    return [int(pid) for task in Path("/proc/self/task").glob("*/children") for pid in task.read_text().split()]


def _start(order: dict) -> str:
    from ray._private import services
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    find_node, until = services.get_node, time.monotonic() + order["start_s"]

    def find_node_patiently(*arguments):
        """Ray gives a node half a minute to start, which is not always enough on a busy machine."""
        while True:
            try:
                return find_node(*arguments)
            except RuntimeError:
                if time.monotonic() > until:
                    raise

    services.get_node = find_node_patiently

    # Without a dashboard Ray would still start its process, only to send the usage reports that are off.
    Node.start_api_server = lambda node, **_: setattr(node, "_webui_url", "")
    parameters = RayParams(
        node_name="node1",
        num_cpus=os.cpu_count(),  # how many hosts may start at once; they are placed by us and ask Ray for none
        num_gpus=0,
        object_store_memory=order["object_store_bytes"],
        include_dashboard=False,
        include_log_monitor=False,
        no_monitor=True,
        min_worker_port=0,
        max_worker_port=0,
        dashboard_agent_listen_port=0,
    )
    return Node(parameters, head=True, shutdown_at_exit=False, spawn_reaper=True).gcs_address
