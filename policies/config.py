"""Options of the policy families. Free of torch, so that `--help` stays fast."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, NonNegativeInt, PositiveInt, Tag, model_validator

from embodied.core.options import LocalPath, Strict

SETS = ("linear", "reference")  # of layers


def a_set_or_names(value: Any) -> Any:
    if not isinstance(value, str | list | tuple):
        raise ValueError("should be linear, reference, or names of layers such as [q_proj, v_proj]")
    return (value,) if isinstance(value, str) and value not in SETS else value


LoraTargets = Annotated[Literal[SETS] | tuple[str, ...], BeforeValidator(a_set_or_names)]


class PolicyOptions(Strict):
    """Attributes that the toolkit asks of every family."""

    merged_rows: ClassVar[int] = 1
    """Env rows that a policy worker answers at once unless the recipe says otherwise."""

    published: ClassVar[bool] = False
    """True if others publish models of this family, which `pretrained` and `preset` choose."""

    mixed_precision: ClassVar[bool] = False
    """True if its weights are not all of one precision."""

    speaks: ClassVar[bool] = False
    """Whether this family answers text envs; what a class of yours does, `Policy.speaks` says."""


class ActorCriticConfig(PolicyOptions):
    """The options that small policies with an actor and a critic share."""

    compile: ClassVar[bool] = False

    hidden: tuple[PositiveInt, ...] = Field((256, 256, 256), min_length=1, description="Width of each hidden layer.")
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


class MLPConfig(ActorCriticConfig):
    name: Literal["mlp"] = Field(
        "mlp", description="Policy family: mlp, cnn, openvla, openvla_oft, pi0, pi05, or my_pkg.my_module:MyPolicy."
    )


class CNNConfig(ActorCriticConfig):
    name: Literal["cnn"] = Field(description="Images of any number of cameras, and the state where there is one.")
    channels: tuple[PositiveInt, ...] = Field((16, 32, 32), min_length=1, description="Channels of each convolution.")
    kernels: tuple[PositiveInt, ...] = Field((8, 4, 3), min_length=1, description="Width of each convolution's kernel.")
    strides: tuple[PositiveInt, ...] = Field((4, 2, 1), min_length=1, description="Step of each convolution's kernel.")
    features: int = Field(128, gt=0, description="Numbers that each camera's image becomes.")
    keypoints: bool = Field(
        False,
        description="An image becomes places instead of policy.features numbers: where in it each channel of the last "
        "convolution is strongest (spatial softmax). Give the later layers strides of 1.",
    )
    estimate: bool = Field(
        False,
        description="Learn to estimate the env's privileged numbers from the images, and act on these estimates and "
        "the state; needs env.privileged.",
    )

    @model_validator(mode="after")
    def _layers_are_complete(self) -> CNNConfig:
        if len({len(self.channels), len(self.kernels), len(self.strides)}) > 1:
            raise ValueError(
                f"policy.channels={list(self.channels)}, policy.kernels={list(self.kernels)} and "
                f"policy.strides={list(self.strides)} describe the same layers; give each as many numbers"
            )
        if self.keypoints and self.features != type(self).model_fields["features"].default:
            raise ValueError(
                f"policy.features={self.features} has no effect with policy.keypoints=true, which makes two numbers of "
                "each channel; leave one of them out"
            )
        return self


MERGED_ROWS = 64  # of a large network, most of whose time goes into reading its weights


class VLAConfig(PolicyOptions):
    """The options that vision-language-action families share."""

    merged_rows = MERGED_ROWS
    published = True

    pretrained: str | None = Field(
        None, description="Folder of a published model, or of a policy of ours; its weights are the initial ones."
    )
    statistics: str | None = Field(
        None,
        description="Data set whose ranges actions and states have, where the model was trained on several; or the "
        "folder of any dataset.",
    )
    instruction: str | None = Field(None, description="The instruction where the env gives none.")
    gripper: Literal["as_is", "libero", "bridge"] = Field(
        "as_is", description="How the last number, from 0 (closed) to 1 (open), becomes what the env takes."
    )
    keyframes: tuple[NonNegativeInt, ...] = Field(
        (),
        description="Imitation also teaches the image tokens, by a linear head on them, these numbers of the "
        "state (by place, from 0): as they will be at the next keyframe, where the gripper opens or "
        "closes, and at the end.",
    )
    lora_rank: int | None = Field(
        None, gt=0, description="Train adapters of this rank beside frozen weights (LoRA); null: train all weights."
    )
    lora_scale: float = Field(1.0, gt=0, description="What an adapter's effect is multiplied by: its alpha / rank.")
    lora_targets: LoraTargets = Field(
        "linear",
        description="Which layers get one. linear: linear layers that are used, without lm_head; reference: all that "
        "the published recipes adapt (peft 0.11's all-linear), lm_head, patches and SigLIP's pooling too; or their "
        "names, or how these end.",
    )
    lora_init: Literal["kaiming", "gaussian"] = Field(
        "kaiming",
        description="How an adapter's first matrix begins: as peft's default, or with deviation 1 / rank, as OpenVLA's "
        "recipe asks for.",
    )
    lora_path: str | None = Field(
        None, description="Folder of adapters that peft saved, to begin with; rank, scale and targets are theirs."
    )
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="As for mlp.")
    compile: bool = Field(
        False,
        description="Act with networks that torch.compile has fused: faster, after a minute at first. On a CPU needs "
        "a C++ compiler. A saved policy does not keep it.",
    )


class PrismaticConfig(VLAConfig):
    preset: Literal["tiny", "full"] = Field(
        "tiny", description="Size of a model with fresh weights; with policy.pretrained the folder says."
    )
    temperature: float = Field(
        1.0, gt=0, description="Logits are divided by it, in acting and in learning; 1.6 explores more."
    )
    train: Literal["all", "language"] = Field(
        "all",
        description="language: the vision towers are frozen, and an update of several epochs looks at each image once.",
    )
    crop_area: float = Field(
        1.0, gt=0, le=1, description="Part of the image it looks at; 0.9 for models tuned on randomly cropped images."
    )
    sft_loss: Literal["actions", "vocabulary"] = Field(
        "actions",
        description="What imitation of tokens teaches: which action token; or, as upstream, which of all words, and "
        "the stop token behind them.",
    )
    rlds_images: bool = Field(
        False,
        description="Frames first pass through JPEG and TensorFlow's Lanczos filter, as in the data sets that "
        "published LIBERO models were tuned on and in their evaluations.",
    )


class OpenVLAConfig(PrismaticConfig):
    chunk: ClassVar[int] = 1

    name: Literal["openvla"] = Field(description="One image and an instruction in, an action as seven tokens out.")
    camera: str | None = Field(None, description="Camera it looks through, where the env has several.")

    @property
    def cameras(self) -> tuple[str | None, ...]:
        return (self.camera,)


class OpenVLAOFTConfig(PrismaticConfig):
    name: Literal["openvla_oft"] = Field(description="Images and an instruction in, a chunk of actions out at once.")
    cameras: tuple[str, ...] = Field(
        (), description="Cameras it looks through, in this order; unset: all the env has, by name."
    )
    chunk: int = Field(8, gt=0, description="Actions per decision: one policy call plays this many env steps.")
    head: Literal["discrete", "l1"] | None = Field(
        None,
        description="discrete: a token for each number; l1: numbers from a head trained with the L1 loss, on the way "
        "there and in RL with Laplace noise around them; null: as the folder says, else discrete.",
    )
    proprio: bool | None = Field(
        None,
        description="Whether it reads the robot's state (env.state=proprio); null: as the folder says, else no.",
    )
    film: bool | None = Field(
        None, description="Whether the instruction modulates the vision towers; null: as the folder says, else no."
    )
    bounds: Literal["quantiles", "extremes"] = Field(
        "quantiles", description="What -1 and 1 stand for: the 1% and 99% quantiles of the data set, or its extremes."
    )
    bidirectional: bool = Field(
        True, description="Every token sees every other one; false for models that were tuned with a causal mask."
    )
    stop_token: bool = Field(
        True, description="The stop token follows the actions, as upstream; RLinf's models were trained without it."
    )
    initial_log_scale: float = Field(-2.0, description="Start of the learned log scale of the l1 head's noise.")


class Pi0Config(PolicyOptions):
    merged_rows = MERGED_ROWS
    published = True

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
    lora_rank: int | None = Field(None, gt=0, description="As for openvla.")
    lora_scale: float = Field(1.0, gt=0, description="As for openvla.")
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="As for mlp.")
    compile: bool = Field(False, description="As for openvla.")

    @property
    def mixed_precision(self) -> bool:
        return self.dtype == "bfloat16"


OF_SERVER = ("url", "token_from", "weights", "answer_s", "away_s")
ANSWERING = tuple(f"policy.{key}" for key in ("engine", *OF_SERVER, "max_running", "cache_gb"))
"""Keys that say how a language model's answers are made, not what they are."""


