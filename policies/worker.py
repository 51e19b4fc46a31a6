"""The policy worker: answers sim workers' requests with the current weights.

It holds no state about envs. A worker that has no weights yet (or lost them) is stale and refuses to act.
"""

from __future__ import annotations

import numpy as np

from embodied import rng
from embodied.data import ActReply, ActRequest, EnvSpec, PolicyOutput, Weights
from embodied.errors import EmbodiedError
from embodied.policies import make_policy
from embodied.policies.base import Policy
from embodied.runtime import Channel, Worker


class PolicyWorker(Worker):
    def __init__(self, config, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.policy: Policy | None = None
        self.version: int | None = None

    def build(self, spec: EnvSpec) -> None:
        self.policy = make_policy(self.config, spec).eval()
        self.noise = self.policy.noise_spec()

    def load_weights(self, channel: Channel) -> int:
        """Take the next published version."""
        with self.timers.measure("wait"):
            weights: Weights = channel.get()
        self.policy.load_weights(weights.tensors)
        self.version = weights.version
        return weights.version

    def serve(self, requests: Channel, replies: dict[str, Channel], greedy: bool = False, stream: str = "train") -> int:
        """Answer until every source has said that it is done. Returns the number of decisions."""
        if self.version is None:
            raise EmbodiedError("this policy worker has no weights yet; publish a version before the rollout")
        asking, decisions = len(replies), 0
        while asking:
            with self.timers.measure("wait"):
                request: ActRequest = requests.get()
            if request.done:
                asking -= 1
                continue
            with self.timers.measure("act"):
                reply = self._answer(request, greedy, stream)
            if reply.output is not None:
                decisions += len(reply.values)
            replies[request.source].put(reply)
        return decisions

    def _answer(self, request: ActRequest, greedy: bool, stream: str) -> ActReply:
        final_values = None if request.final_obs is None else self.policy.value(request.final_obs)
        if request.value_only:
            return ActReply(None, self.policy.value(request.obs), final_values, self.version)
        output: PolicyOutput = self.policy.act(request.obs, self._noise(request, stream), greedy)
        return ActReply(output, output.values, final_values, self.version)

    def _noise(self, request: ActRequest, stream: str) -> np.ndarray:
        draw = rng.normal if self.noise.kind == "normal" else rng.uniform
        return draw(self.seed, f"act/{stream}", request.episodes, request.decisions, self.noise.width)
