"""Runs the rounds of sim workers and policy workers, and replaces dead workers.

In a round sims play jobs, and the policy workers serve them until all are done. Reports of the sims come to one inbox,
which is read here (`read_reports`). A host that dies in a round, or during an update, is restarted in the next wait,
which may come between the choice of jobs and their call. Its workers get:

    policy worker   its policy and the current weights, or the next ones if they are published while it builds. Its
                    predecessor's unanswered requests wait for it (prompts: for any), so nothing is lost. Workers of the
                    same process die with it: on cores its sim, on GPUs its learner, unless placement= says otherwise
    sim worker      its envs, and of horizons the next episode of every row. Data of the dead worker's round are lost,
                    and the collector decides what to play for them

The `Broker` of a round knows the policy workers that take requests. A robot's requests wait with its player
(`core/request_queue.py`), which gets the names of its workers: these follow from the source and the present workers
alone. With several language engines (two cores have two) all prompts wait here (`prompt_queue.py`), and those of a dead
engine go to the next with room. While learners hold a policy worker's devices, others answer its requests.

A user may add policy workers, and take the last one away (`embodied/workers.py`). An added worker is built beside the
run, and takes part from the next round on. A worker that is taken away leaves its round like one whose devices the
learners need; then its process ends.

The runtime notices deaths and decides on restarts (`wait_for_calls`, `supervision.py`); `rl_loop.py` decides how old a
rollout's weights may be.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from embodied.core.errors import ChannelClosed
from embodied.core.types import Answerers, EnvSpec, Job, Played, Report, Route, SamplingRule, rows_of_sims
from embodied.runtime import Budget, Channel, Cluster, DeviceSharing, Handle, HostPlan, WorkerGroup
from embodied.runtime.device_leases import LeaseError
from embodied.runtime.supervision import Failure, Repetitions
from embodied.workflows import ROLLOUT, WARNING

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig
    from embodied.core.conversations import Remark
    from embodied.workflows.prompt_queue import PromptQueue


class BackgroundTask(Protocol):
    """Work of the driver during a round; it may be due when reports of the sims arrive or calls end."""

    def is_due(self) -> bool:
        """True if it has work now."""

    def go_on(self) -> None:
        """Do the work, without waiting."""


@dataclass
class Remarks:
    """Remarks of language engines."""

    channel: Channel
    show: Callable[[str], None]
    suspects: set[int] = field(default_factory=set)  # conversations of this round to leave out
    since: int | None = None  # the first version of weights whose batch used answers of a dropped server
    dropped: set[str] = field(default_factory=set)  # servers that a policy worker has dropped in this round

    def is_due(self) -> bool:
        return bool(self.channel.qsize())

    def go_on(self) -> None:
        with suppress(ChannelClosed):  # by a failed worker
            while self.channel.qsize():
                self.add(self.channel.get())

    def add(self, remark: Remark) -> None:
        self.show(remark.sentence)
        self.suspects.update(remark.suspects)
        if remark.since is not None:
            self.since = remark.since if self.since is None else min(self.since, remark.since)
        self.dropped |= {remark.dropped} - {""}


class Training(Protocol):
    """The record of training's episodes, which hears of their fates."""

    @property
    def collected(self) -> float:
        """The part of the batch that earlier rounds and iterations have collected."""

    def begin_round(self, jobs: dict[int, Job]) -> None:
        """The sims have been asked to play these jobs."""

    def add_report(self, report: Report) -> None:
        """A player has begun or ended episodes."""

    def sim_replaced(self, sim: int) -> int:
        """A sim has died and has a successor; returns the number of abandoned episodes."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation's episodes of one round."""

    jobs: dict[int, Job]  # by sim
    add_report: Callable[[Report], object]


