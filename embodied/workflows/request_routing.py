"""Which policy worker answers which sim while sims play a round.

Robots' requests are dealt: each stage of a sim asks one policy worker, whose number of rows is known before. The
length of a language model's answers is not, so where several engines write, all prompts go into one channel and each
engine takes as many as it has room for (`PromptRouter`). Answers depend on the request alone, so neither way changes
any.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import count, groupby
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from embodied.core.conversations import Prompt, PromptBatch, Vacancy
from embodied.core.types import ActRequest, AskAgain, Route
from embodied.runtime import Handle

if TYPE_CHECKING:
    from embodied.workflows.rollout_manager import RolloutManager

SIGN_OF_LIFE_S = 30.0  # after which an engine that waits for prompts hears from us


class RequestRouter:
    """Decides which policy worker answers which source in a round.

    Every source asks one, and is sent to another one where its own has to leave or more take part. It sends its last
    request again there. An answer depends on the request alone, and the source ignores a second one, so whatever
    moves when, every decision is answered once. A worker that has to leave still answers what was asked, and is ended
    where it does not come to that.
    """

    def __init__(
        self,
        manager: RolloutManager,
        routes: dict[int, Route],
        calls: dict[int, Handle],
        policies: list[int],
        temperature: float,
        stream: str,
    ) -> None:
        """`calls` are those of the sims, `policies` take part from the beginning."""
        self.manager, self.device_sharing, self.policies = manager, manager.device_sharing, manager.policies
        self.calls = calls
        self.how = (manager.weight_sync.version, temperature, stream) if policies else ()
        self.stages = {s: (sim, stage) for sim, route in routes.items() for stage, s in enumerate(route.sources)}
        self.replies = {s: c for route in routes.values() for s, c in zip(route.sources, route.replies, strict=True)}
        self.asked = {source: manager.share(*stage, policies) for source, stage in self.stages.items()}
        self.moving = bool(policies) and any(map(self.device_sharing.gives_way, self.policies.workers))
        self.serving = {policy: self._serve(policy) for policy in policies}
        self.leaving: dict[int, float] = {}  # policy worker -> until when it may answer
        self.changes = -1  # of turns, that it knows of

    def due(self) -> bool:
        """True if workers can join, or should leave, or have left."""
        left = any(self.serving[policy].done() or monotonic() > until for policy, until in self.leaving.items())
        return left or self.device_sharing.due() or (self.moving and self.device_sharing.changes != self.changes)

    def go_on(self) -> None:
        """Let policy workers join or leave."""
        self.device_sharing.go_on()
        self.changes = self.device_sharing.changes
        for policy in [policy for policy in self.leaving if self.serving[policy].done()]:
            del self.leaving[policy], self.serving[policy]
        if self.moving:
            self._rearrange()
        self._end_late()
        self.device_sharing.leave({self.policies.workers[policy] for policy in self.serving})

    def _rearrange(self) -> None:
        here = [rank for rank, worker in enumerate(self.policies.workers) if self.device_sharing.takes_part(worker)]
        joining = [policy for policy in here if policy not in self.serving]
        going = [policy for policy in self.serving if policy not in here and policy not in self.leaving]
        if joining or going:
            self.manager.weight_sync.catch_up(joining)
            self._share_out([policy for policy in here if policy not in self.leaving], joining)
        for policy in going:
            self.manager.requests[policy].put(ActRequest("the driver", done=True))
            self.leaving[policy] = monotonic() + self.manager.budget.hang_s

    def begin_again(self, replaced: Iterable[int]) -> None:
        """Successors of policy workers that died answer whom these answered."""
        for policy in self.serving.keys() & set(replaced) - self.leaving.keys():
            self.serving[policy] = self._serve(policy)
            for source in self._sources(policy):
                self.replies[source].put(AskAgain(source))

    def end(self) -> list[Handle]:
        """End the round: ask all policy workers to stop serving; returns their calls."""
        self.moving = False
        for policy in self.serving.keys() - self.leaving.keys():
            self.manager.requests[policy].put(ActRequest("the driver", done=True))
        return list(self.serving.values())

    def _sources(self, policy: int) -> list[str]:
        return [source for source, asked in self.asked.items() if asked == policy]

    def _serve(self, policy: int) -> Handle:
        """Start serving. If sources may move, the worker gets every reply channel of the round, since a request can
        arrive before the worker learns that its source has moved here."""
        requests, mine = self.manager.requests[policy], self._sources(policy)
        known = {source: self.replies[source] for source in (self.replies if self.moving else mine)}
        call = self.policies[policy].serve(requests, known, *self.how)
        if self.moving:
            self._announce(policy)
        return call

    def _announce(self, policy: int) -> None:
        """Tell a policy worker how many sims ask it: it waits for no others when it merges requests."""
        num_sims = len({self.stages[source][0] for source in self._sources(policy)})
        self.manager.requests[policy].put(ActRequest("the driver", num_sims=num_sims))

    def _share_out(self, policies: list[int], joining: list[int]) -> None:
        """Every source sends its last request again where it has another worker now, or one that has just joined."""
        playing = [source for source, (sim, _) in self.stages.items() if not self.calls[sim].done()]
        new = {s: self.manager.share(*self.stages[s], policies) if policies else self.asked[s] for s in playing}
        moved = [source for source in playing if new[source] != self.asked[source] or new[source] in joining]
        self.asked |= new
        for policy in policies:
            if policy in joining:
                self.serving[policy] = self._serve(policy)
            else:
                self._announce(policy)
        for source in moved:
            self.replies[source].put(AskAgain(source, self.manager.requests[new[source]]))

    def _end_late(self) -> None:
        """A policy worker that should have left and is still at an answer loses its process."""
        for policy, until in self.leaving.items():
            if monotonic() > until and not self.serving[policy].done():
                self.leaving[policy] = inf
                cause = f"still answered {self.manager.budget.hang_s:g} s after others asked for its devices"
                self.manager.cluster.end(self.policies.hosts[policy], f"{cause} (faults.hang_s)")


class PromptRouter(RequestRouter):
    """Decides which engine writes which answer. All sims ask through one channel; the driver hands what waits there to
    engines as they say that they have room, so one whose answers are short, or that is fast, has more of them.

    Where an engine dies or leaves, sims ask again for all that is open to them; what others have in hand is not
    written twice.
    """

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
        """Returns as much as these engines have room for, so that they have about as many each; neighbours stay
        together."""
        if any(name in self.first and name not in self.room for name in engines):
            return {}
        shares = dict.fromkeys((name for name in engines if name in self.room), 0)
        for _ in range(len(self.waiting)):
            free = [name for name in shares if self.room[name] > shares[name]]
            if not free:
                break
            shares[min(free, key=lambda name: self.open[name] + shares[name])] += 1
        return {name: self._batches(name, share) for name, share in shares.items() if share}

    def _batches(self, engine: str, share: int) -> list[PromptBatch]:
        taken = [self.waiting.popleft() for _ in range(share)]
        self.had_by |= {(source, prompt.number): engine for source, prompt in taken}
        self.room[engine] -= share
        self.open[engine] += share
        return [
            PromptBatch(source, tuple(prompt for _, prompt in mine))
            for source, mine in groupby(taken, lambda one: one[0])
        ]
