"""Options of environments of the package verifiers."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from embodied.core.options import LocalPath, Requirement
from embodied.envs.config import NamedWithKind
from embodied.envs.text.config import TextConfig


class VerifiersConfig(TextConfig, NamedWithKind):
    """Environments of the package verifiers: env.name=verifiers:<environment>."""

    env = "embodied.envs.verifiers.env:Verifiers"
    needs = Requirement(elsewhere="verifiers")
    written = "verifiers:<environment>"
    side_by_side: ClassVar[int] = 1  # the process of a hanging rollout is replaced, with all other rollouts in it

    name: str = Field(pattern=r"^verifiers:[\w./-]+$", description="verifiers:<environment>, as the package loads it.")
    task: str = Field("", description="How results name it; unset: the environment's name.")
    python: LocalPath | None = Field(None, description="The interpreter that has the package: FOLDER/bin/python.")
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Its options: of load_environment, or as an [env] block."
    )
    together: bool = Field(
        False,
        description="An episode of the environment plays a whole group of conversations, and scores them together. "
        "false: it is one conversation, whose reward is the sum of its runs'.",
    )
    pictures: bool = Field(False, description="Its messages may show pictures (data URLs).")
    full_score: float = Field(1.0, description="Answers with at least this reward are successes.")
    score_s: float = Field(60.0, gt=0, description="Seconds for a reply or a score; then the conversation is dropped.")
    start_s: float = Field(600.0, gt=0, description="Seconds for loading it, including data sets.")

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        how = "for any NAME that the package verifiers loads there (docs/text_envs.md)"
        return [("", f"env.name=verifiers:NAME env.python=FOLDER/bin/python {how}")]
