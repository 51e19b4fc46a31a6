"""Options of the runtime."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Literal

from pydantic import Field, field_validator

from embodied.core.options import Strict

ADDRESS = re.compile(r"[\w.-]+:\d+")
HARDWARE = re.compile(r"(?:[\w.-]+/)?(?P<kind>[a-z]\w*):\d+")


class ClusterConfig(Strict):
    backend: Literal["auto", "inline", "local", "ray"] = Field(
        "auto",
        description="where hosts run: local = processes on this machine, inline = all in one process for debugging, "
        "ray = on a Ray cluster of one or more machines, auto = ray with an address or named nodes, otherwise local",
    )
    address: str | None = Field(
        None,
        description="host:port of a running Ray cluster to join, of which this machine is a node, or auto: the "
        "running cluster of this machine; unset: RAY_ADDRESS, as `ray job submit` sets it. Without an address "
        "backend=ray starts a cluster of the run's own on this machine",
    )
    start_s: float = Field(
        300.0, gt=0, description="Seconds in which Ray has to start on this machine, unless cluster.address is set."
    )
    machines: str | None = Field(
        None,
        description="Machines to plan for in a --dry-run instead of the present ones: 8xGPU, 4x8xH100, 16xCPU, or "
        "a YAML file (docs/placement.md).",
    )
    devices: tuple[str, ...] = Field(
        (), description="Hardware that placements can name besides cores and GPUs: arm:0, or node1/arm:0 of a cluster."
    )

    memory_gb: float | None = Field(
        None,
        gt=0,
        description="Memory limit of every device: roles that do not fit together take turns. null: a GPU's memory, no "
        "limit elsewhere.",
    )

    @property
    def joined(self) -> str | None:
        """The address of the Ray cluster that the run joins."""
        if self.address is not None or self.backend in ("inline", "local"):
            return self.address
        address = os.environ.get("RAY_ADDRESS", "")
        return (
            address if address == "auto" or ADDRESS.fullmatch(address) else None
        )  # http://... is for `ray job` itself

    @field_validator("devices")
    @classmethod
    def _one_device_each(cls, devices: tuple[str, ...]) -> tuple[str, ...]:
        for name in devices:
            match = HARDWARE.fullmatch(name)
            if not match or match["kind"] in ("cpu", "gpu", "fake"):
                raise ValueError(f"{name!r} should be a device of your own by kind and number, arm:0 for example")
        return devices


class FaultsConfig(Strict):
    timeout_s: float = Field(
        600.0,
        gt=0,
        description="Seconds without a sign of life from any awaited worker, after which replaceable workers are "
        "replaced, or else the run fails.",
    )
    max_restarts: int = Field(
        5, ge=0, description="How often a process of sim or policy workers may be restarted within faults.window_s."
    )
    window_s: float = Field(1800.0, gt=0, description="Seconds over which these restarts are counted.")
    hang_s: float = Field(
        180.0, gt=0, description="Seconds of silence after which a sim or policy worker is killed as hung."
    )

    def conflicts(self) -> Iterator[str]:
        if self.hang_s > self.timeout_s:
            yield (
                f"faults.hang_s={self.hang_s:g} is longer than faults.timeout_s={self.timeout_s:g}, after which the "
                f"run has failed already; try faults.hang_s={self.timeout_s / 2:g}"
            )
