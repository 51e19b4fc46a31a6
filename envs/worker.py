"""The sim worker: owns a slice of the run's envs, plays rollouts for training and episodes for evaluation.

It never sees the policy, only the channels of its `Route`. Finished rows are reset here, at the decision border, to the
next episode of the driver's list; the arrays it records go to the learner ranks that own the env rows.
"""

from __future__ import annotations

import numpy as np

from embodied.core.episodes import EpisodeList, arrays_of, choose_episodes, env_blocks, episodes_from, join_episodes
from embodied.core.types import EnvSpec, EpisodeResult, EpisodeSpec, PlayedEpisodes, Recording, RolloutStats, Route
from embodied.envs import make_env
from embodied.envs.action_source import ExpertActions, PolicyActions
from embodied.envs.episode_collector import Player, play_whole
from embodied.envs.episode_player import play_episodes
from embodied.envs.policy_client import PolicyClient
from embodied.envs.rollout import Record, Stage
from embodied.runtime import Channel, Needs, Worker, served_while_busy
from embodied.runtime.gpu_memory import Taken


class SimWorker(Worker):
    def __init__(
        self, config, stages: int = 1, journal: Channel | None = None, eval_config=None, eval_rows: int = 1
    ) -> None:
        """Every training episode is noted in `journal` before it begins. Evaluations are played in `eval_rows` separate
        envs of `eval_config`; without stages there are no others."""
        self.config = config
        self.eval_config, self.eval_rows = eval_config or config, eval_rows
        self.journal = journal
        self.num_stages = stages
        self.stages: list[Stage] = []
        self.eval_env = None
        self.memory = Taken()  # of its GPU, by all its simulators
        self.stopped = False
        self.shelf: PlayedEpisodes | None = None  # whole episodes that the learners may still want

    def spec(self) -> EnvSpec:
        """Build the envs (the first call takes seconds with a real simulator) and say what they offer."""
        if not self.num_stages:
            return self.eval_spec()
        if not self.stages:
            per_worker = self.config.num_envs // self.world_size
            per_stage = per_worker // self.num_stages
            for stage in range(self.num_stages):
                first = self.rank * per_worker + stage * per_stage
                ids = np.arange(first, first + per_stage)
                with self.memory.counted():
                    env = make_env(self.config, per_stage)
                self.stages.append(
                    Stage(env, f"sim-{self.rank}/{stage}", ids, self.config.num_envs, self.timers, self.journal)
                )
        return self.stages[0].env.env_spec

    def eval_spec(self) -> EnvSpec:
        """The same of the envs for evaluations."""
        if self.eval_env is None:
            with self.memory.counted():
                self.eval_env = make_env(self.eval_config, self.eval_rows)
        return self.eval_env.env_spec

    def needs(self, shared: bool = False) -> Needs:
        """What its simulators took when they were built. They stay: their state is in there."""
        return Needs(self.memory.num_bytes, self.memory.num_bytes)

    def collect(
        self, episodes: EpisodeList, horizon: int, route: Route, out: tuple[Channel, ...], granularity: int = 0
    ) -> RolloutStats:
        """Play `horizon` decisions in every env and hand each learner rank the trajectories of its env rows: at the
        end, or every `granularity` decisions."""
        records = [Record(source, horizon, s.env_ids) for source, s in zip(route.sources, self.stages, strict=True)]
        for stage, *channels in zip(self.stages, route.sources, route.requests, route.replies, strict=True):
            stage.line = PolicyClient(*channels)
            stage.step_s = stage.reset_s = stage.wait_s = 0.0
            if stage.obs is None:
                stage.reset(np.arange(stage.env.num_envs), episodes)
            stage.ask()
        for t in range(horizon):
            for stage, record in zip(self.stages, records, strict=True):
                stage.take(record, t, episodes)
                stage.ask(value_only=t == horizon - 1)
                if granularity and t and t % granularity == 0:
                    self._deliver(record, out, t)
        for stage, record in zip(self.stages, records, strict=True):
            stage.close(record)
            self._deliver(record, out, horizon)
        return RolloutStats(
            env_steps=sum(int(record.arrays["mask"].sum()) for record in records),
            finished=tuple(result for record in records for result in record.finished),
            step_s=sum(stage.step_s for stage in self.stages),
            reset_s=sum(stage.reset_s for stage in self.stages),
            wait_s=sum(stage.wait_s for stage in self.stages),
        )

    def play(self, episodes: list[EpisodeSpec], route: Route) -> RolloutStats:
        """Play these training episodes to their ends, as many at a time as there are envs, and keep them."""
        stages = zip(self.stages, route.sources, route.requests, route.replies, strict=True)
        players = [
            Player(stage.env, episodes[i :: len(self.stages)], PolicyClient(*channels), self.timers)
            for i, (stage, *channels) in enumerate(stages)
        ]
        played = play_whole(players)
        self.shelf = join_episodes([played] if self.shelf is None else [self.shelf, played])
        return RolloutStats(
            env_steps=int(played.mask.sum()),
            finished=tuple(sorted((r for p in players for r in p.results), key=lambda result: result.index)),
            step_s=sum(player.step_s for player in players),
            reset_s=sum(player.reset_s for player in players),
            wait_s=sum(player.wait_s for player in players),
        )

    def kept(self) -> list[int]:
        """The episodes on the shelf."""
        return [] if self.shelf is None else self.shelf.episodes.tolist()

    def hand_over(self, wanted: list[np.ndarray], source: str, out: tuple[Channel, ...]) -> list[int]:
        """Send every learner rank those of its wanted episodes that are kept here; -> the ranks that got something."""
        kept, ranks = set(self.kept()), []
        for rank, (episodes, channel) in enumerate(zip(wanted, out, strict=True)):
            if mine := [episode for episode in episodes.tolist() if episode in kept]:
                part = choose_episodes(self.shelf, mine, source)
                channel.put(part, weight=int(part.mask.sum()))
                ranks.append(rank)
        return ranks

    def keep(self, episodes: tuple[int, ...]) -> None:
        """Forget all kept episodes but these."""
        mine = [episode for episode in self.kept() if episode in episodes]
        self.shelf = choose_episodes(self.shelf, mine) if mine else None

    def get_kept(self) -> dict[str, np.ndarray]:
        """The shelf as arrays, for a checkpoint; empty if nothing is kept."""
        return {} if self.shelf is None else arrays_of(self.shelf)

    def set_kept(self, arrays: dict[str, np.ndarray]) -> None:
        """This worker's part of what all workers kept."""
        shelf = episodes_from(arrays)
        mine = shelf.episodes[self.rank :: self.world_size]
        self.shelf = choose_episodes(shelf, mine) if len(mine) else None

    def begin(self, episodes: EpisodeList, started: np.ndarray) -> None:
        """Take over from a worker that died, whose env rows had begun so many episodes: begin their next ones."""
        for stage, begun in zip(self.stages, np.split(started, len(self.stages)), strict=True):
            stage.rows.started[:] = begun
            stage.reset(np.arange(stage.env.num_envs), episodes)

    def evaluate(
        self,
        episodes: list[EpisodeSpec],
        route: Route,
        recording: Recording,
        notes: Channel,
        alone: frozenset[int],
        expert: str | None = None,
    ) -> list[EpisodeResult]:
        """Play these episodes to the end in separate envs, some of them with no other beside them, with the policy or
        with an expert of the task. `notes` hears of every beginning and end."""
        self.eval_spec()
        line = PolicyClient(route.sources[0], route.requests[0], route.replies[0])
        action_source = (
            ExpertActions(self.eval_env.expert(expert, self.tick), line.source) if expert else PolicyActions(line)
        )
        stop = lambda: self.stopped  # noqa: E731
        return play_episodes(self.eval_env, episodes, action_source, recording, notes, alone, self.timers, stop)

    @served_while_busy
    def stop_playing(self) -> None:
        """Give up the evaluation that goes on, and any that follows."""
        self.stopped = True

    def get_state(self) -> dict[str, np.ndarray]:
        """Open episodes and, where the simulator can save it, its state: arrays with one row per env (empty: nothing
        begun).
        """
        parts = [stage_state(stage) for stage in self.stages if stage.obs is not None]
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}

    def set_state(self, state: dict[str, np.ndarray], episodes: EpisodeList) -> int:
        """Continue from `get_state` of all workers. Returns how many open episodes had to be abandoned."""
        return sum(restore_stage(stage, state, episodes) for stage in self.stages)

    def close(self) -> None:
        for env in [stage.env for stage in self.stages] + ([self.eval_env] if self.eval_env else []):
            env.close()

    def _deliver(self, record: Record, out: tuple[Channel, ...], end: int) -> None:
        """Hand on the decisions before `end`, cut at the borders of the learner ranks' env blocks."""
        for rank, block in enumerate(env_blocks(self.config.num_envs, len(out))):
            columns = np.flatnonzero((record.env_ids >= block.start) & (record.env_ids < block.stop))
            if len(columns):
                cut = slice(int(columns[0]), int(columns[-1]) + 1)
                trajectory = record.trajectory(cut, end)
                out[rank].put(trajectory, weight=trajectory.num_steps)
        record.handed = end


def stage_state(stage: Stage) -> dict[str, np.ndarray]:
    state = {f"rows.{name}": array for name, array in stage.rows.get_state().items()}
    state |= {f"env.{name}": array for name, array in (stage.env.get_state() or {}).items()}
    return {"env_ids": stage.env_ids, **state}


def restore_stage(stage: Stage, state: dict[str, np.ndarray], episodes: EpisodeList) -> int:
    place = {int(env): at for at, env in enumerate(state["env_ids"])}
    at = np.array([place[int(env)] for env in stage.env_ids])
    rows = {name[5:]: array[at] for name, array in state.items() if name.startswith("rows.")}
    stage.rows.set_state(rows, [episodes[int(index)] for index in rows["episode"]])
    env_state = {name[4:]: array[at] for name, array in state.items() if name.startswith("env.")}
    if env_state:
        stage.obs = stage.env.set_state(env_state)
        return 0
    open_episodes = int((stage.rows.length > 0).sum())
    stage.rows.started -= stage.rows.length == 0  # not yet begun: played again; begun: abandoned, the next one follows
    stage.reset(np.arange(stage.env.num_envs), episodes)
    return open_episodes
