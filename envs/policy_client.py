"""A sim stage's line to its policy worker: it asks, and takes the answer to its last question, whoever gives it.

A policy worker may die between question and answer. Its successor knows of no question, so the stage is told to ask
again; the answer is the same, since it depends on the question alone, and should both answer, the second is ignored.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from embodied.core.types import ActReply, ActRequest, AskAgain
from embodied.runtime import Channel


class PolicyClient:
    def __init__(self, source: str, requests: Channel, replies: Channel) -> None:
        self.source = source
        self.requests = requests
        self.replies = replies
        self.question = ActRequest(source)

    def ask(self, same_as: tuple[str, int] | None = None, **what: Any) -> tuple[str, int]:
        """-> what this question can be referred to by. Where its `obs` is the `same_as` that of an earlier one, it goes
        without, unless it has to be asked again."""
        self.question = ActRequest(self.source, self.question.number + 1, **what)
        short = replace(self.question, obs=None, same_as=same_as)
        self.requests.put(self.question if same_as is None else short)
        return self.question.source, self.question.number

    def answer(self) -> ActReply:
        while True:
            reply: ActReply | AskAgain = self.replies.get()
            if reply.source != self.source:
                continue
            if isinstance(reply, AskAgain):
                self.requests.put(self.question)
            elif reply.number == self.question.number:
                return reply
