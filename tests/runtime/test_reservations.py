"""Runs on a Ray cluster reserve their devices: three nodes of one machine, with GPUs that only Ray believes in."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RAY = [sys.executable, "-m", "ray.scripts.scripts"]

WORK = """
    import os
    from embodied.runtime import Worker

    class Work(Worker):
        def where(self):
            return os.getppid()  # the agent of its node
"""
RUN = """
    import sys
    from work import Work
    from embodied.core.errors import EmbodiedError
    from embodied.runtime import Cluster, HostPlan

    def plan(node, core, gpu):
        return HostPlan(f"w-{node}", ("work",), (core,), node=f"node{node}", devices=(f"node{node}/gpu:{gpu}",))

    if __name__ == "__main__":
        plans = [plan(int(node), 0, int(gpu)) for node, gpu in zip(*sys.argv[1:])]
        try:
            with Cluster("ray", plans, address="auto", modules=["work"]) as cluster:
                print("nodes", len(set(cluster.launch(Work, "work").where().wait(120))), flush=True)
                sys.stdin.read()
        except EmbodiedError as err:
            print("error:", err, flush=True)
"""


@pytest.fixture(scope="module")
def cluster():
    """Three nodes of two cores and two GPUs each. Returns the environment of their programs."""
    folder = Path(tempfile.mkdtemp(prefix="three-", dir="/tmp"))  # a short path, for Ray's sockets
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_TMPDIR": str(folder)}
    environment = {**os.environ, **secret, "RAY_USAGE_STATS_ENABLED": "0"}
    for name, text in (("run.py", RUN), ("work.py", WORK)):
        (folder / name).write_text(textwrap.dedent(text))
    nodes = []
    try:
        for number in (1, 2, 3):
            at = ["--head", f"--port={port}", "--include-dashboard=false"]
            at = at if number == 1 else [f"--address=127.0.0.1:{port}"]
            has = ["--num-cpus=2", "--num-gpus=2", "--object-store-memory=100000000", f"--node-name=node{number}"]
            command = [*RAY, "start", *at, *has, f"--node-ip-address=127.0.0.{number}", "--block"]
            nodes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            next(line for line in nodes[-1].stdout if "Ray runtime started" in line)
        yield folder, environment
    finally:
        for node in reversed(nodes):
            node.terminate()
            node.wait(60)
            node.stdout.close()
        shutil.rmtree(folder, ignore_errors=True)


def begin(cluster, nodes: str, gpus: str) -> subprocess.Popen:
    """A program with a worker on each of these nodes, which holds one of its GPUs until its input ends."""
    folder, environment = cluster
    paths = f"{Path(__file__).parents[2]}:{folder}"
    command = [sys.executable, str(folder / "run.py"), nodes, gpus]
    options = {"env": {**environment, "PYTHONPATH": paths}, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, cwd=folder, text=True, **options)


def status(cluster) -> str:
    return subprocess.run([*RAY, "status"], env=cluster[1], capture_output=True, text=True, timeout=120).stdout


def test_a_run_holds_its_cores_and_gpus_and_no_other_run_gets_them(cluster):
    with begin(cluster, "123", "000") as first:
        assert first.stdout.readline() == "nodes 3\n"
        told = status(cluster)
        assert told.count("(0.0 used of 3.0 reserved in placement groups)") == 2, told  # of cores and of GPUs
        with begin(cluster, "2", "0") as second:
            said = second.communicate(timeout=300)[0]
            assert "error: gpu:0 of node2 belongs to another program of the cluster, and gpu:1 is free" in said
        with begin(cluster, "3", "1") as third:
            assert third.stdout.readline() == "nodes 1\n"
            with begin(cluster, "3", "1") as fourth:
                said = fourth.communicate(timeout=300)[0]
            assert "the plan takes 1 cores of node3, of which 0 are free; 1 GPUs of node3, of which 0 are free" in said
            third.communicate(timeout=60)
        first.communicate(timeout=60)
    with begin(cluster, "2", "1") as alone:  # not the one that Ray would give first
        assert alone.communicate(timeout=300)[0] == "nodes 1\n"
