"""The sim worker: owns a slice of the run's envs, plays rollouts for training and episodes for evaluation.

It never sees the policy, only the channels of its `Route`. `player.py` plays its jobs; here the envs are built, freed
and restored, and decisions go to their learner ranks. An expert may act in a policy's place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from embodied.core.arrays import Observation, host, text_arrays
from embodied.core.request_queue import PolicyClient
from embodied.core.types import (
    LABELS,
    ActReply,
    Answerers,
    EnvSpec,
    EpisodeList,
    Job,
    PolicyOutput,
    Report,
    Route,
    choose,
    env_blocks,
    rows_of_sims,
)
from embodied.envs import env_class, make_env
from embodied.envs.capabilities import Expert
from embodied.envs.player import (
    EpisodePlayer,
    EpisodeStream,
    PlayerWorker,
    Record,
    Stage,
    Tally,
    play_episodes,
    play_horizon,
)
from embodied.envs.vector_env import VectorEnv
from embodied.runtime import Needs
from embodied.runtime.device_memory import AllocatedMemory, give_back_unused


class SimWorker(PlayerWorker):
    def __init__(self, *options, **more) -> None:
        super().__init__(*options, **more)
        self.stages: list[Stage] = []
        self.experts: dict[Stage, tuple[VectorEnv, Expert]] = {}  # of algo.name=dagger, with their envs
        self.eval_env = None
        self.memory = AllocatedMemory()  # of its GPU, used by all its simulators
        self.away: dict[str, np.ndarray] | None = None  # state of the envs, while their simulators are freed

    def build(self) -> EnvSpec:
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
                self.stages.append(Stage(env, ids, self.config.num_envs, self.timers, self._began))
            if ":" in self.config.reward:  # a mistake in it ends the run now, instead of restarting this worker
                self.stages[0].env.try_out()
        return self.stages[0].env.env_spec

    def eval_spec(self) -> EnvSpec:
        """Build the envs for evaluations and return their spec."""
        if self.eval_env is None:
            with self.memory.measured():
                self.eval_env = make_env(self.eval_config, self.eval_rows)
        return self.eval_env.env_spec

    def _began(self, episodes: Sequence[int]) -> None:
        self.report(Report(begun=tuple(episodes)))

    def needs(self, shared: bool = False) -> Needs:
        """The memory that its simulators took when they were built. Simulators whose state cannot be saved are not
        offloaded."""
        return Needs(self.memory.num_bytes, 0 if self._can_leave() else self.memory.num_bytes)

    def _can_leave(self) -> bool:
        """True if no episode is open between rollouts, or all can be saved."""
        return self.whole_episodes or all(stage.env.saves_state for stage in self.stages)

    def offload(self) -> None:
        """Free the simulators, after saving their state, or only what they have on the GPU, where that suffices."""
        if self.memory.num_bytes and self.away is None and self._can_leave():
            if not all(env.free_gpu_memory() for env in self._envs()):
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

    def plays(self, tallies: Sequence[Tally], route: Route) -> Iterator[Iterator[None]]:
        for tally in tallies:
            if tally.job.evaluation:
                yield self._evaluate(tally, route[-1])
            elif tally.job.horizon:
                yield from (self._play_horizon(tally, *place) for place in zip(self.stages, route, strict=False))
            else:
                places = enumerate(route[: len(self.stages)])
                yield from (self._play_whole(tally, stage, answerers) for stage, answerers in places)

    def _play_horizon(self, tally: Tally, stage: Stage, answerers: Answerers) -> Iterator[None]:
        """Hand each learner rank the decisions of its env rows."""
        record, client = Record(answerers.source, tally.job.horizon), PolicyClient(answerers)
        if tally.job.labels:
            client = Labelled(answerers, stage, self._expert_of(stage), tally.job.labels == "played")
        return play_horizon(stage, tally, client, record, partial(self._hand_on, tally.job, record))

    def _expert_of(self, stage: Stage) -> Expert:
        """The expert that labels this stage's decisions. One that is made during open episodes begins in the middle."""
        if self.experts.get(stage, (None,))[0] is not stage.env:  # or was built again
            self.experts[stage] = stage.env, stage.env.expert("scripted", self.tick)
            self.experts[stage][1].begin(np.arange(stage.env.num_envs))
        return self.experts[stage][1]

    def _play_whole(self, tally: Tally, stage: int, answerers: Answerers) -> Iterator[None]:
        """Play a stage's share of a list of episodes, and keep them."""
        job, at_once = tally.job, tally.job.at_once
        record = EpisodeStream(answerers.source, self.store) if at_once else Record(answerers.source)
        share = job.episodes[stage :: len(self.stages)]
        yield from play_episodes(self.stages[stage], tally, share, PolicyClient(answerers), record)
        if record.decisions:
            played = record.trajectory()
            self.store |= dict.fromkeys(played.ids.tolist(), played)

    def _evaluate(self, tally: Tally, answerers: Answerers) -> Iterator[None]:
        """Play the episodes of an evaluation in separate envs, with the policy or with an expert of the task."""
        self.eval_spec()
        player, expert = EpisodePlayer(self.eval_env, self.timers), tally.job.expert
        client: Any = PolicyClient(answerers)
        if expert:
            client = ExpertActions(self.eval_env.expert(expert, self.tick), player)
        stop = lambda: self.stopped  # noqa: E731
        return play_episodes(player, tally, tally.job.episodes, client, stop=stop)

    def take_over(self, episodes: EpisodeList, started: np.ndarray) -> None:
        """Take over from a dead worker, whose env rows had `started` episodes: begin their next ones."""
        for stage, begun in zip(self.stages, np.split(started, len(self.stages)), strict=True):
            stage.rows.started[:] = begun
            stage.reset_all(episodes)

    def get_state(self) -> dict[str, np.ndarray]:
        """Open episodes and, where the simulator can save it, its state: arrays with one row per env (empty: nothing
        begun).
        """
        if self.away is not None:
            return self.away
        parts = [stage_state(stage) for stage in self.stages if stage.obs is not None]
        return {name: np.concatenate([state[name] for state in parts]) for name in parts[0]} if parts else {}

    def set_state(self, state: dict[str, np.ndarray], episodes: EpisodeList) -> int:
        """Continue from `get_state` of all workers. Returns how many open episodes had to be abandoned."""
        self.onload()
        return sum(restore_stage(stage, state, episodes) for stage in self.stages)

    def close(self) -> None:
        for env in self._envs():
            env.close()

    def _envs(self) -> list[VectorEnv]:
        return [stage.env for stage in self.stages] + ([self.eval_env] if self.eval_env else [])

    def _hand_on(self, job: Job, record: Record, end: int) -> None:
        """Hand on the decisions before `end`, cut at the borders of the learner ranks' env blocks."""
        played = record.trajectory(end)
        for block, channel in zip(env_blocks(self.config.num_envs, len(job.outlets)), job.outlets, strict=True):
            ids = played.ids[(played.ids >= block.start) & (played.ids < block.stop)]
            if len(ids):
                channel.put(choose(played, ids, played.source), key=job.batch)


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


