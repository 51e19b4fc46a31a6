"""Engines: what continues conversations for a language policy worker, a token at a time.

`policy.engine` picks one: our own loop over the policy's model (slots.py), vLLM in the same process
(vllm_engine.py), or servers that take our weights (http_engine.py). All of them are used in the same way: `add` while
there is `room`, `step` until nothing is `running`, in any order, and `abort` to stop between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.policies.config import LanguageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from embodied.policies.language.policy import LanguagePolicy


@dataclass(frozen=True)
class Request:
    """A conversation to be continued."""

    key: Any  # comes back with the answer
    tokens: Sequence[int]  # the whole stream so far, continued verbatim
    max_tokens: int  # of the answer
    episode: int  # with a token's index in the stream it keys the token's noise


@dataclass(frozen=True)
class Answer:
    """What follows a request's tokens: A tokens, with the stop token where there is one."""

    key: Any
    tokens: np.ndarray  # int32 [A]
    logprobs: np.ndarray  # float32 [A], at temperature 1; float64 of a float64 model
    truncated: bool  # it ended without a stop token: max_tokens, max_length, or aborted
    dropped: str = ""  # why it cannot be used: then it counts for nothing


class Engine:
    """Continues up to `room + running` conversations at a time."""

    running = 0
    """Conversations under way."""

    room = 0
    """How many more it takes now."""

    def begin(self, version: int, seed: int, stream: str, temperature: float) -> None:
        """Start a round of answers by these weights. Nothing may be running."""
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Take a conversation; it needs room."""
        raise NotImplementedError

    def step(self) -> list[Answer]:
        """Write a token of every conversation that runs, and return the answers that ended with it."""
        raise NotImplementedError

    def abort(self) -> list[Answer]:
        """Give up everything that runs, and return what was written of it so far."""
        raise NotImplementedError

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        """Adopt new weights, in an engine that has weights of its own. Nothing may be running."""

    def cache_tensors(self) -> list[Tensor]:
        """Memory that it keeps between rounds, not what is in it: a device may take it back."""
        return []

    def numbers(self) -> dict[str, float]:
        """Counts of the round so far, for the metrics."""
        return {}

    def close(self) -> None:
        """End what it started."""


def unanswered(request: Request, why: str = "") -> Answer:
    """The empty answer to a conversation that has no room for one, or that was not begun."""
    return Answer(request.key, np.zeros(0, np.int32), np.zeros(0, np.float32), not why, why)


def longest(config: LanguageConfig, model_config: Any) -> int:
    """Tokens of a whole conversation, at most: `policy.max_length`, or as many as the model has positions."""
    positions = getattr(model_config, "max_position_embeddings", None)
    if config.max_length is None and positions is None:
        raise ConfigError("the model does not say how many positions it has; set policy.max_length")
    if positions is not None and (config.max_length or 0) > positions:
        raise ConfigError(
            f"policy.max_length={config.max_length} is more than the model's {positions} positions; "
            f"try policy.max_length={positions}"
        )
    return config.max_length or positions


def make_engine(config: LanguageConfig, policy: LanguagePolicy) -> Engine:
    """The engine that `policy.engine` names."""
    if config.engine == "vllm":
        from embodied.policies.language.vllm_engine import VLLMEngine

        return VLLMEngine(config, policy)
    if config.engine == "http":
        from embodied.policies.language.http_engine import HTTPEngine

        return HTTPEngine(config, policy)
    from embodied.policies.language.slots import SlotEngine

    return SlotEngine(config, policy)
