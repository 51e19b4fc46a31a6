"""A tiny policy that speaks, in float64, and conversations of it: what learners and collectors are tested with."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from embodied.core.types import ActionSpec, EnvSpec, Trajectory
from embodied.policies.base import Policy, Scores

WORDS = 11
MAX_TOKENS = 6


class Speaking(Policy):
    """One layer of causal attention over an embedding; every conversation is scored by itself."""

    speaks = True

    def __init__(self, seed: int = 0, dim: int = 8) -> None:
        super().__init__(SimpleNamespace(max_tokens=MAX_TOKENS), EnvSpec(ActionSpec(1, WORDS), text=True))
        self.words = nn.Embedding(WORDS, dim)
        self.query, self.key, self.value_of = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.head = nn.Linear(dim, WORDS)
        self.seen: list[tuple[list[int], list[int]]] = []  # lengths and groups of every pass
        self.double()
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(0.5 * torch.randn(p.shape, generator=draw, dtype=p.dtype))

    def forward(self, inputs) -> Scores:
        tokens, mask = inputs["actions"][:, 0, 0].long(), inputs["mask"][:, 0]
        lengths = inputs["lengths"].tolist()
        self.seen.append((lengths, inputs["groups"].tolist()))
        assert sum(lengths) == len(tokens)
        found = [self.scored(part) for part in tokens.split(lengths)]
        logprobs, entropy = (
            torch.where(mask, torch.cat(each), 0.0)[:, None, None] for each in zip(*found, strict=True)
        )
        return Scores(logprobs, entropy, logprobs.new_zeros(len(tokens)))

    def pack(self, tokens, mask, lengths, groups, most) -> list[list[int]]:
        assert len(tokens) == len(mask) == lengths.sum()
        return pack_groups(lengths, groups, most)

    def scored(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-prob of every token of one conversation and the entropy of what might have come; 0 for the first."""
        logits = self.head(self.hidden(tokens)).log_softmax(1)[:-1]
        none = logits.new_zeros(1)
        chosen = logits.gather(1, tokens[1:, None])[:, 0]
        return torch.cat([none, chosen]), torch.cat([none, -(logits.exp() * logits).sum(1)])

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """[tokens, dim], what it makes of the text up to each token."""
        at = self.words(tokens)
        order = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
        weights = (self.query(at) @ self.key(at).T).masked_fill(~order, -torch.inf).softmax(1)
        return at + weights @ self.value_of(at)


class Judging(Speaking):
    """The same, which predicts what the rest of a conversation is worth."""

    value_names = ("worth.",)

    def __init__(self, seed: int = 0, dim: int = 8) -> None:
        super().__init__(seed, dim)
        self.worth = nn.Linear(dim, 1).double()
        draw = torch.Generator().manual_seed(seed + 100)
        with torch.no_grad():
            for p in self.worth.parameters():
                p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype))

    def forward(self, inputs) -> Scores:
        scores = super().forward(inputs)
        parts = inputs["actions"][:, 0, 0].long().split(inputs["lengths"].tolist())
        values = torch.where(inputs["mask"][:, 0], torch.cat([self.valued(part) for part in parts]), 0.0)
        return Scores(scores.logprobs, scores.entropy, values)

    def valued(self, tokens: torch.Tensor) -> torch.Tensor:
        """The value of the text before every token of one conversation; 0 for the first."""
        values = self.worth(self.hidden(tokens))[:, 0]
        return torch.cat([values.new_zeros(1), values[:-1]])


def pack_groups(lengths: np.ndarray, groups: np.ndarray, most: int) -> list[list[int]]:
    """Whole groups in their order while they fit; one that does not fit into a pack of its own is split."""
    packs: list[list[int]] = []
    room = 0
    for members in np.split(np.arange(len(lengths)), np.flatnonzero(np.diff(groups)) + 1):
        whole = int(lengths[members].sum())
        for bundle in [members] if whole <= most else np.split(members, len(members)):
            tokens = int(lengths[bundle].sum())
            if tokens > room or not packs:
                packs.append([])
                room = most
            packs[-1] += bundle.tolist()
            room -= tokens
    return packs


def talks(policy: Policy, groups: int, size: int, seed: int = 0, version: int = 0, stale: float = 0.0) -> Trajectory:
    """Random conversations of two turns, those of a group with one prompt; the first word of some answers was cut off.
    Their log-probs are the policy's, but for `stale`, a deviation."""
    r = np.random.default_rng(seed)
    tokens, masks = [], []
    for _ in range(groups):
        prompt = r.integers(WORDS, size=r.integers(1, 4))
        for _ in range(size):
            turns = [r.integers(WORDS, size=r.integers(1, most)) for most in (4, 3, 4)]  # answer, env, answer
            tokens.append(np.concatenate([prompt, *turns]))
            masks.append(np.repeat([False, True, False, True], [len(prompt), *map(len, turns)]))
    lengths, mask = np.array([len(each) for each in tokens]), np.concatenate(masks)
    cut = r.random(len(tokens)) < 0.3
    last = np.zeros(len(mask), bool)
    last[np.cumsum(lengths) - 1] = True
    actions = np.concatenate(tokens).astype(np.int32)
    with torch.no_grad():
        parts = torch.from_numpy(actions).long().split(lengths.tolist())
        logprobs = np.concatenate([policy.scored(part)[0].numpy() for part in parts])
    logprobs = np.where(mask, logprobs + stale * r.normal(size=len(mask)), 0.0)
    return Trajectory(
        ids=np.arange(len(tokens)),
        lengths=lengths,
        obs={},
        actions=actions[:, None, None],
        logprobs=logprobs[:, None, None],
        rewards=np.zeros((len(mask), 1)),
        terminated=last[:, None],
        truncated=(last & np.repeat(cut, lengths))[:, None],
        mask=mask[:, None],
        versions=np.where(mask, version, -1),
        episodes=np.repeat(np.arange(len(tokens)), lengths),
    )
