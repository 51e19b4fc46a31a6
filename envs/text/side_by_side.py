"""Plays env steps of several conversations at the same time, in threads."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from statistics import median_low
from time import perf_counter
from typing import Generic, TypeVar

T = TypeVar("T")  # a conversation

QUICK_S = 0.003  # if steps mostly take less, they are played one after the other
REMEMBERED = 16  # number of latest steps for this decision


class SideBySide(Generic[T]):
    """Plays env steps of at most `most` conversations at the same time, in threads, if they take long (tools, scores,
    requests to servers). Quick steps stay in the worker's own thread: a thread would cost more than they do, and the
    order of everything stays the same. The calls of an env never overlap.

        steps.begin(conversation, pass_answer)      # an answer came; `pass_answer` lets its env step
        for conversation, over in steps.take_ended(wait_for_one=True): ...
    """

    def __init__(self, most: int, quick_s: float = QUICK_S) -> None:
        self.most, self.quick_s = most, quick_s
        self.seconds: deque[float] = deque(maxlen=REMEMBERED)  # of the latest steps
        self.begun: list[tuple[T, Future[bool]]] = []  # in the order of the answers
        self.threads: ThreadPoolExecutor | None = None

    @property
    def busy(self) -> bool:
        """True if a step has not been reported as ended."""
        return bool(self.begun)

    def begin(self, conversation: T, step: Callable[[], bool]) -> None:
        """Begin a step; its function returns whether the conversation is over."""
        if self.most > 1 and len(self.seconds) > 1 and median_low(self.seconds) > self.quick_s:
            self.threads = self.threads or ThreadPoolExecutor(self.most, "env-step")
            self.begun.append((conversation, self.threads.submit(self._timed, step)))
        else:
            done: Future[bool] = Future()
            done.set_result(self._timed(step))
            self.begun.append((conversation, done))

    def take_ended(self, wait_for_one: bool) -> list[tuple[T, bool]]:
        """The steps that have ended since the last call, in the order in which they began: (conversation, is it over).
        Raises an exception that one of them raised."""
        if wait_for_one and self.begun:
            wait([step for _, step in self.begun], return_when=FIRST_COMPLETED)
        begun, over = self.begun, []
        self.begun = []
        for conversation, step in begun:
            (over if step.done() else self.begun).append((conversation, step))
        return [(conversation, step.result()) for conversation, step in over]

    def give_up(self) -> None:
        """Forget all steps: steps that have not begun are cancelled, running steps are waited for."""
        running = [step for _, step in self.begun if not step.cancel()]
        self.begun = []
        wait(running)

    def close(self) -> None:
        """End the threads."""
        if self.threads:
            self.threads.shutdown(wait=False, cancel_futures=True)

    def _timed(self, step: Callable[[], bool]) -> bool:
        began = perf_counter()
        try:
            return step()
        finally:
            self.seconds.append(perf_counter() - began)
