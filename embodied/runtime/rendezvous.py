"""Lets the ranks of a role find each other, for `collective.py`. Imports torch only when ranks connect, since the
driver makes the rendezvous."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

SIOCGIFADDR = 0x8915  # Linux: the address of an interface


class ConnectedRanks:
    """How ranks in separate processes connect."""

    interface: str
    timeout_s: float

    def use_interface(self) -> None:
        """Makes gloo and NCCL use the network of the rendezvous, unless the user names an interface for NCCL."""
        os.environ["GLOO_SOCKET_IFNAME"] = self.interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={self.interface}")


@dataclass(frozen=True)
class RendezvousFile(ConnectedRanks):
    """Ranks on one machine find each other through a file in a private folder, and connect over loopback."""

    path: str
    timeout_s: float
    interface = "lo"

    def store(self, purpose: str, world_size: int) -> Any:
        import torch.distributed as dist

        try:
            return dist.FileStore(f"{self.path}-{purpose}", world_size)
        except dist.DistError as err:  # of this file, not of another rank
            raise OSError(f"{self.path}: {err}") from None

    def remove(self) -> None:
        """Removes the files."""
        whole = Path(self.path)
        for file in whole.parent.glob(f"{whole.name}*"):
            file.unlink(missing_ok=True)


@dataclass(frozen=True)
class RendezvousAddress(ConnectedRanks):
    """Ranks on several machines find each other through rank 0, which listens at this address without a password: use a
    private network."""

    host: str
    port: int
    timeout_s: float

    @property
    def interface(self) -> str:  # type: ignore[override]
        """The network interface towards this address."""
        return interface_of(address_towards(self.host))

    def store(self, purpose: str, world_size: int) -> Any:
        import torch.distributed as dist

        return dist.PrefixStore(purpose, dist.TCPStore(self.host, self.port, wait_for_workers=False))

    def remove(self) -> None:
        """Nothing to do: the port closes with rank 0."""


class InProcessRendezvous:
    """For ranks in one process: one instance per group, passed to every rank."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self.barrier = threading.Barrier(world_size, timeout=timeout_s)
        self.seats: list = [None] * world_size


Rendezvous = RendezvousFile | RendezvousAddress | InProcessRendezvous


def rendezvous_point(
    ranks: int, backend: str, folder: Path | None, timeout_s: float
) -> RendezvousFile | InProcessRendezvous | None:
    """Returns the rendezvous of a role's ranks on one machine; None for a single rank. A file is in a folder of this
    run."""
    if ranks == 1:
        return None
    if backend == "inline":
        return InProcessRendezvous(ranks, timeout_s)
    assert folder is not None, "a cluster whose ranks meet has a log_dir"
    return RendezvousFile(str(folder / f"ranks-{secrets.token_hex(4)}"), timeout_s)


def nccl_options(rendezvous: ConnectedRanks, split_from: Any = None, color: int = 0) -> Any:
    """NCCL options: the deadline, and the communicator from which these ranks split theirs to share buffers."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=rendezvous.timeout_s)
    if split_from is not None:
        options.split_from, options.split_color = split_from, color
    return options


def listen(timeout_s: float) -> tuple[Any, RendezvousAddress]:
    """Starts a server for ranks on several machines; returns it and its address. It ends when the object is dropped."""
    import torch.distributed as dist

    server = dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
    return server, RendezvousAddress(address_towards("192.0.2.1"), server.port, timeout_s)  # any remote address


def address_towards(host: str) -> str:
    """This machine's address as seen from `host`. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            return probe.getsockname()[0]
        except OSError:  # without a network
            return "127.0.0.1"


def interface_of(address: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # without an address
                raw = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(raw[20:24]) == address:
                    return name
    return "lo"
