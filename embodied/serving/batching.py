"""Questions that arrive together are answered together, in one pass of the policy.

What surprises: nobody waits for clients that are not there. A question waits for others only while somebody who is
connected has not asked, and never longer than `wait_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

Question = Any
Answer = Any


class Batching:
    def __init__(
        self, answer: Callable[[list[Question]], list[Answer]], most: int, wait_s: float, clients: Callable[[], int]
    ) -> None:
        """`answer` may block: it runs in a thread. An answer that is an exception is raised where it was asked for."""
        self.answer, self.most, self.wait_s, self.clients = answer, most, wait_s, clients
        self.asked: asyncio.Queue[tuple[Question, asyncio.Future]] = asyncio.Queue()

    async def ask(self, question: Question) -> Answer:
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((question, answer))
        return await answer

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            batch = [await self.asked.get()]
            try:
                async with asyncio.timeout(self.wait_s):
                    while len(batch) < min(self.most, self.clients()):
                        batch.append(await self.asked.get())
            except TimeoutError:
                pass  # those who are here are answered
            if batch := [(question, answer) for question, answer in batch if not answer.done()]:  # others have left
                await self._answer(batch)

    async def _answer(self, batch: list[tuple[Question, asyncio.Future]]) -> None:
        questions = [question for question, _ in batch]
        try:
            answers = await asyncio.to_thread(self.answer, questions)
        except Exception as err:
            if len(batch) > 1:  # nobody pays for another's question
                for one in batch:
                    await self._answer([one])
                return
            answers = [err]
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
