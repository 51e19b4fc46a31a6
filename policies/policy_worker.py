"""The policy worker: answers sim workers' requests with the current weights.

A worker without weights is stale and refuses to act. Requests of several sims are answered in one call of the policy if
that pays (`RequestBatcher`). Noise is keyed by episode and decision, so an answer depends on other requests only by
rounding. It is drawn on the device that uses it, from the same counters as in `core/rng.py`: uniform numbers equal the
host's bit for bit, normal numbers may differ in the last digits, since devices compute logarithms, sines and square
roots differently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from embodied.core import rng
from embodied.core.arrays import (
    FiniteChecks,
    Observation,
    concatenate,
    finite_rows,
    host,
    is_tensor,
    join_rows,
    leaves,
    map_obs,
    num_rows,
    text_lists,
)
from embodied.core.errors import DeadlineExceeded, Unusable, WrongShape
from embodied.core.rng import stream
from embodied.core.types import ActReply, ActRequest, Array, EnvSpec, Merging, PolicyOutput, SamplingRule
from embodied.policies import make_policy
from embodied.runtime import Channel, Needs, Worker, served_while_busy
from embodied.runtime.device_memory import Computing, DeviceTensors, give_back_unused, num_bytes
from embodied.runtime.published_weights import Blob, Publication, blob_of, tensor_of
from embodied.runtime.weights import WeightReader

if TYPE_CHECKING:
    from embodied.runtime.device_graphs import CapturedGraphs

ONE_BY_ONE = Merging()
ALL_ACTIONS = SamplingRule()
COMPILING_S = 900.0  # limit for compiling on a busy machine


class PolicyWorker(Worker):
    def __init__(
        self,
        config,
        seed: int,
        precision: str = "full",
        device: str = "cpu",
        merging: Merging = ONE_BY_ONE,
        graphs: str = "off",
    ) -> None:
        """`precision` is the learner's, since log-probs must agree. `graphs`: capture acting as graphs; of small
        policies if observations are tensors."""
        self.config = config
        self.seed = seed
        self.device = device
        self.bf16 = precision == "bf16"
        self.merging = merging
        self.weights = WeightReader()
        self.computing = Computing()
        self.shares_storage = False  # True: it uses a learner's weights
        self.cache_bytes = 0  # its largest working memory so far
        self.checks = FiniteChecks()  # checks of answers on a device, until a rollout ends
        self.captured_graphs: CapturedGraphs | None = None
        if graphs != "off":
            from embodied.runtime.device_graphs import CapturedGraphs

            self.captured_graphs = CapturedGraphs(device)

    def build(self, spec: EnvSpec) -> None:
        self.belongings = DeviceTensors(self.timers)
        self.policy = make_policy(self.config, spec).eval().to(self.device)
        self.policy.captured_graphs = self.captured_graphs
        self.noise = self.policy.noise_spec()
        self.noise_device = self.device if self.device != "cpu" and self.policy.takes_device_noise else ""
        self.action_dim = spec.action.dim

    def initial_weights(self, spec: EnvSpec) -> dict[str, Blob]:
        """The initial weights of a run with this seed."""
        weights = make_policy(self.config, spec, self.seed).state_dict()
        return {name: blob_of(tensor) for name, tensor in weights.items()}

    # Memory and weights

    def needs(self, shared: bool = False) -> Needs:
        """The policy's weights, unless it uses a learner's, and its largest working memory so far."""
        self.shares_storage = shared
        weights = [] if shared else self._weights()
        self.cache_bytes = max(self.cache_bytes, num_bytes(self.policy.cache_tensors()))
        graphs = 0 if self.captured_graphs is None else self.captured_graphs.bytes
        return Needs(num_bytes(weights) + self.cache_bytes + self.computing.num_bytes + graphs)

    def onload(self) -> None:
        self.belongings.onload()

    def offload(self) -> None:
        if not self.belongings.away:
            if self.captured_graphs is not None:
                self.captured_graphs.clear()  # their memory cannot be moved
            weights = {} if self.shares_storage else {"weights": self._weights()}
            self.belongings.offload(weights | {"cache": self.policy.cache_tensors()}, emptied=("cache",))
            give_back_unused()

    def _weights(self) -> list[torch.Tensor]:
        return [*self.policy.parameters(), *self.policy.buffers()]

    def route(self, publication: Publication) -> str:
        """How this process reads published weights."""
        return self.weights.route(publication)

    def load_weights(self, publication: Publication, route: str, channel: Channel, whole: bool) -> int | None:
        """Load a published version; buckets come through the channel. Returns the loaded version; None if a newer
        version was published meanwhile, which it loads later."""
        self.policy.check_names(publication.specs)
        loaded = self.weights.load(publication, route, channel, whole)
        self.policy.use_weights({n: tensor_of(w) if isinstance(w, Blob) else w for n, w in loaded.items()})
        self.weights.follow(self.policy.state_dict())
        return self.weights.version

    @served_while_busy
    def fetch_weights(self, publication: Publication, route: str, channel: Channel) -> None:
        """Begin to fetch the next version for `load_weights`, while acting with the current one."""
        self.weights.fetch(publication, route, channel)

    # Answering

    def serve(
        self,
        requests: Channel,
        replies: dict[str, Channel],
        version: int,
        rule: SamplingRule = ALL_ACTIONS,
        first_sources: Collection[str] | None = None,
    ) -> int:
        """Answer these sources with this version until the round is over (None arrives); requests of other sources
        belong to an earlier round. Returns the number of decisions. Waiting requests are merged by `merging`;
        `first_sources` are the sources that ask this worker at first (None: all)."""
        decisions, batcher = 0, RequestBatcher(requests, replies, self.merging, first_sources)
        while batch := self._take(batcher):
            for reply in self._answers(batch, version, rule):
                decisions += 0 if reply.output is None else len(reply.values)
                replies[reply.source].put(reply)
        self._check_noted()
        return decisions

    def _answers(self, requests: list[ActRequest], version: int, rule: SamplingRule) -> Iterator[ActReply]:
        """Answer in one batch; if that fails, one by one, so that a bad request affects no other."""
        if not requests:
            return
        try:
            with (
                self.timers.measure("act"),
                self.computing.measured(),
                self.weights.acting(version),
                self._patience(),
            ):
                replies = self._answer(requests, rule)
        except Exception as err:
            if len(requests) == 1:
                raise
            print(f"{len(requests)} requests are answered one by one: {type(err).__name__}: {err}", flush=True)
        else:
            if any(request.value_only for request in requests):
                self._check_noted()
            yield from replies
            return
        failure: Exception | None = None
        for request in requests:
            try:
                yield from self._answers([request], version, rule)
            except Exception as err:
                failure = failure or err
        if failure:
            raise failure

    def _patience(self) -> AbstractContextManager[None]:
        """Inside, allow for the time of compiling a network on its first use."""
        return self.alive(COMPILING_S) if self.config.compile else nullcontext()

    def _take(self, batcher: RequestBatcher) -> list[ActRequest]:
        with self.timers.measure("wait"):
            return batcher.take()

    def _answer(self, requests: list[ActRequest], rule: SamplingRule) -> list[ActReply]:
        """One call of the policy for all decisions, one for requests of values, one for the values of final
        observations."""
        numbered = dict(enumerate(requests))
        kept = self.captured_graphs is None  # a graph would read copies of weights that are no longer there
        with torch.autocast(self.device, torch.bfloat16, enabled=self.bf16, cache_enabled=kept):
            later = all(r.checked_later for r in requests)
            final = {i: r.final_obs for i, r in numbered.items() if r.final_obs is not None}
            final_values = self._values(final, later)
            values = self._values({i: r.obs for i, r in numbered.items() if r.value_only}, later)
            outputs = self._act({i: r for i, r in numbered.items() if not (r.value_only or r.rule)}, rule)
            for other in {r.rule for r in requests if r.rule}:  # of an evaluation during the rollout
                outputs |= self._act({i: r for i, r in numbered.items() if r.rule == other}, other)
        values |= {i: output.values for i, output in outputs.items()}
        version = self.weights.version
        return [
            ActReply(r.source, r.key, outputs.get(i), values[i], final_values.get(i), version)
            for i, r in numbered.items()
        ]

    def _act(self, requests: dict[int, ActRequest], rule: SamplingRule) -> dict[int, PolicyOutput]:
        if not requests:
            return {}
        asked = list(requests.values())
        obs = join_rows([request.obs for request in asked])
        output = self._decide(obs, *self._noise_keys(asked), rule)
        check_output(output, num_rows(obs), self.action_dim)
        numbers = {"actions": output.actions, "log-probs": output.logprobs, "values": output.values}
        self._check_finite(numbers, obs, all(request.checked_later for request in asked))
        rows = zip(requests, row_slices([request.rows for request in asked]), strict=True)
        return {i: PolicyOutput(**map_obs(lambda array: array[mine], vars(output))) for i, mine in rows}  # noqa: B023

    def _values(self, observations: dict[int, Observation], checked_later: bool) -> dict[int, Array]:
        if not observations:
            return {}
        counts = [num_rows(obs) for obs in observations.values()]
        obs = join_rows(list(observations.values()))
        values = self.policy.value(text_lists(obs))
        if list(values.shape) != [sum(counts)]:
            raise WrongShape(f"the policy's values are of shape {list(values.shape)}, it must be one per env row")
        self._check_finite({"values": values}, obs, checked_later)
        return {i: values[mine] for i, mine in zip(observations, row_slices(counts), strict=True)}

    def _decide(self, obs: Observation, episodes: Array, decisions: Array, rule: SamplingRule) -> PolicyOutput:
        def decide(obs: Observation, episodes: Array, decisions: Array) -> Observation:
            noise = self._noise(episodes, decisions, rule.stream)
            return vars(self.policy.act(text_lists(obs), noise, rule.temperature))

        inputs = {"obs": obs, "episodes": episodes, "decisions": decisions}
        there = self.noise_device and self.policy.is_recordable and all(map(is_tensor, leaves(inputs)))
        if self.captured_graphs is None or not there:
            return PolicyOutput(**decide(**inputs))
        return PolicyOutput(
            **self.captured_graphs.run((rule.stream, rule.temperature), decide, inputs, self._weights())
        )

    def _noise_keys(self, requests: list[ActRequest]) -> tuple[Array, Array]:
        """The episodes and decisions that key the noise."""
        if len(requests) == 1:
            return requests[0].episodes, requests[0].decisions
        alike = len({is_tensor(request.episodes) for request in requests}) == 1
        parts = zip(*((r.episodes, r.decisions) for r in requests), strict=True)
        episodes, decisions = (concatenate(keys if alike else [*map(host, keys)]) for keys in parts)
        return episodes, decisions

    def _noise(self, episodes: Array, decisions: Array, stream: str) -> Array:
        where = (self.seed, f"act/{stream}")
        if self.noise_device:
            if not is_tensor(episodes):
                episodes, decisions = to_device(episodes, decisions, self.device)
            keys = {"episodes": episodes, "decisions": decisions}

            def drawn(episodes: Tensor, decisions: Tensor) -> Observation:
                numbers = (episodes, decisions, self.noise.width, self.noise_device)
                return {"noise": draw_noise(self.noise.kind, *where, *numbers)}

            if self.captured_graphs is None or self.policy.is_recordable:  # its graph draws the noise, too
                return drawn(**keys)["noise"]
            return self.captured_graphs.run_padded(("noise", stream), drawn, keys, ())["noise"]
        draw = rng.normal if self.noise.kind == "normal" else rng.uniform
        return draw(*where, host(episodes), host(decisions), self.noise.width)

    def _check_finite(self, numbers: dict[str, Array], obs: Observation, later: bool) -> None:
        """Refuse numbers that are not finite; on a device possibly `later`, for all decisions together. Then
        observations are checked, too, so NaN observations are not blamed on the policy."""
        if not later or not all(map(is_tensor, numbers.values())):
            check_finite(numbers)
            return
        seen = FiniteChecks()
        for array in leaves(obs):
            if is_tensor(array) and array.is_floating_point():
                seen.note("seen", array)
        but = [mark.isnan() for mark in seen.wrong.values()]
        for what, array_of_answer in numbers.items():
            self.checks.note(what, array_of_answer, *but)

    def _check_noted(self) -> None:
        """Raise if answers since the last call were not finite."""
        for what, rows in self.checks.read().items():
            raise Unusable(f"the policy's {what} are NaN or infinite for rows {rows[:8].tolist()} of a rollout")


def check_finite(numbers: dict[str, Array]) -> None:
    """Raise if a policy's numbers are NaN or infinite. If all are finite, only one number leaves the device."""
    tensors = [array for array in numbers.values() if is_tensor(array)]
    fine = not tensors or bool(torch.stack([array.isfinite().all() for array in tensors]).all())
    for what, array in numbers.items():
        if fine if is_tensor(array) else np.isfinite(array).all():
            continue
        if len(rows := np.flatnonzero(~finite_rows(array))):
            raise Unusable(f"the policy's {what} are NaN or infinite for rows {rows[:8].tolist()}")


