"""Hosts, workers and channels. Imports neither torch nor ray, so that a host starts in a blink."""

from embodied.runtime.backend import choose_backend, describe_backend, nodes_of
from embodied.runtime.channel import Channel, Waiting
from embodied.runtime.cluster import Cluster
from embodied.runtime.device_sharing import Turns, take_turns
from embodied.runtime.group import Handle, WorkerGroup
from embodied.runtime.host import HostPlan
from embodied.runtime.supervision import Budget
from embodied.runtime.timers import Timers
from embodied.runtime.worker import Needs, Worker, served_while_busy

__all__ = [
    "Budget",
    "Channel",
    "Cluster",
    "Handle",
    "HostPlan",
    "Needs",
    "Timers",
    "Turns",
    "Waiting",
    "Worker",
    "WorkerGroup",
    "choose_backend",
    "describe_backend",
    "nodes_of",
    "served_while_busy",
    "take_turns",
]
