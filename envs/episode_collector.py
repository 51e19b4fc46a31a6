"""Playing whole episodes for training: every env row takes the next one of the list when its own is over.

Rows without an episode are frozen: not simulated, and shown to no policy. What is recorded depends neither on how many
rows there are nor on who finishes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter

import numpy as np

from embodied.core.arrays import host
from embodied.core.observations import Observation, join_rows, take_rows, text_arrays
from embodied.core.types import ActReply, ChunkResult, EpisodeResult, EpisodeSpec, PlayedEpisodes
from embodied.envs.base import VectorEnv
from embodied.envs.episode_player import spread
from embodied.envs.episode_tracker import EpisodeTracker
from embodied.envs.policy_client import PolicyClient
from embodied.runtime import Timers


class Player:
    """One stage of a sim worker: ask -> take -> ask, until all its episodes are over."""

    def __init__(self, env: VectorEnv, episodes: Sequence[EpisodeSpec], line: PolicyClient, timers: Timers) -> None:
        self.env = env
        self.line = line
        self.timers = timers
        self.waiting = deque(episodes)
        self.rows = EpisodeTracker(env.num_envs, env.env_spec.has_success)
        self.playing = np.zeros(env.num_envs, bool)
        self.results: list[EpisodeResult] = []
        self.decisions: list[tuple[Observation, dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        self.step_s = self.reset_s = self.wait_s = 0.0
        self.refill(np.arange(env.num_envs))

    def refill(self, free: np.ndarray) -> None:
        """Begin waiting episodes on free rows, in one batch."""
        free = free[: len(self.waiting)]
        if not len(free):
            return
        started = perf_counter()
        specs = [self.waiting.popleft() for _ in free]
        by_row: list = [None] * self.env.num_envs
        for row, spec in zip(free, specs, strict=True):
            by_row[row] = spec
        mask = np.zeros(self.env.num_envs, bool)
        mask[free] = True
        self.obs, info = self.env.reset(options={"reset_mask": mask, "episodes": by_row})
        self.rows.begin(free, specs, info.get("success"))
        self.playing[free] = True
        self.reset_s += self.timers.add("reset", started)

    def ask(self) -> None:
        """Show the policy those rows that play."""
        self.at = np.flatnonzero(self.playing)
        self.shown = take_rows(text_arrays(self.obs), self.at)
        self.line.ask(obs=self.shown, episodes=self.rows.episode[self.at], decisions=self.rows.decision[self.at])

    def take(self) -> None:
        """Play and record the answer; begin new episodes where some are over."""
        started = perf_counter()
        reply = self.line.answer()
        self.wait_s += self.timers.add("wait", started)
        started = perf_counter()
        result = self.env.step_chunk(spread(reply.output.actions, self.at, self.env.num_envs))
        self.step_s += self.timers.add("step", started)
        self.record(reply, result)
        self.rows.record(result)
        self.obs = result.obs
        done = np.flatnonzero(result.done & self.playing)
        if len(done):
            self.results += self.rows.results(done)
            self.playing[done] = False
            self.refill(done)

    def record(self, reply: ActReply, result: ChunkResult) -> None:
        arrays = {
            "episodes": self.rows.episode[self.at],
            "actions": reply.output.actions,
            "logprobs": reply.output.logprobs,
            "rewards": result.rewards[self.at],
            "mask": result.mask[self.at],
            "versions": np.full(len(self.at), reply.version, np.int64),
        }
        self.decisions.append((self.shown, arrays, reply.output.replay))


def play_whole(players: Sequence[Player]) -> PlayedEpisodes:
    """Let the stages take turns, so that the policy works for one while another is simulated."""
    for player in players:
        if player.playing.any():
            player.ask()
    while any(player.playing.any() for player in players):
        for player in players:
            if player.playing.any():
                player.take()
                if player.playing.any():
                    player.ask()
    return put_together([decision for player in players for decision in player.decisions])


def put_together(decisions: list[tuple[Observation, dict, dict]]) -> PlayedEpisodes:
    """Sorted by episode; within one, decisions are in the order in which they were taken."""
    joined = {name: np.concatenate([host(arrays[name]) for _, arrays, _ in decisions]) for name in decisions[0][1]}
    replay = {name: np.concatenate([host(extra[name]) for _, _, extra in decisions]) for name in decisions[0][2]}
    of = joined.pop("episodes")
    order = np.argsort(of, kind="stable")
    episodes, lengths = np.unique(of, return_counts=True)
    return PlayedEpisodes(
        episodes=episodes,
        lengths=lengths,
        obs=take_rows(join_rows([obs for obs, _, _ in decisions]), order),
        replay={name: array[order] for name, array in replay.items()},
        **{name: array[order] for name, array in joined.items()},
    )
