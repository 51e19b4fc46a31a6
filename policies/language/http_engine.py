"""Uses servers as the engine: conversations are sent over HTTP, and new weights through a common folder or in buckets.

The servers are ours (`python -m embodied.serve`), with the tokens of our own engine; vLLM's (`vllm serve`); or other
servers of OpenAI's completions with token ids, which keep their weights. All take requests from one queue
(`server_pool.py`). The queue and the calls to servers run in a separate thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import secrets
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from embodied.core import rng
from embodied.core.conversations import SamplingRule
from embodied.core.errors import EmbodiedError
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Answer, Engine, Request, unanswered
from embodied.policies.language.folder import as_published
from embodied.policies.language.http_messages import ParsedAnswer, WeightFolder, body_of, fingerprint, settings_of
from embodied.policies.language.pooled_server import PooledRequest, PooledServer
from embodied.policies.language.remote_server import RemoteServer, check_client, token_of
from embodied.policies.language.server_pool import LONGEST_S, ServerPool
from embodied.policies.language.trust import find_mismatch
from embodied.policies.vla.lora import merged, scaling_of
from embodied.runtime.published_weights import blob_of

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

LOOK_S = 0.05  # time that a step waits for an answer
GATHER_S = 0.02  # time that it then waits for more answers, at least


class HTTPEngine(Engine):
    """Continues conversations on servers."""

    def __init__(self, config: LanguageConfig, policy: LanguagePolicy) -> None:
        check_client()
        self.config, self.policy = config, policy
        self.slots = config.max_running * len(config.urls)
        self.stops, self.max_length = sorted(policy.tokenizer.stops), policy.max_length
        self.exact = np.float64 if config.dtype == "float64" else np.float32
        self.asked: dict[int, Request] = {}
        self.new: dict[int, PooledRequest] = {}  # requests added since the last step
        self.ended: list[Answer] = []  # answers to conversations without room
        self.added, self.gather_s = 0, GATHER_S
        self.round: tuple[int, str, SamplingRule] = (0, "", SamplingRule())
        self.name = ""  # name of the current weights
        self.patience_s = config.answer_s + config.away_s
        token = token_of(config)
        self.folder = WeightFolder(Path(config.weights).absolute()) if config.weights else None
        self.loop = asyncio.new_event_loop()
        self.pool = ServerPool(
            [RemoteServer(url, token, config.answer_s) for url in config.urls],
            self.folder,
            settings_of(policy),
            self.max_length,
            config.max_running,
            config.away_s,
            config.gap_limit,
            config.verify is not None,
            policy.tied,
        )
        self.thread = threading.Thread(target=self.loop.run_forever, name="http", daemon=True)
        self.thread.start()
        try:
            self.wait(self.pool.connect())
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> int:
        return len(self.asked) + len(self.ended)

    def begin(self, version: int, seed: int, stream: str, rule: SamplingRule) -> None:
        assert not self.running, "a round begins while answers of the one before are being written"
        assert self.name.startswith(f"v{version}-"), f"the servers have {self.name}, and are to write with v{version}"
        self.round = (seed, stream, rule)

    def add(self, request: Request) -> None:
        self.check(request)
        if (most := self.longest_answer(request)) <= 0:
            self.ended.append(unanswered(request))
            return
        number, self.added = self.added, self.added + 1
        self.asked[number] = request
        body = body_of(request, most, self.stops, *self.sampling(request), self.config.verify is not None)
        self.new[number] = PooledRequest(request, body)

    def step(self) -> list[Answer]:
        """Returns the arrived answers; waits a moment if there are none."""
        if self.new:  # together, so that a server gets many at a time
            self.loop.call_soon_threadsafe(self.pool.put, self.new)
            self.new = {}
        answers, self.ended = self.ended, []
        if came := self.arrived(0.0 if answers else LOOK_S):
            began = time.monotonic()
            differences = self.differences([(self.asked[number], parsed) for _, number, parsed in came])
            self.gather_s = max(GATHER_S, time.monotonic() - began)
            compared = [
                (
                    server,
                    number,
                    self.answer(self.asked[number], parsed),
                    gaps,
                    self.mismatch(self.asked[number], parsed),
                )
                for (server, number, parsed), gaps in zip(came, differences)
            ]
            for number, answer in self.call(self.pool.release, compared):
                del self.asked[number]
                answers.append(answer)
        return answers

    def arrived(self, wait_s: float) -> list[tuple[PooledServer, int, ParsedAnswer]]:
        """Waits for the first answer and returns the arrived ones. If answers are recomputed, it waits for more as long
        as the last recomputation took, so that one pass computes several."""
        items: list[tuple[PooledServer, int, ParsedAnswer]] = []
        until = time.monotonic() + wait_s
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

    def abort(self) -> list[Answer]:
        self.call(self.pool.forget)
        answers = [*self.ended, *map(unanswered, self.asked.values())]
        self.asked, self.new, self.ended = {}, {}, []
        return answers

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        assert not self.running, "new weights come while answers are being written"
        pairs = self.as_served(weights)
        name = fingerprint(version, ((name, blob_of(tensor)) for name, tensor in pairs.items()))
        if self.folder is not None:
            self.folder.write(name, as_published(self.policy.model, pairs.items()))
        self.name = name
        self.wait(self.pool.want(name))

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
        if not self.config.lora_rank or self.pool.lora_rank == self.config.lora_rank:
            return dict(weights)
        return dict(merged(weights.items(), scaling_of(self.config)))

    def answer(self, request: Request, parsed: ParsedAnswer) -> Answer:
        tokens, logprobs = np.array(parsed.tokens, np.int32), np.array(parsed.logprobs, self.exact)
        return Answer(request.key, tokens, logprobs, parsed.finish != "stop", parsed.dropped)

    def sampling(self, request: Request) -> tuple[int, str, SamplingRule]:
        """The seed, stream and sampling rule of a conversation."""
        own = request.sampling
        return (own.seed, own.stream.removeprefix("act/"), own.rule) if own else self.round

    def mismatch(self, request: Request, parsed: ParsedAnswer) -> str:
        """Why an answer is not of this policy's weights; "" if it is, or if it is not verified. A server cannot know
        which answers are verified."""
        if not parsed.tokens or parsed.dropped or secrets.SystemRandom().random() >= (self.config.verify or 0.0):
            return ""
        (seed, stream, rule), count, begin = self.sampling(request), len(parsed.tokens), len(request.tokens)
        episodes, places = np.full(count, request.episode, np.uint64), begin + np.arange(count)
        noise = rng.uniform(seed, f"act/{stream}", episodes, places, 1)[:, 0]
        return find_mismatch(self.policy, request.tokens, parsed, rule, noise)

    def differences(self, came: list[tuple[Request, ParsedAnswer]]) -> list[np.ndarray]:
        """For each answer, the differences by token between its log-probs and the learner's; empty for dropped answers,
        or if the learner's are not finite."""
        nothing = [np.zeros(0) for _ in came]
        whole = [place for place, (_, found) in enumerate(came) if found.tokens and not found.dropped]
        if self.config.gap_limit is None or not whole:
            return nothing
        parts = [(came[place][0].tokens, came[place][1].tokens) for place in whole]
        tokens = np.concatenate([np.array([*said, *written], np.int32) for said, written in parts])
        mask = np.concatenate([np.repeat([False, True], [len(said), len(written)]) for said, written in parts])
        inputs = {
            "actions": tokens[:, None, None],
            "mask": mask[:, None],
            "lengths": np.array([len(said) + len(written) for said, written in parts]),
            "groups": np.array([came[place][0].episode for place in whole]),
        }
        own = self.own_logprobs(inputs)[mask]
        ends = np.cumsum([len(written) for _, written in parts])[:-1]
        for place, each in zip(whole, np.split(own, ends)):
            gaps = each - np.array(came[place][1].logprobs)
            nothing[place] = gaps[np.isfinite(gaps)]
        return nothing

    def own_logprobs(self, inputs: dict[str, Any]) -> np.ndarray:
        """The log-probs of all tokens at temperature 1, as servers report them."""
        policy, drawn_at = self.policy, self.policy.temperature
        policy.temperature = 1.0
        try:
            with torch.no_grad():
                return policy(inputs).logprobs.reshape(-1).double().cpu().numpy()
        finally:
            policy.temperature = drawn_at

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
