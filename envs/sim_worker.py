"""The sim worker: owns a slice of the run's envs, plays rollouts for training and episodes for evaluation.

It never sees the policy, only the channels of its `Route`. Finished rows are reset here, at the decision border, to the
next episode of the driver's list; the arrays it records go to the learner ranks that own the env rows. A chunk of
actions is played in `step_chunk` of `vector_env.py`, called by the `EpisodePlayer` of `player.py`.

Plays a fixed list of episodes to the end; a policy worker or an expert chooses the actions.

`EpisodeTracker` in `player.py` notes success, once and at the end. The caller chooses what else is kept: a
`Recording` names recorders, which work in the sim worker's process (`records/videos.py`,
`datasets/writer.py`).

Where the actions of recorded or evaluated episodes come from: a policy worker, or an expert of the task.

An expert's actions may be executed with noise. Recorders get the expert's action, the env the noisy one, so
demonstrations also show how to recover.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import numpy as np

from embodied.core.arrays import text_arrays
from embodied.core.conversations import EvaluationShare, SamplingRule
from embodied.core.rng import normal
from embodied.core.types import (
    ChunkResult,
    EnvSpec,
    EpisodeList,
    EpisodeResult,
    EpisodeSpec,
    Note,
    Observation,
    Recording,
    RolloutStats,
    Route,
    Servers,
    choose,
    env_blocks,
    rows_of_sims,
)
from embodied.envs import env_class, make_env
from embodied.envs.capabilities import Expert
from embodied.envs.own_modules import try_out
from embodied.envs.player import (
    EpisodePlayer,
    EpisodeStream,
    EpisodeTracker,
    PlayerWorker,
    PolicyClient,
    Record,
    Refill,
    Stage,
    spread,
    step_stages,
)
from embodied.envs.vector_env import VectorEnv
from embodied.runtime import Channel, Needs, Timers
from embodied.runtime.device_memory import AllocatedMemory, give_back_unused


class SimWorker(PlayerWorker):
    def __init__(self, *options, **more) -> None:
        super().__init__(*options, **more)
        self.stages: list[Stage] = []
        self.eval_env = None
        self.memory = AllocatedMemory()  # of its GPU, used by all its simulators
        self.away: dict[str, np.ndarray] | None = None  # state of the envs, while their simulators are freed

    def spec(self) -> EnvSpec:
        """Build the envs (seconds, with a real simulator) and return their spec."""
        if not self.num_stages:
            return self.eval_spec()
        if not self.stages:
            tasks = len(env_class(self.config).tasks(self.config))
            rows = rows_of_sims(self.config.num_envs, self.world_size, tasks)[self.rank]
            per_stage = len(rows) // self.num_stages
            for stage in range(self.num_stages):
                ids = rows[stage * per_stage : (stage + 1) * per_stage]
                with self.memory.measured():
                    env = make_env(self.config, per_stage)
                self.stages.append(
                    Stage(env, f"sim-{self.rank}/{stage}", ids, self.config.num_envs, self.timers, self.journal)
                )
            if ":" in self.config.reward:  # a mistake in it ends the run now, instead of restarting this worker
                try_out(self.stages[0].env)
        return self.stages[0].env.env_spec

    def eval_spec(self) -> EnvSpec:
        """Build the envs for evaluations and return their spec."""
        if self.eval_env is None:
            with self.memory.measured():
                self.eval_env = make_env(self.eval_config, self.eval_rows)
        return self.eval_env.env_spec

    def needs(self, shared: bool = False) -> Needs:
        """The memory that its simulators took when they were built. Simulators whose state cannot be saved are not
        offloaded."""
        return Needs(self.memory.num_bytes, 0 if self._can_leave() else self.memory.num_bytes)

    def _can_leave(self) -> bool:
        """True if no episode is open between rollouts, or all can be saved."""
        return self.whole_episodes or all(stage.env.saves_state for stage in self.stages)

    def offload(self) -> None:
        """Free the simulators, after saving their state."""
        if self.memory.num_bytes and self.away is None and self._can_leave():
            self.away = {} if self.whole_episodes else self.get_state()
            self.close()
            self.eval_env = None
            give_back_unused()

    def onload(self) -> None:
        """Build the simulators again, in the saved state."""
        if self.away is None:
            return
        state, self.away = self.away, None
        for stage in self.stages:
            stage.env = make_env(self.config, stage.env.num_envs)
            if state:
                stage.obs = text_arrays(stage.env.set_state(env_state(stage, state)))

    def collect(
        self,
        episodes: EpisodeList | list[EpisodeSpec],
        route: Route,
        horizon: int = 0,
        out: tuple[Channel, ...] = (),
        batch: int = 0,
        granularity: int = 0,
        noted: bool = False,
        beside: EvaluationShare | None = None,
    ) -> RolloutStats:
        """Play `horizon` decisions in every env and hand each learner rank the trajectories of its env rows, for this
        `batch`: at the end, or every `granularity` decisions. Without a horizon, play a list of episodes to their ends,
        as many at a time as there are envs, and keep them; if their ends are `noted`, `hand_in` may be called for each
        from then on. The episodes of an evaluation `beside` take turns with these, in separate envs, and use the last
        place of the route."""
        before, make = self.timers.totals(), partial(Record, horizon=horizon)
        evaluation = self._evaluating(beside, route[-1]) if beside else iter(())
        route = route[: len(self.stages)]
        if noted:
            make = partial(EpisodeStream, store=self.kept_episodes, journal=self.journal)
        records = [make(servers.source) for servers in route]
        for stage, servers in zip(self.stages, route, strict=True):
            stage.play_for(PolicyClient(servers), horizon)
        refills = self._go_on(episodes) if horizon else self._begin_whole(episodes)
        next(evaluation, None)
        for decisions in step_stages(self.stages, records, refills, horizon):
            next(evaluation, None)
            if granularity and decisions > 1 and (decisions - 1) % granularity == 0:
                self._deliver(records, out, batch, decisions - 1)  # the observation after the last one is not known yet
        if horizon:
            for stage, record in zip(self.stages, records, strict=True):
                stage.close(record)
            self._deliver(records, out, batch, horizon)
        elif not noted:
            for played in [record.trajectory() for record in records if record.decisions]:
                self.kept_episodes |= dict.fromkeys(played.ids.tolist(), played)
        deque(evaluation, maxlen=0)  # play its remaining episodes
        finished = tuple(result for record in records for result in record.finished)
        spent = self.timers.seconds_since(before, "step", "reset", "wait")
        return RolloutStats(sum(record.env_steps for record in records), finished, *spent)

    def _go_on(self, episodes: EpisodeList) -> list[Refill]:
        """Open episodes continue; every row has its own next episode."""
        for stage in self.stages:
            if stage.obs is None:
                stage.reset_all(episodes)
        return [partial(stage.go_on, episodes=episodes) for stage in self.stages]

    def _begin_whole(self, episodes: list[EpisodeSpec]) -> list[Refill]:
        """Begin as many of these as there are rows; each free row takes the next one."""
        queues = [deque(episodes[i :: len(self.stages)]) for i in range(len(self.stages))]
        for stage, waiting in zip(self.stages, queues, strict=True):
            stage.playing[:] = False
            stage.refill(np.arange(stage.env.num_envs), waiting=waiting)
        return [partial(stage.refill, waiting=waiting) for stage, waiting in zip(self.stages, queues, strict=True)]

    def begin(self, episodes: EpisodeList, started: np.ndarray) -> None:
        """Take over from a dead worker, whose env rows had `started` episodes: begin their next ones."""
        for stage, begun in zip(self.stages, np.split(started, len(self.stages)), strict=True):
            stage.rows.started[:] = begun
            stage.reset_all(episodes)

    def evaluate(
        self,
        episodes: list[EpisodeSpec],
        route: Route,
        recording: Recording,
        notes: Channel,
        alone: frozenset[int],
        expert: str | None = None,
    ) -> list[EpisodeResult]:
        """Play these episodes to the end in separate envs, some of them alone, with the policy or with an expert of the
        task. `notes` gets every beginning and end."""
        self.eval_spec()
        client = PolicyClient(route[0])
        action_source = (
            ExpertActions(self.eval_env.expert(expert, self.tick), client.source) if expert else PolicyActions(client)
        )
        stop = lambda: self.stopped  # noqa: E731
        turns = play_episodes(self.eval_env, episodes, action_source, recording, notes, alone, self.timers, stop)
        return [result for ended in turns for result in ended]

    def _evaluating(self, share: EvaluationShare, servers: Servers) -> Iterator[list[EpisodeResult]]:
        """Play the episodes of an evaluation, one decision for each item of the iterator."""
        self.eval_spec()
        actions = PolicyActions(PolicyClient(servers), share.rule)
        options = (actions, share.recording, share.notes, frozenset[int](), self.timers)
        return play_episodes(self.eval_env, list(share.episodes), *options)

    def get_state(self) -> dict[str, np.ndarray]:
        """Open episodes and, where the simulator can save it, its state: arrays with one row per env (empty: nothing
        begun).
        """
        if self.away is not None:
            return self.away
        parts = [stage_state(stage) for stage in self.stages if stage.obs is not None]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def set_state(self, state: dict[str, np.ndarray], episodes: EpisodeList) -> int:
        """Continue from `get_state` of all workers. Returns how many open episodes had to be abandoned."""
        self.onload()
        return sum(restore_stage(stage, state, episodes) for stage in self.stages)

    def close(self) -> None:
        for env in [stage.env for stage in self.stages] + ([self.eval_env] if self.eval_env else []):
            env.close()

    def _deliver(self, records: list[Record], out: tuple[Channel, ...], batch: int, end: int) -> None:
        """Hand on the decisions before `end`, cut at the borders of the learner ranks' env blocks."""
        for record in records:
            played = record.trajectory(end)
            for block, channel in zip(env_blocks(self.config.num_envs, len(out)), out, strict=True):
                ids = played.ids[(played.ids >= block.start) & (played.ids < block.stop)]
                if len(ids):
                    channel.put(choose(played, ids, played.source), key=batch)


