"""Imitation for language policies: predicts every token of an answer, given all earlier text.

An item is one conversation. Each rank generates its own block of them from the run's seed or from a file, so no text is
sent. The loss is the mean over the answers' tokens of a minibatch, independent of their division into ranks and passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.conversations import pictures_in
from embodied.core.errors import ConfigError
from embodied.core.types import env_blocks
from embodied.learners.bc import ImitationLearner
from embodied.learners.examples import Example, read_examples, shown, solved


class TextImitationLearner(ImitationLearner):
    def __init__(self, env: Any, *learner: Any) -> None:
        """`env`: the options of the text env with the prompts."""
        super().__init__(*learner)
        self.env = env

    def open_data(self) -> int:
        """Encode this rank's conversations as tokens. Returns the number of conversations of all ranks."""
        if not hasattr(self.policy, "tokenizer"):
            raise ConfigError(
                f"policy.name={self.policy_config.name} is not a language model; try policy.name=language"
            )
        config = self.algo
        given = read_examples(config.data, config.episodes) if config.data else None
        total = config.episodes if given is None else len(given)
        if total < self.world_size:
            raise ConfigError(f"{self.world_size} learners share {total} examples; give more, or use fewer learners")
        block = env_blocks(total, self.world_size)[self.rank]
        examples = solved(self.env, self.seed, block) if given is None else given[block.start : block.stop]
        self.demos = ExampleTokens(self.policy, examples, block.start, total)
        self.sizes = np.concatenate(self.collective.gather(self.demos.sizes))  # sizes of all ranks' conversations
        self.blocks = self.blocks_of_ranks()
        return total

    def _count(self, minibatch: np.ndarray) -> float:
        return float(self.sizes[minibatch, 1].sum())

    def _loss_sum(self, losses: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask[:, :, None], losses, 0.0).sum()

    def _parts(self, items: np.ndarray) -> list[slice]:
        return packs(self.sizes[items, 0].tolist(), self.config.pack_tokens)


def packs(lengths: list[int], most: int) -> list[slice]:
    """Packs of consecutive conversations with at most `limit` tokens; a longer conversation is a pack by itself.
    Lengths 3 2 4 9 1 with at most 6: 3 2, 4, 9, 1."""
    cuts, held = [0], 0
    for number, length in enumerate(lengths):
        if number > cuts[-1] and held + length > most:
            cuts.append(number)
            held = 0
        held += length
    return [slice(a, b) for a, b in pairwise([*cuts, len(lengths)]) if b > a]


class ExampleTokens:
    """The conversations of one rank as tokens; `first` is the number of its first conversation among all `total`."""

    def __init__(self, policy: Any, examples: Sequence[Example], first: int, total: int) -> None:
        self.first, self.total = first, total
        tokens, masks = [], []
        self.pictures = [pictures_of(example) for example in examples]
        for number, example in enumerate(examples, first):
            stream, mask = written(policy.tokenizer, example)
            check_length(policy, stream, mask, f"example {number + 1} ({shown(example[0][0])})")
            tokens.append(stream)
            masks.append(mask)
        lengths = np.array([len(stream) for stream in tokens], np.int64)
        # [R, 2]: the number of tokens of each conversation, and of its trained tokens.
        self.sizes = np.stack([lengths, [int(mask.sum()) for mask in masks]], axis=1)
        self.ends = np.cumsum(lengths)
        self.tokens, self.mask = np.concatenate(tokens), np.concatenate(masks)

    def __len__(self) -> int:
        return len(self.sizes)

    def batch(self, items: Tensor) -> dict[str, Tensor]:
        """The inputs of `Policy.imitate`: the conversations one after the other, n tokens in all."""
        rows = items.numpy()
        lengths, ends = self.sizes[rows, 0], self.ends[rows]
        at = np.concatenate([np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])
        return {
            "actions": torch.from_numpy(self.tokens[at])[:, None, None],
            "mask": torch.from_numpy(self.mask[at])[:, None],
            "lengths": torch.from_numpy(lengths),
            "groups": torch.arange(len(rows)),
            "pictures": [name for row in rows for name in self.pictures[row]],
        }

    def close(self) -> None:
        """Nothing is open."""


def pictures_of(example: Example) -> tuple[str, ...]:
    """The names of the pictures that a conversation shows, in order."""
    return tuple(name for said, _ in example for name in pictures_in(said))


def written(tokenizer: Any, example: Example) -> tuple[np.ndarray, np.ndarray]:
    """A conversation's tokens, int64 [n], and a mask of the trained tokens: the answers, each with its end token.

    "5+6=" answered by "11" as characters with the stop token 0: 5 + 6 = 1 1 0, mask F F F F T T T.
    """
    tokens: list[int] = []
    mask: list[bool] = []
    own = getattr(getattr(tokenizer, "own", None), "eos_token_id", None)
    stop = own if own in tokenizer.stops else min(tokenizer.stops)
    for turn, (said, answer) in enumerate(example):
        prompt = list(tokenizer.encode(said, first=not turn))
        reply = [*tokenizer.encode(answer, first=False), stop]
        tokens += prompt + reply
        mask += [False] * len(prompt) + [True] * len(reply)
    return np.array(tokens, np.int64), np.array(mask)


def check_length(policy: Any, tokens: np.ndarray, mask: np.ndarray, which: str) -> None:
    """Refuse an example that is too long for the policy, in an answer or as a whole."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    longest = int((edges[1::2] - edges[::2]).max())
    if (limit := policy.config.max_tokens) and longest > limit:
        raise ConfigError(
            f"{which}: an answer of {longest} tokens, with the one that ends it, is more than "
            f"policy.max_tokens={limit}; try policy.max_tokens={longest}, or leave the example out"
        )
    if (room := policy.max_length) and len(tokens) > room:
        raise ConfigError(f"{which}: a conversation of {len(tokens)} tokens does not fit into the model's {room}")
