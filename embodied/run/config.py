"""How long a run is, what it starts from, and what it leaves on disk: `run.*`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator, model_validator

from embodied.core.options import LocalPath, Strict


class RunSection(Strict):
    one_of: ClassVar = ("env_steps", "iterations")

    dir: LocalPath = Field(Path("runs"), description="Folder under which every run gets a folder of its own.")
    name: str | None = Field(None, description="First part of that folder's name; null: the recipe's name.")
    env_steps: int | None = Field(None, gt=0, description="Train until this many env steps, in whole iterations; or:")
    iterations: int | None = Field(None, gt=0, description="Train for this many iterations.")
    eval_every: int | None = Field(None, gt=0, description="Evaluate every so many iterations; null: only at the end.")
    save_every: int | None = Field(None, gt=0, description="Save a checkpoint every so many iterations, too.")
    save_minutes: float | None = Field(
        5,
        gt=0,
        description="Save before a crash could cost more than so many minutes of training, and after each iteration "
        "that takes longer; more rarely where saving would take over 5% of the time. null: by save_every only, and "
        "always before evaluations and when the run is stopped.",
    )
    keep: int | None = Field(
        3,
        gt=0,
        description="How many of the newest checkpoints stay, besides the best by the run's evaluations and those "
        "evaluated by hand; null: all.",
    )
    start_from: LocalPath | None = Field(
        None,
        description="Begin with this policy's weights instead of random ones: a run's folder, one of its checkpoints, "
        "or a policy folder. The policy's options must be the same.",
    )
    trace: int = Field(
        5, ge=0, description="Iterations, from the start, of which trace.json gets every piece of work of every worker."
    )

    @field_validator("name")
    @classmethod
    def _one_part_of_a_path(cls, name: str | None) -> str | None:
        if name is not None and (not name.strip() or "/" in name or name.startswith(".") or len(name.encode()) > 100):
            raise ValueError("should be a short name without /; the folder around it is run.dir")
        return name

    @model_validator(mode="after")
    def _one_length(self) -> RunSection:
        if (self.env_steps is None) == (self.iterations is None):
            if self.env_steps:
                raise ValueError(
                    f"run.env_steps={self.env_steps} and run.iterations={self.iterations}: set one of them"
                )
            raise ValueError("run.env_steps or run.iterations: set one, for example run.env_steps=100000")
        return self
