"""Engines continue conversations for a language policy worker, a token at a time.

`policy.engine` picks one: our own loop over the policy's model (slot_engine.py), vLLM in the same process (vllm.py),
or servers that are asked over HTTP (servers/). All are used in the same way: `add` while there is `room`, `step`
until nothing is `running`, in any order, and `abort` to stop between two tokens. `choose` draws tokens from logits,
`draw_errors` checks drawn tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from embodied.core import rng
from embodied.core.conversations import Remark
from embodied.core.errors import ConfigError
from embodied.core.plugins import ENGINE_CLASSES
from embodied.core.types import SamplingRule
from embodied.policies.language.attention import token_bytes
from embodied.policies.language.config import LanguageConfig

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

Likeliest = tuple[tuple[tuple[int, float], ...], ...]  # by token of an answer: the likeliest tokens, their log-probs


@dataclass(frozen=True)
class Sampling:
    """The sampling settings of an answer."""

    seed: int
    stream: str
    rule: SamplingRule
    stops: frozenset[int]  # tokens that end the answer
    likeliest: int = 0  # number of likeliest tokens to report at every place; only for our engine
    proves: bool = False  # True: the answer has a proof; only for our engine


@dataclass(frozen=True)
class Request:
    """A conversation to be continued."""

    key: Any  # returned with the answer
    tokens: Sequence[int]  # the whole conversation so far
    max_tokens: int  # of the answer
    episode: int  # keys a token's noise, together with the token's index
    sampling: Sampling | None = None  # None: the round's settings
    pictures: Sequence[str] = ()  # names of the pictures in the tokens
    keep: bool = False  # True if a request may follow that begins with these tokens and their answer


class Block(Protocol):
    """A part of a proof (`trust.ProofBlock`)."""

    def to_text(self) -> str: ...


@dataclass(frozen=True)
class Answer:
    """The answer to a request: A tokens, including the stop token if there is one."""

    key: Any
    tokens: np.ndarray  # int32 [A]
    logprobs: np.ndarray  # float32 [A], at SamplingRule.logprob_temperature; float64 of a float64 model
    truncated: bool  # it ended without a stop token: max_tokens, max_length, or aborted
    dropped: str = ""  # why it is unusable: it is dropped
    likeliest: Likeliest = ()  # for each token, if requested
    proof: tuple[Block, ...] = ()  # proof of its hidden states, if requested


class Engine:
    """Continues up to `slots` conversations at a time."""

    totals: dict[str, int] = {}  # noqa: RUF012  never added to
    """Counters since the last call of `metrics`."""

    def __init__(self, policy: LanguagePolicy, slots: int) -> None:
        """`slots`: the most concurrent conversations."""
        self.policy, self.slots = policy, slots
        self.max_length, self.stops = policy.max_length, frozenset(policy.tokenizer.stops)
        self.round = Sampling(0, "", SamplingRule(), self.stops)
        self.added: list[Request] = []  # since the last step
        self.ended: list[Answer] = []  # answers to conversations without room

    @property
    def running(self) -> int:
        """The number of running conversations."""
        return self.num_open() + len(self.added) + len(self.ended)

    @property
    def room(self) -> int:
        """The number of prompts that it can take now."""
        return self.slots - self.running

    def begin(self, version: int, seed: int, stream: str, rule: SamplingRule) -> None:
        """Start a round of answers with these weights. No conversation may be running."""
        assert not self.running, "a round begins while answers of the one before are being written"
        self.round = Sampling(seed, f"act/{stream}", rule, self.stops)

    def add(self, request: Request) -> None:
        """Add a conversation; requires `room`."""
        assert self.room > 0, "no room for another conversation"
        if not len(request.tokens):
            raise ValueError(f"conversation {request.key} is empty: there is nothing to continue")
        most = min(request.max_tokens, self.max_length - len(request.tokens))
        if most <= 0:
            self.ended.append(empty_answer(request))
        else:
            self.added.append(replace(request, max_tokens=most, sampling=request.sampling or self.round))

    def step(self) -> list[Answer]:
        """Generate a token for every running conversation; return the answers that ended."""
        answers, added, self.ended, self.added = self.ended, self.added, [], []
        if added:
            self.open(added)
        return answers + self.write() if self.num_open() else answers

    def abort(self) -> list[Answer]:
        """Abort all running conversations; return their answers so far."""
        answers, added, self.ended, self.added = self.ended, self.added, [], []
        return [*answers, *self.give_up(), *map(empty_answer, added)]

    # What engines implement

    def num_open(self) -> int:
        """The number of conversations that were opened and have not ended."""
        raise NotImplementedError

    def open(self, requests: list[Request]) -> None:
        """Begin these conversations. They have room for `max_tokens`, and a `sampling`."""
        raise NotImplementedError

    def write(self) -> list[Answer]:
        """Go on with all open conversations; return the answers that ended."""
        raise NotImplementedError

    def give_up(self) -> list[Answer]:
        """End all open conversations; return their answers so far."""
        raise NotImplementedError

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        """Load new weights, for engines with separate weights. No conversation may be running."""

    patience_s = 0.0
    """Time limit of `load`, for engines that wait for servers."""

    def cache_tensors(self) -> list[Tensor]:
        """Memory that it keeps between rounds; its content may be discarded."""
        return []

    # For engines with separate weights

    @property
    def needs_load(self) -> bool:
        """True if it has no weights and needs `load` before the next round."""
        return False

    def num_bytes(self) -> int:
        """Its device memory in bytes, besides the policy and `cache_tensors`."""
        return 0

    def offload(self) -> int:
        """Free this memory, losing the weights; return the bytes. No conversation may be running."""
        return 0

    def onload(self) -> int:
        """Allocate the memory that `load` needs; return the bytes."""
        return 0

    def metrics(self) -> dict[str, float]:
        """The counters since the last call."""
        totals, self.totals = self.totals, dict.fromkeys(self.totals, 0)
        return {name: float(count) for name, count in totals.items()}

    def drop_servers(self, names: Collection[str]) -> None:
        """Use no more answers of these servers."""

    def take_remarks(self) -> list[Remark]:
        """The remarks since the last call."""
        return []

    def close(self) -> None:
        """End its processes."""


def seed_of(request: Request) -> int:
    """The seed for engines with their own noise, from run, stream, episode and the answer's first index."""
    how = request.sampling
    return int(rng.generator(how.seed, how.stream, request.episode, len(request.tokens)).integers(2**63))


