"""Options of EnvPool's tasks."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from embodied.core.options import Requirement
from embodied.envs.config import NamedWithKind, OnSuccess

POOL_BYTES, ROW_BYTES, METAWORLD_ROW_BYTES = 0.15e9, 0.003e9, 0.04e9  # measured: worker, each row


class EnvPoolConfig(NamedWithKind):
    """EnvPool's tasks, simulated in C++ by its own threads: env.name=envpool:<id>."""

    env = "embodied.envs.envpool.env:EnvPoolEnv"
    needs = Requirement(("envpool",), "envpool")
    written = "envpool:<id>"

    name: str = Field(pattern=r"^envpool:\S+$", description="envpool:<id>, as EnvPool lists it: envpool:Ant-v5.")
    task: str = Field(description="How results name the task; unset: EnvPool's id.")
    on_success: OnSuccess = Field("terminate", description="As for all envs, if the task reports success.")
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Options of the task: {partially_observable: false} shows MetaWorld's goals."
    )
    video_size: int = Field(256, gt=15, le=1024, multiple_of=2, description="Width and height of video frames.")

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        return [("", 'env.name=envpool:ID for any ID of: python -c "import envpool; print(envpool.list_all_envs())"')]

    def worker_bytes(self, rows: int, num_tasks: int) -> float:
        return POOL_BYTES + rows * (METAWORLD_ROW_BYTES if ":MetaWorld/" in self.name else ROW_BYTES)
