"""A policy that is a server: the policy worker asks it about every env row (`client.py`). It has no weights."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from embodied.core.arrays import host
from embodied.core.types import ActRequest, EnvSpec, NoiseSpec, Observation, PolicyOutput, SamplingRule
from embodied.policies.base import Policy
from embodied.policies.policy_worker import PolicyWorker
from embodied.policies.remote.client import Connection, OpenEpisodes

MOST_ANSWERS = 1000  # in a decision


class RemotePolicy(Policy):
    def __init__(self, config: Any, spec: EnvSpec) -> None:
        super().__init__(config, spec)
        self.episodes = OpenEpisodes(config, spec)
        self.asked: list[Connection] = []  # of the rows of the next observation

    def initialise(self, rng: np.random.Generator) -> None:
        """Nothing to draw."""

    def noise_spec(self) -> NoiseSpec:
        return NoiseSpec("uniform", 1)

    def act(self, obs: Observation, noise: np.ndarray, temperature: float = 1.0) -> PolicyOutput:
        actions = self.episodes.act(self.asked, obs)
        return PolicyOutput(actions, np.zeros(actions.shape), np.zeros(len(actions)))


class RemoteWorker(PolicyWorker):
    """Tells the policy which episodes its rows play, since a server may remember them."""

    policy: RemotePolicy

    def serve(self, *options: Any, **more: Any) -> int:
        for source in self.policy.episodes.playing:  # a round begins, so no episode is open
            self.policy.episodes.end(source, set())
        return super().serve(*options, **more)

    def _act(self, requests: dict[int, ActRequest], rule: SamplingRule) -> dict[int, PolicyOutput]:
        self.policy.asked = [connection for request in requests.values() for connection in self._connections(request)]
        return super()._act(requests, rule)

    def _connections(self, request: ActRequest) -> list[Connection]:
        """The connection of every row's episode; a request names all open episodes of its source."""
        episodes, open_episodes = host(request.episodes).tolist(), self.policy.episodes
        open_episodes.end(request.source, {*episodes})
        tasks = request.obs.get("instruction", [""] * len(episodes))
        for episode, decision, task in zip(episodes, host(request.decisions).tolist(), tasks, strict=True):
            if decision == 0:
                open_episodes.begin(request.source, episode, str(task))
        return [open_episodes.of(request.source, episode) for episode in episodes]

    def _patience(self) -> AbstractContextManager[None]:
        return self.alive(MOST_ANSWERS * self.config.answer_s)  # every answer has its own deadline

    def close(self) -> None:
        if hasattr(self, "policy"):
            self.policy.episodes.close()
