"""Options of reasoning_gym's puzzles."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from embodied.core.options import Requirement
from embodied.envs.config import NamedWithKind
from embodied.envs.text.config import TextConfig


class ReasoningGymConfig(TextConfig, NamedWithKind):
    """Generated puzzles: env.name=reasoning_gym:<task>."""

    env = "embodied.envs.reasoning_gym.env:ReasoningGym"
    needs = Requirement(("reasoning-gym",), "reasoning")
    written = "reasoning_gym:<task>"

    name: str = Field(pattern=r"^reasoning_gym:\w+$", description="reasoning_gym:<name>, any of its tasks.")
    task: str = Field("", description="How results name it; unset: the task's name.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Options of that task, as reasoning_gym has them.")
    partial_scores: bool = Field(False, description="Reward the task's scores below 1 too; only 1 is a success.")
    score_s: float = Field(5.0, gt=0, description="As for math.")

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        listing = 'python -c "import reasoning_gym.factory as f; print(*sorted(f.DATASETS))"'
        return [("", f"env.name=reasoning_gym:NAME for any NAME of: {listing}")]