@dataclass(frozen=True)
class Newcomer:
    """A policy worker that is being built beside the run."""

    worker: WorkerGroup
    plan: HostPlan
    calls: tuple[Handle, ...]  # its construction, and the questions for its memory and for its way to the weights

    def is_built(self) -> bool:
        return all(call.succeeded() for call in self.calls)

    def failure(self) -> str:
        """Why it cannot be built; "" if nothing is known against it."""
        return next((failure.cause for call in self.calls for failure in call.failed.values()), "")


@dataclass(frozen=True)
class Round:
    """The results of a round."""

    played: dict[int, Played]  # training's, by sim that has played its job to the end
    sources: dict[int, tuple[str, ...]]  # by sim, the names of its stages in requests and trajectories
    failures: dict[int, str]  # by sim that died, the cause
    seconds: float  # of the slowest sim


class RolloutWorkers(Protocol):
    """What rounds need of a program's `Workers`."""

    config: RunConfig
    cluster: Cluster
    sims: WorkerGroup
    policies: WorkerGroup
    spec: EnvSpec
    inbox: Channel
    stages: int
    tasks: tuple[str, ...]
    notify: Callable[[str], None]
    weight_sync: Any
    device_sharing: DeviceSharing


class RolloutManager:
    """Plays rounds; from its construction on, sim and policy workers that die are replaced."""

    def __init__(self, workers: RolloutWorkers) -> None:
        """All workers are built."""
        self.cluster, self.sims, self.policies = workers.cluster, workers.sims, workers.policies
        self.spec, self.weight_sync = workers.spec, workers.weight_sync
        self.inbox, self.notify = workers.inbox, workers.notify
        self.training: Training | None = None
        self.beside: Evaluation | None = None  # evaluation to be played beside the next rollout
        self.evaluation: Evaluation | None = None  # of the current round
        self.divides = workers.config.merged_rows > 1  # True: a request may be divided among policy workers
        self.num_stages = max(workers.stages, 1)
        self.device_sharing = workers.device_sharing
        self.num_envs, self.num_tasks = workers.config.env.num_envs, len(workers.tasks)
        self.background: list[BackgroundTask] = []  # tasks during every round
        self.rounds = 0
        self.restarts = 0
        self.abandoned_episodes = 0
        self.repetitions = Repetitions()
        self.warnings: set[str] = set()  # shown warnings
        # Requests wait with the policy workers, replies with the sims.
        channel, text = self.cluster.channel, self.spec.text
        places = range(self.num_stages + workers.config.eval.interleave)
        sims, policies = range(len(self.sims)), range(len(self.policies))
        options = self.channel_options = {"capacity": None} if text else {}  # bounded by the open conversations
        self.requests = [self._requests_to(policy) for policy in policies]
        self.newcomers: list[Newcomer] = []  # policy workers that are built, or are being built, for the next round
        self.is_leaving = False  # True: the last policy worker is to leave for good
        self.prompt_channel: Channel | None = None
        self._make_prompt_channel()
        self.remarks: Remarks | None = None
        if text:
            is_inline = workers.config.cluster.backend == "inline"  # its workers print on the user's terminal
            self.remarks = Remarks(channel("remarks", **options), (lambda text: None) if is_inline else self.warn)
            self.cluster.watch(self.remarks.channel)
        if text:  # replies are taken in the order of their arrival
            self.replies = [[channel(f"replies-sim-{s}", home=self.sims[s], **options)] * self.num_stages for s in sims]
        else:
            self.replies = [[channel(f"replies-sim-{s}/{i}", home=self.sims[s]) for i in places] for s in sims]
        faults = workers.config.faults
        self.budget = Budget(faults.max_restarts, faults.window_s, faults.hang_s)
        self.cluster.supervise([self.sims, self.policies], self.budget)

    def rows(self, sim: int) -> np.ndarray:
        """The env rows of a sim worker."""
        return rows_of_sims(self.num_envs, len(self.sims), self.num_tasks)[sim]

    # Work

    def play(
        self,
        jobs: dict[int, Job],
        sampling: SamplingRule,
        evaluation: Evaluation | None = None,
        background: BackgroundTask | None = None,
        by_expert: bool = False,
    ) -> Round:
        """Run a round: sims play these jobs and an `evaluation`, and policy workers serve them, unless an expert acts.
        A `background` task runs meanwhile, and may be due when reports arrive."""
        self.wait_and_replace()
        self.rounds += 1
        stages, beside = (self.num_stages, evaluation is not None and not self.spec.text) if jobs else (1, False)
        of_sims = {sim: [job] for sim, job in jobs.items()}
        for sim, job in evaluation.jobs.items() if evaluation else ():
            of_sims.setdefault(sim, []).append(replace(job, evaluation=self._evaluation_name))
        self.evaluation = evaluation
        self.cluster.watch(self.inbox, background is not None)
        broker = Broker(self, of_sims, stages, [] if by_expert else self._acting(), sampling, beside)
        broker.collected = self.training.collected if jobs and self.training else 0.0
        routes = {sim: broker.route(sim) for sim in of_sims}
        broker.calls = calls = {sim: self.sims[sim].play(of_sims[sim], routes[sim]) for sim in of_sims}
        if self.training:  # now, since a sim that died before was replaced, and its successor plays the job
            self.training.begin_round(jobs)
        tasks = [task for task in (broker, background, self.remarks, *self.background) if task]
        while deaths := self._wait_for_deaths(calls.values(), tasks):
            if jobs:  # in an evaluation a failing episode loses only itself
                self._refuse_repeated(deaths.values())
            broker.replace_takers(self._replace(deaths))
        ending = broker.end()
        while deaths := self._wait_for_deaths(ending, [broker]):
            self._replace(deaths)
        self.device_sharing.leave(())
        self.let_leave()
        self.read_reports()
        if self.remarks:
            self.remarks.go_on()
            self._drop_everywhere(self.remarks)
        return self._collect_results(calls, {sim: tuple(one.source for one in routes[sim][:stages]) for sim in jobs})

    def _drop_everywhere(self, remarks: Remarks) -> None:
        """Let all policy workers drop the servers that one of them has dropped."""
        names = (*sorted(remarks.dropped),)
        if names and len(self.policies) > 1:
            for remarks_of_worker in self.ask(lambda: self.policies.drop_servers(names)):
                for remark in remarks_of_worker:
                    remarks.add(remark)
        remarks.dropped.clear()

    def _collect_results(self, calls: dict[int, Handle], sources: dict[int, tuple[str, ...]]) -> Round:
        """The results of a round's calls, with these sources of training; the evaluation hears of its own."""
        done = {sim: call for sim, call in calls.items() if call.succeeded()}
        failures = {sim: next(iter(calls[sim].failed.values())).cause for sim in calls.keys() - done}
        lost = {self.sims.hosts[sim] for sim in failures}
        workers = [one for group in (self.sims, self.policies) for one in zip(group.workers, group.hosts, strict=True)]
        self.repetitions.came_through(worker for worker, host in workers if host not in lost)
        results = {sim: call.wait()[0] for sim, call in done.items()}
        if evaluation := self.evaluation:
            for sim in results.keys() & evaluation.jobs.keys():
                evaluation.add_report(Report(self._evaluation_name, finished=results[sim][-1].finished))
        seconds = max((call.seconds() for call in done.values()), default=0.0)
        return Round({sim: results[sim][0] for sim in results.keys() & sources.keys()}, sources, failures, seconds)

    @property
    def _evaluation_name(self) -> str:
        return f"evaluation#{self.rounds}"

    def read_reports(self) -> None:
        """Read all reports of the sims. An evaluation's reports from earlier rounds are ignored."""
        with suppress(ChannelClosed):  # by a failed worker
            while self.inbox.qsize():
                report = self.inbox.get()
                self.warn(report.warning)
                if not report.evaluation and self.training:
                    self.training.add_report(report)
                elif report.evaluation == self._evaluation_name and self.evaluation:
                    self.evaluation.add_report(report)

    def take_beside(self) -> Evaluation | None:
        """The evaluation to be played beside the beginning round."""
        beside, self.beside = self.beside, None
        return beside

    def _acting(self) -> list[int]:
        """The policy workers that begin a round: every worker with its device, or the first worker to get one."""
        self.device_sharing.go_on()
        self.let_leave()
        self._admit()
        self.device_sharing.wait_for_one(self.policies.workers)
        ranks = self.present()
        self.wait_and_replace(*self.weight_sync.catch_up(ranks))
        return ranks

    def present(self) -> list[int]:
        """The policy workers that take requests: they have their devices, and need not leave."""
        staying = self.policies.workers[: len(self.policies) - self.is_leaving]
        return [rank for rank, worker in enumerate(staying) if self.device_sharing.takes_part(worker)]

    def _wait_for_deaths(self, calls: Collection[Handle], tasks: list[BackgroundTask]) -> dict[str, Failure]:
        """Hosts that died while these calls ran; {} when the calls are done."""
        while True:
            deaths = self.cluster.wait_for_calls(*calls, until=lambda: any(task.is_due() for task in tasks))
            due = [task for task in tasks if task.is_due()]
            if deaths or not due:
                return deaths
            for task in due:
                task.go_on()

    def wait_and_replace(self, *handles: Handle, until: Callable[[], bool] = lambda: False) -> None:
        """Wait for calls, or until something is due. Workers that die meanwhile are replaced, and their calls count as
        failed."""
        while deaths := self.cluster.wait_for_calls(*handles, until=until):
            self._replace(deaths)

    def ask(self, call: Callable[[], Handle]) -> list[Any]:
        """The results of a call to idle workers; the call is repeated if a worker was replaced meanwhile."""
        while True:
            handle = call()
            self.wait_and_replace(handle)
            if handle.succeeded():
                return handle.wait()

    # Policy workers that come and go on purpose

    def add_policy(self, plan: HostPlan) -> Newcomer:
        """Begin to build one more policy worker, which takes part from the next round after that on."""
        worker, made = self.cluster.add(self.policies, plan)
        calls = made, worker.build(self.spec), worker.needs(), worker.route(self.weight_sync.current)
        self.newcomers.append(newcomer := Newcomer(worker, plan, calls))
        return newcomer

    def drop(self, newcomer: Newcomer) -> None:
        """Do without a worker that has not joined."""
        self.newcomers.remove(newcomer)
        self.cluster.dismiss(newcomer.worker, newcomer.plan.name)

    def _admit(self) -> None:
        """Let built newcomers join the policy workers. One that has died since, or does not fit, is left out."""
        for newcomer in [newcomer for newcomer in self.newcomers if newcomer.is_built()]:
            needs, route = (call.wait()[0] for call in newcomer.calls[-2:])
            seconds = sum(call.seconds() for call in newcomer.calls)
            try:
                self.device_sharing.add(ROLLOUT, newcomer.worker, needs, newcomer.plan)
            except LeaseError as err:
                self.drop(newcomer)
                self.notify(f"{WARNING}{newcomer.plan.name} does not take part: {err}")
                continue
            if self.cluster.join(self.policies, newcomer.worker, seconds):
                self.newcomers.remove(newcomer)
                self.weight_sync.add(route)
                self.requests.append(self._requests_to(len(self.requests)))
                self._make_prompt_channel()
            else:
                self.device_sharing.remove(newcomer.plan.name)
                self.drop(newcomer)
                self.notify(f"{WARNING}{newcomer.plan.name} does not take part: its process has died")

    def let_leave(self) -> None:
        """End the process of the last policy worker if it is to leave; it has no more requests."""
        if self.is_leaving:
            self.is_leaving = False
            name = self.policies.workers[-1]
            self.device_sharing.remove(name)
            self.weight_sync.remove()
            self.requests.pop()
            self.cluster.dismiss(self.policies, name)

    def _requests_to(self, policy: int) -> Channel:
        """The channel in which requests wait with a policy worker."""
        name = f"requests-{self.policies.workers[policy]}"
        return self.cluster.channel(name, home=self.policies[policy], **self.channel_options)

    def _make_prompt_channel(self) -> None:
        """With several engines: make the channel of prompts for any engine with room, and of reports of their room."""
        if self.spec.text and len(self.policies) > 1 and self.prompt_channel is None:
            self.prompt_channel = self.cluster.channel("prompts", **self.channel_options)
            self.cluster.watch(self.prompt_channel)

    # Replacing

    def _refuse_repeated(self, deaths: Iterable[Failure]) -> None:
        for failure in deaths:
            line = failure.raised_at
            if line and (reason := self.repetitions.count_error(failure.worker, line, failure.exception)):
                raise failure.final(reason).error()

    def _replace(self, deaths: dict[str, Failure]) -> list[int]:
        """Restart dead hosts while other hosts work; returns their policy workers. A worker does its calls in order: it
        loads weights, or begins its episodes, before it serves or plays."""
        replaced = []
        for host, failure in deaths.items():
            sims, policies = (
                [rank for rank, h in enumerate(group.hosts) if h == host] for group in (self.sims, self.policies)
            )
            if self.is_leaving and host == self.policies.hosts[-1]:
                replaced += policies  # it has left
                continue
            restart = self.cluster.restarts(host)  # counted before the new one can die, too
            built = self.cluster.replace(host)
            built += [self.sims[sim].build() for sim in sims]
            names = self.policies.workers
            here = [policy for policy in policies if self.device_sharing.takes_part(names[policy])]
            self.device_sharing.unbuilt |= {names[policy] for policy in policies if policy not in here}
            self.weight_sync.forget(policy for policy in policies if policy not in here)
            built += [self.policies[policy].build(self.spec) for policy in here]
            self.weight_sync.reload(here)
            present = self.device_sharing.has_memory
            for policy in [policy for policy in here if not present(names[policy])]:
                self.policies[policy].offload()  # after it has loaded weights
            self.read_reports()  # of the dead worker
            abandoned = sum(self.training.sim_replaced(sim) for sim in sims) if self.training else 0
            for sim in [sim for sim in sims if not present(self.sims.workers[sim])]:
                self.sims[sim].offload()
            self.cluster.watch_rebuilding(host, built)
            self.restarts += 1
            self.abandoned_episodes += abandoned
            self._report_restart(restart, failure, abandoned)
            replaced += policies
        return replaced

    def take_abandoned(self) -> int:
        """Episodes that were abandoned since the last call."""
        count, self.abandoned_episodes = self.abandoned_episodes, 0
        return count

    def _report_restart(self, restart: int, failure: Failure, abandoned: int) -> None:
        budget = self.budget
        anew = "abandoned: new ones begin, and learned weights are kept"
        lost = f"; {abandoned} episodes, open or ended unreported, were {anew}" if abandoned else ""
        self.notify(
            f"{failure.worker} is started again (restart {restart}, at most {budget.max_restarts} in "
            f"{budget.window_s:g} s): {failure.cause}{lost}"
        )

    def warn(self, text: str) -> None:
        """Show the user a warning once, even if several workers give it."""
        if text and text not in self.warnings:
            self.warnings.add(text)
            self.notify(f"{WARNING}{text}")


