"""The agent of a node, between its hosts and those of other nodes. Without a Ray cluster, in a process of its own."""

import subprocess
import sys

import pytest

pytest.importorskip("ray")

PROGRAM = """
import os, queue, sys, threading
from types import SimpleNamespace
from embodied.runtime import HostPlan
from embodied.runtime.channel import Channel
from embodied.runtime.local import boot_order
from embodied.runtime.payload import Payload, decode, encode
from embodied.runtime.ray.actors import NodeAgent, carried, identity, pack_message, unpack_message

here = {"path": sys.path, "folder": os.getcwd(), "log_dir": None, "process": identity(os.getpid())}
agent = NodeAgent({"boot": boot_order("run", 60.0, os.getpid()), "first": ["one"], **here})
answers = queue.Queue()
other = SimpleNamespace(deliver=SimpleNamespace(remote=lambda *message: answers.put(message)))
agent.place({"other": (1, other), "one": (2, None)})


def send_all():
    for message, item in (
        (("put", "numbers", None, "a-0"), "for a process of this host that is dead"),
        (("open", "numbers", Channel("run", "numbers", "one", 4)), None),
        (("put", "numbers", None, "a-0"), "for this one"),
        (("get", "numbers", 7, None), None),
    ):
        agent.deliver("other", 1, "one", pack_message(message), *carried(None if item is None else encode(item)))


sending = threading.Thread(target=send_all)
sending.start()
sending.join(0.2)
agent.spawn(HostPlan("one", ("b",)))
host, life, to, message, body, _ = answers.get(timeout=60)
assert (host, life, to, unpack_message(message)[:3]) == ("one", 2, "other", ("answer", "numbers", 7))
print(decode(Payload(body)))
sending.join(60)
agent.stop(5.0)
sys.stdout.flush()
os._exit(0)
"""


def test_messages_wait_for_a_host_that_is_still_started_and_those_for_its_dead_process_are_dropped():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "for this one\n"), done.stderr
