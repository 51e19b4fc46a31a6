"""The options of a policy: one model per family, chosen by `policy.name` and imported when it is named. Families with a
folder have them in its `config.py`. Free of torch, so that `--help` stays fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)
from typing_extensions import TypedDict

from embodied.core.errors import ConfigError
from embodied.core.options import ChosenByName, Requirement, Strict, never_with
from embodied.core.plugins import FAMILIES, Plugins

OF_SERVER = ("url", "token_from", "weights", "answer_s", "away_s", "gap_limit", "verify", "suspects")
TEMPLATE = ("system", "template_arguments")
ANSWERING = tuple(
    f"policy.{key}" for key in ("engine", "tensor_parallel", *OF_SERVER, "max_running", "cache_gb", *TEMPLATE)
)
"""Options of a language model that an evaluation may set: how answers are computed, and how messages are written."""
PLAYING = ("policy.chunk", "policy.chunks", "policy.steps")
"""Options of a robot policy that an evaluation may set: how its actions are computed and played."""


class Chunks(TypedDict, total=False):
    """How an evaluation joins a policy's chunks."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    overlap: NonNegativeInt
    blend: Literal["linear", "real_time"]


CHUNKS = Field(
    default_factory=Chunks,
    description="In evaluations, how a chunk takes over from the one before: overlap, the number of actions that both "
    "predict, and blend: linear mixes them, real_time lets a flow policy make the new chunk so that it continues the "
    "old one. {overlap: 4, blend: real_time}",
)


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

    worker: ClassVar[str] = "embodied.policies.policy_worker:PolicyWorker"
    """What acts with it."""

    alike: ClassVar[tuple[str, ...]] = ()
    """Values of policy.name whose published folders may look the same."""

    @classmethod
    def recognise(cls, folder: PublishedFolder) -> str | None:
        """The policy.name of a published model, if it is of this family."""
        return None

    needs: ClassVar[Requirement] = Requirement()
    """Packages that it needs."""

    sends_weights: ClassVar[bool] = True
    """False: its workers read its folder themselves."""

    acts_best: ClassVar[bool] = False
    """True: it plays its best actions and learns nothing."""

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

    speaks: ClassVar[bool] = False
    """True if this family answers text envs; what a class of yours does, `Policy.speaks` says."""

    loaded_by: ClassVar[str] = ""
    """Code of another program that loads its published folder {name}, for a model card."""

    continues_chunks: ClassVar[bool] = False
    """True if it makes chunks that continue given actions."""

    def chunk_rule(self, delay: int) -> ChunkRule | None:
        """How evaluations with this delay play its chunks; None: each as a whole, at once."""
        stated, length = getattr(self, "chunks", {}), getattr(self, "chunk", 1)
        if not delay and not stated:
            return None
        from embodied.core.chunks import ChunkRule

        rule = ChunkRule(delay, stated.get("overlap", 0), stated.get("blend") == "real_time")
        if rule.real_time and not self.continues_chunks:
            raise ConfigError(f"policy.chunks.blend=real_time needs a flow policy, and this is {self.name}; try linear")
        if self.speaks and rule.num_continued:
            raise ConfigError(f"eval.delay={delay} counts env steps, and policy.name={self.name} answers in words")
        rule.check(length, f"policy.chunk={length}")
        return rule if rule.num_continued else None

    def check_sizes(self, folder: Path | None) -> None:
        """Refuse options beyond the sizes of the published model in this folder, as its config.json states them; None:
        of a new model."""

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


ADAPTERS = Requirement(("peft",), "vla")
SETS = ("linear", "reference")  # of layers


def a_set_or_names(value: Any) -> Any:
    if not isinstance(value, str | list | tuple):
        raise ValueError("should be linear, reference, or names of layers such as [q_proj, v_proj]")
    return (value,) if isinstance(value, str) and value not in SETS else value


LoraTargets = Annotated[Literal[SETS] | tuple[str, ...], BeforeValidator(a_set_or_names)]


