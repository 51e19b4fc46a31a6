"""Takes turns on devices that workers share: carries out what the coordinator asks for, around a phase.

turns = Turns(coordinator, {"policy": policies, "learner": learners})
with turns.phase("update"): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from embodied.runtime.group import WorkerGroup
from embodied.runtime.leases import Action, Claim, Coordinator, LeaseError
from embodied.runtime.timers import Timers


class Turns:
    def __init__(
        self,
        coordinator: Coordinator,
        groups: Mapping[str, WorkerGroup],
        timers: Timers,
        growing: Mapping[str, Callable[[], list[Claim]]] | None = None,
    ) -> None:
        """`growing` says of a gang what its workers need after a phase: more than they knew of before, perhaps."""
        self.coordinator = coordinator
        self.growing = growing or {}
        self.workers = {name: group[i] for group in groups.values() for i, name in enumerate(group.workers)}
        self.timers = timers
        self.moves: list[Action] = []  # all that were carried out

    @contextmanager
    def phase(self, gang: str) -> Iterator[None]:
        """The gang's devices are its own inside; others' memory leaves only if there is no room for both."""
        if actions := self.coordinator.acquire(gang):
            with self.timers.measure("switch"):
                self._carry_out(actions)
        if not self.coordinator.granted(gang):
            raise LeaseError(f"{gang} needs devices that others hold: phases that share devices cannot be nested")
        try:
            yield
            if gang in self.growing:
                self.coordinator.revise(self.growing[gang]())
        finally:
            self._carry_out(self.coordinator.release(gang))

    def has_memory(self, worker: str) -> bool:
        """Whether its memory lies on its device: one that is started again gives it back at once where it does not."""
        return worker in self.coordinator.resident

    def _carry_out(self, actions: list[Action]) -> None:
        """All actions of a step at once; what they make possible next."""
        while actions:
            calls = [getattr(self.workers[action.worker], action.verb)() for action in actions]
            for call in calls:
                call.survivors()  # the memory of a process that died moved in its way
            self.moves += actions
            actions = [further for action in actions for further in self.coordinator.done(action)]
