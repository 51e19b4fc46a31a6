"""The base of every policy family's options. Free of torch, so that `--help` stays fast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from embodied.core.errors import ConfigError
from embodied.core.options import Requirement, Strict

OF_SERVER = ("url", "token_from", "weights", "answer_s", "away_s", "gap_limit", "verify")
TEMPLATE = ("system", "template_arguments")
ANSWERING = tuple(
    f"policy.{key}" for key in ("engine", "tensor_parallel", *OF_SERVER, "max_running", "cache_gb", *TEMPLATE)
)
"""Options of a language model that an evaluation may set: how answers are computed, and how messages are written."""


@dataclass(frozen=True)
class PublishedFolder:
    """The files of a published model, by which its family is recognised."""

    config: dict[str, Any]  # config.json
    files: frozenset[str]  # names of the files beside it
    weights: Callable[[], Iterable[str]]  # reads the names of the weights, which takes a moment


class PolicyOptions(Strict):
    """Attributes of every family."""

    name: str

    policy: ClassVar[str] = ""
    """Its class, as my_pkg.my_module:MyPolicy."""

    worker: ClassVar[str] = "embodied.policies.worker:PolicyWorker"
    """What acts with it."""

    alike: ClassVar[tuple[str, ...]] = ()
    """Values of policy.name whose published folders may look the same."""

    @classmethod
    def recognise(cls, folder: PublishedFolder) -> str | None:
        """The policy.name of a published model, if it is of this family."""
        return None

    needs: ClassVar[Requirement] = Requirement()
    """Packages that it needs."""

    merged_rows: ClassVar[int] = 1
    """Env rows that a policy worker answers at once unless the recipe says otherwise."""

    worker_gpus: ClassVar[int] = 1
    """GPUs of a policy worker."""

    published: ClassVar[bool] = False
    """True if others publish models of this family, which `pretrained` and `preset` choose."""

    mixed_precision: ClassVar[bool] = False
    """True if its weights are not all of one precision."""

    sees: ClassVar[bool] = False
    """True if it cannot act without images."""

    reads_pictures: ClassVar[bool] = False
    """True if a text env may show it pictures."""

    window: ClassVar[int | None] = None
    """Tokens of a sliding window that alone limits a conversation."""

    speaks: ClassVar[bool] = False
    """True if this family answers text envs; what a class of yours does, `Policy.speaks` says."""

    def check_images(self, sizes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse an env without images where it needs some, or with too small ones; `sizes` are height and width of the
        images of each camera."""
        if self.sees and not sizes:
            raise ConfigError(
                f"policy.name={self.name} needs images, but this env offers none; set env.cameras of a bundled "
                "simulator, let an env of yours observe some (docs/own_task.md), or try policy.name=mlp"
            )

    @property
    def few_weights(self) -> float:
        """The number of weights if a core may be enough for them; else infinity."""
        return float("inf")

    @property
    def least_weights(self) -> int:
        """A lower bound on the number of weights, if it follows from options; else 0."""
        return 0
