"""The policy worker: answers sim workers' requests with the current weights.

It knows nothing of envs but what each stage saw at the end of a rollout, with which the next one begins. A worker that
has no weights yet (or lost them) is stale and refuses to act.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch

from embodied.core import rng
from embodied.core.arrays import Observation, finite_rows, join_rows, num_rows, text_lists
from embodied.core.errors import Unusable, WrongShape
from embodied.core.types import ActReply, ActRequest, Array, AskAgain, EnvSpec, PolicyOutput
from embodied.policies import make_policy
from embodied.policies.request_batching import Merging, Questions, cut, cut_output
from embodied.runtime import Channel, Needs, Worker
from embodied.runtime.device_memory import Belongings, Computing, give_back_unused, num_bytes
from embodied.runtime.tensor_bytes import Blob, blob_of, tensor_of
from embodied.runtime.weights import Publication, WeightReader

ONE_BY_ONE = Merging()
COMPILING_S = 900.0  # at most, on a busy machine


class PolicyWorker(Worker):
    def __init__(
        self, config, seed: int, precision: str = "full", device: str = "cpu", merging: Merging = ONE_BY_ONE
    ) -> None:
        """`precision` is the learner's: log-probs must agree."""
        self.config = config
        self.seed = seed
        self.device = device
        self.bf16 = precision == "bf16"
        self.merging = merging
        self.weights = WeightReader()
        self.computing = Computing()
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
        """Its weights, unless it acts with those of a learner, and the memory it acts in: as much as it took so far."""
        self.shares = shared
        weights = [] if shared else self._weights()
        self.cache_bytes = max(self.cache_bytes, num_bytes(self.policy.cache_tensors()))
        return Needs(num_bytes(weights) + self.cache_bytes + self.computing.num_bytes)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            weights = {} if self.shares else {"weights": self._weights()}
            self.belongings.offload(weights | {"cache": self.policy.cache_tensors()}, emptied=("cache",))
            give_back_unused()

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
        round. Returns the number of decisions. What waits is answered together, as far as `merging` says."""
        decisions, questions = 0, Questions(requests, replies, self.merging)
        while taken := self._take(questions):
            whole = [(request, self.completed(request)) for request in taken]
            for request in (request for request, known in whole if known is None):
                replies[request.source].put(AskAgain(request.source))
            for reply in self._answers([known for _, known in whole if known], version, temperature, stream):
                decisions += 0 if reply.output is None else len(reply.values)
                replies[reply.source].put(reply)
        return decisions

    def _answers(self, requests: list[ActRequest], version: int, temperature: float, stream: str) -> Iterator[ActReply]:
        """Together; where that fails each by itself, so that one bad question leaves no other without an answer."""
        if not requests:
            return
        try:
            with (
                self.timers.measure("act"),
                self.computing.counted(),
                self.weights.acting(version),
                self._patience(),
            ):
                replies = self._answer(requests, temperature, stream)
        except Exception as err:
            if len(requests) == 1:
                raise
            print(f"{len(requests)} questions are answered one by one: {type(err).__name__}: {err}", flush=True)
        else:
            yield from replies
            return
        failure: Exception | None = None
        for request in requests:
            try:
                yield from self._answers([request], version, temperature, stream)
            except Exception as err:
                failure = failure or err
        if failure:
            raise failure

    def _patience(self) -> AbstractContextManager[None]:
        """Networks that are compiled when they are first asked take their time."""
        return self.alive(COMPILING_S) if self.config.compile else nullcontext()

    def completed(self, request: ActRequest) -> ActRequest | None:
        """With the observation that it refers to; None if that is not known here."""
        stage = request.source.partition("#")[0]
        if request.value_only:
            self.valued[stage] = (request.source, request.number), request.obs
        if request.same_as is None:
            return request
        question, obs = self.valued.pop(stage, (None, None))
        return replace(request, obs=obs) if question == request.same_as else None

    def _take(self, questions: Questions) -> list[ActRequest]:
        with self.timers.measure("wait"):
            return questions.take()

    def _answer(self, requests: list[ActRequest], temperature: float, stream: str) -> list[ActReply]:
        """One call of the policy for all decisions, one for values alone, one for those of final observations."""
        numbered = dict(enumerate(requests))
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16):
            final_values = self._values({i: r.final_obs for i, r in numbered.items() if r.final_obs is not None})
            values = self._values({i: r.obs for i, r in numbered.items() if r.value_only})
            outputs = self._act({i: r for i, r in numbered.items() if not r.value_only}, temperature, stream)
        values |= {i: output.values for i, output in outputs.items()}
        version = self.weights.version
        return [
            ActReply(r.source, r.number, outputs.get(i), values[i], final_values.get(i), version)
            for i, r in numbered.items()
        ]

    def _act(self, requests: dict[int, ActRequest], temperature: float, stream: str) -> dict[int, PolicyOutput]:
        if not requests:
            return {}
        asked = list(requests.values())
        noise = self._noise(asked, stream)
        output = self.policy.act(text_lists(join_rows([request.obs for request in asked])), noise, temperature)
        check_output(output, len(noise), self.action_dim)
        for what in ("actions", "logprobs", "values"):
            self._check_finite(what.replace("logprobs", "log-probs"), getattr(output, what))
        return dict(zip(requests, cut_output(output, [len(request.episodes) for request in asked]), strict=True))

    def _values(self, observations: dict[int, Observation]) -> dict[int, Array]:
        if not observations:
            return {}
        counts = [num_rows(obs) for obs in observations.values()]
        values = self.policy.value(text_lists(join_rows(list(observations.values()))))
        if list(values.shape) != [sum(counts)]:
            raise WrongShape(f"the policy's values are of shape {list(values.shape)}, it must be one per env row")
        self._check_finite("values", values)
        return dict(zip(observations, cut(values, counts), strict=True))

    def _check_finite(self, what: str, numbers: Array) -> None:
        if not (finite := finite_rows(numbers)).all():
            rows = np.flatnonzero(~finite)
            raise Unusable(f"the policy's {what} are NaN or infinite for rows {rows[:8].tolist()}")

    def _noise(self, requests: list[ActRequest], stream: str) -> np.ndarray:
        draw = rng.normal if self.noise.kind == "normal" else rng.uniform
        episodes, decisions = (
            np.concatenate(part) for part in zip(*((r.episodes, r.decisions) for r in requests), strict=True)
        )
        return draw(self.seed, f"act/{stream}", episodes, decisions, self.noise.width)


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
