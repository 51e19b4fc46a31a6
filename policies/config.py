"""Options of the policy families. Free of torch, so that `--help` stays fast."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from embodied.config_base import Strict


class MLPConfig(Strict):
    name: Literal["mlp"] = Field("mlp", description="Policy family: mlp, or my_pkg.my_module:MyPolicy for your own.")
    hidden: tuple[int, ...] = Field((256, 256, 256), min_length=1, description="Width of each hidden layer.")
    activation: Literal["tanh", "relu", "silu"] = Field("tanh", description="Activation between the layers.")
    initial_log_std: float = Field(
        -0.5, description="Start of the learned log standard deviation (continuous actions)."
    )
    normalize_observations: bool = Field(
        False, description="Track mean and variance of the state and normalise with them."
    )
    normalize_floor: float = Field(
        1e-3,
        gt=0,
        description="Deviation, in units of the state, below which normalising blows nothing up any further.",
    )
    chunk: int = Field(1, gt=0, description="Actions per decision: one policy call plays this many env steps.")
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        "float32",
        description="Precision of weights and matrix products; bfloat16 weights are trained through a float32 copy.",
    )


class ExternalPolicyConfig(Strict):
    name: str = Field(pattern=r"^[\w.]+:\w+$", description="Your own policy class, as my_pkg.my_module:MyPolicy.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Handed to your class as it is.")


def _family(value: Any) -> str:
    name = value.get("name", "mlp") if isinstance(value, dict) else getattr(value, "name", "mlp")
    return "external" if ":" in str(name) else "mlp"


PolicyConfig = Annotated[
    Annotated[MLPConfig, Tag("mlp")] | Annotated[ExternalPolicyConfig, Tag("external")],
    Discriminator(_family),
]
