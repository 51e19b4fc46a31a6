"""Servers that take requests from one queue, while they have the current weights and room.

A server may join, leave, die, restart, or get other weights from another program at any moment:

    it has other weights         it takes no requests until it has loaded the current weights
    a request fails there        the request waits again, and the server takes no requests until it was checked
    its answers are aborted or   the same: a request may fail at all servers for `policy.away_s`
      of other weights
    it answers nonsense          all its requests wait again, and it takes none until the next version
    it cannot be reached         all its requests wait again; connecting is retried until it is back
    it has become very slow      its last requests wait again when other servers are idle
    its log-probs are wrong      all its requests and unreleased answers wait again; it is dropped for the run

An answer is released after its server's log-probs were compared with the learner's (`release`), so no answer of a
dropped server's last batch is used. All of this runs in one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.conversations import ANOTHER_PROMPT, Remark
from embodied.core.errors import ConfigError, EmbodiedError, in_a_line
from embodied.core.request_queue import RequestQueue, Waiting
from embodied.core.types import SamplingRule
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Request
from embodied.policies.language.http_messages import (
    MOST_TOGETHER,
    ParsedAnswer,
    WeightFolder,
    body_of,
    read_answer,
    settings_of,
    version_of,
)
from embodied.policies.language.servers.remote_server import (
    SHORTEST_S,
    Overdue,
    RemoteServer,
    ServerUnavailable,
    first_look,
    servers_of,
)
from embodied.policies.language.trials import Trial
from embodied.policies.language.trust import JUDGED_TOKENS, SMALL, GapRecord

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

LONGEST_S = 5.0  # longest pause between two attempts
WATCH_S = 5.0  # interval for checking a server's weights
QUIET_S = 60.0  # a longer silence of a server with requests is reported
PATIENCE = 4.0  # a request may take this multiple of the longest answer while other servers are idle
CHANGES = 5  # limit of foreign changes of a server's weights during one of our versions
TRIES = 10  # limit of tries of a request that a server fails slowly
SHOWN = 20  # conversations with answers of a dropped server that are listed
# suspect: used answers of servers that were dropped later
COUNTED = ("asked_again", "unusable", "outages", "moved", "dropped_servers", "suspect_answers", "suspect_tokens")
TRAINING = "act/train"  # stream of the noise of training's answers
KEEPS = "name the checkpoint that it serves, or let it take new weights: policy.weights=FOLDER"


@dataclass
class FailingRequest:
    """A request that was asked again, and not yet answered."""

    since: float  # first failure
    servers: set[str] = field(default_factory=set)  # at which it failed since then
    slow_tries: int = 0  # failures after a long time


class WritingSpeed:
    """A server's smoothed tokens per second while requests wait."""

    rate: float | None = None

    def __init__(self, answers: int) -> None:
        """A measurement lasts `answers` answers."""
        self.answers = answers
        self.began: float | None = None

    def count_answer(self, tokens: int, now: float, busy: bool) -> None:
        """Counts an answer; `busy`: requests still wait. Measurements without a queue are dropped."""
        if not busy or self.began is None:
            self.began, self.tokens, self.count = (now if busy else None), 0, 0
            return
        self.tokens, self.count = self.tokens + tokens, self.count + 1
        if self.count >= self.answers and now > self.began:
            rate = self.tokens / (now - self.began)
            self.rate = rate if self.rate is None else (self.rate + rate) / 2
            self.began, self.tokens, self.count = now, 0, 0


def request_limits(most: dict[str, int], rates: dict[str, float | None]) -> dict[str, int]:
    """The number of concurrent requests of each server, in proportion to its throughput and within its cache. Example:
    servers with room for 8 that write 30 and 10 tokens/s get 8 and 4; before measurements both get 8.
    """
    if any(rates[name] is None for name in most):
        return dict(most)
    total, speed = sum(most.values()), sum(rates[name] or 0.0 for name in most)
    return {name: max(1, min(rate, ceil(total * (rates[name] or 0.0) / speed))) for name, rate in most.items()}


