"""Which engine writes which answer, where several language policy workers do.

The length of an answer is not known before it is written. So all prompts go into one channel, and each engine takes as
many as it has room for. An answer depends on its prompt alone, so whoever writes it changes none.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count, groupby
from time import monotonic

from embodied.core.conversations import Prompt, PromptBatch, Vacancy
from embodied.core.types import ActRequest, AskAgain, Route
from embodied.runtime import Handle
from embodied.workflows.rollout_manager import RequestRouter, RolloutManager

SIGN_OF_LIFE_S = 30.0  # after which an engine that waits for prompts hears from us


class PromptRouter(RequestRouter):
    """Decides which engine writes which answer. All sims ask through one channel; the driver hands what waits there to
    engines as they say that they have room, so one whose answers are short, or that is fast, has more of them.

    Where an engine dies or leaves, sims ask again for all that is open to them; what others have in hand is not
    written twice.
    """

    one_channel = True

    def __init__(self, manager: RolloutManager, routes: dict[int, Route], *others) -> None:
        self.names: dict[int, str] = {}  # of policy workers as they serve now: every time another one
        self.times = count()
        self.queue = PromptQueue()
        self.quiet_until = monotonic() + SIGN_OF_LIFE_S
        super().__init__(manager, routes, *others)
        self.queue.first = {*self.names.values()}

    def due(self) -> bool:
        """True if somebody asks or has room, or `RequestRouter.due`."""
        return self.manager.prompts.qsize() > 0 or monotonic() > self.quiet_until or super().due()

    def go_on(self) -> None:
        """Hand on what waits, and let policy workers join or leave."""
        prompts = self.manager.prompts
        while prompts.qsize():
            item = prompts.get()
            if isinstance(item, Vacancy):
                self.queue.make_room(item)
            elif item.source in self.stages and self._plays(item.source):
                self.queue.add(item)
        if super().due():
            super().go_on()
            self._forget_who_left()
        self._hand_out()
        if monotonic() > self.quiet_until:
            self.quiet_until = monotonic() + SIGN_OF_LIFE_S
            for policy in self.serving:
                self.manager.requests[policy].put(ActRequest("the driver"))

    def begin_again(self, replaced: Iterable[int]) -> None:
        for policy in self.serving.keys() & set(replaced) - self.leaving.keys():
            self.serving[policy] = self._serve(policy)
        self.queue.keep(self._plays)
        self._forget_who_left()
        self._hand_out()

    def _plays(self, source: str) -> bool:
        return not self.calls[self.stages[source][0]].done()

    def _serve(self, policy: int) -> Handle:
        self.names[policy] = name = f"policy-{policy}#{self.manager.rounds}.{next(self.times)}"
        manager = self.manager
        return self.policies[policy].serve(
            manager.requests[policy], dict(self.replies), *self.how, name, manager.prompts
        )

    def _share_out(self, policies: list[int], joining: list[int]) -> None:
        """A worker that joins says that it has room; one that leaves is forgotten when it has left."""
        self.serving |= {policy: self._serve(policy) for policy in joining}

    def _forget_who_left(self) -> None:
        if self.queue.forget({self.names[policy] for policy in self.serving}):
            for source in filter(self._plays, self.stages):
                self.replies[source].put(AskAgain(source))

    def _hand_out(self) -> None:
        here = {self.names[policy]: policy for policy in self.serving.keys() - self.leaving.keys()}
        for name, batches in self.queue.hand_out(sorted(here)).items():
            for batch in batches:
                self.manager.requests[here[name]].put(batch)


class PromptQueue:
    """The prompts of a round: those that wait, in the order in which they came, and which engine had each other one."""

    def __init__(self) -> None:
        self.first: set[str] = set()  # engines that the round begins with: nothing is handed out before all have spoken
        self.waiting: deque[tuple[str, Prompt]] = deque()  # (source, prompt)
        self.had_by: dict[tuple[str, int], str] = {}  # (source, number of the prompt) -> engine; "" while it waits
        self.written_by: dict[tuple[str, int], str] = {}  # (source, episode) -> engine that has its keys and values
        self.room: dict[str, int] = {}  # by engine, conversations that it could have more
        self.open: dict[str, int] = {}  # by engine, conversations that it has

    def add(self, batch: PromptBatch) -> None:
        """Queue new prompts; a repeated one that waits already, or that an engine has, is skipped."""
        for prompt in batch.prompts:
            if (batch.source, prompt.number) not in self.had_by:
                self.had_by[batch.source, prompt.number] = ""
                self.waiting.append((batch.source, prompt))

    def make_room(self, vacancy: Vacancy) -> None:
        """Add an engine's free rows: its first report is its capacity, later ones are answers it finished."""
        if vacancy.engine in self.room:
            self.open[vacancy.engine] -= vacancy.room
        else:
            self.open[vacancy.engine] = 0
        self.room[vacancy.engine] = self.room.get(vacancy.engine, 0) + vacancy.room

    def keep(self, wanted: Callable[[str], bool]) -> None:
        """Drop waiting prompts of all other sources."""
        self.waiting = deque((source, prompt) for source, prompt in self.waiting if wanted(source))

    def forget(self, here: set[str]) -> bool:
        """Forget engines that have left; their prompts may be asked again. Returns whether they had any."""
        gone = {name for name in (*self.room, *self.first) if name not in here}
        self.first -= gone
        for name in gone & self.room.keys():
            del self.room[name], self.open[name]
        lost = [key for key, name in self.had_by.items() if name in gone]
        for key in lost:
            del self.had_by[key]
        return bool(lost)

    def hand_out(self, engines: list[str]) -> dict[str, list[PromptBatch]]:
        """Returns as much as these engines have room for. A conversation goes on where it was, if there is room; with
        the others engines have about as many each, and neighbours stay together."""
        if any(name in self.first and name not in self.room for name in engines):
            return {}
        taken: dict[str, list[tuple[str, Prompt]]] = {name: [] for name in engines if name in self.room}
        others: deque[tuple[str, Prompt]] = deque()
        for source, prompt in self.waiting:
            name = self.written_by.get((source, prompt.episode), "")
            goes_on = len(prompt.tokens) > 0 and name in taken and self.room[name] > len(taken[name])
            (taken[name] if goes_on else others).append((source, prompt))
        shares = {name: len(mine) for name, mine in taken.items()}
        for _ in range(len(others)):
            free = [name for name in shares if self.room[name] > shares[name]]
            if not free:
                break
            shares[min(free, key=lambda name: self.open[name] + shares[name])] += 1
        for name, mine in taken.items():
            mine += [others.popleft() for _ in range(shares[name] - len(mine))]
        self.waiting = others
        return {name: self._batches(name, mine) for name, mine in taken.items() if mine}

    def _batches(self, engine: str, taken: list[tuple[str, Prompt]]) -> list[PromptBatch]:
        self.had_by |= {(source, prompt.number): engine for source, prompt in taken}
        self.written_by |= {(source, prompt.episode): engine for source, prompt in taken if prompt.has_more_turns}
        self.room[engine] -= len(taken)
        self.open[engine] += len(taken)
        return [
            PromptBatch(source, tuple(prompt for _, prompt in mine))
            for source, mine in groupby(taken, lambda one: one[0])
        ]
