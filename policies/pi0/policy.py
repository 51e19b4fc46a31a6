"""Pi0 and Pi0.5 as a policy: images, state and an instruction in, a chunk of actions out of noise (`vla.flow`).

Images and words (the prefix) attend to each other. Pi0's expert reads the state as a token of its own, which attends to
the prefix; actions attend to all tokens. So the prefix does not depend on the suffix, and the state's token does not
depend on actions or time. Pi0.5 has the state in its prompt, as numbers from 0 to 255, and the time conditions the
expert's norms. The value is read at the state's token (Pi0), or over the prefix (Pi0.5).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from embodied.core.arrays import host, tensor_of
from embodied.core.errors import ConfigError
from embodied.core.types import Observation
from embodied.policies.pi0.config import Pi0Config
from embodied.policies.policy_folder import TOKENIZER
from embodied.policies.vla import flow_network as networks
from embodied.policies.vla.config import HORIZONS
from embodied.policies.vla.flow import MODEL, FlowPolicy, FlowSettings, normalization_of
from embodied.policies.vla.layers import NamedParts
from embodied.policies.vla.policy import hashed_words, pad_rows
from embodied.policies.vla.statistics import MEAN_STD, QUANTILES

# Sizes of the networks, read from config.json files of openpi and lerobot


@dataclass(frozen=True, kw_only=True)
class Pi0Settings(FlowSettings):
    @property
    def adaptive(self) -> bool:
        """True for Pi0.5."""
        return self.kind == "pi05"


GEMMAS = {
    "gemma_2b": networks.StackSettings(2048, 18, 16384, 8, 1, 256),
    "gemma_300m": networks.StackSettings(1024, 18, 4096, 8, 1, 256),
    "dummy": networks.StackSettings(64, 4, 128, 8, 1, 16),
    "tiny_language": networks.StackSettings(128, 4, 512, 4, 1, 32),
    "tiny_expert": networks.StackSettings(128, 4, 384, 4, 1, 32),
}
SO400M = networks.VisionSettings(1152, 27, 4304, 16, 14, 224)
TINY_VISION = networks.VisionSettings(128, 3, 384, 4, 16, 64)
VOCAB, TINY_VOCAB = 257152, 1024
MAX_TOKENS = {"pi0": 48, "pi05": 200}

FULL = {
    "action_dim": 32,
    "action_horizon": HORIZONS["full"],
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "precision": "float32",
}
TINY = FULL | {  # a small model does not pad actions
    "action_dim": 8,
    "max_state_dim": 32,
    "action_horizon": HORIZONS["tiny"],
    "paligemma_variant": "tiny_language",
    "action_expert_variant": "tiny_expert",
}
UNSUPPORTED = ("use_relative_actions", "use_visual_memory", "use_proprioceptive_memory")


def settings_of(config: dict[str, Any], names: Collection[str], kind: str | None = None) -> Pi0Settings:
    """Read a published config.json; `names` of the weights distinguish Pi0 from Pi0.5 if it does not (openpi)."""
    kind = kind or config.get("type") or kind_of(names)
    if kind not in MAX_TOKENS:
        raise ValueError(f"type={kind!r}; known: {', '.join(MAX_TOKENS)}")
    if odd := [key for key in UNSUPPORTED if config.get(key)]:
        raise ValueError(f"{odd[0]}={config[odd[0]]!r} is not supported")
    tiny = config["paligemma_variant"] == "tiny_language"
    action_dim = config.get("action_dim") or config["max_action_dim"]
    return Pi0Settings(
        kind=kind,
        language=_gemma(config["paligemma_variant"]),
        expert=_gemma(config["action_expert_variant"]),
        vision=TINY_VISION if tiny else SO400M,
        vocab=TINY_VOCAB if tiny else VOCAB,
        horizon=config.get("action_horizon") or config["chunk_size"],
        action_dim=action_dim,
        state_dim=config.get("max_state_dim", action_dim),
        max_tokens=config.get("max_token_len") or config.get("tokenizer_max_length") or MAX_TOKENS[kind],
        normalization=normalization_of(config, QUANTILES if kind == "pi05" else MEAN_STD),
        tokenizer="words" if tiny else "folder",
        published=config,
    )


def kind_of(names: Collection[str]) -> str:
    """Only Pi0.5 has an MLP for the time alone."""
    ends = {name.rpartition("model.")[2].partition(".")[0] for name in names}
    if "time_mlp_in" in ends:
        return "pi05"
    if "action_time_mlp_in" in ends:
        return "pi0"
    raise ValueError("the weights are neither Pi0's (action_time_mlp_in) nor Pi0.5's (time_mlp_in)")


def _gemma(variant: str) -> networks.StackSettings:
    if variant not in GEMMAS:
        more = ": merge the adapters into the weights first" if str(variant).endswith("_lora") else ""
        raise ValueError(f"{variant!r} is none of the known sizes, {', '.join(GEMMAS)}{more}")
    return GEMMAS[variant]


# The names of weights in published folders. Upstream ties the word embeddings to an unused output layer, and files use
# either name; they also have an unused output layer of the expert.

WORDS = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
TIED = "paligemma_with_expert.paligemma.lm_head.weight"
EXPERT_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"


def own_name(published: str) -> str | None:
    """Our name of a published weight; None if it is unused."""
    name = published.removeprefix(MODEL)
    if name == EXPERT_HEAD:
        return None
    if name == TIED:
        name = WORDS
    return MODEL + name.replace(".vision_tower.vision_model.", ".vision_tower.").replace(
        ".vision_tower.", ".vision_tower.vision_model."
    )


BOS = 2
EDGES = np.linspace(-1, 1, 257)[:-1]  # bin edges of the state's numbers in the prompt


# openpi's image augmentation, drawn separately for each image.
#
# The base camera's images are cropped to 95% at a random place, resized and rotated by up to 5 degrees (with black
# borders); all images change in brightness, contrast and saturation.

DRAWS = 6  # uniform numbers per image: row, column, rotation, brightness, contrast, saturation
CUT, DEGREES, STILL = 0.95, 5.0, 0.1  # rotations below STILL degrees are skipped


def augmented(pixels: Tensor, uniform: Tensor) -> Tensor:
    """Pixels [B, cameras, 3, S, S] from -1 to 1, the base camera first, by uniform numbers [B, cameras, 6]."""
    pixels, uniform = pixels / 2 + 0.5, uniform.to(pixels.dtype)
    base = random_rotation(random_crop(pixels[:, 0], uniform[:, 0, :2]), uniform[:, 0, 2])
    pixels = torch.cat([base[:, None], pixels[:, 1:]], dim=1)
    return random_colours(pixels, uniform[:, :, 3:, None, None, None].unbind(2)) * 2 - 1


def random_crop(pixels: Tensor, uniform: Tensor) -> Tensor:
    """Crops images [B, 3, S, S] at a whole pixel and resizes them (bilinear)."""
    size = pixels.shape[-1]
    kept_size = int(size * CUT)
    first = (uniform * (size - kept_size + 1)).floor().clamp(max=size - kept_size)  # [B, 2]
    inside = ((torch.arange(size, device=pixels.device) + 0.5) * kept_size / size - 0.5).clamp(0, kept_size - 1)
    rows, columns = (2 * (begin[:, None] + inside) / (size - 1) - 1 for begin in first.unbind(1))
    grid = torch.stack([columns[:, None].expand(-1, size, -1), rows[:, :, None].expand(-1, -1, size)], dim=-1)
    return F.grid_sample(pixels, grid, mode="bilinear", align_corners=True)


def random_rotation(pixels: Tensor, uniform: Tensor) -> Tensor:
    degrees = (2 * uniform - 1) * DEGREES
    angle = torch.where(degrees.abs() > STILL, degrees, 0.0)[:, None, None] * math.pi / 180
    line = torch.linspace(-1, 1, pixels.shape[-1], device=pixels.device, dtype=pixels.dtype)
    y, x = torch.meshgrid(line, line, indexing="ij")
    grid = torch.stack([x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()], dim=-1)
    after = F.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return torch.where(angle[:, None] == 0, pixels, after)


def random_colours(pixels: Tensor, uniform: tuple[Tensor, ...]) -> Tensor:
    """[B, cameras, 3, S, S], each image by uniform numbers [B, cameras, 1, 1, 1] of its own."""
    brightness, contrast, saturation = uniform
    pixels = pixels * (0.7 + 0.6 * brightness)
    mean = pixels.mean(dim=(2, 3, 4), keepdim=True)
    pixels = mean + (pixels - mean) * (0.6 + 0.8 * contrast)
    grey = pixels.mean(dim=2, keepdim=True)
    return (grey + (pixels - grey) * (0.5 + saturation)).clamp(0, 1)


# The prompt


def prompt(instruction: str, state: np.ndarray | None) -> str:
    """`state` is in the model's units; None: the prompt has no state."""
    text = instruction.strip().replace("_", " ").replace("\n", " ")
    if state is None:
        return f"{text}\n"
    numbers = " ".join(str(number) for number in np.digitize(state, EDGES) - 1)
    return f"Task: {text}, State: {numbers};\nAction: "


