"""Conversations of many clients, continued side by side by our own engine in a thread of its own.

Clients share the engine's rows: the first that waits gets the next free one, at any token. Weights change only while
nothing is being written, so that every answer is of one version.
"""

from __future__ import annotations

import queue
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from embodied.core.conversations import SamplingRule
from embodied.core.errors import CheckpointError, EmbodiedError
from embodied.policies.base import check_like
from embodied.policies.language.engine import Answer, Request, Sampling
from embodied.policies.language.http_messages import fingerprint
from embodied.policies.language.policy import LanguagePolicy
from embodied.policies.language.slots import SlotEngine
from embodied.runtime.tensor_bytes import Blob, blob_of, tensor_of
from embodied.serving.openai_protocol import BadRequest

ROUND = "serve"  # the stream of noise of requests that bring none
Mode = Literal["wait", "abort", "keep"]


@dataclass(frozen=True)
class Written:
    """An answer with what its client gets to know about it."""

    answer: Answer
    finish: str  # stop, length or abort
    version: int
    fingerprint: str


@dataclass(eq=False)
class ServedConversation:
    """One answer that is asked for."""

    tokens: list[int]
    max_tokens: int
    episode: int
    sampling: Sampling
    stop: tuple[str, ...] = ()  # texts at which it ends
    on_progress: Callable[[Answer], object] | None = None  # is called with what is written so far, token by token
    written: Future[Written] = field(default_factory=Future)
    alone: bool = False  # the engine failed while it was written: it is written again with no other beside it


