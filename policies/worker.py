"""The policy worker: answers sim workers' requests with the current weights.

It knows nothing of envs but what each stage saw at the end of a rollout, with which the next one begins. A worker that
has no weights yet (or lost them) is stale and refuses to act.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from embodied import rng
from embodied.arrays import finite_rows
from embodied.data import ActReply, ActRequest, Array, AskAgain, EnvSpec, Observation, PolicyOutput
from embodied.errors import Unusable, WrongShape
from embodied.policies import make_policy
from embodied.runtime import Channel, Needs, Worker
from embodied.runtime.blobs import Blob, blob_of, tensor_of
from embodied.runtime.residence import Belongings, num_bytes
from embodied.runtime.weights import Publication, WeightReader

COMPILING_S = 900.0  # at most, on a busy machine


class PolicyWorker(Worker):
    def __init__(self, config, seed: int, precision: str = "full", device: str = "cpu") -> None:
        """`precision` is the learner's: log-probs must agree."""
        self.config = config
        self.seed = seed
        self.device = device
        self.bf16 = precision == "bf16"
        self.weights = WeightReader()
        self.shares = False  # its weights are a learner's
        self.cache_bytes = 0  # the most that it acted in so far
        self.valued: dict[str, tuple[tuple[str, int], Observation]] = {}  # stage -> its last question of values only

    def build(self, spec: EnvSpec) -> None:
        self.belongings = Belongings(self.timers)
        self.policy = make_policy(self.config, spec).eval().to(self.device)
        self.noise = self.policy.noise_spec()
        self.action_dim = spec.action.dim

    def initial_weights(self, spec: EnvSpec) -> dict[str, Blob]:
        """Those that a run with this seed begins with."""
        weights = make_policy(self.config, spec, self.seed).state_dict()
        return {name: blob_of(tensor) for name, tensor in weights.items()}

    def needs(self, shared: bool = False) -> Needs:
        """Its weights, unless it acts with those of a learner, and the memory it acts in."""
        self.shares = shared
        weights = [] if shared else self._weights()
        self.cache_bytes = max(self.cache_bytes, num_bytes(self.policy.cache_tensors()))
        return Needs(num_bytes(weights) + self.cache_bytes)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            weights = {} if self.shares else {"weights": self._weights()}
            self.belongings.offload(weights | {"cache": self.policy.cache_tensors()}, emptied=("cache",))

    def _weights(self) -> list[torch.Tensor]:
        return [*self.policy.parameters(), *self.policy.buffers()]

    def route(self, publication: Publication) -> str:
        """How this process gets at published weights."""
        return self.weights.route(publication)

    def load_weights(self, publication: Publication, route: str, channel: Channel, whole: bool) -> int | None:
        """Take a published version; buckets of it come through the channel. -> the version it has now: None where the
        next one has come meanwhile, which it will be told of."""
        self.policy.check_names(publication.specs)
        found = self.weights.load(publication, route, channel, whole)
        self.policy.use_weights({n: tensor_of(w) if isinstance(w, Blob) else w for n, w in found.items()})
        return self.weights.version

    def serve(
        self,
        requests: Channel,
        replies: dict[str, Channel],
        version: int,
        temperature: float = 1.0,
        stream: str = "train",
    ) -> int:
        """Answer these sources with this version until one says that nobody asks any more; others are of an earlier
        round. Returns the number of decisions."""
        decisions = 0
        while not (request := self._next(requests)).done:
            if request.source not in replies:
                continue
            whole = self.completed(request)
            if whole is None:
                replies[request.source].put(AskAgain(request.source))
                continue
            with self.timers.measure("act"), self.weights.acting(version), self._patience():
                reply = self._answer(whole, temperature, stream)
            decisions += 0 if reply.output is None else len(reply.values)
            replies[request.source].put(reply)
        return decisions

    def _patience(self) -> AbstractContextManager[None]:
        """Networks that are compiled when they are first asked take their time."""
        return self.alive(COMPILING_S) if getattr(self.config, "compile", False) else nullcontext()

    def completed(self, request: ActRequest) -> ActRequest | None:
        """With the observation that it refers to; None if that is not known here."""
        stage = request.source.partition("#")[0]
        if request.value_only:
            self.valued[stage] = (request.source, request.number), request.obs
        if request.same_as is None:
            return request
        question, obs = self.valued.pop(stage, (None, None))
        return replace(request, obs=obs) if question == request.same_as else None

    def _next(self, requests: Channel) -> ActRequest:
        with self.timers.measure("wait"):
            return requests.get()

    def _answer(self, request: ActRequest, temperature: float, stream: str) -> ActReply:
        output, final_values = None, None
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            if request.final_obs is not None:
                final_values = self.policy.value(request.final_obs)
            if request.value_only:
                values = self.policy.value(request.obs)
            else:
                output = self.policy.act(request.obs, self._noise(request, stream), temperature)
                check_output(output, len(request.episodes), self.action_dim)
                values = output.values
                self._check_finite("actions", output.actions)
                self._check_finite("log-probs", output.logprobs)
        for each in (values, final_values):
            if each is not None and each.ndim != 1:
                raise WrongShape(f"the policy's values are of shape {list(each.shape)}, it must be one per env row")
        self._check_finite("values", values)
        return ActReply(request.source, request.number, output, values, final_values, self.weights.version)

    def _check_finite(self, what: str, numbers: Array) -> None:
        if not (finite := finite_rows(numbers)).all():
            rows = np.flatnonzero(~finite)
            raise Unusable(f"the policy's {what} are NaN or infinite for rows {rows[:8].tolist()}")

    def _noise(self, request: ActRequest, stream: str) -> np.ndarray:
        draw = rng.normal if self.noise.kind == "normal" else rng.uniform
        return draw(self.seed, f"act/{stream}", request.episodes, request.decisions, self.noise.width)


def check_output(output: PolicyOutput, num: int, dim: int) -> None:
    """Refuse what `act` may not return; numpy would broadcast some of it without a word."""
    if not isinstance(output, PolicyOutput):
        raise WrongShape(f"the policy's act returned {type(output).__name__}, it must be a PolicyOutput")
    actions, logprobs, values = (list(each.shape) for each in (output.actions, output.logprobs, output.values))
    decisions = [num, *actions[1:2], dim]
    if actions != decisions or len(logprobs) != 3 or logprobs[:2] != actions[:2] or values != [num]:
        raise WrongShape(
            f"the policy's act returned actions {actions}, logprobs {logprobs}, values {values}; they must be "
            f"[{num}, chunk, {dim} action dimensions], the same and [{num}]"
        )
