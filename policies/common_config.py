"""What the options of every policy family have. Free of torch, so that `--help` stays fast."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from embodied.core.errors import ConfigError
from embodied.core.options import Requirement, Strict


class PolicyOptions(Strict):
    """Attributes that the toolkit asks of every family."""

    name: str

    needs: ClassVar[Requirement] = Requirement()
    """What has to be installed for it."""

    merged_rows: ClassVar[int] = 1
    """Env rows that a policy worker answers at once unless the recipe says otherwise."""

    published: ClassVar[bool] = False
    """True if others publish models of this family, which `pretrained` and `preset` choose."""

    mixed_precision: ClassVar[bool] = False
    """True if its weights are not all of one precision."""

    sees: ClassVar[bool] = False
    """True if it cannot act without images."""

    reads_pictures: ClassVar[bool] = False
    """True if a text env may show it pictures."""

    speaks: ClassVar[bool] = False
    """True if this family answers text envs; what a class of yours does, `Policy.speaks` says."""

    def check_images(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse an env without images where it needs some, or with too small ones; `sizes` are height and width of the
        images of each camera."""
        if self.sees and not sizes:
            raise ConfigError(
                f"policy.name={self.name} needs images, but this env offers none; set env.cameras, or try "
                "policy.name=mlp"
            )

    @property
    def few_weights(self) -> float:
        """The number of weights where it may be so small that a core is enough; else infinity."""
        return float("inf")

    @property
    def least_weights(self) -> int:
        """The number of weights that it has at least, where options alone say so; else 0."""
        return 0
