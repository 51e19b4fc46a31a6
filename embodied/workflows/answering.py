"""The policy workers of a round: they join, leave, die and are replaced while requests wait.

Requests wait with the players (`envs/request_client.py`); a player only gets the names of its policy workers. With
several language engines all prompts wait here until an engine has room (`SharedPrompts`), since the length of an answer
is not known in advance.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from itertools import count, groupby
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from embodied.core.conversations import PromptBatch, SamplingRule, Vacancy
from embodied.core.request_queue import RequestQueue, Waiting
from embodied.core.types import Route, Servers
from embodied.runtime import Handle

if TYPE_CHECKING:
    from embodied.workflows.rollout_manager import RolloutManager

SIGN_OF_LIFE_S = 30.0  # after which an engine that waits for prompts gets an empty message


class Answering:
    """The policy workers of a round, and their assignment to sources. Every request is answered, also when workers
    change."""

    def __init__(
        self,
        manager: RolloutManager,
        sims: Iterable[int],
        stages: int,
        policies: list[int],
        sampling: SamplingRule,
        beside: bool = False,
    ) -> None:
        """`policies` take part from the beginning. If an evaluation is played `beside`, each sim has one more source,
        which asks the same worker as its first stage."""
        self.manager, self.device_sharing, self.policies = manager, manager.device_sharing, manager.policies
        self.sources = {f"sim-{s}/{i}#{manager.rounds}": (s, i) for s in sims for i in range(stages + beside)}
        self.replies = {source: manager.replies[sim][stage] for source, (sim, stage) in self.sources.items()}
        self.stages = stages
        self.calls: dict[int, Handle] = {}  # of the sims
        self.how = (manager.weight_sync.version, sampling) if policies else ()
        self.moving = bool(policies) and any(map(self.device_sharing.gives_way, self.policies.workers))
        self.serving: dict[int, Handle] = {}
        self.names: dict[int, str] = {}  # names of the serving workers; every replacement has a new name
        self.lives = count()
        self.leaving: dict[int, float] = {}  # policy worker -> the time until which it may answer
        self.changes = -1  # number of known changes of turns
        self._name(policies)
        self.shared = SharedPrompts(self.names.values()) if manager.prompts and policies else None
        self.told = {source: self._servers(source) for source in self.sources}
        for policy in policies:
            self._serve(policy)

    def route(self, sim: int) -> Route:
        """The route of a sim at the beginning."""
        sources = [source for source, (of, _) in self.sources.items() if of == sim]
        return tuple(replace(self.told[source], replies=self.replies[source]) for source in sources)

    def due(self) -> bool:
        """True if workers can join, should leave or have left, or if prompts wait for a worker."""
        if self.shared and (self.manager.prompts.qsize() or monotonic() > self.shared.quiet_until):
            return True
        left = any(self.serving[policy].done() or monotonic() > until for policy, until in self.leaving.items())
        return left or self.device_sharing.due() or (self.moving and self.device_sharing.changes != self.changes)

    def go_on(self) -> None:
        """Let policy workers join or leave, and send waiting prompts to engines."""
        self.device_sharing.go_on()
        self.changes = self.device_sharing.changes
        if self.shared:
            self.device_sharing.report_progress(self.shared.progress)
        for policy in [policy for policy in self.leaving if self.serving[policy].done()]:
            del self.leaving[policy], self.serving[policy], self.names[policy]
            self.device_sharing.woke(self.manager.weight_sync.load_s(policy))
        if self.moving:
            self._join_or_leave()
        self._end_late()
        self.device_sharing.leave({self.policies.workers[policy] for policy in self.serving})
        self._tell()
        if self.shared:
            names = (self.names.get(policy, "") for policy in range(len(self.policies.workers)))
            idle = [self.shared.rests(name) for name in names]
            self.device_sharing.rest([worker for worker, rests in zip(self.policies.workers, idle) if rests])

    def begin_again(self, replaced: Iterable[int]) -> None:
        """Replace dead policy workers by their successors. If other workers hold a successor's device, it is built and
        joins when it gets the device back."""
        replaced = {*replaced}
        for policy in replaced & self.serving.keys():
            if self.policies.workers[policy] in self.device_sharing.unbuilt:
                del self.serving[policy], self.names[policy]
                self.leaving.pop(policy, None)
                self.changes = -1
        again = self.serving.keys() & replaced - self.leaving.keys()
        self._name(again)
        for policy in again:
            self._serve(policy)
        self._tell()

    def end(self) -> list[Handle]:
        """End the round: ask all policy workers to stop serving; returns their calls."""
        self.moving = False
        self.device_sharing.rest(())
        for policy in self.serving.keys() - self.leaving.keys():
            self.manager.requests[policy].put(None)
        return list(self.serving.values())

    # Inside

    def _join_or_leave(self) -> None:
        here = [rank for rank, worker in enumerate(self.policies.workers) if self.device_sharing.takes_part(worker)]
        joining = [policy for policy in here if policy not in self.serving]
        self.manager.weight_sync.catch_up(joining)
        self._name(joining)
        for policy in joining:
            self._serve(policy)
        for policy in [policy for policy in self.serving if policy not in here and policy not in self.leaving]:
            self.manager.requests[policy].put(None)
            self.leaving[policy] = monotonic() + self.manager.budget.hang_s

    def _name(self, policies: Iterable[int]) -> None:
        self.names |= {policy: f"policy-{policy}#{self.manager.rounds}.{next(self.lives)}" for policy in policies}

    def _serve(self, policy: int) -> None:
        """Start serving. A worker knows every source of the round, since any source may ask it later."""
        sources = [source for source, told in self.told.items() if self.names[policy] in told.channels]
        shared = (self.names[policy], self.manager.prompts) if self.shared else ()
        requests = self.manager.requests[policy]
        self.serving[policy] = self.policies[policy].serve(requests, dict(self.replies), *self.how, sources, *shared)

    def _tell(self) -> None:
        """Tell the playing sources their policy workers, if these have changed."""
        if self.shared:
            self._hand_out(self.shared)
            return
        for source in filter(self._plays, self.sources):
            new, old = self._servers(source), self.told[source]
            if (new.channels.keys(), new.others) != (old.channels.keys(), old.others):
                self.told[source] = new
                self.replies[source].put(new)

    def _servers(self, source: str) -> Servers:
        """The worker that a source asks, and other workers that may still have requests of this source."""
        manager = self.manager
        if self.shared or not self.names:
            return Servers(source, {"all": manager.prompts} if self.shared else {})
        sim, stage = self.sources[source]
        block = manager.share(sim, stage % self.stages, self.stages, self._taking())
        others = frozenset(self.names.values()) - {self.names[policy] for policy in block}
        return Servers(source, {self.names[policy]: manager.requests[policy] for policy in block}, others)

    def _taking(self) -> list[int]:
        return sorted(self.names.keys() - self.leaving.keys())

    def _plays(self, source: str) -> bool:
        return not self.calls[self.sources[source][0]].done()

    def _hand_out(self, shared: SharedPrompts) -> None:
        manager, prompts = self.manager, self.manager.prompts
        assert prompts is not None
        shared.hear([prompts.get() for _ in range(prompts.qsize())], filter(self._plays, self.sources))
        named = {self.names[policy]: policy for policy in self._taking()}
        for name, batches in shared.hand_out(named, {self.names[policy] for policy in self.leaving}).items():
            for batch in batches:
                manager.requests[named[name]].put(batch)
        if monotonic() > shared.quiet_until:
            shared.quiet_until = monotonic() + SIGN_OF_LIFE_S
            for policy in self.serving:
                manager.requests[policy].put(PromptBatch("the driver", ()))

    def _end_late(self) -> None:
        """End the process of a policy worker that still answers although it should have left."""
        for policy, until in self.leaving.items():
            if monotonic() > until and not self.serving[policy].done():
                self.leaving[policy] = inf
                cause = f"still answered {self.manager.budget.hang_s:g} s after others asked for its devices"
                self.manager.cluster.end(self.policies.hosts[policy], f"{cause} (faults.hang_s)")


class SharedPrompts:
    """The prompts of a round, which wait until an engine has room."""

    def __init__(self, first: Iterable[str]) -> None:
        """No prompt is sent before the round's first engines (`first`) have reported their room."""
        self.first = {*first}
        self.queue = RequestQueue()
        self.room: dict[str, int] = {}  # by engine
        self.answered = 0
        self.quiet_until = monotonic() + SIGN_OF_LIFE_S

    @property
    def progress(self) -> float:
        """The answered share of all prompts so far."""
        return self.answered / max(1, self.answered + self.queue.unanswered)

    def rests(self, engine: str) -> bool:
        """True if no prompt waits for this engine."""
        return bool(self.answered) and not self.queue.waiting and not self.queue.load(engine)

    def hear(self, items: Iterable[PromptBatch | Vacancy], sources: Iterable[str]) -> None:
        """Take prompts of these sources, and reports of engines; drop prompts of other sources."""
        playing = {*sources}
        for item in items:
            if isinstance(item, Vacancy):
                self.room[item.engine] = item.room
                self.answered += sum(map(self.queue.answered, item.answered))
                for key, written in item.unfinished:
                    if had := self.queue.taken.get(item.engine, {}).get(key):
                        self.queue.taken[item.engine][key] = replace(had, request=replace(had.request, written=written))
            else:
                self.queue.put(
                    *(
                        Waiting((item.source, one.number), one, 1, (item.source, one.episode), one.has_more_turns)
                        for one in item.prompts
                    )
                )
        self.queue.drop(lambda prompt: prompt.key[0] not in playing)

    def hand_out(self, taking: Iterable[str], others: Collection[str]) -> dict[str, list[PromptBatch]]:
        """The prompts to send to the `taking` engines now; engines in `others` only finish their prompts."""
        taking = [*taking]
        self.queue.workers({name: self.room[name] for name in taking if name in self.room}, others)
        if any(name in self.first and name not in self.room for name in taking):
            return {}
        return {name: in_batches(prompts) for name, prompts in self.queue.take().items()}


def in_batches(waiting: list[Waiting]) -> list[PromptBatch]:
    """Batches of neighbouring prompts of the same source."""
    return [
        PromptBatch(source, tuple(prompt.request for prompt in prompts))
        for source, prompts in groupby(waiting, lambda prompt: prompt.key[0])
    ]
