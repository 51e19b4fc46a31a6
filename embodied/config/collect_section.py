"""How demonstrations are collected."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodied.core.options import Strict


class CollectSection(Strict):
    episodes: int = Field(50, gt=0, description="Episodes that are played, never those of training or evaluation.")
    expert: Literal["scripted", "planner"] = Field("scripted", description="Our script or ManiSkill's motion planner.")
    keep: Literal["successes", "all"] = Field("successes", description="Which of them become demonstrations.")
    noise: float = Field(
        0.0,
        ge=0,
        description="Deviation of the noise on the actions that are played; recorded is what was wanted, so that the "
        "demonstrations show how to recover.",
    )
