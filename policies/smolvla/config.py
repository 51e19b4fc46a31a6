"""Options of SmolVLA."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodied.policies.config import PublishedFolder
from embodied.policies.vla.config import FlowConfig


class SmolVLAConfig(FlowConfig):
    """SmolVLA: images, state and an instruction in, a chunk of actions out of noise."""

    policy = "embodied.policies.smolvla.policy:SmolVLAPolicy"
    loaded_by = (
        "from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy\n\n"
        'policy = SmolVLAPolicy.from_pretrained("{name}")'
    )

    name: Literal["smolvla"] = Field(
        description="Images, state and an instruction in, a chunk of actions out of noise: lerobot's SmolVLA."
    )
    steps: int = Field(10, gt=0, description="As for pi0.")

    @classmethod
    def recognise(cls, folder: PublishedFolder) -> str | None:
        return "smolvla" if folder.config.get("type") == "smolvla" else None
