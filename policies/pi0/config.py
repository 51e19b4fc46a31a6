"""Options of Pi0 and Pi0.5."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, NonNegativeInt

from embodied.policies.vla.config import MERGED_ROWS, TOKENIZERS, LoraOptions


class Pi0Config(LoraOptions):
    needs = TOKENIZERS
    merged_rows = MERGED_ROWS
    published = True
    sees = True

    name: Literal["pi0", "pi05"] = Field(
        description="Images, state and an instruction in, a chunk of actions out of noise: Pi0 and Pi0.5."
    )
    preset: Literal["tiny", "full"] = Field(
        "tiny", description="Size of a model with fresh weights; with policy.pretrained the folder says."
    )
    pretrained: str | None = Field(
        None, description="Folder of a published model (openpi's or lerobot's), or of a policy of ours."
    )
    statistics: str | None = Field(
        None,
        description="Whose mean, deviation and quantiles states and actions are normalised by: a data set that the "
        "folder names, or the folder of any dataset; null: the folder's only ones, without a folder none.",
    )
    cameras: tuple[str, ...] = Field(
        (), description="The env's cameras in the model's order: base, left wrist, right wrist; unset: all, in theirs."
    )
    instruction: str | None = Field(None, description="The instruction where the env gives none.")
    state_in_prompt: bool = Field(
        True, description="Pi0.5 reads the state in its prompt; false for models that were tuned without."
    )
    horizon: int | None = Field(
        None, gt=0, description="Actions it predicts at once; null: as many as the folder or the preset says."
    )
    chunk: int = Field(5, gt=0, description="The first so many of them are one decision: played before it looks again.")
    steps: int = Field(4, gt=0, description="Steps from noise to actions; more are finer and slower.")
    relative_actions: int = Field(
        0,
        ge=0,
        description="Leading action numbers that are relative to the state's: 6 for openpi's pi0_libero.",
    )
    gripper: Literal["as_is", "libero", "bridge"] = Field(
        "as_is", description="How the last number, from 0 (closed) to 1 (open), becomes what the env takes."
    )
    exploration: Literal["flow_sde", "flow_noise"] = Field(
        "flow_sde",
        description="Where RL's noise comes in: at one random step, of policy.noise_level, or at all steps, learned.",
    )
    noise_level: float = Field(0.5, gt=0, description="How strong flow_sde's noise is.")
    noise_range: tuple[float, float] = Field(
        (0.08, 0.16), description="Between which deviations flow_noise's lies, in the model's units."
    )
    train: Literal["all", "expert"] = Field(
        "all", description="expert: what sees and reads is frozen, only what acts is trained."
    )
    detach_value: bool = Field(False, description="The value's error trains nothing but the value's own weights.")
    augment: bool = Field(
        False,
        description="Imitation sees images cropped, turned and coloured at random, as in openpi's training.",
    )
    keyframes: tuple[NonNegativeInt, ...] = Field((), description="As for openvla.")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="As for mlp.")
    compile: bool = Field(False, description="As for openvla.")

    @property
    def mixed_precision(self) -> bool:
        return self.dtype == "bfloat16"
