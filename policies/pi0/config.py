"""Options of Pi0 and Pi0.5."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from embodied.policies.config import PublishedFolder
from embodied.policies.vla.config import FlowConfig


class Pi0Config(FlowConfig):
    """Pi0 and Pi0.5: images, state and an instruction in, a chunk of actions out of noise."""

    policy = "embodied.policies.pi0.policy:Pi0Policy"

    name: Literal["pi0", "pi05"] = Field(
        description="Images, state and an instruction in, a chunk of actions out of noise: Pi0 and Pi0.5."
    )
    state_in_prompt: bool = Field(
        True, description="Pi0.5 reads the state in its prompt; false for models that were tuned without it."
    )
    augment: bool = Field(
        False, description="Imitation crops, rotates and recolours images at random, as openpi's training does."
    )

    @classmethod
    def recognise(cls, folder: PublishedFolder) -> str | None:
        if "action_expert_variant" not in folder.config:
            return None
        if kind := folder.config.get("type"):  # lerobot says which of the two it is, openpi's weights show it
            return kind
        adaptive = any(name.endswith("time_mlp_in.weight") and "action_" not in name for name in folder.weights())
        return "pi05" if adaptive else "pi0"
