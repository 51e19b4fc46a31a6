"""The options of a policy: one model per family, chosen by `policy.name` and imported when it is named. Families with a
folder have them in its `config.py`. Free of torch, so that `--help` stays fast.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from embodied.core.errors import ConfigError
from embodied.core.options import ChosenByName, never_with
from embodied.core.plugins import FAMILIES, Plugins
from embodied.policies.common_config import PolicyOptions


class ActorCriticConfig(PolicyOptions):
    """The options common to small policies with an actor and a critic."""

    compile: ClassVar[bool] = False

    hidden: tuple[PositiveInt, ...] = Field((256, 256, 256), min_length=1, description="Width of each hidden layer.")
    activation: Literal["tanh", "relu", "silu"] = Field("tanh", description="Activation between the layers.")
    initial_log_std: float = Field(
        -0.5, ge=-20, le=20, description="Start of the learned log standard deviation (continuous actions)."
    )
    normalize_observations: bool = Field(
        False, description="Track mean and variance of the state and normalise with them."
    )
    normalize_floor: float = Field(
        1e-3,
        gt=0,
        description="Smallest standard deviation by which the state is divided, in units of the state.",
    )
    chunk: int = Field(1, gt=0, description="Actions per decision: one policy call plays this many env steps.")
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32",
        description="Precision of weights and matrix products; bfloat16 weights are trained through a float32 copy.",
    )

    @property
    def num_features(self) -> int:
        """The number of inputs of the first hidden layer, at least."""
        return 1

    @property
    def least_weights(self) -> int:
        return sum(a * b for a, b in pairwise((self.num_features, *self.hidden, self.chunk)))


class MLPConfig(ActorCriticConfig):
    """A network of a few layers on the state."""

    policy = "embodied.policies.networks:MLPPolicy"

    name: Literal["mlp"] = Field(
        "mlp",
        description="Policy family: mlp, cnn, openvla, openvla_oft, pi0, pi05, smolvla, or my_pkg.my_module:MyPolicy.",
    )

    @property
    def few_weights(self) -> float:
        return 2 * sum(a * b for a, b in pairwise(self.hidden))  # an actor's and a critic's


class CNNConfig(ActorCriticConfig):
    """Convolutions on the images of any number of cameras, and the state where there is one."""

    policy = "embodied.policies.networks:CNNPolicy"
    sees = True

    name: Literal["cnn"] = Field(description="Images of any number of cameras, and the state where there is one.")
    channels: tuple[PositiveInt, ...] = Field((16, 32, 32), min_length=1, description="Channels of each convolution.")
    kernels: tuple[PositiveInt, ...] = Field((8, 4, 3), min_length=1, description="Width of each convolution's kernel.")
    strides: tuple[PositiveInt, ...] = Field((4, 2, 1), min_length=1, description="Step of each convolution's kernel.")
    features: int = Field(128, gt=0, description="Numbers that represent each camera's image.")
    keypoints: bool = Field(
        False,
        description="Represent an image by the positions at which each channel of the last convolution is strongest "
        "(spatial softmax), instead of policy.features numbers. Give the later layers strides of 1.",
    )
    estimate: bool = Field(
        False,
        description="Learn to estimate the env's privileged numbers from the images, and act on these estimates and "
        "the state; needs env.privileged.",
    )

    @property
    def num_features(self) -> int:
        return 1 if self.keypoints else self.features

    @property
    def least_image_side(self) -> int:
        """Height and width, in pixels, of the smallest image that the convolutions accept."""
        side = 2 if self.keypoints else 1  # of the last layer's output
        for kernel, stride in zip(reversed(self.kernels), reversed(self.strides), strict=True):
            side = max(kernel, (side - 1) * stride + kernel)
        return side

    def check_images(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        super().check_images(sizes)
        for camera, (height, width, *_) in sizes.items():
            if min(height, width) < (least := self.least_image_side):
                raise ConfigError(
                    f"policy.kernels={list(self.kernels)} with policy.strides={list(self.strides)} need images of "
                    f"{least}x{least} pixels or more, and those of camera {camera!r} are {height}x{width}; try larger "
                    f"images (env.image_size={least} of a bundled simulator), or smaller policy.strides"
                )

    section = "policy."
    rules = (never_with("features", {"keypoints": True}, "these make two numbers of each channel; leave it out"),)

    def conflicts(self) -> Iterator[str]:
        if len({len(self.channels), len(self.kernels), len(self.strides)}) > 1:
            yield (
                f"policy.channels={list(self.channels)}, policy.kernels={list(self.kernels)} and "
                f"policy.strides={list(self.strides)} describe the same layers; give each as many numbers"
            )


class ExternalPolicyConfig(PolicyOptions):
    chunk: ClassVar[int] = 1
    compile: ClassVar[bool] = False
    dtype: ClassVar[str] = ""  # chosen by the class
    max_tokens: ClassVar[int | None] = None  # likewise

    name: str = Field(pattern=r"^[\w.]+:\w+$", description="Your own policy class, as my_pkg.my_module:MyPolicy.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Options for your own class.")

    @property
    def few_weights(self) -> float:
        return 0  # unknown


POLICY_CONFIGS = Plugins(FAMILIES, "policy.name", {"external": ExternalPolicyConfig})


def family_of(value: Any) -> str:
    """The tag of the model that a policy section belongs to."""
    name = str(value.get("name", "mlp") if isinstance(value, dict) else getattr(value, "name", "mlp"))
    return "external" if ":" in name else name


if TYPE_CHECKING:
    PolicyConfig = Any
else:
    PolicyConfig = Annotated[PolicyOptions, ChosenByName(POLICY_CONFIGS, family_of)]