class Pi0Network(networks.FlowNetwork):
    part = "paligemma_with_expert"
    settings: Pi0Settings

    def __init__(self, settings: Pi0Settings) -> None:
        super().__init__()
        self.settings = settings
        dim = settings.expert.dim
        vlm = NamedParts(
            vision_tower=NamedParts(vision_model=networks.VisionModel(settings.vision)),
            multi_modal_projector=NamedParts(linear=nn.Linear(settings.vision.dim, settings.language.dim)),
            language_model=gemma(settings.language, settings.vocab),
        )
        expert = NamedParts(model=gemma(settings.expert, condition_dim=dim if settings.adaptive else 0))
        self.paligemma_with_expert = NamedParts(paligemma=NamedParts(model=vlm), gemma_expert=expert)
        self.action_in_proj = nn.Linear(settings.action_dim, dim)
        self.action_out_proj = nn.Linear(dim, settings.action_dim)
        if settings.adaptive:
            self.time_mlp_in = nn.Linear(dim, dim)
            self.time_mlp_out = nn.Linear(dim, dim)
        else:
            self.state_proj = nn.Linear(settings.state_dim, dim)
            self.action_time_mlp_in = nn.Linear(2 * dim, dim)
            self.action_time_mlp_out = nn.Linear(dim, dim)
            self._freeze_unused()

    vlm = property(lambda self: self.paligemma_with_expert.paligemma.model)
    tower = property(lambda self: self.vlm.vision_tower.vision_model)
    to_words = property(lambda self: self.vlm.multi_modal_projector.linear)
    language = property(lambda self: self.vlm.language_model)
    expert = property(lambda self: self.paligemma_with_expert.gemma_expert.model)

    def prefix(self, pixels: Tensor, ids: Tensor, is_word: Tensor, padded: bool = True) -> networks.Prefix:
        """`pixels` [N, cameras, 3, S, S], word ids [N, L] and their mask [N, L]."""
        patches, is_word = self.read_patches(pixels), is_word if padded else is_word[:1]
        words = self.language.embed_tokens(ids) * math.sqrt(self.settings.language.dim)
        present = F.pad(is_word, (patches.shape[1], 0), value=True)
        x = torch.cat([patches, words.to(patches.dtype)], dim=1).to(precision_of(self.language))
        mask = networks.with_itself(present[:, None]) if padded else None
        hidden, seen = self.language(x, [networks.places_in(present)], [mask])
        hidden = self.language.norm(hidden)[0] if self.settings.adaptive else None
        return networks.Prefix(seen, present, hidden, padded=padded)

    def suffix(self, prefix: networks.Prefix, x: Tensor | None, time: Tensor) -> Tensor:
        """The first token is the state's (Pi0 only); without actions it is the only one."""
        wide, waves = self.action_in_proj.weight, self.waves(time)
        tokens, condition = [], None
        if self.settings.adaptive:
            condition = F.silu(self.time_mlp_out(F.silu(self.time_mlp_in(waves))))
        else:
            tokens.append(self.state_proj(prefix.state.to(wide.dtype))[:, None])
        if x is not None:
            actions = self.action_in_proj(x.to(wide.dtype))
            tokens.append(actions if self.settings.adaptive else self.mixed_with_time(actions, waves))
        joined = torch.cat(tokens, dim=1).to(precision_of(self.expert))
        length = joined.shape[1]
        position = prefix.present.sum(1, keepdim=True) + torch.arange(length, device=joined.device)
        mask = self._mask(prefix.present, length) if prefix.padded or not self.settings.adaptive else None
        hidden, _ = self.expert(joined, [position], [mask], prefix.seen, condition)
        return self.expert.norm(hidden, condition)[0].to(wide.dtype)

    def _mask(self, present: Tensor, length: int) -> Tensor:
        among = torch.ones(length, length, dtype=torch.bool, device=present.device)
        if not self.settings.adaptive:
            among[0, 1:] = False  # the state does not attend to actions
        rows = present.shape[0]
        return torch.cat([present[:, None].expand(-1, length, -1), among.expand(rows, -1, -1)], dim=2)[:, None]

    def _freeze_unused(self) -> None:
        """Freeze unused weights: of the language model's last layer only keys and values are used."""
        last = self.language.layers[-1]
        attention = last.self_attn
        for module in (attention.q_proj, attention.o_proj, last.mlp, last.post_attention_layernorm, self.language.norm):
            module.requires_grad_(False)