class Generation:
    """Answers conversations. Every method may be called by any thread, and returns at once."""

    def __init__(self, policy: LanguagePolicy, version: int, on_failure: Callable[[], object] = lambda: None) -> None:
        """`on_failure` is called where the engine can write nothing more."""
        self.policy, self.version, self.on_failure = policy, version, on_failure
        self.fingerprint = fingerprint(version, ((name, blob_of(w)) for name, w in policy.state_dict().items()))
        self.engine = SlotEngine(policy.config, policy)
        self.begin()
        self.orders: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.waiting: deque[ServedConversation] = deque()
        self.writing: set[ServedConversation] = set()
        self.changes: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # that wait until nothing is written
        self.paused = self.kept = False
        self.failed: BaseException | None = None
        self.thread = threading.Thread(target=self.work, name="engine", daemon=True)
        self.thread.start()

    def ask(self, conversation: ServedConversation) -> Future[Written]:
        """A future of the answer; cancelling it gives the conversation up."""
        return self.order(lambda: self.waiting.append(conversation), conversation.written)

    def pause(self, mode: Mode) -> Future[None]:
        """Begin no more conversations until `resume`. Those under way are brought to their end first, given up with
        what was written, or kept as they are."""
        done: Future[None] = Future()

        def pause() -> None:
            self.paused, self.kept = True, mode == "keep"
            if self.kept:
                settle(done)
                return
            self.abort(mode)
            self.changes.append((lambda: None, done))

        return self.order(pause, done)

    def resume(self) -> Future[None]:
        """Go on after a pause."""
        done: Future[None] = Future()

        def resume() -> None:
            self.paused = self.kept = False
            settle(done)

        return self.order(resume, done)

    def update(self, source: Path | dict[str, Blob], version: int, mode: Mode, known: str | None = None) -> Future[str]:
        """Load weights, a folder's or these by their published names, once nothing is being written; returns their
        fingerprint. Those that are loaded already, by the fingerprint that is `known`, are not loaded again."""
        done: Future[str] = Future()

        def update() -> None:
            if self.kept and self.writing:
                why = "what /pause keeps would go on with other weights; send /resume first, or /pause?mode=wait"
                settle(done, error=BadRequest(why, status=409))
                return
            self.abort(mode)
            self.changes.append((lambda: self.load(source, version, known), done))

        return self.order(update, done)

    def close(self) -> None:
        """End the thread; nothing that waits is answered."""
        self.orders.put(None)
        self.thread.join(30)

    # In the engine's thread

    def order(self, do: Callable[[], None], done: Future) -> Future:
        if self.failed:
            done.set_exception(EmbodiedError("the engine has failed; the server's log says why"))
        else:
            self.orders.put(do)
        return done

    def work(self) -> None:
        try:
            while self.obey():
                self.go_on()
        except BaseException as err:  # goes to all that wait
            traceback.print_exc()
            self.failed = err
            for future in [*(c.written for c in [*self.writing, *self.waiting]), *(done for _, done in self.changes)]:
                settle(future, error=EmbodiedError("the engine has failed; the server's log says why"))
            self.on_failure()
        else:
            self.engine.abort()

    def obey(self) -> bool:
        """Do what was ordered; wait for it where there is nothing else to do. False at the end."""
        while True:
            at_work = bool(self.writing) and not self.kept
            at_work |= bool(self.changes) and not self.writing
            at_work |= bool(self.waiting) and not (self.paused or self.changes)
            try:
                order = self.orders.get(block=not at_work)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()

    def go_on(self) -> None:
        """Make changes where nothing is written; else begin what waits, and write a token of all that runs."""
        self.forget_who_left()
        if self.changes and not self.writing:
            change, done = self.changes.popleft()
            try:
                settle(done, change())
            except Exception as err:  # goes to the client that asked
                settle(done, error=err)
            return
        while self.waiting and self.engine.room > 0 and not (self.paused or self.changes or self.must_wait()):
            one = self.waiting.popleft()
            self.writing.add(one)
            self.engine.add(Request(one, one.tokens, one.max_tokens, one.episode, one.sampling))
        if self.writing and not self.kept:
            try:
                for answer in self.engine.step():
                    self.finish(answer.key, answer, "length" if answer.truncated else "stop")
                self.look()
            except Exception:
                self.find_culprit(traceback.format_exc())

    def must_wait(self) -> bool:
        """True while a conversation is written alone, or is to be and others are not over."""
        return bool(self.writing) and (self.waiting[0].alone or any(one.alone for one in self.writing))

    def find_culprit(self, why: str) -> None:
        """The engine failed: a conversation that was written alone is to blame, and its client hears so, unless the
        engine fails at one of its own too. Several are written again, each alone."""
        print(why, file=sys.stderr, flush=True)
        self.engine.abort()
        conversations = [*self.writing]
        self.writing.clear()
        if len(conversations) > 1:
            for one in conversations:
                one.alone = True
            self.waiting.extendleft(conversations)
            return
        for one in conversations:
            settle(one.written, error=EmbodiedError("the engine fails at this request; the server's log says why"))
        own = Sampling(0, ROUND, SamplingRule(), frozenset())
        self.engine.add(Request(None, [min(self.policy.tokenizer.stops)], 1, 0, own))
        while self.engine.running:
            self.engine.step()

    def look(self) -> None:
        """Report progress to those that stream, and end answers in which a text to stop at has appeared."""
        if not any(each.stop or each.on_progress for each in self.writing):
            return
        for answer in self.engine.so_far():
            conversation: ServedConversation = answer.key
            if conversation.stop and self.stops(conversation, answer):
                self.engine.cancel(conversation)
                self.finish(conversation, answer, "stop")
            elif conversation.on_progress:
                conversation.on_progress(answer)

    def stops(self, conversation: ServedConversation, answer: Answer) -> bool:
        """True if the last token completed a text to stop at."""
        window = 4 * max(map(len, conversation.stop)) + 4  # tokens: a letter is four at most
        end = self.policy.tokenizer.decode(answer.tokens[-window:].tolist())
        return any(text in end for text in conversation.stop)

    def finish(self, conversation: ServedConversation, answer: Answer, finish: str) -> None:
        self.writing.discard(conversation)
        settle(conversation.written, Written(answer, finish, self.version, self.fingerprint))

    def abort(self, mode: Mode) -> None:
        if mode == "abort":
            for answer in self.engine.abort():
                self.finish(answer.key, answer, "abort")

    def forget_who_left(self) -> None:
        """Give up conversations whose clients are gone."""
        if any(each.written.cancelled() for each in self.waiting):
            self.waiting = deque(each for each in self.waiting if not each.written.cancelled())
        for conversation in [each for each in self.writing if each.written.cancelled()]:
            self.engine.cancel(conversation)
            self.writing.discard(conversation)

    def load(self, source: Path | dict[str, Blob], version: int, known: str | None) -> str:
        """Replace all weights by those of a folder, or by these, or none."""
        if known == self.fingerprint:
            return known
        folder = source if isinstance(source, Path) else "what was sent"
        stored = self.policy.read_weights(source) if isinstance(source, Path) else source
        own = self.policy.state_dict(keep_vars=True)
        names = {name: self.policy.stored_name(stored, name) for name in own}
        if odd := sorted({*names.values()} ^ stored.keys()):
            raise CheckpointError(f"{folder}: its weights are not those of this model: {', '.join(odd[:4])} differ")
        found = {name: tensor_of(stored[there]) for name, there in names.items()}  # read once: they may be gone soon
        blobs = [(names[name], blob_of(tensor)) for name, tensor in found.items()]
        for name, new in found.items():
            check_like(name, new, own[name])
            if new.is_floating_point() and not torch.isfinite(new.float() if new.itemsize == 1 else new).all():
                raise CheckpointError(f"{folder}: {name} has numbers that are not finite")
        with torch.no_grad():
            for name, new in found.items():
                own[name].copy_(new)
        self.version, self.fingerprint = version, fingerprint(version, blobs)
        self.begin()
        return self.fingerprint

    def begin(self) -> None:
        self.engine.begin(self.version, 0, ROUND, SamplingRule())


def settle(future: Future, result: Any = None, error: BaseException | None = None) -> None:
    """Give a future its result, unless it was cancelled."""
    with suppress(Exception):  # it was cancelled in between
        if not future.cancelled():
            future.set_exception(error) if error else future.set_result(result)
