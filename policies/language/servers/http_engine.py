"""Uses servers as the engine: conversations are sent over HTTP, and new weights through a common folder or in buckets.

The servers are ours (`python -m embodied.serve`), with the tokens of our own engine; vLLM's (`vllm serve`); or other
servers of OpenAI's completions with token ids, which keep their weights. All take requests from one queue
(`server_pool.py`). The queue and the calls to servers run in a separate thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import secrets
import threading
import time
from collections.abc import Collection, Coroutine
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from embodied.core import rng
from embodied.core.conversations import Remark
from embodied.core.errors import EmbodiedError
from embodied.core.types import SamplingRule
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Answer, Engine, Request, empty_answer
from embodied.policies.language.folder import as_published
from embodied.policies.language.http_messages import ParsedAnswer, WeightFolder, fingerprint
from embodied.policies.language.servers.server_pool import LONGEST_S, PooledServer, ServerPool
from embodied.policies.language.trust import check_logprobs, check_proof
from embodied.policies.lora import merged_weights, scaling_of
from embodied.runtime.published_weights import blob_of

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

LOOK_S = 0.05  # time that a step waits for an answer
GATHER_S = 0.02  # time that it then waits for more answers, at least


class HTTPEngine(Engine):
    """Servers at policy.url: python -m embodied.serve, or vllm serve."""

    def __init__(self, config: LanguageConfig, policy: LanguagePolicy) -> None:
        super().__init__(policy, config.max_running * len(config.urls))
        self.config = config
        self.exact = np.float64 if config.dtype == "float64" else np.float32
        self.asked: dict[int, Request] = {}
        self.numbers, self.gather_s = itertools.count(), GATHER_S
        self.name = ""  # name of the current weights
        self.patience_s = config.answer_s + config.away_s
        self.folder = WeightFolder(Path(config.weights).absolute()) if config.weights else None
        self.pool = ServerPool(config, policy, self.folder)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="http", daemon=True)
        self.thread.start()
        try:
            self.wait(self.pool.connect())
        except BaseException:
            self.close()
            raise

    def drop_servers(self, names: Collection[str]) -> None:
        for server in self.pool.servers:
            if server.name in names and not server.is_dropped:
                self.call(self.pool.drop, server, "another policy worker has found answers of other weights")

    def num_open(self) -> int:
        return len(self.asked)

    def begin(self, version: int, seed: int, stream: str, rule: SamplingRule) -> None:
        super().begin(version, seed, stream, rule)
        assert self.name.startswith(f"v{version}-"), f"the servers have {self.name}, and are to write with v{version}"

    def open(self, requests: list[Request]) -> None:
        """Send them together, so that a server gets many at a time."""
        numbered = dict(zip(self.numbers, requests))
        self.asked |= numbered
        self.loop.call_soon_threadsafe(self.pool.put, numbered)

    def write(self) -> list[Answer]:
        """Returns the arrived answers; waits a moment if there are none."""
        if not (came := self.arrived()):
            return []
        began, pairs = time.monotonic(), [(self.asked[number], parsed) for _, number, parsed in came]
        differences = self.differences(pairs)
        self.gather_s = max(GATHER_S, time.monotonic() - began)
        compared = [
            (server, number, self.answer(*pair), gaps, self.mismatch(server, *pair))
            for (server, number, _), pair, gaps in zip(came, pairs, differences)
        ]
        released = self.call(self.pool.release, compared)
        for number, _ in released:
            del self.asked[number]
        return [answer for _, answer in released]

    def arrived(self) -> list[tuple[PooledServer, int, ParsedAnswer]]:
        """Waits for the first answer and returns the arrived ones. If answers are recomputed, it waits for more as long
        as the last recomputation took, so that one pass computes several."""
        items: list[tuple[PooledServer, int, ParsedAnswer]] = []
        until = time.monotonic() + LOOK_S
        with contextlib.suppress(queue.Empty):
            while len(items) < len(self.asked):
                left = until - time.monotonic()
                item = self.pool.done.get(timeout=left) if left > 0 else self.pool.done.get_nowait()
                if isinstance(item, Exception):
                    self.abort()
                    raise item
                if not items:
                    until = time.monotonic() + (self.gather_s if self.config.gap_limit else 0.0)
                items.append(item)
        return items

    def give_up(self) -> list[Answer]:
        self.call(self.pool.forget)
        answers, self.asked = [*map(empty_answer, self.asked.values())], {}
        return answers

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        assert not self.running, "new weights come while answers are being written"
        pairs = self.as_served(weights)
        name = fingerprint(version, ((name, blob_of(tensor)) for name, tensor in pairs.items()))
        if self.folder is not None:
            self.folder.write(name, as_published(self.policy.model, pairs.items()))
        self.name = name
        self.wait(self.pool.require_weights(name))

    def take_remarks(self) -> list[Remark]:
        return [self.pool.remarks.get() for _ in range(self.pool.remarks.qsize())]

    def metrics(self) -> dict[str, float]:
        return self.call(self.pool.metrics)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self.pool.close(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        if not self.thread.is_alive():
            self.loop.close()
        if self.folder is not None:
            self.folder.close()

    # Inside

    def as_served(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights for the servers: with separate adapters, or merged if the servers have none."""
        return dict(merged_weights(weights.items(), scaling_of(self.config))) if self.merges else dict(weights)

    @property
    def merges(self) -> bool:
        """True if servers get merged weights, whose rounding moves all answers the same way."""
        return bool(self.config.lora_rank) and self.pool.lora_rank != self.config.lora_rank

    def answer(self, request: Request, parsed: ParsedAnswer) -> Answer:
        tokens, logprobs = np.array(parsed.tokens, np.int32), np.array(parsed.logprobs, self.exact)
        return Answer(request.key, tokens, logprobs, parsed.finish != "stop", parsed.dropped)

    def mismatch(self, server: PooledServer, request: Request, parsed: ParsedAnswer) -> str:
        """Why a server's answers are not of this policy's weights; "" if they are, or if this one is not verified. A
        server cannot know which answers are verified."""
        if not parsed.tokens or parsed.dropped or secrets.SystemRandom().random() >= (self.config.verify or 0.0):
            return ""
        how, count, begin = request.sampling, len(parsed.tokens), len(request.tokens)
        if not (server.remote.is_ours or how.rule.logprob_temperature == self.config.temperature):
            return ""
        episodes, places = np.full(count, request.episode, np.uint64), begin + np.arange(count)
        noise = rng.uniform(how.seed, how.stream, episodes, places, 1)[:, 0]
        told = self.policy, request.tokens, parsed, how.rule, noise
        pooled = not self.merges and server.trial.is_new(request)
        if not (server.remote.is_ours or pooled):
            return ""  # log-probs of one answer prove nothing
        checked = check_proof(*told, pooled=pooled) if server.remote.is_ours else check_logprobs(*told)
        return checked.mismatch or (server.trial.add(checked) if pooled else "")

    def differences(self, came: list[tuple[Request, ParsedAnswer]]) -> list[np.ndarray]:
        """For each answer, the differences by token between its log-probs and the learner's; empty for dropped answers,
        or if the learner's are not finite. Answers of evaluations are not compared unless policy.temperature=1: a
        server of vLLM's tells log-probs of their own temperatures."""
        gaps, told_at = [np.zeros(0)] * len(came), self.config.temperature
        whole = [
            place
            for place, (request, parsed) in enumerate(came)
            if parsed.tokens and not parsed.dropped and request.sampling.rule.logprob_temperature == told_at
        ]
        if self.config.gap_limit is None or not whole:
            return gaps
        parts = [(came[place][0].tokens, came[place][1].tokens) for place in whole]
        mask = np.concatenate([np.repeat([False, True], [len(said), len(written)]) for said, written in parts])
        tokens = np.concatenate([np.array([*said, *written], np.int32) for said, written in parts])
        inputs = {"actions": tokens[:, None, None], "mask": mask[:, None]}
        inputs["lengths"] = np.array([len(said) + len(written) for said, written in parts])
        if shown := [name for place in whole for name in came[place][0].pictures]:
            inputs["pictures"] = shown
        inputs["groups"] = np.array([came[place][0].episode for place in whole])
        with torch.no_grad():
            computed = self.policy(inputs).logprobs.reshape(-1).double().cpu().numpy()[mask]
        ends = np.cumsum([len(written) for _, written in parts])[:-1]
        for place, logprobs in zip(whole, np.split(computed, ends)):
            gap = logprobs - np.array(came[place][1].logprobs)
            gaps[place] = gap[np.isfinite(gap)]
        return gaps

    def call(self, what: Any, *args: Any) -> Any:
        """Calls a function in the other thread; returns its result."""

        async def work() -> Any:
            return what(*args)

        return self.wait(work())

    def wait(self, work: Coroutine) -> Any:
        """Runs a coroutine in the other thread; returns its result."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(self.patience_s + LONGEST_S)
        except TimeoutError:
            future.cancel()
            names = ", ".join(self.config.urls)
            raise EmbodiedError(f"policy.url={names} has not answered for {self.patience_s:g} s") from None
        except CancelledError:
            raise EmbodiedError(f"policy.url={', '.join(self.config.urls)}: given up") from None
