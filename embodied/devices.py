"""Devices besides cores: which a run may use, what a process sees of them, and where its networks compute.

Cores need no word here: every host has some. GPUs are looked for only where a placement names one, or a mode is to be
laid out for networks that compute there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from embodied.config import RunConfig
from embodied.errors import ConfigError
from embodied.placement import Host, Offer, PlacementPlan, named_kinds, named_nodes
from embodied.runtime import nodes_of
from embodied.runtime.leases import GB


def devices_here(config: RunConfig) -> tuple[str, ...]:
    """The GPUs of this machine, if the placement wants one, and hardware that the recipe declares for it, by name."""
    wanted = "gpu" in named_kinds(config.placement) or (isinstance(config.placement, str) and on_cuda(config))
    cards = [f"gpu:{i}" for i in range(len(visible_gpus()))] if wanted else []
    return (*cards, *(name for name in config.cluster.devices if "/" not in name))


def on_cuda(config: RunConfig) -> bool:
    """Whether the networks compute on a GPU where the placement does not say."""
    return config.learner.device_beside(getattr(config.env, "backend", "")) == "cuda"


def offers(config: RunConfig) -> dict[str, Offer]:
    """What the named machines of a Ray cluster have; empty where the placement names none."""
    if not named_nodes(config.placement) or not config.cluster.address:
        return {}
    declared = [name.split("/", 1) for name in config.cluster.devices if "/" in name]
    found = {}
    for node, (cores, num_gpus) in nodes_of(config.cluster.address).items():
        hardware = [device for where, device in declared if where == node]
        found[node] = Offer(cores, (*(f"gpu:{i}" for i in range(num_gpus)), *hardware))
    return found


def visible_gpus() -> list[str]:
    """As CUDA names those that this process may use."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name.strip() for name in chosen.split(",") if name.strip()]
    return [str(card.index) for card in gpus_here()]


def gpus_here() -> list:
    from embodied.discovery import gpus  # only where it is wanted: --help should answer at once

    return gpus()


def capacities(devices: Iterable[str], memory_gb: float | None) -> dict[str, float]:
    """Bytes that each device holds: so many gigabytes, else what a GPU of this machine has; no limit elsewhere."""
    if memory_gb is not None:
        return dict.fromkeys(devices, memory_gb * GB)
    found = dict.fromkeys(devices, float("inf"))
    if any(device.startswith("gpu:") for device in found):
        known = {str(card.index): card.memory_bytes for card in gpus_here()}
        for place, name in enumerate(visible_gpus()):
            if (card := f"gpu:{place}") in found:
                found[card] = known.get(name, float("inf"))
    return found


def environment(host: Host) -> dict[str, str]:
    """What a host's process must find before it imports anything."""
    card = host.device if host.device.startswith("gpu:") else host.render
    found = {"EMBODIED_DEVICE": host.device} if host.device else {}
    if card:
        name = visible_name(card, host.node)
        found |= {"CUDA_VISIBLE_DEVICES": name, "MUJOCO_EGL_DEVICE_ID": name}
    return found | ({"EMBODIED_RENDER": host.render} if host.render else {})


def visible_name(card: str, node: str) -> str:
    place = int(card.partition(":")[2])
    return str(place) if node else visible_gpus()[place]


def check_devices(config: RunConfig, plan: PlacementPlan) -> None:
    """Raise ConfigError where the recipe computes elsewhere than the placement says."""
    on_gpus = [host for host in plan.hosts if host.device.startswith("gpu:")]
    for host in on_gpus:
        if host.roles == ("sim",) and getattr(config.env, "backend", "") != "cuda":
            raise ConfigError(
                f"placement: sim on {host.device}, but {config.env.name} simulates on CPU cores here; "
                f'try sim: {{devices: "cpu:0", render: "{host.device}"}} to draw on the GPU, or env.backend=cuda'
            )
        if host.roles != ("sim",) and config.learner.device == "cpu":
            raise ConfigError(
                f"placement: {' and '.join(host.roles)} on {host.device}, but learner.device=cpu; "
                "try learner.device=auto"
            )