def empty_answer(request: Request) -> Answer:
    """The empty answer to a conversation without room for one, or that was not begun."""
    return Answer(request.key, np.zeros(0, np.int32), np.zeros(0, np.float32), True)


def cache_bytes(config: LanguageConfig, model: Any, max_length: int) -> int:
    """Memory for keys and values: `policy.cache_gb`, or enough for `policy.max_running` whole conversations."""
    num_bytes = token_bytes(model) * max_length
    if config.cache_gb is None:
        return config.max_running * num_bytes
    if (given := int(config.cache_gb * 1e9)) < num_bytes:
        needs = f"{max_length} tokens of {token_bytes(model)} bytes are {num_bytes / 1e9:.3g} GB"
        fits = f"policy.max_length={given // token_bytes(model)}"
        raise ConfigError(f"policy.cache_gb={config.cache_gb:g} has no room for one conversation: {needs}; try {fits}")
    return given


def make_engine(config: LanguageConfig, policy: LanguagePolicy) -> Engine:
    """The engine that `policy.engine` names."""
    return ENGINE_CLASSES[config.engine](config, policy)


# How tokens are drawn


def likeliest_tokens(logits: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The likeliest tokens by logits [vocabulary], and their log-probs at temperature 1."""
    logprobs, tokens = logits.double().log_softmax(-1).topk(count)
    return tuple(zip(tokens.tolist(), logprobs.tolist()))


def choose(logits: Tensor, rule: SamplingRule, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the tokens [N] at which the cumulative probabilities exceed `uniform` [N], and their log-probs at the
    rule's `logprob_temperature`.

    Probabilities .2 .5 .3 and the number .6 give token 1, since .2 <= .6 < .7. At temperature 0 the likeliest token is
    taken. With top_k=2 the first token is excluded, .5 .3 become .625 .375, and .6 still gives token 1.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    scores = scores - scores.amax(-1, keepdim=True)
    temperature, of_logprobs = rule.temperature, rule.logprob_temperature
    scored = scores if of_logprobs == 1 else scores / of_logprobs
    sums = scored.exp().cumsum(-1, dtype=torch.float64)
    total = sums[:, -1]
    if temperature == 0:
        tokens = scores.argmax(-1)
    else:
        if temperature != of_logprobs or not rule.draws_from_all:
            likely = (scores.double() / temperature).exp()
            sums = (likely if rule.draws_from_all else allowed_probabilities(likely, rule)).cumsum(-1)
        tokens = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)[:, 0]
        tokens = tokens.clamp(max=scores.shape[-1] - 1)
    return tokens, scored.gather(-1, tokens[:, None])[:, 0].double() - total.log()


def allowed_probabilities(likely: Tensor, rule: SamplingRule) -> Tensor:
    """Unnormalised probabilities [N, vocabulary], with 0 for tokens that the rule excludes. Of equally likely tokens
    the first are kept, so at most top_k remain."""
    ordered, places = likely.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if rule.min_p:
        keep &= ordered >= rule.min_p * ordered[:, :1]
    if rule.top_k:
        keep[:, rule.top_k :] = False
    if rule.top_p < 1:
        ordered = ordered * keep
        before = ordered.cumsum(-1) - ordered  # cumulative probability of likelier tokens
        keep &= before < rule.top_p * ordered.sum(-1, keepdim=True)
    return likely * torch.zeros_like(keep).scatter(-1, places, keep)


def probabilities(logits: Tensor, rule: SamplingRule) -> Tensor:
    """The probabilities [N, vocabulary] by which the rule draws, in float64; of temperature 1 if it draws nothing."""
    likely = (logits.double() / (rule.temperature or 1.0)).softmax(-1)
    likely = likely if rule.draws_from_all else allowed_probabilities(likely, rule)
    return likely / likely.sum(-1, keepdim=True)


def draw_errors(logits: Tensor, tokens: Tensor, rule: SamplingRule, uniform: Tensor) -> Tensor:
    """Returns the distance of `uniform` [N] from the interval of cumulative probabilities in which `choose` draws these
    tokens [N]; 0 if it draws them. At temperature 0: how much less likely a token is than the likeliest token.

    Probabilities .2 .5 .3 and the number .6: 0 for token 1 (.2 to .7), .4 for token 0 (0 to .2), .1 for token 2.
    """
    chosen = tokens[:, None]
    if rule.temperature == 0:
        scores = logits.double() - logits.double().amax(-1, keepdim=True)
        return 1 - scores.gather(-1, chosen)[:, 0].exp()
    ends = probabilities(logits, rule).cumsum(-1)
    end = ends.gather(-1, chosen)[:, 0]
    begin = torch.where(tokens > 0, ends.gather(-1, (chosen - 1).clamp(min=0))[:, 0], 0.0)
    return torch.maximum(begin - uniform, uniform - end).clamp(min=0)