class Labelled(PolicyClient):
    """Asks policies, and an expert for the label of every decision, which `replay` holds (algo.name=dagger)."""

    def __init__(self, answerers: Answerers, stage: Stage, expert: Expert, plays: bool) -> None:
        """`plays`: the expert's actions are played, not the policies'."""
        super().__init__(answerers)
        self.stage, self.expert, self.plays = stage, expert, plays

    def ask(self, obs: Observation, episodes: Any, decisions: Any, **what: Any) -> None:
        super().ask(obs, episodes, decisions, **what)
        if what.get("value_only"):
            return
        if len(begun := np.flatnonzero(self.stage.rows.decision == 0)):
            self.expert.begin(begun)
        self.labels = np.clip(self.expert.act()[self.stage.at, None], -1, 1).astype(np.float32)

    def answer(self) -> ActReply:
        reply = super().answer()
        if reply.output is None:
            return reply
        actions = self.labels.astype(host(reply.output.actions).dtype) if self.plays else reply.output.actions
        replay = reply.output.replay | {LABELS: self.labels}
        return replace(reply, output=replace(reply.output, actions=actions, replay=replay))


class ExpertActions:
    """An expert of the task in place of a policy: the env executes its actions, perhaps with noise. Recorders get the
    actions without noise, so demonstrations also show how to recover."""

    def __init__(self, expert: Expert, player: EpisodePlayer) -> None:
        self.expert, self.player = expert, player

    def begin(self, rows: np.ndarray) -> None:
        self.expert.begin(rows)

    def ask(self, *_: Any, **what: Any) -> None:
        """Do nothing: an expert acts when its answer is needed."""

    def answer(self) -> ActReply:
        actions, unknown = self.expert.act()[self.player.at, None], np.empty(0)
        return ActReply("", (0, 0, len(actions)), PolicyOutput(actions, unknown, unknown), unknown, None, -1)
