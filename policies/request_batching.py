"""Questions of several sims in one call of the policy: which are taken together, how they are put side by side, and
how the answer is cut up again.

Noise is keyed by episode and decision, so what is answered to a question does not depend on the others beside it, but
for the last digits of floating-point numbers.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from embodied.core.errors import DeadlineExceeded
from embodied.core.types import ActRequest, Array, PolicyOutput
from embodied.runtime import Channel


@dataclass(frozen=True)
class Merging:
    rows: int = 1  # env rows that are answered together at most; a question of more is answered by itself
    wait_s: float = 0.0  # how long a question waits for those of other sims


class Questions:
    """What comes through a channel of requests in one round, of these sources."""

    def __init__(self, channel: Channel, sources: Collection[str], merging: Merging) -> None:
        self.channel = channel
        self.sources = sources
        self.merging = merging
        self.sims = len({sim_of(source) for source in sources})
        self.next: ActRequest | None = None  # taken already, and too large for what was answered before it
        self.over = False

    def take(self) -> list[ActRequest]:
        """Those to be answered now; none when nobody asks any more."""
        first, self.next = self.next or self._get(), None
        if first is None or first.done:
            return []
        taken, until = [first], time.monotonic() + self.merging.wait_s
        room = self.merging.rows - len(first.episodes)
        while room > 0 and not self.over and (more := self._another(taken, until)) is not None:
            room -= 0 if more.done else len(more.episodes)
            if room < 0 or more.done:
                self.next, self.over = more, more.done
                break
            taken.append(more)
        return taken

    def _another(self, taken: Sequence[ActRequest], until: float) -> ActRequest | None:
        """Waits only while there is a sim that has not asked: one whose question is here asks no second one, or is
        simulating the other half of its envs meanwhile."""
        asked = len({sim_of(request.source) for request in taken})
        return self._get(until if asked < self.sims else 0.0)

    def _get(self, until: float | None = None) -> ActRequest | None:
        """The next question of this round; None if none came `until` then."""
        while True:
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0 and not self.channel.qsize():
                return None
            try:
                request = self.channel.get(timeout_s=None if left_s is None else max(left_s, 0.0))
            except DeadlineExceeded:
                if until is None:
                    raise
                return None
            if request.num_sims is not None:
                self.sims = request.num_sims
            elif request.done or request.source in self.sources:
                return request


def sim_of(source: str) -> str:
    """ "sim-0/1#7" -> "sim-0"."""
    return source.partition("/")[0]


def cut(array: Array, counts: Sequence[int]) -> list[Array]:
    """Rows back to whom they belong."""
    if len(counts) == 1:
        return [array]
    ends = np.cumsum(counts).tolist()
    return [array[end - count : end] for end, count in zip(ends, counts, strict=True)]


def cut_output(output: PolicyOutput, counts: Sequence[int]) -> list[PolicyOutput]:
    actions, logprobs, values = (cut(part, counts) for part in (output.actions, output.logprobs, output.values))
    replay = {name: cut(part, counts) for name, part in output.replay.items()}
    return [
        PolicyOutput(actions[i], logprobs[i], values[i], {name: parts[i] for name, parts in replay.items()})
        for i in range(len(counts))
    ]
