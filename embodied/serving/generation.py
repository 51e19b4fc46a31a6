"""Continues the conversations of many clients side by side, by our own engine in a separate thread.

Conversations wait in the queue of `core/request_queue.py`, from which the engine takes as many as it has room for, at
any token. Weights change only while no answer is open, so every answer has one version.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from embodied.core.errors import CheckpointError, EmbodiedError
from embodied.core.request_queue import RequestQueue, Waiting
from embodied.core.types import SamplingRule
from embodied.policies.base import check_like
from embodied.policies.language.engine import Answer, Request, Sampling, empty_answer
from embodied.policies.language.http_messages import fingerprint
from embodied.policies.language.policy import LanguagePolicy
from embodied.policies.language.slot_engine import SlotEngine
from embodied.runtime.published_weights import Blob, blob_of, tensor_of
from embodied.serving.openai import BadRequest, TokenScore

SCORED = 256  # prompt tokens whose logits are computed at a time
FAILS = "the engine fails at this request; the server's log says why"
FAILED = "the engine has failed; the server's log says why"
GATHER_S = 0.01  # wait for further prompts while answers are open: one pass reads several prompts
ROUND = "serve"  # the noise stream of requests without one
ENGINE = "engine"  # the only worker of the queue
Mode = Literal["wait", "abort", "keep"]


@dataclass(frozen=True)
class Written:
    """An answer with the data for its client."""

    answer: Answer
    finish: str  # stop, length or abort
    version: int
    fingerprint: str
    prompt: tuple[TokenScore, ...] = ()  # of the prompt's tokens except the first


@dataclass(eq=False)
class ServedConversation:
    """One requested answer."""

    tokens: list[int]
    max_tokens: int
    episode: int
    sampling: Sampling
    names: tuple[str, ...] = ()  # ids of its request
    stop: Sequence[str] = ()  # texts that end the answer
    pictures: tuple[str, ...] = ()  # pictures in `tokens`
    on_progress: Callable[[Answer], object] | None = None  # called with the answer so far after every token
    written: Future[Written] = field(default_factory=Future)
    scores: int | None = None  # how many of the likeliest tokens are reported at every place of the prompt; None: none
    scored: tuple[TokenScore, ...] = ()
    since: float = field(default_factory=time.monotonic)
    alone: bool = False  # retried alone, after the engine failed while it was open

    def request(self) -> Request:
        return Request(self, self.tokens, self.max_tokens, self.episode, self.sampling, self.pictures)


class Generation:
    """Answers conversations. Every method may be called by any thread, and returns at once."""

    def __init__(self, policy: LanguagePolicy, version: int, on_failure: Callable[[], object] = lambda: None) -> None:
        """`on_failure` is called if the engine has failed for good."""
        self.policy, self.version, self.on_failure = policy, version, on_failure
        self.fingerprint = fingerprint(version, ((name, blob_of(w)) for name, w in policy.state_dict().items()))
        self.engine = SlotEngine(policy.config, policy)
        self.begin()
        self.orders: queue.SimpleQueue[tuple[Callable[[Future], None], Future] | None] = queue.SimpleQueue()
        self.queue = RequestQueue()
        self.answers = self.tokens = 0  # totals so far
        self.changes: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # waiting changes
        self.paused = self.kept = False
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self.work, name="engine", daemon=True)
        self.thread.start()

    def ask(self, *conversations: ServedConversation) -> list[Future[Written]]:
        """Futures of the answers; cancelling a future abandons its conversation. One pass reads all of these
        prompts."""
        for done in [conversation.written for conversation in conversations] if self.failed else []:
            resolve_future(done, error=EmbodiedError(FAILED))
        self.orders.put((lambda _: self.queue.put(*(Waiting(c, c) for c in conversations)), Future()))
        return [conversation.written for conversation in conversations]

    @property
    def writing(self) -> list[ServedConversation]:
        """The conversations with open answers."""
        return [taken.request for taken in [*self.queue.taken.get(ENGINE, {}).values()]]

    def pause(self, mode: Mode) -> Future[None]:
        """Begin no conversation until `resume`. Open conversations are finished first, aborted with their partial
        answers, or frozen."""

        def pause(done: Future[None]) -> None:
            self.paused, self.kept = True, mode == "keep"
            self.abort(mode)
            if self.kept:
                resolve_future(done)
            else:
                self.changes.append((lambda: None, done))

        return self.order(pause)

    def resume(self) -> Future[None]:
        """Continue after a pause."""

        def resume(done: Future[None]) -> None:
            self.paused = self.kept = False
            resolve_future(done)

        return self.order(resume)

    def update(
        self, source: Path | dict[str, Blob], version: int, mode: Mode, source_fingerprint: str | None = None
    ) -> Future[str]:
        """Load weights (of a folder, or by their published names) when no answer is open; returns their fingerprint.
        Weights are not loaded again if `source_fingerprint` is that of the current ones."""

        def update(done: Future[str]) -> None:
            if self.kept and self.writing:
                why = "frozen answers would continue with other weights; send /resume first, or /pause?mode=wait"
                resolve_future(done, error=BadRequest(why, status=409))
                return
            self.abort(mode)
            self.changes.append((lambda: self.load(source, version, source_fingerprint), done))

        return self.order(update)

    def abort_requests(self, names: Collection[str] | None) -> Future[int]:
        """Abort the conversations of these requests, or all, with their partial answers; returns their number."""

        def abort(done: Future[int]) -> None:
            requests = [*self.writing, *(waiting.request for waiting in self.queue.waiting)]
            unwanted = [request for request in requests if names is None or {*request.names} & {*names}]
            for request in unwanted:
                self.finish(request, self.engine.cancel(request) or empty_answer(request.request()), "abort")
            self.queue.drop(lambda waiting: waiting.request in unwanted)
            resolve_future(done, len(unwanted))

        return self.order(abort)

    def numbers(self) -> dict[str, float]:
        """Numbers of its current and past work."""
        return {
            "answers_total": self.answers,
            "generated_tokens_total": self.tokens,
            "prefilled_tokens_total": self.engine.totals["prefilled"],
            "running": len(self.writing),
            "waiting": len(self.queue.waiting),
            "slots": self.engine.slots,
            "paused": float(self.paused),
            "policy_version": self.version,
        }

    def close(self) -> None:
        """End the thread; waiting conversations get no answer."""
        self.orders.put(None)
        self.thread.join(30)

    def order(self, do: Callable[[Future], None]) -> Future:
        """Let the engine's thread do this; the returned future is settled by it."""
        done: Future = Future()
        if self.failed:
            done.set_exception(EmbodiedError(FAILED))
        else:
            self.orders.put((do, done))
        return done

    # In the engine's thread

    def work(self) -> None:
        try:
            while self.execute_orders():
                self.go_on()
        except BaseException as err:  # every waiting request gets the error
            traceback.print_exc()
            self.failed = err
            self.queue.workers({})  # all wait again
            for future in [
                *(waiting.request.written for waiting in self.queue.waiting),
                *(done for _, done in self.changes),
            ]:
                resolve_future(future, error=EmbodiedError(FAILED))
            self.on_failure()
        else:
            self.engine.abort()

    def execute_orders(self) -> bool:
        """Execute orders; wait for one if there is nothing else to do. False at the end."""
        while True:
            at_work = bool(self.writing) and not self.kept
            at_work |= bool(self.changes) and not self.writing
            at_work |= bool(self.queue.waiting) and not (self.paused or self.changes)
            try:
                order = self.orders.get(block=not at_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            do, done = order
            do(done)

    def go_on(self) -> None:
        """If no answer is open, make a pending change; else begin waiting conversations, and generate a token of
        each."""
        self.forget_who_left()
        if self.changes and not self.writing:
            change, done = self.changes.popleft()
            try:
                resolve_future(done, change())
            except Exception as err:  # sent to the client
                resolve_future(done, error=err)
            return
        self.queue.workers({ENGINE: self.room()})
        try:
            for taken in self.queue.take().get(ENGINE, ()):
                self.begin_answer(taken.request)
            if self.writing and not self.kept:
                for answer in self.engine.step():
                    self.finish(answer.key, answer, "length" if answer.truncated else "stop")
                self.report_progress()
        except Exception:  # any kind, such as out of memory for a long prompt
            self.find_culprit(traceback.format_exc())

    def room(self) -> int:
        """The most conversations that may be open now: none more after /pause, before a change of weights, and while
        further prompts are gathered; one if it must run alone."""
        writing, waiting = self.writing, self.queue.waiting
        if not waiting or self.paused or self.changes:
            return 0
        first = waiting[0].request
        if writing and time.monotonic() - first.since < GATHER_S:
            return 0
        return 1 if first.alone or any(conversation.alone for conversation in writing) else self.engine.slots

    def begin_answer(self, conversation: ServedConversation) -> None:
        if conversation.scores is not None:
            conversation.scored = self.score(conversation.tokens, conversation.scores)
        self.engine.add(conversation.request())

    def find_culprit(self, why: str) -> None:
        """After a failure of the engine: a conversation that ran alone is the cause, and its client gets the error,
        unless the engine also fails at a test conversation. Several conversations are retried, each alone."""
        print(why, file=sys.stderr, flush=True)
        self.engine.abort()
        conversations = self.writing
        if len(conversations) > 1:
            for conversation in conversations:
                conversation.alone = True
            self.queue.workers({})  # all wait again
            return
        for conversation in conversations:
            self.queue.take_answer(conversation)
            resolve_future(conversation.written, error=EmbodiedError(FAILS))
        check = Sampling(0, ROUND, SamplingRule(), frozenset())
        self.engine.add(Request(None, [min(self.policy.tokenizer.stops)], 1, 0, check))
        while self.engine.running:
            self.engine.step()

    def report_progress(self) -> None:
        """Report progress to streaming requests, and end answers that contain a stop text."""
        if not any(talk.stop or talk.on_progress for talk in self.writing):
            return
        for answer in self.engine.so_far():
            conversation: ServedConversation = answer.key
            if conversation.stop and self.stops(conversation, answer):
                self.engine.cancel(conversation)
                self.finish(conversation, answer, "stop")
            elif conversation.on_progress:
                conversation.on_progress(answer)

    def stops(self, conversation: ServedConversation, answer: Answer) -> bool:
        """True if the last token completed a stop text."""
        window = 4 * max(map(len, conversation.stop)) + 4  # in tokens: a letter has at most four
        end = self.policy.tokenizer.decode(answer.tokens[-window:].tolist())
        return any(text in end for text in conversation.stop)

    def finish(self, conversation: ServedConversation, answer: Answer, finish: str) -> None:
        self.queue.take_answer(conversation)
        self.answers += 1
        self.tokens += len(answer.tokens)
        written = Written(answer, finish, self.version, self.fingerprint, conversation.scored)
        resolve_future(conversation.written, written)

    def score(self, tokens: list[int], count: int) -> tuple[TokenScore, ...]:
        """The log-probs of all tokens except the first, and the `likeliest` tokens at their places."""
        scores: list[TokenScore] = []
        with torch.no_grad():
            ids = torch.tensor([tokens], device=self.policy.device)
            states = self.policy.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, :-1]
            for begin in range(0, len(states), SCORED):
                likely = self.policy.head(states[begin : begin + SCORED]).double().log_softmax(-1)
                given = likely.gather(1, ids[0, begin + 1 : begin + 1 + len(likely), None])
                ranks = (likely > given).sum(1) + 1
                best = likely.topk(max(count, 1))
                for place, (rank, logprob) in enumerate(zip(ranks.tolist(), given[:, 0].tolist())):
                    pairs = zip(best.indices[place, :count].tolist(), best.values[place, :count].tolist())
                    scores.append(TokenScore(tokens[begin + place + 1], logprob, rank, tuple(pairs)))
        return tuple(scores)

    def abort(self, mode: Mode) -> None:
        if mode == "abort":
            for answer in self.engine.abort():
                self.finish(answer.key, answer, "abort")

    def forget_who_left(self) -> None:
        """Abandon conversations of disconnected clients."""
        self.queue.drop(lambda waiting: waiting.request.written.cancelled())
        for conversation in [served for served in self.writing if served.written.cancelled()]:
            self.engine.cancel(conversation)
            self.queue.take_answer(conversation)

    def load(self, source: Path | dict[str, Blob], version: int, source_fingerprint: str | None) -> str:
        """Replace all weights by a folder's or by these; on an error none is replaced."""
        if source_fingerprint == self.fingerprint:
            return source_fingerprint
        stored = self.policy.read_weights(source) if isinstance(source, Path) else source
        self.policy.check_names(stored)
        ours = self.policy.state_dict(keep_vars=True)
        weights = {name: tensor_of(blob) for name, blob in stored.items()}  # read once: they may be deleted
        for name, new in weights.items():
            check_like(name, new, ours[name])
            if new.is_floating_point() and not torch.isfinite(new.float() if new.itemsize == 1 else new).all():
                raise CheckpointError(f"weight {name} has numbers that are not finite")
        with torch.no_grad():
            for name, new in weights.items():
                ours[name].copy_(new)
        blobs = ((name, blob_of(new)) for name, new in weights.items())
        self.version, self.fingerprint = version, fingerprint(version, blobs)
        self.begin()
        return self.fingerprint

    def begin(self) -> None:
        self.engine.begin(self.version, 0, ROUND, SamplingRule())


def resolve_future(future: Future, result: Any = None, error: BaseException | None = None) -> None:
    """Give a future its result, unless it was cancelled."""
    with suppress(Exception):  # it was cancelled in between
        if not future.cancelled():
            future.set_exception(error) if error else future.set_result(result)
