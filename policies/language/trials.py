"""Pools the checked answers of a server into one test, for differences too small for a single answer.

In bfloat16, rounding moves an answer's numbers as much as a step of training does. But rounding moves every answer its
own way, and other weights move all answers the same way. So a trial makes three bets on every checked answer:

    direction  its differences from the learner's numbers point where those of earlier answers pointed
    size       they are larger than those of simulated rounding (`trust.rounding_noise`)
    draws      its tokens miss the noise by more than with simulated rounding; or, of a server with a noise of its own,
               likely tokens come more often than their probabilities

Answers to one prompt share the rounding of its keys and values, so only its first answer is bet on (`is_new`). An
honest server's answers lose a bet at least as often as they win it, whatever the size of its rounding. A bet multiplies
a capital by 1 + stake * outcome, with outcomes of -1 to 1, and begins anew when the capital is below 1. So the capital
of an honest server reaches `LIMIT` less than once in `LIMIT` answers, however long the run is (e-detectors: arXiv
2203.03532).

    if trial.is_new(request):
        evidence = trial.add(check_proof(...))    # "" until the capital of a bet reaches the limit, then why
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from embodied.policies.language.engine import Request

LIMIT = 1e7
STAKES = np.array([0.25, 0.5, 0.9])  # of three capitals, whose mean counts
REMEMBERED = 1024  # prompts whose further answers are not bet on
MEMORY = 0.95  # weight of the earlier answers' direction at each new answer
# Kernels have a small common direction, too: cosines up to the first number lose; beyond it a win grows to 1 over
# the second.
TOLERATED, WIDTH = 0.15, 0.2
REASONS = (
    "differ from the learner's numbers in a common direction, as those of other weights do",
    "differ from the learner's numbers by more than rounding does",
    "were not drawn as they were asked for",
)


@dataclass(frozen=True)
class CheckedAnswer:
    """What the learner's recomputation of an answer shows."""

    mismatch: str = ""  # why this answer alone is not of the learner's weights
    shifts: Sequence[np.ndarray] = ()  # by block [D]: how its numbers are moved
    size: float = 0.0  # outcome of the bet on the size
    draws: np.ndarray = field(default_factory=lambda: np.zeros(0))  # outcomes of the bets on the drawn tokens


class Trial:
    """The bets on a server's checked answers."""

    def __init__(self) -> None:
        self.capital = np.ones((len(REASONS), len(STAKES)))
        self.direction: np.ndarray | None = None  # the sum of earlier answers' directions
        self.answers = 0
        self.prompts: deque[Hashable] = deque(maxlen=REMEMBERED)

    def is_new(self, request: Request) -> bool:
        """True for the first answer of a prompt, and of a conversation's turns."""
        keys = ("episode", int(request.episode)), hash(tuple(request.tokens))
        is_new = not any(key in self.prompts for key in keys)
        self.prompts.extend(keys)
        return is_new

    def add(self, checked: CheckedAnswer) -> str:
        """Why the server's answers together are not of the learner's weights; "" if that is not certain."""
        self.answers += 1
        for capital, outcomes in zip(self.capital, (self.follow(checked.shifts), checked.size, checked.draws)):
            won = np.prod(1 + STAKES[:, None] * np.atleast_1d(outcomes), axis=1)
            capital[:] = np.maximum(capital, 1) * won
        most = self.capital.mean(1)
        if most.max() < LIMIT:
            return ""
        of = f"its last answers, of {self.answers} that were checked together, {REASONS[int(most.argmax())]}"
        return f"{of}; an honest server's would once in {LIMIT:,.0f} answers"

    def follow(self, blocks: Sequence[np.ndarray]) -> float:
        """The outcome of the bet that these shifts point where earlier ones did, which they join."""
        if not len(blocks):
            return 0.0
        shifts = np.stack(blocks)
        lengths = np.linalg.norm(shifts, axis=1, keepdims=True)
        if not lengths.any():
            return 0.0
        shifts, before = (shifts / np.maximum(lengths, 1e-30))[lengths[:, 0] > 0], self.direction
        self.direction = shifts.mean(0) if before is None else MEMORY * before + shifts.mean(0)
        if before is None:
            return 0.0
        cosine = float((shifts @ before).mean() / max(float(np.linalg.norm(before)), 1e-30))
        return float(np.clip((cosine - TOLERATED) / WIDTH, -1, 1))