def gemma(sizes: networks.StackSettings, vocab: int = 0, condition_dim: int = 0) -> networks.Stack:
    """Gemma's layers, whose norms add 1 to their weights."""
    return networks.Stack(
        sizes,
        partial(networks.Norm, sizes.dim, networks.EPS, 1, condition_dim),
        partial(F.gelu, approximate="tanh"),
        vocab,
    )


def precision_of(stack: networks.Stack) -> torch.dtype:
    return stack.layers[0].mlp.up_proj.weight.dtype


# Prefixes of weights that stay float32 in half precision, as upstream keeps them: embeddings of images, norms; and the
# small projections outside the stacks.
EXACT = ("embeddings.", "input_layernorm.", "post_attention_layernorm.", "model.norm.")


def in_half(network: Pi0Network) -> None:
    """Convert weights to half precision."""
    for name, parameter in network.named_parameters():
        if name.startswith(f"{network.part}.") and not any(word in name for word in EXACT):
            parameter.data = parameter.data.to(torch.bfloat16)


SEEN, PRESENT, HIDDEN = "prefix", "prefix_present", "prefix_hidden"


class Pi0Policy(FlowPolicy):
    vocabulary = (
        "a Pi0",
        f"Pi0 reads with the tokenizer of google/paligemma-3b-pt-224: put its {TOKENIZER} beside the weights",
    )
    presets: ClassVar = {"tiny": TINY, "full": FULL}
    settings_of = staticmethod(settings_of)
    own_name = staticmethod(own_name)
    network = Pi0Network
    model: Pi0Network

    def judged_dim(self) -> int:
        return super().judged_dim() if self.settings.adaptive else self.settings.expert.dim

    @property
    def critic(self) -> tuple[int, ...]:
        return (1024, 512, 256) if self.settings.adaptive else (512, 256, 128)

    def use_half_precision(self) -> None:
        in_half(self.model)

    @classmethod
    def lerobots_own(cls, published: dict[str, Any]) -> dict[str, Any]:
        """Options of lerobot's folders that differ from openpi's on the same task."""
        if "type" not in published:
            return {}
        return {"relative_actions": 0, "state_in_prompt": True, "horizon": None} | super().lerobots_own(published)

    @classmethod
    def reads_state(cls, config: Pi0Config, settings: Any) -> bool:
        return not settings.adaptive or config.state_in_prompt

    def state_room(self) -> int | None:
        return None if self.settings.adaptive else self.settings.state_dim

    def start(self, name: str, shape: torch.Size, draw: torch.Generator) -> Tensor:
        opens = name.endswith((".dense.weight", ".dense.bias"))
        if opens or (name.endswith("norm.weight") and "vision" not in name):
            return torch.zeros(shape)  # for gates, and norms to which Gemma adds 1
        return super().start(name, shape, draw)

    def encode(self, text: str) -> list[int]:
        if self.fast is None:  # small models: numbers up to 255 have ids of their own, words a hash
            return [BOS, *(self._hash_word(word) for word in re.findall(r"-?\d+|\w+|[^\w ]", text))]
        body = text.removesuffix("\n")  # the answer begins after a newline, which is a separate token
        parts = [body, "\n"] if body != text else [body]
        return [BOS, *(id_ for words in parts for id_ in self.fast.encode(words, add_special_tokens=False).ids)]

    def _hash_word(self, word: str) -> int:
        if word.lstrip("-").isdecimal() and -1 <= int(word) < 256:
            return 4 + int(word)
        return 260 + (hashed_words(word, self.settings.vocab - 260) or [0])[0]

    def frozen_features(self, obs: Observation) -> dict[str, Tensor]:
        """Keys and values of a frozen PaliGemma for images and words, with prompts of one length."""
        if self.config.train == "all":
            return {}
        prefix = self._prefix(obs, self.settings.max_tokens, padded=True)
        hidden = {HIDDEN: prefix.hidden} if self.settings.adaptive else {}
        return {SEEN: prefix.stacked(), PRESENT: prefix.present} | hidden

    def num_draws(self) -> int:
        return DRAWS * len(self.views) if self.config.augment else 0

    def read(
        self, obs: Observation, encoded: dict[str, Any] | None = None, draws: Tensor | None = None
    ) -> networks.Prefix:
        state = self._unit_state(obs)
        if encoded and SEEN in encoded:
            parts = [tensor_of(encoded[name], self.device) for name in (SEEN, PRESENT, HIDDEN) if name in encoded]
            prefix = networks.Prefix.unstacked(*parts)
        else:
            prefix = self._prefix(obs, draws=draws)
        return replace(prefix, state=self._padded_state(state))

    def value_features(self, seen: networks.Prefix, hidden: Tensor | None) -> Tensor:
        if self.settings.adaptive:
            present = seen.present[:, :, None].to(self.exact)
            return (seen.hidden.to(self.exact) * present).sum(1) / present.sum(1)
        if hidden is None:
            hidden = self.model.suffix(seen, None, torch.ones(len(seen.state), device=self.device))
        return hidden[:, 0]

    def prompt_tokens(self, texts: list[str], multiple: int = 1) -> tuple[np.ndarray, np.ndarray]:
        if self.settings.adaptive and self.config.state_in_prompt:
            raise ConfigError(
                "policy.state_in_prompt=true writes each state into the prompt, so its words are not known before; "
                "python -m embodied.serve answers with such a policy"
            )
        return self._padded_words(texts, [None] * len(texts), multiple)

    def _padded_words(
        self, texts: list[str], states: Any, multiple: int = 1, width: int = 0
    ) -> tuple[np.ndarray, np.ndarray]:
        most = self.settings.max_tokens
        sentences = [self.encode(prompt(text, row)) for text, row in zip(texts, states, strict=True)]
        least = most if self.config.dtype == "bfloat16" else width
        return pad_rows(sentences, most=most, least=least, multiple=multiple)

    def prompts(self, obs: Observation, count: int, multiple: int = 1, width: int = 0) -> tuple[np.ndarray, np.ndarray]:
        texts = self.instructions(obs, count)
        states: Any = [None] * count
        if self.settings.adaptive and self.config.state_in_prompt:
            state = self._unit_state(obs)
            states = np.zeros(state.shape) if state.is_meta else host(state)  # memory is counted by shapes
        return self._padded_words(texts, states, multiple, width)

    def _prefix(
        self, obs: Observation, width: int = 0, draws: Tensor | None = None, padded: bool = False
    ) -> networks.Prefix:
        """The prefix of images and prompts, padded to at least `width` tokens. In half precision all prompts have one
        width, as in openpi: other padding changes rounding, by 0.1 nats of a log-prob."""
        pixels = self._pixels(obs)
        *words, may_pad = self.word_ids(obs, pixels.shape[0], width=width)
        if draws is not None:
            pixels = augmented(pixels, draws.view(len(draws), -1, DRAWS))
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.config.train == "all"):
            return self.for_acting(Pi0Network.prefix)(self.model, pixels, *words, padded or may_pad)
