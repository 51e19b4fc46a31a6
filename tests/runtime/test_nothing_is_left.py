"""However a command ends, it leaves no process, no port, no shared memory and no folder for sockets behind."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
GONE_S = 10
ARGUMENTS = [
    *("recipe=pointmass_ppo", "env.num_envs=8", "algo.rollout_decisions=16", "algo.minibatch_size=32"),
    *("placement={'sim,policy': 'cpu:0', learner: 'cpu:0'}", "eval.episodes=4", "eval.videos=0"),
]


class Run:
    """A training run whose processes can be told from all others."""

    def __init__(self, folder: Path, backend: str, *arguments: str) -> None:
        self.folder = folder
        self.mark = f"EMBODIED_TEST_MARK={secrets.token_hex(8)}"
        self.shared_before = shared()
        name, _, value = self.mark.partition("=")
        self.output = folder / "output.txt"
        with self.output.open("w") as output:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "embodied.train", *ARGUMENTS, f"cluster.backend={backend}", *arguments],
                cwd=folder,
                env={**os.environ, name: value},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, text: str) -> None:
        until = time.monotonic() + 240
        while text not in self.output.read_text():
            assert self.driver.poll() is None and time.monotonic() < until, self.output.read_text()
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "comm").read_text().strip()
        return found

    def left(self) -> tuple[dict[int, str], list[str]]:
        """Of its processes, and in the places where something with a name could stay, but for what others use now."""
        processes, new = self.processes(), shared() - self.shared_before
        used = commands_maps_and_files() if new else ""
        return processes, sorted(path for path in new if path not in used and os.path.exists(path))


def commands_maps_and_files() -> str:
    """Of all processes; their files are open."""
    found = []
    for path in (path for name in ("cmdline", "maps") for path in Path("/proc").glob(f"[0-9]*/{name}")):
        with suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    for path in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            found.append(os.readlink(path))
    return "".join(found)


def shared() -> set[str]:
    return {str(path) for pattern in ("dev/shm/*", "tmp/embodied-*") for path in Path("/").glob(pattern)}


def listening(pids) -> set[str]:
    """The ports on which these processes take connections."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with suppress(OSError):
                sockets.add(os.readlink(fd))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return {row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets}


def check_gone(run: Run, ports: set[str]) -> None:
    until = time.monotonic() + GONE_S
    while run.left() != ({}, []) and time.monotonic() < until:
        time.sleep(0.05)
    assert run.left() == ({}, [])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    assert ports.isdisjoint(row[1] for row in rows if row[3] == "0A")


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_run_that_finishes_leaves_nothing(tmp_path, backend):
    run = Run(tmp_path, backend, "run.iterations=2")
    assert run.driver.wait(280) == 0, run.output.read_text()
    assert f"{backend}: one " in run.output.read_text()
    check_gone(run, set())
    (info,) = tmp_path.glob("runs/*/run.json")
    assert json.loads(info.read_text())["state"] == "finished"


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_killed_driver_leaves_nothing(tmp_path, backend, number):
    run = Run(tmp_path, backend, "run.iterations=100000")
    run.wait_for("iteration 2/")
    ports = listening(run.processes())
    assert len(run.processes()) >= 3 and (ports or backend == "local")
    run.driver.send_signal(number)
    run.driver.wait(GONE_S)
    check_gone(run, ports)
