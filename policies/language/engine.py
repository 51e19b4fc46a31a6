"""Engines: what continues conversations for a language policy worker, a token at a time.

`policy.engine` picks one: our own loop over the policy's model (slots.py), vLLM in the same process (vllm_engine.py),
or a server that is asked over HTTP (http_engine.py). All are used in the same way: `add` while there is `room`, `step`
until nothing is `running`, in any order, and `abort` to stop between two tokens.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core import rng
from embodied.core.conversations import SamplingRule
from embodied.core.errors import ConfigError
from embodied.policies.language.config import LanguageConfig

if TYPE_CHECKING:
    from torch import Tensor

    from embodied.policies.language.policy import LanguagePolicy
    from embodied.policies.language.trust import ProofBlock

ENGINES = {  # by what `policy.engine` says; imported when named
    "transformers": "embodied.policies.language.slots:SlotEngine",
    "vllm": "embodied.policies.language.vllm_engine:VLLMEngine",
    "http": "embodied.policies.language.http_engine:HTTPEngine",
}


Likeliest = tuple[tuple[tuple[int, float], ...], ...]  # by place: the likeliest tokens there and their log-probs


@dataclass(frozen=True)
class Sampling:
    """The settings by which a conversation is continued."""

    seed: int
    stream: str
    rule: SamplingRule
    stops: frozenset[int]  # tokens that end the answer
    likeliest: int = 0  # how many tokens are reported at every place; only our own engine knows how
    proves: bool = False  # whether the answer comes with a proof; only our own engine makes one


@dataclass(frozen=True)
class Request:
    """A conversation to be continued."""

    key: Any  # comes back with the answer
    tokens: Sequence[int]  # the whole stream so far, continued verbatim
    max_tokens: int  # of the answer
    episode: int  # with a token's index in the stream it keys the token's noise
    sampling: Sampling | None = None  # None: as the round says
    pictures: Sequence[str] = ()  # that the tokens show
    keep: bool = False  # whether another request may follow that begins with these tokens and their answer


@dataclass(frozen=True)
class Answer:
    """The tokens that follow a request's: A tokens, with the stop token where there is one."""

    key: Any
    tokens: np.ndarray  # int32 [A]
    logprobs: np.ndarray  # float32 [A], at SamplingRule.logprob_temperature; float64 of a float64 model
    truncated: bool  # it ended without a stop token: max_tokens, max_length, or aborted
    dropped: str = ""  # why it cannot be used: then it counts for nothing
    likeliest: Likeliest = ()  # by place, where the sampling asks for them
    proof: tuple[ProofBlock, ...] = ()  # of the hidden states that its tokens were drawn from, likewise


class Engine:
    """Continues up to `slots` conversations at a time."""

    slots: int
    """Conversations that may be under way at a time."""

    max_length: int
    """Tokens of a whole conversation, at most."""

    totals: dict[str, int] = {}  # noqa: RUF012  never added to
    """What it counts, since it was last asked."""

    @property
    def running(self) -> int:
        """Conversations under way."""
        raise NotImplementedError

    @property
    def room(self) -> int:
        """The number of prompts that it can take more now."""
        return self.slots - self.running

    def check(self, request: Request) -> None:
        """Refuse what callers must not add."""
        assert self.room > 0, "no room for another conversation"
        if not len(request.tokens):
            raise ValueError(f"conversation {request.key} is empty: there is nothing to continue")

    def longest_answer(self, request: Request) -> int:
        """The most tokens that may be written; not above 0 where the conversation fills its length already."""
        return min(request.max_tokens, self.max_length - len(request.tokens))

    def begin(self, version: int, seed: int, stream: str, rule: SamplingRule) -> None:
        """Start a round of answers by these weights. Nothing may be running."""
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Take a conversation; it needs room."""
        raise NotImplementedError

    def step(self) -> list[Answer]:
        """Write a token of every conversation that runs, and return the answers that ended with it."""
        raise NotImplementedError

    def abort(self) -> list[Answer]:
        """Abort all open conversations, and return their answers so far."""
        raise NotImplementedError

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        """Adopt new weights, in an engine that has weights of its own. Nothing may be running."""

    patience_s = 0.0
    """Seconds that `load` may take, in an engine that waits for others."""

    def cache_tensors(self) -> list[Tensor]:
        """Memory that it keeps between rounds. Its content does not matter, so a device may free it."""
        return []

    # An engine that has weights of its own

    @property
    def needs_load(self) -> bool:
        """True if it has no weights: then `load` comes before the next round."""
        return False

    def num_bytes(self) -> int:
        """Bytes of the device that it takes beside the policy and `cache_tensors`."""
        return 0

    def offload(self) -> int:
        """Free these bytes, and return how many; the weights are lost. Nothing may be running."""
        return 0

    def onload(self) -> int:
        """Take the bytes that `load` needs, and return how many."""
        return 0

    def metrics(self) -> dict[str, float]:
        """The numbers that it counted since the last call, for the metrics."""
        totals, self.totals = self.totals, dict.fromkeys(self.totals, 0)
        return {name: float(count) for name, count in totals.items()}

    def close(self) -> None:
        """End its processes."""


def seed_of(seed: int, stream: str, request: Request) -> int:
    """The seed for an engine whose noise is its own: by run, stream, episode and the place where the answer begins."""
    return int(rng.generator(seed, stream, request.episode, len(request.tokens)).integers(2**63))


def unanswered(request: Request, why: str = "") -> Answer:
    """The empty answer to a conversation that has no room for one, or that was not begun."""
    return Answer(request.key, np.zeros(0, np.int32), np.zeros(0, np.float32), not why, why)


def token_bytes(model: Any) -> int:
    """Bytes of one token's keys and values."""
    shape = model.config.get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    dims = [getattr(shape, key, None) or dim for key in ("qk_head_dim", "v_head_dim")]  # DeepSeek has other values
    return sum(dims) * shape.num_hidden_layers * heads * next(model.parameters()).element_size()


def cache_bytes(config: LanguageConfig, model: Any, max_length: int) -> int:
    """Memory for keys and values: `policy.cache_gb`, or what `policy.max_running` whole conversations need."""
    one = token_bytes(model) * max_length
    if config.cache_gb is None:
        return config.max_running * one
    if (given := int(config.cache_gb * 1e9)) < one:
        raise ConfigError(
            f"policy.cache_gb={config.cache_gb:g} has no room for one conversation: {max_length} tokens of "
            f"{token_bytes(model)} bytes are {one / 1e9:.3g} GB; try policy.max_length={given // token_bytes(model)}"
        )
    return given


def make_engine(config: LanguageConfig, policy: LanguagePolicy) -> Engine:
    """The engine that `policy.engine` names."""
    module, _, name = ENGINES[config.engine].partition(":")
    return getattr(importlib.import_module(module), name)(config, policy)
