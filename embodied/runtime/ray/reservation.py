"""A run's reservation on a Ray cluster: a bundle of cores and GPUs for each node of its plan.

Hosts take turns on devices, so they request none from Ray; the placement group holds the devices of all hosts. Ray
gives a device to only one reservation, shows it in `ray status`, and frees it when the run's driver ends. Ray counts
cores without naming them, but it names GPUs: a plan for another program's GPU is refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray._private.state import available_resources_per_node
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from embodied.core.errors import EmbodiedError
from embodied.runtime.host import HostPlan
from embodied.runtime.ray.nodes import RayNode

_RESERVE_S = 15.0  # time to wait for devices: Ray frees an ended run's devices late
_LOOK_S = 60.0  # deadline to start a process on a node
_UNITS = {"CPU": "cores", "GPU": "GPUs"}


class Reservation:
    """Reserves the devices of these plans; EmbodiedError if another program of the cluster has some of them."""

    def __init__(self, plans: Sequence[HostPlan], node_of: Callable[[str], RayNode]) -> None:
        self.devices: dict[str, tuple[RayNode, set[int], set[int]]] = {}  # node id -> (node, cores, GPUs)
        for plan in plans:
            node = node_of(plan.node)
            _, cores, gpus = self.devices.setdefault(node.id, (node, set(), set()))
            cores.update(plan.cores)
            names = [name.rpartition("/")[2] for name in plan.devices]
            gpus.update(int(name.removeprefix("gpu:")) for name in names if name.startswith("gpu:"))
        self._groups: list[PlacementGroup] = []
        try:
            for node_id, (node, cores, gpus) in self.devices.items():
                self._take(node_id, {"CPU": max(1, len(cores)), "GPU": len(gpus)})
                if gpus and (given := self._gpus_of(self._groups[-1], len(gpus))) != gpus:
                    remove_placement_group(self._groups.pop())
                    self._take(node_id, {"CPU": max(1, len(cores))})
                    self._take_named(node, gpus, given)
        except BaseException:
            self.free()
            raise

    def free(self) -> None:
        for group in self._groups:
            remove_placement_group(group)

    def _take(self, node_id: str, bundle: dict[str, int]) -> None:
        group = placement_group([bundle], bundle_label_selector=[{"ray.io/node-id": node_id}])
        self._groups.append(group)
        if not group.wait(_RESERVE_S):
            raise EmbodiedError(self._why_not())

    def _take_named(self, node: RayNode, gpus: set[int], offered: set[int]) -> None:
        """Reserve the node's free GPUs one by one until all of `gpus` are reserved, and release the rest."""
        spare = []
        try:
            for _ in range(node.num_gpus):
                if not gpus:
                    return
                try:
                    self._take(node.id, {"GPU": 1})
                except EmbodiedError:
                    break
                named = self._gpus_of(self._groups[-1], 1)
                if not named <= gpus:
                    spare.append(self._groups.pop())
                gpus = gpus - named
        finally:
            for group in spare:
                remove_placement_group(group)
        if gpus:
            taken, free = (", ".join(f"gpu:{number}" for number in sorted(of)) for of in (gpus, offered))
            raise EmbodiedError(
                f"{taken} of {node.name} belongs to another program of the cluster, and {free} is free: name that in "
                "the placement, or wait (`ray status` shows what is reserved)"
            )

    @staticmethod
    def _gpus_of(group: PlacementGroup, count: int) -> set[int]:
        strategy = PlacementGroupSchedulingStrategy(group, 0)
        task = ray.remote(num_cpus=0, num_gpus=count, max_retries=0)(reserved_gpus)
        return set(ray.get(task.options(scheduling_strategy=strategy).remote(), timeout=_LOOK_S))

    def _why_not(self) -> str:
        """The missing devices, by node."""
        free = available_resources_per_node()
        lacking = [
            f"{len(wanted)} {_UNITS[kind]} of {node.name}, of which {free.get(node_id, {}).get(kind, 0):g} are free"
            for node_id, (node, *both) in self.devices.items()
            for kind, wanted in zip(_UNITS, both, strict=True)
            if len(wanted) > free.get(node_id, {}).get(kind, 0)
        ]
        return (
            f"the plan takes {'; '.join(lacking) or 'devices that Ray does not give'}: other programs of the cluster "
            "have reserved the rest (`ray status` shows it); wait for them, or let the placement name fewer devices"
        )


def reserved_gpus() -> list[int]:
    """In a task that holds GPUs of a node: their indices among the GPUs of the node's Ray, as in plans."""
    gpus = [str(name) for name in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
    started_with = Path(f"/proc/{os.getppid()}/environ").read_bytes().decode(errors="replace").split("\0")
    seen: Any = dict(line.partition("=")[::2] for line in started_with).get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else None
    return [names.index(name) if names else int(name) for name in gpus]