class LanguageConfig(PolicyOptions):
    published = True
    speaks = True
    compile: ClassVar[bool] = False
    chunk: ClassVar[int] = 1
    of_engine: ClassVar = OF_SERVER

    name: Literal["language"] = Field(description="A causal language model, for text envs.")
    preset: Literal["tiny", "tiny_gpt2"] = Field(
        "tiny",
        description="A model with fresh weights and a tokenizer of characters: Qwen3's shape or GPT-2's; with "
        "policy.pretrained the folder says.",
    )
    pretrained: str | None = Field(
        None,
        description="Folder or hub id of a published model, or a policy folder of ours; its weights are the first.",
    )
    engine: Literal["transformers", "vllm", "http"] = Field(
        "transformers",
        description="What generates: our own loop over the model, vLLM in the policy worker's process (make vllm), or "
        "the server at policy.url.",
    )
    url: str | None = Field(
        None,
        description="Where policy.engine=http finds its server, python -m embodied.serve or vllm serve: "
        "http://127.0.0.1:8000.",
    )
    token_from: str = Field(
        "EMBODIED_SERVE_TOKEN",
        description="Environment variable, or file with a / in its name, that holds the server's token; the token "
        "itself is written down nowhere.",
    )
    weights: LocalPath | None = Field(
        None,
        description="Folder in which the server finds new weights, under the same name here and there; null: it keeps "
        "its own, which must be the checkpoint's, for evaluations alone.",
    )
    answer_s: float = Field(
        600.0, gt=0, description="Seconds that the server has for an answer, and for taking new weights."
    )
    away_s: float = Field(
        60.0,
        gt=0,
        description="Seconds that the server may be away or failing before the run fails; a request is then asked "
        "again.",
    )
    max_tokens: int = Field(512, gt=0, description="Tokens of an answer, at most; then it counts as cut off.")
    max_length: int | None = Field(
        None, gt=0, description="Tokens of a whole conversation, at most; null: as many as the model has positions."
    )
    max_running: int = Field(64, gt=0, description="Conversations that a policy worker continues at a time.")
    cache_gb: float | None = Field(
        None,
        gt=0,
        description="Memory for the keys and values of these; null: what max_running and max_length ask for.",
    )
    chat: bool | None = Field(
        None,
        description="Put messages into words with the model's chat template; null: if it has one. false: their "
        "contents alone.",
    )
    train_layers: int | None = Field(
        None, gt=0, description="Train only so many of the last layers and the final norm; null: all weights."
    )
    lora_rank: int | None = Field(None, gt=0, description="As for openvla.")
    lora_scale: float = Field(1.0, gt=0, description="As for openvla.")
    lora_targets: LoraTargets = Field("linear", description="As for openvla.")
    value_head: bool = Field(
        False,
        description="Predict what the rest of a conversation is worth before every token, a linear map of what the "
        "network makes of the text so far: needed by algo.name=ppo.",
    )
    dtype: Literal["float32", "float64", "bfloat16"] = Field("float32", description="As for mlp.")

    @property
    def mixed_precision(self) -> bool:
        return False

    @property
    def merged_rows(self) -> int:
        return self.max_running

    @model_validator(mode="after")
    def _the_server_is_named(self) -> LanguageConfig:
        usual = type(self).model_fields
        if self.engine != "http":
            if given := [key for key in self.of_engine if getattr(self, key) != usual[key].default]:
                raise ValueError(
                    f"policy.{given[0]} has no effect with policy.engine={self.engine}; leave it out, or set "
                    "policy.engine=http"
                )
            return self
        if self.url is None:
            raise ValueError("policy.engine=http asks a server: set policy.url, such as http://127.0.0.1:8000")
        if not re.fullmatch(r"https?://[^/@\s?#]+(/[^@\s?#]*)?", self.url):
            raise ValueError("policy.url should be like http://127.0.0.1:8000, without a user's name or a password")
        if "/" not in self.token_from and not re.fullmatch(r"[A-Za-z_]\w*", self.token_from):
            raise ValueError("policy.token_from names an environment variable, or a file with a / in its name")
        return self


class ExternalPolicyConfig(PolicyOptions):
    chunk: ClassVar[int] = 1
    compile: ClassVar[bool] = False
    dtype: ClassVar[str] = ""  # the class's own
    max_tokens: ClassVar[int | None] = None  # likewise

    name: str = Field(pattern=r"^[\w.]+:\w+$", description="Your own policy class, as my_pkg.my_module:MyPolicy.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Handed to your class as it is.")


def _family(value: Any) -> str:
    name = str(value.get("name", "mlp") if isinstance(value, dict) else getattr(value, "name", "mlp"))
    return "external" if ":" in name else name


PolicyConfig = Annotated[
    Annotated[MLPConfig, Tag("mlp")]
    | Annotated[CNNConfig, Tag("cnn")]
    | Annotated[OpenVLAConfig, Tag("openvla")]
    | Annotated[OpenVLAOFTConfig, Tag("openvla_oft")]
    | Annotated[Pi0Config, Tag("pi0")]
    | Annotated[Pi0Config, Tag("pi05")]
    | Annotated[LanguageConfig, Tag("language")]
    | Annotated[ExternalPolicyConfig, Tag("external")],
    Discriminator(_family),
]