@dataclass
class UsedAnswers:
    """The answers of a server that the run has used."""

    answers: int = 0
    tokens: int = 0
    versions: list[int] = field(default_factory=list)  # of the weights: the first and the last
    episodes: dict[int, None] = field(default_factory=dict)  # training's conversations of the last version
    since: int | None = None  # the first version with answers of training

    def add(self, tokens: int, version: int, episode: int | None) -> None:
        """`episode`: None for an answer of an evaluation."""
        self.answers, self.tokens = self.answers + 1, self.tokens + tokens
        if self.versions[-1:] != [version]:
            self.episodes = {}
        self.versions = [*self.versions[:1], version]
        if episode is not None:
            self.episodes[episode] = None
            self.since = version if self.since is None else self.since

    def __str__(self) -> str:
        if not self.answers:
            return "none of its answers was used before"
        of = " to ".join(f"{version}" for version in dict.fromkeys(self.versions))
        used = f"{self.answers} of its answers to this worker, of {self.tokens} tokens, were used before"
        shown, more = ", ".join([*map(str, self.episodes)][:SHOWN]) or "none of training", len(self.episodes) - SHOWN
        rest = f" and {more} more" if more > 0 else ""
        return f"{used} (versions of weights: {of}; conversations of the last one: {shown}{rest})"


@dataclass(eq=False)
class PooledServer:
    """A server and its state."""

    remote: RemoteServer
    takes: bool = False  # True: it takes requests
    is_dropped: bool = False  # True: for the rest of the run
    is_refused: bool = False  # True: until the next version
    told: str = ""  # why it sends no answers, as the user was told last
    away_since: float | None = None  # time of the first of the current failures; None: it can be reached
    is_failing: bool = False  # True: it has failed since its last good answer while in reach, and the user was told
    pause: float = SHORTEST_S  # pause before the next attempt
    loads: int = 0  # number of loads of the current weights
    doubt: asyncio.Event = field(default_factory=asyncio.Event)  # set if its weights must be checked
    calls: dict[int, tuple[asyncio.Task, float]] = field(default_factory=dict)  # and their begins, by request
    longest_s: float = 0.0  # longest time of an answer
    answered_at: float = 0.0  # time of the last answer
    unreleased: dict[int, Any] = field(default_factory=dict)  # unreleased answers, by request
    gap: GapRecord = field(default_factory=GapRecord)
    used: UsedAnswers = field(default_factory=UsedAnswers)
    trial: Trial = field(default_factory=Trial)  # of its verified answers; only the engine's thread uses it
    evidence: str = ""  # why its answers are of other weights; "": no evidence
    speed: WritingSpeed = field(default_factory=lambda: WritingSpeed(1))

    @property
    def name(self) -> str:
        return self.remote.name