def stage_state(stage: Stage) -> dict[str, np.ndarray]:
    state = {f"rows.{name}": array for name, array in stage.rows.get_state().items()}
    state |= {f"env.{name}": array for name, array in (stage.env.get_state() or {}).items()}
    return {"env_ids": stage.env_ids, "rows.initial": stage.initial, **state}


def places(stage: Stage, state: dict[str, np.ndarray]) -> np.ndarray:
    """The places of a stage's env rows in the state of all."""
    place = {int(env): at for at, env in enumerate(state["env_ids"])}
    return np.array([place[int(env)] for env in stage.env_ids])


def env_state(stage: Stage, state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The simulator's part of the state; empty if it cannot be saved."""
    return {name[4:]: array[places(stage, state)] for name, array in state.items() if name.startswith("env.")}


def restore_stage(stage: Stage, state: dict[str, np.ndarray], episodes: EpisodeList) -> int:
    at = places(stage, state)
    rows = {name[5:]: array[at] for name, array in state.items() if name.startswith("rows.")}
    stage.initial[:] = rows["initial"]
    stage.rows.set_state(rows, episodes.at(stage.initial, rows["episode"]))
    if saved := env_state(stage, state):
        stage.obs = text_arrays(stage.env.set_state(saved))
        stage.playing[:] = True
        return 0
    open_episodes = int((stage.rows.length > 0).sum())
    stage.rows.started -= stage.rows.length == 0  # not yet begun: played again; begun: abandoned, the next one follows
    stage.reset_all(episodes)
    return open_episodes


class Recorder(Protocol):
    """Records the episodes of env rows. A context manager that discards unfinished episodes at the end. It is
    constructed with the env, the recording, and a function that shows the user a line, for a recorder that gives up."""

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        """Episodes begin on these rows."""

    def decided(self, obs: Observation, actions: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        """The next decision of all rows, which observe `obs`; `values` are of the rows `at`, empty if unknown."""

    def on_frame(self, active: np.ndarray) -> None:
        """These rows, a mask, have taken an env step."""

    def played(self, result: ChunkResult) -> None:
        """Record the result of the decision."""

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        """The episodes of these rows are over."""

    def __enter__(self) -> Recorder: ...

    def __exit__(self, *raised: object) -> None: ...


def play_episodes(
    env: VectorEnv,
    episodes: list[EpisodeSpec],
    action_source: ActionSource,
    recording: Recording,
    notes: Channel,
    alone: frozenset[int],
    timers: Timers,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[EpisodeResult]]:
    """Play a fixed list of episodes to the end; a free row takes the next one. After every decision yields the newly
    ended episodes, when the next decisions are requested but not yet awaited. `alone` are the last episodes; they are
    played one at a time. When `stop()` is true, the decision in progress is the last one, and open episodes are given
    up."""
    player, waiting = EpisodePlayer(env, timers), deque(episodes)
    outcomes: list[EpisodeResult] = []

    def warn(text: str) -> None:
        notes.put(Note(action_source.source, warning=text))

    def refill(free: np.ndarray) -> None:
        """Begin waiting episodes on free rows."""
        free = free[: num_startable(waiting, player.playing, alone)]
        if not len(free):
            return
        specs = [waiting.popleft() for _ in free]
        notes.put(Note(action_source.source, begun=tuple(spec.index for spec in specs)))
        player.begin(free, specs)
        action_source.begin(free)
        for recorder in recorders:
            recorder.begin(free, specs, player.obs.get("instruction"))

    def on_frame(moved: np.ndarray) -> None:
        for recorder in recorders:
            recorder.on_frame(moved)

    with ExitStack() as stack:
        recorders = [stack.enter_context(record(env, recording, warn)) for record in recording.recorders]
        refill(np.arange(env.num_envs))
        while player.playing.any() and not stop():
            at, seen = player.seen()
            action_source.ask(seen, player.rows, at)
            yield outcomes
            with timers.measure("wait"):
                decisions, values = action_source.answer()
            actions = spread(decisions, at, env.num_envs)
            for recorder in recorders:
                recorder.decided(player.obs, actions, at, values)
            result = player.play(disturbed(actions, player.rows, recording), on_frame)
            for recorder in recorders:
                recorder.played(result)
            done, outcomes = player.end(result)
            if len(done):
                for recorder in recorders:
                    recorder.finish(done, outcomes)
                notes.put(Note(action_source.source, finished=tuple(outcomes)))
                refill(np.flatnonzero(~player.playing) if waiting and waiting[0].index in alone else done)
        yield outcomes


def num_startable(waiting: deque[EpisodeSpec], playing: np.ndarray, alone: frozenset[int]) -> int:
    """The number of waiting episodes that may begin now."""
    if waiting and waiting[0].index in alone:
        return int(not playing.any())
    return sum(spec.index not in alone for spec in waiting)


class ActionSource(Protocol):
    """Chooses the actions of the rows that play."""

    source: str  # its name in notes to the driver

    def begin(self, rows: np.ndarray) -> None:
        """Episodes begin on these rows."""

    def ask(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> None:
        """Request the next decisions of the rows `at`, which see `obs`."""

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        """These decisions [len(at), C, A], and their values [len(at)], empty if unknown."""


class PolicyActions:
    """The actions of a policy worker, drawn by this rule (None: the round's rule)."""

    def __init__(self, client: PolicyClient, rule: SamplingRule | None = None) -> None:
        self.client, self.rule = client, rule
        self.source = client.source

    def begin(self, rows: np.ndarray) -> None:
        """Do nothing: a policy has no memory."""

    def ask(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> None:
        self.client.ask(obs, rows.episode[at], rows.decision[at], rule=self.rule)

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        reply = self.client.answer()
        return reply.output.actions, reply.values


class ExpertActions:
    """The actions of an expert of the task."""

    def __init__(self, expert: Expert, source: str) -> None:
        self.expert = expert
        self.source = source

    def begin(self, rows: np.ndarray) -> None:
        self.expert.begin(rows)

    def ask(self, obs: Observation, rows: EpisodeTracker, at: np.ndarray) -> None:
        self.at = at

    def answer(self) -> tuple[np.ndarray, np.ndarray]:
        return self.expert.act()[self.at, None], np.empty(0)


def disturbed(actions: np.ndarray, rows: EpisodeTracker, recording: Recording) -> np.ndarray:
    """The actions [N, C, A] with the requested noise, which follows from episode and decision."""
    if not recording.noise:
        return actions
    width = actions[0].size
    noise = normal(recording.seed, "disturbance", rows.episode, rows.decision, width).reshape(actions.shape)
    return (actions + recording.noise * noise).astype(actions.dtype)
