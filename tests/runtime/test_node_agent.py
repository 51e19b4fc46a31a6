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
from embodied.runtime.ray_backend import NodeAgent, carried, identity, pack_message, unpack_message

here = {"path": sys.path, "folder": os.getcwd(), "log_dir": None, "process": identity(os.getpid())}
agent = NodeAgent({"boot": boot_order("run", 60.0, os.getpid()), "first": ["one"], **here})
answers = queue.Queue()
other = SimpleNamespace(deliver=SimpleNamespace(remote=lambda *message: answers.put(message)))
agent.place({"other": (1, other), "third": (1, None), "one": (2, None)})
opening, get = ("open", "numbers", Channel("run", "numbers", "one", 4)), ("get", "numbers", 7, None)
put = ("put", "numbers", None, "a-0")


def send(*sent, of_life=2):
    for sender, life, message, item in sent:
        packed = carried(None if item is None else encode(item))
        agent.deliver(sender, life, "one", of_life, pack_message(message), *packed)


def print_answer():
    host, _, to, _, message, body, _ = answers.get(timeout=60)
    assert (host, to, unpack_message(message)[:3]) == ("one", "other", ("answer", "numbers", 7))
    print(decode(Payload(body)))


early = (
    ("third", 1, opening, None),
    ("other", 1, put, "for a process of this host that is dead"),
    ("other", 1, get, None),  # as well
    ("other", 1, opening, None),
    ("other", 1, put, "for this one"),
    ("other", 1, get, None),
)
sending = threading.Thread(target=send, args=early)
sending.start()
sending.join(0.2)
agent.spawn(HostPlan("one", ("b",)))
print_answer()
sending.join(60)
of_a_successor = threading.Thread(target=send, args=(("other", 2, opening, None), ("other", 2, get, None)))
of_a_successor.start()
of_a_successor.join(0.2)
agent.call("one", pack_message(("died", "other", "a-0", "its process was killed", True)))
agent.place({"other": (2, other)})
of_a_successor.join(60)
send(("other", 1, put, "of a dead process"), ("third", 1, put, "for a successor"))
print_answer()
agent.kill("one")
assert agent._hosts.processes["one"].ended.wait(60)
agent.place({"one": (3, None)})
late = (
    ("third", 1, opening, None),
    ("third", 1, put, "to a successor"),
    ("other", 2, opening, None),
    ("other", 2, get, None),
)
to_a_successor = threading.Thread(target=send, args=late, kwargs={"of_life": 3})
to_a_successor.start()
to_a_successor.join(0.2)
agent.spawn(HostPlan("one", ("b",)))
print_answer()
agent.stop(5.0)
sys.stdout.flush()
os._exit(0)
"""


def test_messages_wait_until_both_hosts_are_known_and_those_for_or_from_dead_processes_are_dropped():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout) == (0, "for this one\nfor a successor\nto a successor\n"), done.stderr
