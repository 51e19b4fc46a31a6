"""What Ray says when a node, an agent or the run has ended."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.core.errors import WorkerFailed
from embodied.runtime import Cluster, HostPlan, Worker

ray = pytest.importorskip("ray")

# Every start of Ray is counted, and none takes place; in a process of its own, since others here are connected.
AFTER_THE_END = """
import ray
from ray._private import auto_init_hook
from ray.exceptions import RayError

from embodied.runtime import ray_nodes

calls = []
auto_init_hook.enable_auto_connect = True
ray.init = lambda **options: calls.append(options.get("address"))
ray_nodes._connect("127.0.0.1:1", None)
assert calls == ["127.0.0.1:1"] and not ray.is_initialized(), calls
try:
    ray.get([])
except RayError:
    print("refused")
assert calls == ["127.0.0.1:1"], calls
"""


def test_a_call_after_the_end_of_a_cluster_does_not_start_another_ray_cluster():
    done = subprocess.run([sys.executable, "-c", AFTER_THE_END], capture_output=True, text=True, timeout=120)
    assert done.stdout == "refused\n", done.stderr


def test_an_agent_that_failed_itself_is_told_from_a_lost_node():
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError, RuntimeEnvSetupError

    from embodied.runtime.ray_backend import raised_by_actor

    failed = RayTaskError("NodeAgent.__init__", "no module named torch", ImportError("torch"), proctitle="agent")
    of_agent = (failed, ActorDiedError(failed), RuntimeEnvSetupError("no room"))
    of_node = (ActorDiedError(), ActorUnavailableError("it does not answer", None))
    assert all(map(raised_by_actor, of_agent)) and not any(map(raised_by_actor, of_node))


class Sleeper(Worker):
    def parent(self):
        return int(Path(f"/proc/{os.getpid()}/stat").read_text().rpartition(")")[2].split()[1])

    def sleep(self, channel):
        channel.get()


@pytest.mark.slow
def test_a_lost_agent_is_reported_although_ray_cannot_list_its_nodes(ray_cluster, monkeypatch):
    def no_answer():
        raise ray.exceptions.RaySystemError("no answer")

    with Cluster("ray", [HostPlan("one", ("a",))], timeout_s=300) as cluster:
        workers = cluster.launch(Sleeper, "a")
        (agent,) = workers.parent().wait()
        asleep = workers.sleep(cluster.channel("never"))
        monkeypatch.setattr(ray, "nodes", no_answer)
        os.kill(agent, signal.SIGKILL)
        with pytest.raises(WorkerFailed, match="its process could not run"):
            asleep.wait()
