"""Workers on devices: the classes for running roles side by side, on one machine or a cluster.

    Cluster, HostPlan      starts the processes of a plan and launches groups of workers there
    Worker                 the base of a role: its public methods are called on the group; send, recv, broadcast
    WorkerGroup, Handle    all replicas of a role, and a call to them that may still run
    Channel                a named queue between workers
    share_devices, DeviceSharing   groups that share devices work there in turns, phase by phase
    Needs                  a worker's report of its device memory
    Budget                 how often a process that died or hangs is started again
    Timers                 measures named pieces of work
    served_while_busy      marks a method that answers while the worker is at work
    choose_backend, describe_backend, nodes_of    inline, local or ray, and the nodes of a Ray cluster

Imports neither torch nor ray, so that a host starts in a blink. Weights, device memory and sums over
ranks have modules of their own.
"""

from embodied.runtime.backend import choose_backend, describe_backend, nodes_of
from embodied.runtime.channel import Channel
from embodied.runtime.cluster import Cluster
from embodied.runtime.device_sharing import DeviceSharing, share_devices
from embodied.runtime.host import HostPlan
from embodied.runtime.supervision import Budget
from embodied.runtime.worker import Handle, Needs, Timers, Worker, WorkerGroup, served_while_busy

__all__ = [
    "Budget",
    "Channel",
    "Cluster",
    "DeviceSharing",
    "Handle",
    "HostPlan",
    "Needs",
    "Timers",
    "Worker",
    "WorkerGroup",
    "choose_backend",
    "describe_backend",
    "nodes_of",
    "served_while_busy",
    "share_devices",
]
