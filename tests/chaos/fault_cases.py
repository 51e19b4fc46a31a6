"""Which faults strike whom, where and when: every mode, schedule, backend, algorithm, phase; and how each has to end.

A placement says what a mode means on a machine of two cores; what needs more devices than that is given fake ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import product

from faulty_env import FAULTS, OF_A_POLICY

MODES = {
    "auto": "",  # what a user gets who says nothing
    "collocated-2": '{"sim,policy": "cpu:0-1*2", learner: "cpu:0"}',
    "collocated-4": '{"sim,policy": "fake:0-3", learner: "fake:0-1"}',
    "hybrid": "hybrid",
    "disaggregated": '{sim: "fake:0-1", policy: "fake:2", learner: "fake:3"}',
}
HOSTS = {  # who is started again, and who takes the run along
    "auto": (("sim+policy",), "learner"),
    "collocated-2": (("sim+policy",), "learner"),
    "collocated-4": (("sim+policy",), "learner"),
    "hybrid": (("sim",), "policy+learner"),
    "disaggregated": (("sim", "policy"), "learner"),
}
BACKENDS = ("local", "ray")
RECIPES = ("pointmass_ppo", "pointmass_grpo")
SIMULATOR, SIMULATOR_MODES = "maniskill_ppo", ("auto", "hybrid")
SYNC = "sync"  # in which all modes are struck; other schedules are in the placement that they get without asking
SCHEDULES = {"periodic": ("pointmass_grpo",), "async": ("pointmass_ppo", "pointmass_grpo", SIMULATOR)}
SCHEDULE_OPTIONS = {"periodic": {"algo.epochs": 1, "algo.minibatch_size": "null"}}  # what it cannot do without
PHASES = ("rollout", "reset", "update", "long_update", "publish", "weights", "saving", "evaluation", "rebuild")
OF_A_LEARNER = ("start", "rollout", "update", "publish", "saving", "evaluation")
AT_THE_START = ("exception", "os_exit", "sigkill", "hang")
INSIDE = {"sim": (FAULTS, ("rollout", "reset", "evaluation")), "policy": (OF_A_POLICY, ("rollout", "evaluation"))}
SILENT = ("sigstop", "hang", "hang_with_gil")

RECOVERED, TOLD = "recovered", "ended with its cause"


@dataclass(frozen=True)
class Case:
    """`victim`: the roles of a process that is struck from outside, or the worker whose code goes wrong (`inside`)."""

    recipe: str
    mode: str
    backend: str
    victim: str
    phase: str
    fault: str = "sigkill"
    inside: bool = False
    schedule: str = SYNC

    @property
    def name(self) -> str:
        return " ".join(map(str, asdict(self).values()))

    @property
    def algo(self) -> str:
        return self.recipe.rpartition("_")[2]

    @property
    def wanted(self) -> str:
        """Who dies in its constructor fails the run, and so does a learner."""
        return TOLD if "learner" in self.victim or self.phase == "start" else RECOVERED

    @property
    def run(self) -> tuple:
        """The cases for which this is the same are struck one after the other in one run."""
        shared = (self.recipe, self.mode, self.backend, self.wanted, self.inside, self.schedule)
        if self.wanted == TOLD:
            return (*shared, self.victim, self.phase, self.fault)
        return (*shared, self.victim, self.phase) if self.inside else shared


def all_cases() -> list[Case]:
    return [*kills(), *simulator_kills(), *faults(), *schedule_kills()]


def kills() -> Iterable[Case]:
    """SIGKILL everywhere."""
    for mode, backend, recipe in product(MODES, BACKENDS, RECIPES):
        mortals, learner = HOSTS[mode]
        for victim in mortals:
            yield from (Case(recipe, mode, backend, victim, phase) for phase in ("start", *PHASES))
        for phase in OF_A_LEARNER if recipe == RECIPES[0] else ("update",):
            yield Case(recipe, mode, backend, learner, phase)
        yield Case(recipe, mode, backend, learner, "update", "sigstop")


def simulator_kills() -> Iterable[Case]:
    """The same with the recipe that the README begins with."""
    for mode, backend in product(SIMULATOR_MODES, BACKENDS):
        mortals, learner = HOSTS[mode]
        for victim in mortals:
            yield from (Case(SIMULATOR, mode, backend, victim, phase) for phase in PHASES)
        yield Case(SIMULATOR, mode, backend, learner, "update")


def faults() -> Iterable[Case]:
    """Whatever else can go wrong, in the default placement."""
    for backend, (worker, (kinds, phases)) in product(BACKENDS, INSIDE.items()):
        for phase, fault in product(phases, kinds):
            yield Case(RECIPES[0], "auto", backend, worker, phase, fault, inside=True)
        for fault in AT_THE_START:
            yield Case(RECIPES[0], "auto", backend, worker, "start", fault, inside=True)


def schedule_kills() -> Iterable[Case]:
    """SIGKILL where learners work beside the others."""
    mortals, learner = HOSTS["auto"]
    for schedule, recipes in SCHEDULES.items():
        for recipe, backend, victim in product(recipes, BACKENDS, mortals):
            yield from (Case(recipe, "auto", backend, victim, phase, schedule=schedule) for phase in PHASES)
            yield Case(recipe, "auto", backend, learner, "update", schedule=schedule)
