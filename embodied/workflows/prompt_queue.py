"""The prompts of a round that wait for one of several language engines. On two cores there are two.

The length of an answer is not known in advance, so a prompt waits until an engine has room. Text envs put their prompts
into one channel, and engines report there what they have answered, and how much room they have.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from itertools import groupby
from time import monotonic
from typing import cast

from embodied.core.conversations import PromptBatch, Vacancy
from embodied.core.request_queue import RequestQueue, Waiting
from embodied.runtime import Channel

SIGN_OF_LIFE_S = 30.0  # after which an engine that waits for prompts gets an empty message


class PromptQueue:
    """Hands prompts to engines with room."""

    def __init__(self, channel: Channel, first: Collection[str]) -> None:
        """`channel` brings prompts and reports. No prompt is sent before all engines of `first` have reported room."""
        self.channel, self.first = channel, first
        self.queue = RequestQueue()
        self.room: dict[str, int] = {}  # by engine that has reported it
        self.answered = 0
        self.quiet_until = monotonic() + SIGN_OF_LIFE_S

    def is_due(self) -> bool:
        """True if prompts or reports have come, or engines need a sign of life."""
        return bool(self.channel.qsize()) or monotonic() > self.quiet_until

    @property
    def progress(self) -> float:
        """The share of answered prompts among those that have come."""
        return self.answered / max(1, self.answered + self.queue.unanswered)

    def is_idle(self, engine: str) -> bool:
        """True if no prompt waits for this engine."""
        return bool(self.answered) and not self.queue.waiting and not self.queue.load(engine)

    def hand_out(self, engines: Mapping[str, Channel], staying: Collection[str], playing: Collection[str]) -> None:
        """Take new prompts and reports, and send prompts to engines with room among `staying`; other engines only end
        their answers. Prompts of other sources than `playing` are forgotten."""
        for item in [self.channel.get() for _ in range(self.channel.qsize())]:
            self._add_message(item)
        self.queue.workers({name: self.room[name] for name in staying if name in self.room}, engines.keys() - staying)
        self.queue.drop(lambda prompt: source_of(prompt) not in playing)  # also what a dead engine had taken
        if not any(name in self.first and name not in self.room for name in staying):
            for name, waiting in self.queue.take().items():
                for source, batch in groupby(waiting, source_of):  # neighbouring prompts of a source together
                    engines[name].put(PromptBatch(source, tuple(one.request for one in batch)))
        if monotonic() > self.quiet_until:
            self.quiet_until = monotonic() + SIGN_OF_LIFE_S
            for channel in engines.values():
                channel.put(PromptBatch("the driver", ()))

    def _add_message(self, item: PromptBatch | Vacancy) -> None:
        if isinstance(item, PromptBatch):
            asked = ((item.source, one) for one in item.prompts)
            self.queue.put(
                *(Waiting((who, one.number), one, 1, (who, one.episode), one.has_more_turns) for who, one in asked)
            )
            return
        self.room[item.engine] = item.room
        self.answered += sum(map(self.queue.take_answer, item.answered))
        taken = self.queue.taken.get(item.engine, {})
        for key, written in item.unfinished:
            if had := taken.get(key):
                taken[key] = replace(had, request=replace(had.request, written=written))


def source_of(prompt: Waiting) -> str:
    """The player of a prompt, whose key is (player, number)."""
    source, _ = cast(tuple[str, int], prompt.key)
    return source