class LoraFields(TypedDict, total=False):
    """peft's fields of a LoraConfig that `policy.lora_config` may set, with peft's meanings."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)

    use_dora: bool
    use_rslora: bool
    rank_pattern: dict[str, PositiveInt]
    alpha_pattern: dict[str, PositiveFloat]
    modules_to_save: tuple[str, ...]


LORA_FIELDS = tuple(LoraFields.__annotations__)
MOST_CHOICES = 5  # of a pattern; the time to match one grows exponentially with them


def with_patterns(fields: LoraFields) -> LoraFields:
    for name in (*fields.get("rank_pattern", ()), *fields.get("alpha_pattern", ())):
        try:
            re.compile(name)
        except re.error as err:
            raise ValueError(f"{name!r} is no regular expression for names of layers: {err}") from None
        if len(re.findall(r"[*+?{)]", name)) > MOST_CHOICES or re.search(r"\)[*+{]", name):
            raise ValueError(
                f"{name!r} could take forever to match: it may repeat characters, not groups, and hold at most "
                f"{MOST_CHOICES} of ) * + ? {{; name the layers, or parts of their names"
            )
    return fields


class LoraOptions(PolicyOptions):
    """Options of families that LoRA trains."""

    lora_rank: int | None = Field(
        None, gt=0, description="Train adapters of this rank beside frozen weights (LoRA); null: train all weights."
    )
    lora_scale: float = Field(1.0, gt=0, description="Factor of an adapter's output: its alpha / rank.")
    lora_targets: LoraTargets = Field(
        "linear",
        description="Layers that get an adapter. linear: the used linear layers, without lm_head; reference: the "
        "layers of the published recipes (peft 0.11's all-linear), with lm_head, patches and SigLIP's pooling; or a "
        "list of names or their endings.",
    )
    lora_init: Literal["kaiming", "gaussian"] = Field(
        "kaiming",
        description="Initial values of an adapter's first matrix: peft's default, or with deviation 1 / rank, as in "
        "OpenVLA's recipe.",
    )
    lora_config: Annotated[LoraFields, AfterValidator(with_patterns)] = Field(
        default_factory=LoraFields,
        description="More fields of peft's LoraConfig: use_dora, use_rslora, rank_pattern, alpha_pattern, "
        "modules_to_save.",
    )

    @model_validator(mode="after")
    def _adapters_exist(self) -> LoraOptions:
        if self.lora_config and not self.lora_rank and not getattr(self, "lora_path", None):
            raise ValueError("policy.lora_config describes adapters, and there are none: set policy.lora_rank")
        return self


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
    chunks: Chunks = CHUNKS
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
    encoder: Literal["colors"] | None = Field(
        None,
        description="colors: instead of convolutions, represent an image by the positions at which each of 14 hues, "
        "light and dark are strongest. None of it is trained. For objects of another color than what surrounds them.",
    )
    estimate: bool = Field(
        False,
        description="Learn to estimate the env's privileged numbers from the images, and act on these estimates and "
        "the state; needs env.privileged.",
    )

    @property
    def num_features(self) -> int:
        return 1 if self.keypoints or self.encoder else self.features

    @property
    def least_image_side(self) -> int:
        """Height and width, in pixels, of the smallest image that the convolutions accept."""
        if self.encoder:
            return 1
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
    rules = (
        never_with("features", {"keypoints": True}, "these make two numbers of each channel; leave it out"),
        never_with(
            "channels kernels strides features keypoints", {"encoder": "colors"}, "it has no convolutions; leave it out"
        ),
    )

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


def odd_addresses(*urls: str) -> Iterator[str]:
    """What is wrong with hosts and ports of servers."""
    for url in urls:
        try:
            urlsplit(url).port  # noqa: B018
        except ValueError as err:
            yield f"policy.url={url} is no address ({err}); write host and port, such as 127.0.0.1:8000"


class RemoteConfig(PolicyOptions):
    """A server that acts, in vla-eval's model protocol. It is evaluated, and learns nothing."""

    policy = "embodied.policies.remote.policy:RemotePolicy"
    worker = "embodied.policies.remote.policy:RemoteWorker"
    continues_chunks = True  # if the server's policy does
    compile: ClassVar[bool] = False
    dtype: ClassVar[str] = ""

    name: Literal["remote"] = "remote"
    url: str = Field(pattern=r"^wss?://\S+$", description="Address of the server, such as ws://127.0.0.1:8000.")
    chunk_length: int = Field(
        1,
        gt=0,
        description="Actions of an answer: 1, or the policy.chunk of a server of ours, for whole chunks. With "
        "eval.delay or policy.chunks the server says it.",
    )
    chunks: Chunks = CHUNKS
    token_from: str = Field(
        "EMBODIED_SERVE_TOKEN",
        description="Environment variable, or file with a / in its name, that holds the server's token.",
    )
    answer_s: float = Field(120.0, gt=0, description="Seconds in which the server must answer an observation.")

    @property
    def chunk(self) -> int:
        """Actions per decision."""
        return self.chunk_length

    @property
    def few_weights(self) -> float:
        return 0

    def conflicts(self) -> Iterator[str]:
        yield from odd_addresses(self.url)


ONNX = "policy.onnx"  # in an exported folder; without it, operations of PyTorch


class ExportedConfig(PolicyOptions):
    """A policy that `embodied.export` wrote, without the code of its family."""

    policy = "embodied.policies.exported:ExportedPolicy"
    sends_weights = False
    acts_best = True

    compile: ClassVar[bool] = False
    dtype: ClassVar[str] = ""  # the program's

    name: Literal["exported"] = Field(description="A policy that embodied.export wrote; it only acts.")
    pretrained: str = Field(".", description="The folder that embodied.export wrote.")
    chunk: int = Field(1, gt=0, description="Actions per decision: one policy call plays this many env steps.")
    chunks: Chunks = CHUNKS
    noise: tuple[Literal["normal", "uniform"], NonNegativeInt] = Field(
        ("normal", 0), description="Kind and count of the random numbers of a decision, as of the policy it was."
    )

    @property
    def few_weights(self) -> float:
        return 0  # unknown


POLICY_CONFIGS = Plugins(FAMILIES, "policy.name", {"external": ExternalPolicyConfig, "remote": RemoteConfig})


def family_of(value: Any) -> str:
    """The tag of the model that a policy section belongs to."""
    name = str(value.get("name", "mlp") if isinstance(value, dict) else getattr(value, "name", "mlp"))
    return "external" if ":" in name else name


if TYPE_CHECKING:
    from embodied.core.chunks import ChunkRule

    PolicyConfig = Any
else:
    PolicyConfig = Annotated[PolicyOptions, ChosenByName(POLICY_CONFIGS, family_of)]