class ServerPool:
    def __init__(self, config: LanguageConfig, policy: LanguagePolicy, folder: WeightFolder | None) -> None:
        self.config, self.folder, self.tied, self.max_length = config, folder, policy.tied, policy.max_length
        self.away_s, self.settings = config.away_s, settings_of(policy)
        self.servers = [PooledServer(remote) for remote in servers_of(config)]
        self.shows = policy.spec.pictures  # True: prompts show pictures
        self.queue = RequestQueue()
        self.done: SimpleQueue[tuple[PooledServer, int, ParsedAnswer] | Exception] = SimpleQueue()  # answers to compare
        self.failing: dict[int, FailingRequest] = {}
        self.error: Exception | None = None  # why no server can answer
        self.wanted = ""  # name of the current weights
        self.named, self.joined = asyncio.Event(), asyncio.Event()
        self.tasks: set[asyncio.Task] = set()  # of all servers, also calls with cancelled requests
        self.totals = dict.fromkeys(COUNTED, 0)
        self.remarks: SimpleQueue[Remark] = SimpleQueue()

    # Called by the engine

    async def connect(self) -> None:
        """Connect to all servers; raises ConfigError if one has other settings, or if none answers."""
        await first_look([server.remote for server in self.servers], self.away_s)
        self.settings |= {"lora_rank": self.lora_rank}
        for server in self.servers:
            if server.remote.owner:
                await self.check_settings(server.remote)
        for server in self.servers:
            self.start(server, self.keep(server))

    async def check_settings(self, remote: RemoteServer) -> None:
        remote.check_settings(self.settings, self.max_length, self.shows)
        drawn = SamplingRule(top_p=self.config.top_p, top_k=self.config.top_k, min_p=self.config.min_p)
        await remote.divide_logits(self.config.temperature, drawn.draws_from_all)

    @property
    def lora_rank(self) -> int | None:
        """The rank of the servers' adapters."""
        return next((server.remote.adapters for server in self.servers if server.remote.owner), None)

    async def require_weights(self, name: str) -> None:
        """From now on only servers with these weights answer; returns when one of them is ready."""
        self.forget()
        self.wanted, self.error = name, None
        if self.folder is not None:
            self.folder.use(name)
        self.joined.clear()
        self.named.set()
        for server in self.servers:
            server.takes = server.is_refused = False
            server.gap, server.loads = GapRecord(), 0
            server.doubt.set()
        await self.joined.wait()
        if self.error is not None:
            raise self.error

    def put(self, requests: Mapping[int, Request]) -> None:
        self.queue.put(*(Waiting(number, asked, 1, asked.episode, asked.keep) for number, asked in requests.items()))
        self.hand_out()

    def release(self, compared: Sequence[tuple[PooledServer, int, Any, np.ndarray, str]]) -> list[tuple[int, Any]]:
        """Returns the answers that may be used now, by request. `compared` are new answers, each with the differences
        between its log-probs and the learner's, and with evidence of a wrong proof or ""."""
        for server, number, answer, differences, evidence in compared:
            if number in self.queue.taken.get(server.name, ()):  # otherwise it was taken from the server meanwhile
                server.unreleased[number] = answer
                server.gap.add(differences)
                server.evidence = evidence or server.evidence
        released: list[tuple[int, Any]] = []
        for server in self.servers:
            if not server.unreleased:
                continue
            others = [s.gap.mean for s in self.servers if s is not server and s.gap.tokens >= JUDGED_TOKENS]
            most = self.config.gap_limit
            limit = inf if most is None else server.gap.limit(most, others, SMALL[self.config.dtype])
            if server.evidence or server.gap.mean > limit:
                self.drop(server, server.evidence or server.gap.evidence(limit))
            elif server.gap.tokens >= JUDGED_TOKENS or not server.calls or most is None:
                for number, answer in server.unreleased.items():
                    self.failing.pop(number, None)
                    waiting = self.queue.taken.get(server.name, {}).get(number)
                    if self.queue.take_answer(number):
                        released.append((number, answer))
                        asked = waiting.request if waiting else None
                        trains = asked and asked.sampling.stream == TRAINING
                        episode = asked.episode % ANOTHER_PROMPT if trains else None
                        server.used.add(len(answer.tokens), version_of(self.wanted), episode)
                server.unreleased = {}
        self.hand_out()
        return released

    def forget(self) -> None:
        """Cancel all requests by closing their connections."""
        for server in self.servers:
            self.take_from(server)
        self.queue = RequestQueue()
        self.failing.clear()
        while not self.done.empty():
            self.done.get_nowait()

    def start(self, server: PooledServer, work: Coroutine) -> asyncio.Task:
        """Begin a task of a server. Any error that ends the task is a failure of this server."""

        def ended(task: asyncio.Task) -> None:
            self.tasks.discard(task)
            if not task.cancelled() and (err := task.exception()):
                self.refuse(server, err)

        self.tasks.add(task := asyncio.create_task(work))
        task.add_done_callback(ended)
        return task

    async def close(self) -> None:
        self.forget()
        tasks = [*self.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.remote.close() for server in self.servers))

    # A server joins and leaves

    async def keep(self, server: PooledServer) -> None:
        """Connect a server, and again whenever it has left or has other weights."""
        while not server.is_dropped:
            if server.away_since is not None:
                await asyncio.sleep(server.pause)
            try:
                await self.bring_in(server)
                server.takes, server.away_since = not (server.is_dropped or server.is_refused), None
                self.joined.set()
                self.hand_out()
                await self.watch(server)
                server.takes = False
            except ServerUnavailable as err:
                self.lose(server, err)
            except Exception as err:
                self.refuse(server, err)
            while server.is_refused and not server.is_dropped:
                await server.doubt.wait()
                server.doubt.clear()

    async def bring_in(self, server: PooledServer) -> None:
        """Returns once the server has the current weights."""
        remote, name = server.remote, None
        await remote.look(self.away_s)
        await self.check_settings(remote)
        await self.named.wait()
        while name != self.wanted:
            name = self.wanted
            server.doubt.clear()
            if self.folder is None:
                await self.check_weights(remote)
            elif await remote.weights() != name:
                if server.loads == CHANGES:
                    why = f"{remote.name} has had other weights than this run's {CHANGES} times"
                    raise EmbodiedError(f"{why}: another program loads weights there; give every run its own servers")
                with self.folder.reading() as at:
                    await remote.load(at, name, self.tied)
                server.loads += 1

    async def check_weights(self, remote: RemoteServer) -> None:
        """Refuse a server whose fixed weights differ from these. If a server does not name its weights, log-probs are
        compared later."""
        if remote.is_ours and not same_numbers(has := await remote.weights(), self.wanted):
            raise ConfigError(f"{remote.name} has other weights ({has}) than this policy ({self.wanted}); {KEEPS}")

    async def watch(self, server: PooledServer) -> None:
        """Returns when a server's weights must be checked."""
        while True:
            try:
                await asyncio.wait_for(server.doubt.wait(), WATCH_S)
                return
            except TimeoutError:
                self.move_stragglers(server)
                await self.report_waiting(server)
                has = await server.remote.weights(self.away_s)
                if not has:
                    await server.remote.look(self.away_s)
                elif not (has == self.wanted or (self.folder is None and same_numbers(has, self.wanted))):
                    return

    async def report_waiting(self, server: PooledServer) -> None:
        """Tell the user once if a server has requests of this run and is paused, or has sent no answer for a while."""
        begun = min((began for _, began in server.calls.values()), default=inf)
        before, server.told = server.told, ""
        if server.calls and await server.remote.is_paused(self.away_s):
            server.told = "is paused (POST /pause); its requests wait until POST /resume"
        elif time.monotonic() - max(begun, server.answered_at) > QUIET_S:
            waits = f"a request waits for at most {self.config.answer_s:g} s (policy.answer_s)"
            server.told = f"has requests of this run, and has sent no answer for {QUIET_S:g} s; {waits}"
        if server.told not in ("", before):
            self.say(f"{server.name} {server.told}")

    def move_stragglers(self, server: PooledServer) -> None:
        """If other servers are idle, requeue requests that take this server much longer than any answer so far."""
        idle = [s for s in self.servers if s.takes and not s.calls and s.longest_s]
        if self.queue.waiting or not idle:
            return
        since = time.monotonic() - PATIENCE * max(free.longest_s for free in idle)
        for number in [number for number, (_, began) in server.calls.items() if began < since]:
            server.calls.pop(number)[0].cancel()
            self.queue.kept_by[self.queue.taken[server.name][number].conversation] = idle[0].name
            self.queue.give_back(number)
            self.totals["moved"] += 1
        self.hand_out()

    def lose(self, server: PooledServer, err: Exception) -> None:
        """A server cannot be reached: requeue all its requests."""
        self.note_failure(server, err)
        self.take_from(server)
        self.hand_out()
        left, since = self.left, time.monotonic() - self.away_s
        silent = [s for s in left if not s.takes and s.away_since is not None and s.away_since <= since]
        if len(silent) == len(left) and (self.queue.unanswered or not self.joined.is_set()):
            urls = ", ".join(s.remote.url for s in left)
            who = f"{server.name} has" if len(left) == 1 else f"the servers of policy.url, {urls}, have"
            self.stop(EmbodiedError(f"{who} not answered for {self.away_s:g} s (policy.away_s): {err}"))

    @property
    def left(self) -> list[PooledServer]:
        """Servers that answer or may come back."""
        return [server for server in self.servers if not (server.is_dropped or server.is_refused)]

    def note_failure(self, server: PooledServer, err: Exception) -> None:
        server.takes = False
        if server.away_since is None:
            server.away_since = time.monotonic()
        if server.is_failing:
            server.pause = min(2 * server.pause, LONGEST_S)
            return
        server.is_failing = True
        self.totals["outages"] += 1
        rest = (
            f"trying again for {self.away_s:.3g} s" if len(self.servers) == 1 else "the other servers answer meanwhile"
        )
        self.say(f"{server.name}: {err}; {rest}")

    def refuse(self, server: PooledServer, cause: BaseException) -> None:
        """Exclude a server until the next version, or for good."""
        err = cause
        if not isinstance(err, EmbodiedError):
            err = EmbodiedError(f"{server.name}: {in_a_line(cause)[:300].removeprefix('ValueError: ')}")
        was_refused, server.is_refused, server.takes = server.is_refused, True, False
        self.take_from(server)
        if not (was_refused or self.left):
            return self.stop(err)
        if not was_refused:
            self.say(f"{err}; the other servers answer without it")
        self.hand_out()

    def drop(self, server: PooledServer, evidence: str) -> None:
        """Drop a server whose answers are not of the weights that it names."""
        self.totals["dropped_servers"] += 1
        server.is_dropped = True
        server.doubt.set()
        why = f"{server.name}: {evidence}" + (f"; {KEEPS}" if self.folder is None else "")
        self.totals["suspect_answers"] += server.used.answers
        self.totals["suspect_tokens"] += server.used.tokens
        why = f"{why}: it is dropped with these and {len(server.calls)} more requests; {server.used}"
        used, how, now = server.used, self.config.suspects, version_of(self.wanted)
        suspect = how != "use" and bool(used.answers)
        shown = tuple(used.episodes) if suspect and used.versions[-1] == now else ()
        early = suspect and how == "stop" and used.since is not None and used.since < now
        self.remarks.put(Remark("", shown, used.since if early else None, server.name))
        self.refuse(server, EmbodiedError(why))

    def take_from(self, server: PooledServer) -> None:
        """Requeue its requests; its later answers to them are ignored."""
        calls, server.calls, server.unreleased = server.calls, {}, {}
        for call, _ in calls.values():
            call.cancel()
        for number in [*self.queue.taken.get(server.name, ())]:
            self.queue.give_back(number)

    def say(self, sentence: str) -> None:
        """Tell the user, in the worker's log and by the engine's remarks."""
        print(sentence, flush=True)
        self.remarks.put(Remark(sentence))

    def stop(self, err: Exception) -> None:
        """No server can answer: the engine raises this error."""
        self.forget()
        self.error = err
        self.joined.set()
        self.done.put(err)

    # Requests

    def hand_out(self) -> None:
        """Let servers take waiting requests."""
        taking = [server for server in self.servers if server.takes]
        most = {server.name: server.remote.slots or self.config.max_running for server in taking}
        for server in taking:
            server.speed.answers = most[server.name]
        others = [server.name for server in self.servers if not server.takes]
        self.queue.workers(request_limits(most, {server.name: server.speed.rate for server in taking}), others)
        by_name = {server.name: server for server in taking}
        for name, requests in self.queue.take().items():
            server, size = by_name[name], MOST_TOGETHER if by_name[name].remote.is_ours and not self.shows else 1
            for first in range(0, len(requests), size):
                some = {int(request.key): request.request for request in requests[first : first + size]}  # type: ignore[call-overload]
                began = time.monotonic()
                server.calls |= dict.fromkeys(some, (self.start(server, self.ask(server, some, began)), began))

    async def ask(self, server: PooledServer, requests: dict[int, Request], began: float) -> None:
        """Send these requests to a server, in one call."""
        remote, left, proves = server.remote, dict(requests), server.remote.is_ours and self.config.verify is not None
        bodies = {
            number: body_of(request, remote.model, proves, remote.divided_by) for number, request in requests.items()
        }
        try:
            async with contextlib.aclosing(remote.answers(bodies)) as answers:
                async for number, answer in answers:
                    if isinstance(answer, ServerUnavailable):
                        self.fail(server, number, answer, began)
                    else:
                        await self.take_answer(server, number, left[number], answer, began)
                    self.close_call(server, number)
                    del left[number]
        except ServerUnavailable as err:
            for number in left:
                self.fail(server, number, err, began)
        finally:
            for number in left:
                self.close_call(server, number)

    def close_call(self, server: PooledServer, number: int) -> None:
        task, _ = server.calls.get(number, (None, 0.0))
        if task is asyncio.current_task():  # otherwise the request was taken from the server meanwhile
            del server.calls[number]

    async def take_answer(self, server: PooledServer, number: int, request: Request, answer: Any, began: float) -> None:
        """Keep an answer for comparison, or ask again if it was aborted or is of other weights."""
        parsed, remote, why = read_answer(answer), server.remote, ""
        has = parsed.fingerprint if remote.is_ours else None
        if remote.owner == "vllm" and self.folder is not None:  # it may have restarted meanwhile
            has = await remote.weights()
        if not parsed.dropped:
            if parsed.finish == "abort":
                why = "its answers are aborted"
            elif has and not same_numbers(has, self.wanted):
                why = f"its answers are of other weights ({has[:40]}, and not {self.wanted})"
            if why:
                return self.fail(server, number, ServerUnavailable(why), began)
            check_tokens(parsed, request, self.settings["vocab_size"])
        if server.away_since is None:  # otherwise other requests of its calls have failed since it was checked
            server.pause, server.is_failing = SHORTEST_S, False
        server.answered_at = time.monotonic()
        server.longest_s = max(server.longest_s, server.answered_at - began)
        self.totals["unusable"] += bool(parsed.dropped)
        server.speed.count_answer(len(parsed.tokens), time.monotonic(), bool(self.queue.waiting))
        self.done.put((server, number, parsed))

    def fail(self, server: PooledServer, number: int, err: ServerUnavailable, began: float) -> None:
        """A request has failed: requeue it, and check the server before it takes another one."""
        self.totals["asked_again"] += 1
        self.queue.give_back(number)
        self.note_failure(server, err)
        server.doubt.set()
        now = time.monotonic()
        failing = self.failing.setdefault(number, FailingRequest(began))
        is_silent = isinstance(err, Overdue) and server.answered_at < began
        if now - began > 2 * LONGEST_S and not is_silent:  # it was being answered
            failing.since, failing.servers, failing.slow_tries = now, set(), failing.slow_tries + 1
        failing.servers.add(server.name)
        if failing.slow_tries >= TRIES * len(self.left):
            self.stop(EmbodiedError(f"{server.name} has failed at a request {failing.slow_tries} times: {err}"))
        elif now - failing.since >= self.away_s and all(server.name in failing.servers for server in self.left):
            self.stop(EmbodiedError(f"{server.name} has not answered for {self.away_s:g} s (policy.away_s): {err}"))
        else:
            self.hand_out()

    def metrics(self) -> dict[str, float]:
        """The counts since the last call, and each server's differences of log-probs."""
        numbers: dict[str, float] = {name: float(count) for name, count in self.totals.items()}
        self.totals = dict.fromkeys(self.totals, 0)
        for place, server in enumerate(self.servers):
            numbers |= {f"gap_{place}": server.gap.mean, f"largest_gap_{place}": server.gap.largest}
        return numbers


