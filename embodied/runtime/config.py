"""Options of the runtime."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodied.config_base import Strict


class ClusterConfig(Strict):
    backend: Literal["auto", "inline", "local"] = Field(
        "auto",
        description="where hosts run: local = processes on this machine, inline = all in one process for debugging, "
        "auto = local",
    )


class FaultsConfig(Strict):
    timeout_s: float = Field(600.0, gt=0, description="seconds that any wait may last before the run fails")
