"""A Ray cluster for one run: `ray start` on this machine, ended with the driver, however the driver ends.

Everything listens on the loopback interface only and asks for a token that is never written to disk. There is no
dashboard, usage report or autoscaler; the cluster's folder, readable only by its owner, is deleted at the end.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from embodied.core.errors import EmbodiedError
from embodied.runtime.processes import START_S

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

    def __init__(self, object_store_bytes: int | None = None, start_s: float = START_S) -> None:
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
