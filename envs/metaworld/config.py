"""Options of MetaWorld's tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodied.core.options import Requirement
from embodied.envs.config import ImageSize, NamedWithKind

METAWORLD_BYTES, SINGLE_BYTES = 0.15e9, 0.01e9  # measured: worker, each simulation
Camera = Literal["topview", "corner", "corner2", "corner3", "corner4", "behindGripper", "gripperPOV"]


class MetaWorldConfig(NamedWithKind):
    """MetaWorld's 50 tasks of a Sawyer arm, alone or as MT10, MT50, ML1, ML10, ML45: env.name=metaworld:<task>."""

    env = "embodied.envs.metaworld.env:MetaWorldEnv"
    needs = Requirement(elsewhere="metaworld")
    written = "metaworld:<task>"

    name: str = Field(
        pattern=r"^metaworld:\S+$",
        description="metaworld:reach-v3, MT10, MT25 or MT50; with hidden goals ML1/reach-v3, ML10, ML25 or ML45, and "
        "ML10/test with the tasks that are kept for tests.",
    )
    task: str = Field(description="How results name it; unset: MetaWorld's name.")
    num_envs: int = Field(16, gt=0, description="As for all envs; every row is a simulation of its own.")
    cameras: tuple[Camera, ...] = Field((), description="Cameras whose images are observed.")
    image_size: ImageSize = Field((84, 84), description="Height and width of these images in pixels.")
    video_size: int = Field(256, gt=15, le=1024, multiple_of=2, description="Width and height of video frames.")

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        return [("", "env.name=metaworld:NAME, NAME as reach-v3, pick-place-v3, MT10, MT50, ML1/reach-v3, ML10, ML45")]

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, self.image_size)

    def worker_bytes(self, rows: int, num_tasks: int) -> float:
        """A row keeps a simulation of each task that it has played, for itself or another row."""
        return METAWORLD_BYTES + rows * num_tasks * SINGLE_BYTES
