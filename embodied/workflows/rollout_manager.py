"""Runs the rounds of sim workers and policy workers, and replaces dead workers.

In a round some sims play, and the policy workers serve them until all are done. A host that dies in a round, or during
an update, is restarted at once. Its workers get:

    policy worker   its policy and the current weights, or the next ones if they are published while it builds. Its
                    predecessor's unanswered requests wait for it, so nothing is lost. Workers of the same process die
                    with it: on cores its sim, on GPUs its learner, unless placement= says otherwise
    sim worker      its envs, and the next episode of every row. Data of the dead worker's round are lost, and the
                    caller decides whether to collect them again

`answering.py` assigns policy workers to sims. While learners hold a policy worker's devices, other policy workers
answer its requests.

The runtime notices deaths and decides on restarts (`Cluster.settle`, `supervision.py`).

`lagging_versions.py` decides how old a rollout's weights may be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from embodied.core.conversations import SamplingRule
from embodied.core.types import EpisodeList, EpisodeResult, Route, rows_of_sims
from embodied.runtime import Budget, Handle
from embodied.runtime.failures import Failure
from embodied.runtime.supervision import Repetitions
from embodied.workflows.answering import Answering
from embodied.workflows.contract import WARNING

if TYPE_CHECKING:
    from embodied.core.conversations import EvaluationShare
    from embodied.workflows.workers import Workers


class BackgroundTask(Protocol):
    """Work of the driver during a round; it may be due when notes of the sims arrive or calls end."""

    def due(self) -> bool:
        """True if it has work now."""

    def go_on(self) -> None:
        """Do the work, without waiting."""


class RolloutManager:
    """Plays rounds; from its construction on, sim and policy workers that die are replaced."""

    def __init__(self, workers: Workers) -> None:
        """All workers are built."""
        self.cluster, self.sims, self.policies = workers.cluster, workers.sims, workers.policies
        self.spec, self.weight_sync = workers.spec, workers.weight_sync
        self.episodes: EpisodeList | None = None  # the episodes that a replaced sim worker continues
        self.journal, self.notify = workers.journal, workers.notify
        self.divides = workers.config.merged_rows > 1  # True: a request may be divided among policy workers
        self.num_stages = max(workers.stages, 1)
        self.device_sharing = workers.device_sharing
        self.episode_counter, self.num_tasks = EpisodeCounter(workers.config.env.num_envs), len(workers.tasks)
        self.background: list[BackgroundTask] = []  # tasks during every round
        self.beside: dict[int, EvaluationShare] = {}  # by sim, the evaluation episodes of the next rollout round
        self.rounds = 0
        self.restarts = 0
        self.lives: Counter[str] = Counter()  # number of replacements by worker
        self.abandoned_episodes = 0
        self.repetitions = Repetitions()
        self.warnings: set[str] = set()  # shown warnings
        # Requests wait with the policy workers, replies with the sims.
        channel, text = self.cluster.channel, self.spec.text
        places = range(self.num_stages + workers.config.eval.interleave)
        sims, policies = range(len(self.sims)), range(len(self.policies))
        options = {"capacity": None} if text else {}  # bounded by the number of open conversations
        self.requests = [channel(f"requests-{p}", home=self.policies[p], **options) for p in policies]
        # Prompts for any engine with room, and the engines' reports of their room.
        self.prompts = channel("prompts", **options) if text and len(self.policies) > 1 else None
        if self.prompts:
            self.cluster.watch(self.prompts)
        if text:  # replies are taken in the order of their arrival
            self.replies = [[channel(f"replies-sim-{s}", home=self.sims[s], **options)] * self.num_stages for s in sims]
        else:
            self.replies = [[channel(f"replies-sim-{s}/{i}", home=self.sims[s]) for i in places] for s in sims]
        faults = workers.config.faults
        self.budget = Budget(faults.max_restarts, faults.window_s, faults.hang_s)
        self.cluster.supervise([self.sims, self.policies], [self.policies], self.budget)

    def rows(self, sim: int) -> np.ndarray:
        """The env rows of a sim worker."""
        return rows_of_sims(len(self.episode_counter.begun), len(self.sims), self.num_tasks)[sim]

    # Work

    def play(
        self,
        sims: Iterable[int],
        begin: Callable[[int, Route], Handle],
        stages: int,
        sampling: SamplingRule,
        asked: bool = True,
        background: BackgroundTask | None = None,
        beside: bool = False,
    ) -> tuple[dict[int, Handle], dict[int, Route]]:
        """Run a round: call `begin` for these sims, and let the policy workers serve `stages` stages of each (if
        `asked`), and robots' evaluation episodes `beside`. `background` tasks run meanwhile. Returns the finished
        calls, successful except for dead sims, and their routes."""
        self.settle()
        self.rounds += 1
        acting, robots = self._acting() if asked else [], not self.spec.text
        answering = Answering(self, sims := list(sims), stages, acting, sampling, beside and robots)
        routes = {sim: answering.route(sim) for sim in sims}
        answering.calls = calls = {sim: begin(sim, route) for sim, route in routes.items()}
        tasks = [task for task in (answering, background, *self.background) if task]
        while losses := self._losses(calls.values(), tasks):
            if sampling.stream != "eval":  # in an evaluation a failing episode loses only itself
                self._refuse_repeated(losses.values())
            answering.begin_again(self._replace(losses))
        ending = answering.end()
        while losses := self._losses(ending, [answering]):
            self._replace(losses)
        self.device_sharing.leave(())
        lost = {self.sims.hosts[sim] for sim, call in calls.items() if not call.succeeded()}
        workers = [one for group in (self.sims, self.policies) for one in zip(group.workers, group.hosts, strict=True)]
        self.repetitions.came_through(worker for worker, host in workers if host not in lost)
        return calls, routes

    def _acting(self) -> list[int]:
        """The policy workers that begin a round: every worker with its device, or the first worker to get one."""
        self.device_sharing.go_on()
        self.device_sharing.wait_for_one(self.policies.workers)
        ranks = [rank for rank, worker in enumerate(self.policies.workers) if self.device_sharing.takes_part(worker)]
        self.settle(*self.weight_sync.catch_up(ranks))
        return ranks

    def _losses(self, calls: Collection[Handle], tasks: list[BackgroundTask]) -> dict[str, Failure]:
        """Hosts that died while these calls ran; {} when the calls are done."""
        while True:
            losses = self.cluster.settle(*calls, until=lambda: any(one.due() for one in tasks))
            due = [one for one in tasks if one.due()]
            if losses or not due:
                return losses
            for one in due:
                one.go_on()

    def take_beside(self) -> dict[int, EvaluationShare]:
        """The share of an evaluation for the beginning round, by sim."""
        beside, self.beside = self.beside, {}
        return beside

    def settle(self, *handles: Handle) -> None:
        """Wait for calls. Workers that die meanwhile are replaced, and their calls count as failed."""
        while losses := self.cluster.settle(*handles):
            self._replace(losses)

    def ask(self, call: Callable[[], Handle]) -> list[Any]:
        """The results of a call to idle workers; the call is repeated if a worker was replaced meanwhile."""
        while True:
            handle = call()
            self.settle(handle)
            if handle.succeeded():
                return handle.wait()

    # Replacing

    def _refuse_repeated(self, losses: Iterable[Failure]) -> None:
        for failure in losses:
            line = failure.raised_at
            if line and (reason := self.repetitions.raised(failure.worker, line, failure.exception)):
                raise failure.final(reason).error()

    def _replace(self, losses: dict[str, Failure]) -> list[int]:
        """Restart dead hosts while other hosts work; returns their policy workers."""
        replaced = []
        for host, failure in losses.items():
            sims, policies = (
                [rank for rank, h in enumerate(group.hosts) if h == host] for group in (self.sims, self.policies)
            )
            restart = self.cluster.restarts(host)  # counted before the new one can die, too
            built = self.cluster.replace(host)
            built += [self.sims[sim].spec() for sim in sims]
            names = self.policies.workers
            here = [policy for policy in policies if self.device_sharing.takes_part(names[policy])]
            self.device_sharing.unbuilt |= {names[policy] for policy in policies if policy not in here}
            self.weight_sync.forget(policy for policy in policies if policy not in here)
            built += [self.policies[policy].build(self.spec) for policy in here]
            loads = self.weight_sync.reload(here)
            present = self.device_sharing.has_memory
            absent = [policy for policy in here if not present(names[policy])]
            loads += [self.policies[policy].offload() for policy in absent]  # after it has loaded weights
            abandoned = sum(self._begin_anew(sim) for sim in sims) if self.episodes else 0
            loads += [self.sims[sim].offload() for sim in sims if not present(self.sims.workers[sim])]
            self.cluster.rebuilt_by(host, built, loads)
            self.restarts += 1
            self.lives.update(self.sims.workers[sim] for sim in sims)
            self.abandoned_episodes += abandoned
            self._report_restart(restart, failure, abandoned)
            replaced += policies
        return replaced

    def _begin_anew(self, sim: int) -> int:
        """Begin the next episode in every row of a replaced sim; returns the number of lost episodes."""
        self.read_journal()
        rows = self.rows(sim)
        abandoned = self.episode_counter.abandon(rows)
        self.sims[sim].begin(self.episodes, self.episode_counter.begun[rows])
        return abandoned

    def take_abandoned(self) -> int:
        """Episodes that were abandoned since the last call."""
        count, self.abandoned_episodes = self.abandoned_episodes, 0
        return count

    def read_journal(self) -> None:
        while self.journal.qsize():
            self.episode_counter.begin(self.journal.get().begun)

    def _report_restart(self, restart: int, failure: Failure, abandoned: int) -> None:
        budget = self.budget
        anew = "abandoned: new ones begin, and learned weights are kept"
        lost = f"; {abandoned} open episodes were {anew}" if abandoned else ""
        self.notify(
            f"{failure.worker} is started again (restart {restart}, at most {budget.max_restarts} in "
            f"{budget.window_s:g} s): {failure.cause}{lost}"
        )

    def warn(self, text: str) -> None:
        """Show the user a warning once, even if several workers give it."""
        if text and text not in self.warnings:
            self.warnings.add(text)
            self.notify(f"{WARNING}{text}")

    def share(self, sim: int, stage: int, stages: int, policies: list[int]) -> list[int]:
        """The policy workers for a stage of a sim: neighbouring sims ask the same worker. If there are more workers
        than sims and requests may be divided, every request of a sim is divided among its own workers."""
        sims = len(self.sims)
        if self.divides and len(policies) > sims:
            return policies[sim * len(policies) // sims : (sim + 1) * len(policies) // sims]
        place, places = sim * stages + stage, sims * stages
        return policies[place * len(policies) // places :][:1]


class EpisodeCounter:
    """Counts the begun training episodes of each env row, and the episodes with a known outcome.

    Sim workers record every episode before it begins, so a replacement begins the next one: no episode is played twice,
    and lost episodes are counted.
    """

    def __init__(self, num_envs: int) -> None:
        self.begun = np.zeros(num_envs, np.int64)  # episodes that each env row has begun
        self.settled = np.zeros(num_envs, np.int64)  # begun episodes that ended or were abandoned

    def begin(self, indices: Iterable[int]) -> None:
        """Env row e plays episodes e, e + E, e + 2E, ..."""
        for index in indices:
            count, env = divmod(index, len(self.begun))
            self.begun[env] = max(self.begun[env], count + 1)

    def finish(self, results: Iterable[EpisodeResult]) -> None:
        """Count these episodes as settled."""
        for result in results:
            self.settled[result.index % len(self.begun)] += 1

    def abandon(self, rows: Sequence[int] | np.ndarray) -> int:
        """Give up the open episodes of these rows; returns their number."""
        lost = int((self.begun[rows] - self.settled[rows]).sum())
        self.settled[rows] = self.begun[rows]
        return lost

    def abandoned(self) -> dict[str, np.ndarray]:
        """The state of all env rows without their open episodes; no simulator is needed."""
        from embodied.envs.episode_player import EpisodeTracker  # imports a simulator's packages

        rows = len(self.begun)
        state = {f"rows.{name}": np.zeros(rows, np.int64) for name in (*EpisodeTracker.ARRAYS, "initial")}
        state |= {"rows.started": self.settled + (self.begun > self.settled), "rows.length": np.ones(rows, np.int64)}
        return {"env_ids": np.arange(rows), **state}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Continue from the state of all env rows: each has one open episode, a new one if the old one was
        abandoned."""
        envs, started = state["env_ids"], state["rows.started"]
        goes_on = any(name.startswith("env.") for name in state)
        self.begun[envs] = started if goes_on else started + (state["rows.length"] > 0)
        self.settled[envs] = self.begun[envs] - 1
