"""What the options of every policy family have. Free of torch, so that `--help` stays fast."""

from __future__ import annotations

from typing import ClassVar

from embodied.core.options import Requirement, Strict


class PolicyOptions(Strict):
    """Attributes that the toolkit asks of every family."""

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

    speaks: ClassVar[bool] = False
    """True if this family answers text envs; what a class of yours does, `Policy.speaks` says."""

    @property
    def few_weights(self) -> float:
        """The number of weights where it may be so small that a core is enough; else infinity."""
        return float("inf")

    @property
    def least_weights(self) -> int:
        """The number of weights that it has at least, where options alone say so; else 0."""
        return 0