def check_output(output: PolicyOutput, num: int, dim: int) -> None:
    """Refuse wrong outputs of `act`; numpy would silently broadcast some of them."""
    if not isinstance(output, PolicyOutput):
        raise WrongShape(f"the policy's act returned {type(output).__name__}, it must be a PolicyOutput")
    actions, logprobs, values = (list(array.shape) for array in (output.actions, output.logprobs, output.values))
    decisions = [num, *actions[1:2], dim]
    if actions != decisions or len(logprobs) != 3 or logprobs[:2] != actions[:2] or values != [num]:
        raise WrongShape(
            f"the policy's act returned actions {actions}, logprobs {logprobs}, values {values}; they must be "
            f"[{num}, chunk, {dim} action dimensions], the same and [{num}]"
        )


# Merging of waiting requests


class RequestBatcher:
    """The requests of these sources that come through a channel in one round."""

    def __init__(
        self, channel: Channel, sources: Collection[str], merging: Merging, first_sources: Collection[str] | None = None
    ) -> None:
        self.channel = channel
        self.sources = sources
        self.merging = merging
        waited_for = sources if first_sources is None else first_sources
        self.sims = {sim_of(source) for source in waited_for}  # sims that are waited for
        self.next: ActRequest | None = None  # taken, but too large for the previous answer
        self.over = False

    def take(self) -> list[ActRequest]:
        """The requests to answer now; [] once the round is over."""
        first, self.next = self.next or (None if self.over else self._get()), None
        if first is None:
            return []
        requests, until = [first], time.monotonic() + self.merging.wait_s
        room = self.merging.rows - first.rows
        while room > 0 and not self.over and (more := self._next_request(requests, until)) is not None:
            room -= more.rows
            if room < 0:
                self.next = more
                break
            requests.append(more)
        return requests

    def _next_request(self, requests: Sequence[ActRequest], until: float) -> ActRequest | None:
        """The next request. Waits only for sims without a request here: a sim sends its second request only after an
        answer, or simulates the other half of its envs meanwhile. A sim for which this worker waits in vain asks
        another worker now; it is not waited for until it asks here again."""
        asked = {sim_of(request.source) for request in requests}
        self.sims |= asked
        item = self._get(until if self.sims - asked else 0.0)
        if item is None and not self.over:
            self.sims = asked
        return item

    def _get(self, until: float | None = None) -> ActRequest | None:
        """The next request of this round; None if none arrived by `until`, or if the round is over."""
        while True:
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s <= 0 and not self.channel.qsize():
                return None
            try:
                request = self.channel.get(timeout_s=None if left_s is None else max(left_s, 0.0))
            except DeadlineExceeded:
                if until is None:
                    raise
                return None
            if request is None:
                self.over = True
                return None
            if request.source in self.sources:
                return request


