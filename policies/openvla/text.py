"""The prompt, and the tokenisers that turn it into ids."""

from __future__ import annotations

from pathlib import Path

from embodied.core.errors import CheckpointError
from embodied.policies.openvla.settings import OpenVLASettings
from embodied.policies.vla.text import Tokenizer, fast_tokenizer, hashed_words

BOS, STOP = 1, 2
SPACE = 29871  # Llama's "▁", which every published model has seen in front of the first action token


PURE = "In: What action should the robot take to {}?\nOut:"
VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, "
    "and polite answers to the user's questions. USER: What action should the robot take to {}? ASSISTANT:"
)


def template_of(settings: OpenVLASettings, where: str) -> str:
    """The sentence that a model was trained with, by the language model it grew from: OpenVLA v0.1's was a chat."""
    backbone = str(settings.published.get("llm_backbone_id", "llama2-7b-pure"))
    if backbone.startswith("vicuna"):
        return VICUNA
    if backbone.endswith(("-pure", "-words")):
        return PURE
    raise CheckpointError(
        f"{where}: llm_backbone_id={backbone!r} is told what to do in a way that is not known here; known are "
        "llama2-7b-pure (OpenVLA) and vicuna-v15-7b (OpenVLA v0.1)"
    )


def prompt(instruction: str, template: str = PURE) -> str:
    return template.format(instruction.lower())


class LlamaTokenizer:
    """The tokeniser of a published folder."""

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
    """Tokeniser of small models without a vocabulary file: a word's id is a hash of it."""

    def __init__(self, settings: OpenVLASettings) -> None:
        self.words = settings.first_action_id - 3  # 0, 1 and 2 are unknown, begin and end

    def encode(self, text: str) -> list[int]:
        return [BOS, *(3 + number for number in hashed_words(text, self.words))]


def tokenizer_of(folder: Path | None, settings: OpenVLASettings) -> Tokenizer:
    """The tokeniser of a published folder, or that of a small model."""
    return LlamaWords(settings) if settings.tokenizer == "words" else LlamaTokenizer(folder)
