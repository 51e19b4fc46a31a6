"""Input and output tokens: the prompt with its tokenizers, and actions as 256 bins of [-1, 1] on the last ids of the
vocabulary. `actions_of` in `network.py` turns [-1, 1] into the robot's units.

256 ids share 255 bin centres (the two lowest ids mean the same), and ids fall as actions grow.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.core.errors import CheckpointError
from embodied.policies.openvla.settings import OpenVLASettings
from embodied.policies.vla.policy import fast_tokenizer, hashed_words

BOS, STOP = 1, 2
SPACE = 29871  # Llama's "▁", which precedes the first action token in training
PURE = "In: What action should the robot take to {}?\nOut:"
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: What action should the robot take to {}? ASSISTANT:"
)


def template_of(settings: OpenVLASettings, where: str) -> str:
    """The prompt template of a model, by its language model: OpenVLA v0.1 uses a chat."""
    backbone = str(settings.published.get("llm_backbone_id", "llama2-7b-pure"))
    if backbone.startswith("vicuna"):
        return VICUNA
    if backbone.endswith(("-pure", "-words")):
        return PURE
    raise CheckpointError(
        f"{where}: llm_backbone_id={backbone!r} uses an unsupported prompt format; supported are "
        "llama2-7b-pure (OpenVLA) and vicuna-v15-7b (OpenVLA v0.1)"
    )


def prompt(instruction: str, template: str = PURE) -> str:
    return template.format(instruction.lower())


class LlamaTokenizer:
    """The tokenizer of a published folder."""

    def __init__(self, folder: Path | None) -> None:
        self._fast = fast_tokenizer(
            folder,
            "a published OpenVLA",
            "a folder with only tokenizer.model needs one: "
            "transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes it",
        )

    def encode(self, text: str) -> list[int]:
        ids = self._fast.encode(text).ids
        ids = ids if ids[:1] == [BOS] else [BOS, *ids]
        return ids if ids[-1] == SPACE else [*ids, SPACE]


class LlamaWords:
    """Tokenizer of small models without a vocabulary file: a word's id is its hash."""

    def __init__(self, settings: OpenVLASettings) -> None:
        self.words = settings.first_action_id - 3  # 0, 1 and 2 are unknown, begin and end

    def encode(self, text: str) -> list[int]:
        return [BOS, *(3 + number for number in hashed_words(text, self.words))]


class ActionTokens:
    """Tokens count from 0: `OpenVLASettings.first_action_id` is added for the vocabulary."""

    def __init__(self, bins: int) -> None:
        self.edges = np.linspace(-1, 1, bins)
        self.centers = (self.edges[:-1] + self.edges[1:]) / 2
        self.bins = bins

    def decode(self, tokens: np.ndarray) -> np.ndarray:
        """Numbers in [-1, 1]."""
        return self.centers[np.minimum(self.bins - 1 - tokens, self.bins - 2)]

    def encode(self, actions: np.ndarray) -> np.ndarray:
        return self.bins - np.digitize(np.clip(actions, -1, 1), self.edges)


def pick(logits: Tensor, uniform: Tensor, temperature: float) -> Tensor:
    """Draws a token from logits [..., bins], by the inverse of the cumulative probabilities; temperature 0: the best
    token."""
    if temperature == 0:
        return logits.argmax(-1)
    steps = (logits.double() / temperature).softmax(-1).cumsum(-1)
    below = uniform[..., None].double() * steps[..., -1:]
    return torch.searchsorted(steps, below).squeeze(-1).clamp(max=logits.shape[-1] - 1)


def action_scores(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of these tokens, and entropies, [...] of logits [..., bins]."""
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, tokens[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)
