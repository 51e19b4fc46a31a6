"""Options of OpenVLA and OpenVLA-OFT."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import ClassVar, Literal

from pydantic import Field

from embodied.policies.config import PublishedFolder
from embodied.policies.vla.config import VLAConfig


class PrismaticConfig(VLAConfig):
    preset: Literal["tiny", "full"] = Field(
        "tiny", description="Size of a model with random weights; policy.pretrained has its own."
    )
    temperature: float = Field(
        1.0, gt=0, description="Logits are divided by it, in acting and in learning; 1.6 explores more."
    )
    train: Literal["all", "language"] = Field(
        "all",
        description="language: the vision towers are frozen, and an update of several epochs encodes each image once.",
    )
    crop_area: float = Field(
        1.0, gt=0, le=1, description="Share of the image that is used; 0.9 for models tuned on randomly cropped images."
    )
    sft_loss: Literal["actions", "vocabulary"] = Field(
        "actions",
        description="Imitation of tokens teaches the action token among all action tokens, or as upstream among the "
        "whole vocabulary, with the stop token after them.",
    )
    rlds_images: bool = Field(
        False,
        description="Frames first pass through JPEG and TensorFlow's Lanczos filter, as in the data sets that "
        "published LIBERO models were tuned on and in their evaluations.",
    )


class OpenVLAConfig(PrismaticConfig):
    """OpenVLA: one image and an instruction in, one action out, token by token."""

    policy = "embodied.policies.openvla.policy:OpenVLAPolicy"
    alike = ("openvla_oft",)
    chunk: ClassVar[int] = 1

    name: Literal["openvla"] = Field(description="One image and an instruction in, an action as seven tokens out.")
    camera: str | None = Field(None, description="Camera that it uses, if the env has several.")

    @property
    def cameras(self) -> tuple[str | None, ...]:
        return (self.camera,)

    @classmethod
    def recognise(cls, folder: PublishedFolder) -> str | None:
        if folder.config.get("model_type") != "openvla":
            return None
        return "openvla_oft" if any(fnmatch(name, "*--*_checkpoint.*") for name in folder.files) else "openvla"


class OpenVLAOFTConfig(PrismaticConfig):
    """OpenVLA-OFT: images and an instruction in, a chunk of actions out at once."""

    policy = "embodied.policies.openvla.policy:OpenVLAOFTPolicy"
    alike = ("openvla",)

    name: Literal["openvla_oft"] = Field(description="Images and an instruction in, a chunk of actions out at once.")
    cameras: tuple[str, ...] = Field(
        (), description="Cameras that it uses, in this order; unset: all of the env, by name."
    )
    chunk: int = Field(8, gt=0, description="Actions per decision: one policy call plays this many env steps.")
    head: Literal["discrete", "l1"] | None = Field(
        None,
        description="discrete: a token for each number; l1: numbers from a head trained with the L1 loss, with "
        "Laplace noise in RL; null: as the folder says, else discrete.",
    )
    proprio: bool | None = Field(
        None, description="Whether it reads the robot's state (env.state=proprio); null: as the folder says, else no."
    )
    film: bool | None = Field(
        None, description="Whether the instruction modulates the vision towers; null: as the folder says, else no."
    )
    bounds: Literal["quantiles", "extremes"] = Field(
        "quantiles", description="Meaning of -1 and 1: the 1% and 99% quantiles of the data set, or its extremes."
    )
    bidirectional: bool = Field(
        True, description="Every token sees every other one; false for models that were tuned with a causal mask."
    )
    stop_token: bool = Field(
        True, description="The stop token follows the actions, as upstream; RLinf's models were trained without it."
    )
    initial_log_scale: float = Field(
        -2.0, ge=-20, le=20, description="Start of the learned log scale of the l1 head's noise."
    )