def check_tokens(parsed: ParsedAnswer, request: Request, vocabulary: int) -> None:
    """Raise ValueError if an answer does not fit its request: it ends at its first stop token, or has as many
    tokens as were asked for."""
    tokens, most, stops = parsed.tokens, request.max_tokens, request.sampling.stops
    what = f"an answer of {len(tokens)} tokens"
    if odd := [token for token in tokens if not 0 <= token < vocabulary]:
        raise ValueError(f"token {odd[0]} in an answer is none of this model's {vocabulary}")
    if len(tokens) > most:
        raise ValueError(f"{what}, and {most} were asked for")
    if early := [place for place, token in enumerate(tokens[:-1], 1) if token in stops]:
        raise ValueError(f"{what} goes on after its stop token, which is number {early[0]}")
    ended = bool(tokens) and tokens[-1] in stops
    if not (ended if parsed.finish == "stop" else parsed.finish == "length" and len(tokens) == most):
        what += "" if ended else " without a stop token"
        raise ValueError(f"{what}, of {most} that were asked for, has finish_reason={parsed.finish[:40]}")


def same_numbers(one: str | None, other: str) -> bool:
    """True if two names are of the same weights, whatever their version numbers."""
    return one is not None and one.partition("-")[2] == other.partition("-")[2]
