"""Options of Gymnasium's envs."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from embodied.envs.config import NamedWithKind, OnSuccess


class GymConfig(NamedWithKind):
    """Any Gymnasium env: env.name=gym:<id>."""

    env = "embodied.envs.gym.env:GymEnv"
    written = "gym:<id>"

    name: str = Field(pattern=r"^gym:\S+$", description="gym:<id>, any registered Gymnasium env.")
    task: str = Field(description="How results name the task; unset: the Gymnasium id.")
    on_success: OnSuccess = Field("terminate", description="As for all envs, if the env reports success.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Arguments for gymnasium.make.")

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        listing = 'python -c "import gymnasium; gymnasium.pprint_registry()"'
        return [("", f"env.name=gym:ID for any ID of: {listing}")]
