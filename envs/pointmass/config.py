"""Options of the toy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodied.envs.config import PRIVILEGED, SIZE_HELP, CommonEnvConfig, ImageSize


class PointMassConfig(CommonEnvConfig):
    """A toy: push a point with inertia to a target in a square."""

    env = "embodied.envs.pointmass.env:PointMassEnv"

    name: Literal["pointmass"] = Field(description="A toy: move a point to a target, numpy only.")
    task: Literal["reach"] = Field("reach", description="The only task.")
    size: float = Field(1.0, gt=0, description="The world is the square from -size to size.")
    discrete: bool = Field(False, description="Stay, left, right, down, up instead of a force in two dimensions.")
    state: Literal["full", "proprio"] = Field(
        "full", description="Observed numbers: all, or only the point's own position and speed."
    )
    privileged: bool = PRIVILEGED
    cameras: tuple[Literal["top", "near"], ...] = Field(
        (), description="Cameras whose images are observed: the whole world from above, the point's surroundings."
    )
    image_size: ImageSize = Field((32, 32), description=SIZE_HELP)
    instruction: bool = Field(False, description="Observe an instruction text as well.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of the physics, states and rewards.")

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, self.image_size)
