"""The options that vision-language-action families share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field, NonNegativeInt

from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import read_object
from embodied.core.options import Requirement
from embodied.policies.config import CHUNKS, Chunks, LoraOptions

TOKENIZERS = Requirement(("tokenizers",), "vla")
HORIZONS = {"tiny": 8, "full": 50}  # of the flow families' presets
MERGED_ROWS = 64  # merged env rows; a large network spends most of its time reading weights


class VLAConfig(LoraOptions):
    needs = TOKENIZERS
    merged_rows = MERGED_ROWS
    published = True
    sees = True

    pretrained: str | None = Field(
        None, description="Folder of a published model, or of a policy of ours; its weights are the initial ones."
    )
    statistics: str | None = Field(
        None,
        description="Data set that gives the ranges of actions and states, if the model was trained on several; or "
        "the folder of any dataset.",
    )
    instruction: str | None = Field(None, description="The instruction, if the env gives none.")
    gripper: Literal["as_is", "libero", "bridge"] = Field(
        "as_is", description="How the last number, from 0 (closed) to 1 (open), is converted for the env."
    )
    chunks: Chunks = CHUNKS
    keyframes: tuple[NonNegativeInt, ...] = Field(
        (),
        description="In imitation a linear head on the image tokens also predicts these numbers of the state (by "
        "index, from 0) at the next keyframe: where the gripper opens or closes, and the end.",
    )
    lora_path: str | None = Field(
        None, description="Folder of adapters that peft saved, to begin with; rank, scale and targets are theirs."
    )
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="As for mlp.")
    compile: bool = Field(
        False,
        description="Act on CPUs with networks compiled by torch.compile: faster, after a minute at first; needs a C++ "
        "compiler. GPUs capture decisions instead (learner.graphs). A saved policy does not keep it.",
    )


class FlowConfig(VLAConfig):
    """Options of families that make actions out of noise by flow matching."""

    continues_chunks = True

    preset: Literal["tiny", "full"] = Field(
        "tiny", description="Size of a model with random weights; policy.pretrained has its own."
    )
    cameras: tuple[str, ...] = Field(
        (),
        description="The env's cameras in the model's order, for Pi0 base, left wrist, right wrist; unset: all, in "
        "the env's order.",
    )
    horizon: int | None = Field(
        None, gt=0, description="Actions that it predicts at once; null: as the folder or the preset says."
    )
    chunk: int = Field(
        5,
        gt=0,
        description="Actions per decision: the first ones of policy.horizon, played before the next observation.",
    )
    steps: int = Field(4, gt=0, description="Steps from noise to actions; more are finer and slower.")
    relative_actions: int = Field(
        0, ge=0, description="Leading action numbers that are relative to the state's: 6 for openpi's pi0_libero."
    )
    exploration: Literal["flow_sde", "flow_noise"] = Field(
        "flow_sde",
        description="Where RL adds noise: at one random step, with policy.noise_level, or at all steps, with a "
        "learned deviation.",
    )
    noise_level: float = Field(0.5, gt=0, description="Strength of flow_sde's noise.")
    noise_range: tuple[float, float] = Field(
        (0.08, 0.16), description="Range of flow_noise's deviation, in the model's units."
    )
    train: Literal["all", "expert"] = Field(
        "all", description="expert: vision and language are frozen, only the action expert is trained."
    )
    detach_value: bool = Field(False, description="The value's error trains only the value's own weights.")

    @property
    def mixed_precision(self) -> bool:
        return self.dtype == "bfloat16"

    def conflicts(self) -> Iterator[str]:
        if self.horizon:
            yield from self.too_long(self.horizon)

    def too_long(self, horizon: int) -> Iterator[str]:
        """Yields a mistake if decisions have more actions than a model predicts."""
        if self.chunk > horizon:
            yield (
                f"policy.chunk={self.chunk} is more than the {horizon} actions that the model predicts at once; "
                f"try policy.chunk={horizon}"
            )

    def check_chunk(self, horizon: int) -> None:
        """Refuse longer decisions; `horizon` of the folder, which `policy.horizon` replaces."""
        for mistake in self.too_long(self.horizon or horizon):
            raise ConfigError(mistake)

    def check_sizes(self, folder: Path | None) -> None:
        stated = read_object(folder / "config.json", CheckpointError) if folder else {}
        if folder is None and type(self).__module__.startswith("embodied."):  # another package has its own presets
            stated = {"action_horizon": HORIZONS[self.preset]}
        if isinstance(horizon := stated.get("action_horizon") or stated.get("chunk_size"), int):
            self.check_chunk(horizon)