def sim_of(source: str) -> str:
    """ "sim-0/1#7" -> "sim-0"."""
    return source.partition("/")[0]


def row_slices(counts: Sequence[int]) -> list[slice]:
    """The rows of each request among the rows of all requests."""
    return [slice(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


LOW = 0xFFFFFFFF
FACTORS, STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def philox(counters: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 of int64 tensors that hold 32-bit words; products keep all of their 64 bits."""
    c0, c1, c2, c3 = counters
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * FACTORS[0], c2 * FACTORS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & LOW) ^ c1 ^ k0, p1 & LOW, ((p0 >> 32) & LOW) ^ c3 ^ k1, p0 & LOW
        k0, k1 = (k0 + STEPS[0]) & LOW, (k1 + STEPS[1]) & LOW
    return c0, c1, c2, c3


def uniform(seed: int, name: str, episodes: Tensor, decisions: Tensor, width: int) -> Tensor:
    """float64 [N, width] in (0, 1), of int64 [N] episodes and decisions, on their device."""
    blocks = torch.arange(-(-width // 2), device=episodes.device)
    rows = torch.broadcast_tensors(
        blocks, (decisions & LOW)[:, None], (episodes & LOW)[:, None], ((episodes >> 32) & LOW)[:, None]
    )
    words = philox((rows[0], rows[1], rows[2], rows[3]), ((seed ^ (seed >> 32)) & LOW, stream(name)))
    pairs = [((high >> 5).double() * 2.0**26 + (low >> 6) + 0.5) / 2.0**53 for high, low in (words[:2], words[2:])]
    return torch.stack(pairs, dim=2).flatten(1)[:, :width]


def normal(seed: int, name: str, episodes: Tensor, decisions: Tensor, width: int) -> Tensor:
    """float64 [N, width] standard normal numbers (Box-Muller), keyed like `uniform`."""
    pairs = uniform(seed, name, episodes, decisions, 2 * -(-width // 2))
    radius, angle = (-2.0 * pairs[:, 0::2].log()).sqrt(), 2.0 * math.pi * pairs[:, 1::2]
    return torch.stack([radius * angle.cos(), radius * angle.sin()], dim=2).flatten(1)[:, :width]


def to_device(episodes: Array, decisions: Array, device: str) -> Tensor:
    """Both as one tensor."""
    return torch.from_numpy(np.stack([episodes, decisions]).astype(np.int64)).to(device)


def draw_noise(kind: str, seed: int, name: str, episodes: Array, decisions: Array, width: int, device: str) -> Tensor:
    """Noise of this kind; only its counters are sent to the device, unless they are already there."""
    if not is_tensor(episodes):
        episodes, decisions = to_device(episodes, decisions, device)
    there = (counters.to(device) for counters in (episodes, decisions))
    return (normal if kind == "normal" else uniform)(seed, name, *there, width)
