"""The policy worker: answers sim workers' requests with the current weights.

It holds no state about envs. A worker that has no weights yet (or lost them) is stale and refuses to act.
"""

from __future__ import annotations

import numpy as np

from embodied import rng
from embodied.data import ActReply, ActRequest, EnvSpec, Weights
from embodied.errors import EmbodiedError, Unusable
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

    def load_weights(self, channel: Channel, version: int) -> None:
        """Take this published version; earlier ones may still wait before it."""
        with self.timers.measure("wait"):
            weights: Weights = channel.get()
            while weights.version != version:
                weights = channel.get()
        self.policy.load_weights(weights.tensors)
        self.version = weights.version

    def serve(self, requests: Channel, replies: dict[str, Channel], greedy: bool = False, stream: str = "train") -> int:
        """Answer these sources until one says that nobody asks any more; others are of an earlier round. Returns the
        number of decisions."""
        if self.version is None:
            raise EmbodiedError("this policy worker has no weights yet; publish a version before the rollout")
        decisions = 0
        while not (request := self._next(requests)).done:
            if request.source in replies:
                with self.timers.measure("act"):
                    reply = self._answer(request, greedy, stream)
                decisions += 0 if reply.output is None else len(reply.values)
                replies[request.source].put(reply)
        return decisions

    def _next(self, requests: Channel) -> ActRequest:
        with self.timers.measure("wait"):
            return requests.get()

    def _answer(self, request: ActRequest, greedy: bool, stream: str) -> ActReply:
        final_values = None if request.final_obs is None else self.policy.value(request.final_obs)
        if request.value_only:
            output, values = None, self.policy.value(request.obs)
        else:
            output = self.policy.act(request.obs, self._noise(request, stream), greedy)
            values = output.values
            self._check_finite("actions", output.actions)
            self._check_finite("log-probs", output.logprobs)
        self._check_finite("values", values)
        return ActReply(request.source, request.number, output, values, final_values, self.version)

    def _check_finite(self, what: str, numbers: np.ndarray) -> None:
        if not np.isfinite(numbers).all():
            rows = np.flatnonzero(~np.isfinite(numbers.reshape(len(numbers), -1)).all(axis=1))
            raise Unusable(f"the policy's {what} are NaN or infinite for rows {rows[:8].tolist()}")

    def _noise(self, request: ActRequest, stream: str) -> np.ndarray:
        draw = rng.normal if self.noise.kind == "normal" else rng.uniform
        return draw(self.seed, f"act/{stream}", request.episodes, request.decisions, self.noise.width)