@dataclass
class Taker:
    """A policy worker that takes requests of the round."""

    name: str  # every replacement has a new one
    serving: Handle = field(init=False)
    leaves_at: float | None = None  # it takes no more requests, and may answer until then; None: it stays


class Broker:
    """Says which policy workers answer the requests of a round's sources. They may join, leave, die and be replaced
    meanwhile; every request is answered. Requests go directly from a source (a stage of a sim, or a text env worker) to
    a policy worker. Only prompts for several language engines wait in the driver (`prompt_queue`)."""

    def __init__(
        self,
        manager: RolloutManager,
        sims: Iterable[int],
        stages: int,
        policies: list[int],
        sampling: SamplingRule,
        beside: bool = False,
    ) -> None:
        """`policies` take requests from the beginning. If an evaluation is played `beside`, each sim has one more
        source, which asks the same worker as its first stage."""
        self.manager, self.device_sharing, self.policies = manager, manager.device_sharing, manager.policies
        self.sources = {f"sim-{s}/{i}#{manager.rounds}": (s, i) for s in sims for i in range(stages + beside)}
        self.replies = {source: manager.replies[sim][stage] for source, (sim, stage) in self.sources.items()}
        self.stages = stages
        self.calls: dict[int, Handle] = {}  # of the sims
        self.collected = 0.0  # part of the batch before this round
        self.how = (manager.weight_sync.version, sampling) if policies else ()
        self.moving = bool(policies) and any(map(self.device_sharing.gives_way, self.policies.workers))
        self.lives = count()
        self.changes = -1  # number of known changes of turns
        self.takers = {policy: self._taker(policy) for policy in policies}
        self.prompt_queue: PromptQueue | None = None  # of several language engines
        if policies and manager.prompt_channel:
            from embodied.workflows.prompt_queue import PromptQueue

            self.prompt_queue = PromptQueue(manager.prompt_channel, {taker.name for taker in self.takers.values()})
        self.answerers = {source: self._answerers(source) for source in self.sources}
        for policy in policies:
            self._serve(policy)

    def route(self, sim: int) -> Route:
        """The route of a sim at the beginning."""
        sources = [source for source, (of, _) in self.sources.items() if of == sim]
        return tuple(replace(self.answerers[source], replies=self.replies[source]) for source in sources)

    def is_due(self) -> bool:
        """True if workers can join, should leave or have left, or if prompts wait for a worker."""
        if self.prompt_queue and self.prompt_queue.is_due():
            return True
        left = any(one.serving.done() or monotonic() > one.leaves_at for one in self.takers.values() if one.leaves_at)
        last = self.takers.get(len(self.policies) - 1)
        left = left or (self.manager.is_leaving and (last is None or last.leaves_at is None))
        return left or self.device_sharing.is_due() or (self.moving and self.device_sharing.changes != self.changes)

    def go_on(self) -> None:
        """Let policy workers join or leave, and send waiting prompts to engines."""
        self.device_sharing.go_on()
        self.changes = self.device_sharing.changes
        if self.prompt_queue:
            self.device_sharing.report_progress(1 - (1 - self.collected) * (1 - self.prompt_queue.progress))
        for policy in [policy for policy, taker in self.takers.items() if taker.leaves_at and taker.serving.done()]:
            del self.takers[policy]
            self.device_sharing.report_load_time(self.manager.weight_sync.load_s(policy))
        if len(self.policies) - 1 not in self.takers:
            self.manager.let_leave()
        if self.moving or self.manager.is_leaving:
            self._join_or_leave()
        self._end_late()
        self.device_sharing.leave({self.policies.workers[policy] for policy in self.takers})
        self._announce_policies()
        if self.prompt_queue:
            names = {policy: taker.name for policy, taker in self.takers.items()}
            workers = enumerate(self.policies.workers)
            idle = [worker for policy, worker in workers if self.prompt_queue.is_idle(names.get(policy, ""))]
            self.device_sharing.report_idle(idle)

    def replace_takers(self, replaced: Iterable[int]) -> None:
        """Replace dead policy workers by their successors. If other workers hold a successor's device, it is built and
        joins when it gets the device back."""
        for policy in sorted(self.takers.keys() & {*replaced}):
            unbuilt = self.policies.workers[policy] in self.device_sharing.unbuilt
            if unbuilt or (self.manager.is_leaving and policy == len(self.policies) - 1):
                del self.takers[policy]
                self.changes = -1
            elif self.takers[policy].leaves_at is None:
                self.takers[policy] = self._taker(policy)
                self._serve(policy)
        self._announce_policies()

    def end(self) -> list[Handle]:
        """End the round: ask all policy workers to stop serving; returns their calls."""
        self.moving = False
        self.device_sharing.report_idle(())
        for policy in self._staying():
            self.manager.requests[policy].put(None)
        return [taker.serving for taker in self.takers.values()]

    # Takers

    def _taker(self, policy: int) -> Taker:
        return Taker(f"policy-{policy}#{self.manager.rounds}.{next(self.lives)}")

    def _staying(self) -> list[int]:
        return sorted(policy for policy, taker in self.takers.items() if taker.leaves_at is None)

    def _serve(self, policy: int) -> None:
        """Start serving. A worker knows every source of the round, since any source may ask it later."""
        name, requests = self.takers[policy].name, self.manager.requests[policy]
        sources = [source for source, answerers in self.answerers.items() if name in answerers.channels]
        more = {"name": name, "vacancies": self.prompt_queue.channel} if self.prompt_queue else {}
        more |= {"remarks": remarks.channel} if (remarks := self.manager.remarks) else {}
        serving = self.policies[policy].serve(requests, dict(self.replies), *self.how, sources, **more)
        self.takers[policy].serving = serving

    def _join_or_leave(self) -> None:
        here = self.manager.present()
        joining = [policy for policy in here if self.moving and policy not in self.takers]
        self.manager.weight_sync.catch_up(joining)
        for policy in joining:
            self.takers[policy] = self._taker(policy)
            self._serve(policy)
        for policy in self._staying():
            if policy not in here:
                self.manager.requests[policy].put(None)
                self.takers[policy].leaves_at = monotonic() + self.manager.budget.hang_s

    def _end_late(self) -> None:
        """End the process of a policy worker that still answers although it should have left."""
        for policy, taker in self.takers.items():
            if taker.leaves_at and monotonic() > taker.leaves_at and not taker.serving.done():
                taker.leaves_at = inf
                cause = f"still answered {self.manager.budget.hang_s:g} s after others asked for its devices"
                self.manager.cluster.end(self.policies.hosts[policy], f"{cause} (faults.hang_s)")

    # Requests of robots

    def _announce_policies(self) -> None:
        """Tell the playing sources their policy workers, if these have changed."""
        if self.prompt_queue:
            engines = {taker.name: self.manager.requests[policy] for policy, taker in self.takers.items()}
            staying = [self.takers[policy].name for policy in self._staying()]
            self.prompt_queue.hand_out(engines, staying, {*filter(self._plays, self.sources)})
            return
        for source in filter(self._plays, self.sources):
            new, old = self._answerers(source), self.answerers[source]
            if (new.channels.keys(), new.others) != (old.channels.keys(), old.others):
                self.answerers[source] = new
                self.replies[source].put(new)

    def _plays(self, source: str) -> bool:
        return not self.calls[self.sources[source][0]].done()

    def _answerers(self, source: str) -> Answerers:
        """The workers that a source asks, and other workers that may still have requests of this source."""
        manager = self.manager
        if self.prompt_queue or not self.takers:
            return Answerers(source, {"all": self.prompt_queue.channel} if self.prompt_queue else {})
        sim, stage = self.sources[source]
        place = sim, stage % self.stages
        block = block_of(*place, len(manager.sims), self.stages, self._staying(), manager.divides)
        channels = {self.takers[policy].name: manager.requests[policy] for policy in block}
        return Answerers(source, channels, frozenset(taker.name for taker in self.takers.values()) - channels.keys())


def block_of(sim: int, stage: int, sims: int, stages: int, policies: list[int], divides: bool) -> list[int]:
    """The policy workers for a stage of a sim: neighbouring sims ask the same worker. If there are more workers than
    sims and a request may be divided, every request of a sim is divided among its own workers."""
    if divides and len(policies) > sims:
        return policies[sim * len(policies) // sims : (sim + 1) * len(policies) // sims]
    place, places = sim * stages + stage, sims * stages
    return policies[place * len(policies) // places :][:1]
