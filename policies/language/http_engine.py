"""A server as the engine: conversations go to it over HTTP, and new weights by way of a folder that both see.

The server is ours (`python -m embodied.serve`), whose tokens are then those of our own engine, or vLLM's (`vllm
serve`), or another that speaks OpenAI's completions with token ids and keeps its weights. A request that fails on the
way is asked again, with the same noise, for `policy.away_s`, and one answer to it is taken. Before that the server is
asked which weights it has: one that was started again gets the current ones first.

The calls to the server run in a thread of their own; everything else is the worker's. vLLM takes weights from a folder
by its development routes (`VLLM_SERVER_DEV_MODE=1`); whether a head that is tied to the embeddings follows depends on
the device, so there `vllm_worker.FromFolder` has to be loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import importlib.util
import json
import os
import queue
import secrets
import shutil
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from embodied.core.conversations import SamplingRule
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import as_path
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.engine import Answer, Engine, Request, unanswered
from embodied.policies.language.folder import as_published
from embodied.policies.language.http_messages import (
    NOT_FINITE,
    OWNER,
    Read,
    body_of,
    fingerprint,
    read_answer,
    read_error,
)
from embodied.policies.policy_folder import WEIGHTS, write_tensors
from embodied.policies.vla.lora import merged
from embodied.runtime.tensor_bytes import blob_of

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

LOOK_S = 0.05  # that a step waits for an answer
AT_FIRST_S = 5.0  # that a worker waits for a server which is not there when it begins
SHORTEST_S, LONGEST_S = 0.1, 5.0  # between two attempts
FAR = 0.1  # of log-probs, a token: farther apart they are not of the same weights, half precision or not
PROBED = 8  # tokens by which that is found
BUSY = (408, 425, 429, 500, 502, 503, 504)  # answers after which it is worth trying again
EXTENSION = "embodied.policies.language.vllm_worker.FromFolder"


class HTTPEngine(Engine):
    """Continues conversations on a server."""

    def __init__(self, config: LanguageConfig, policy: LanguagePolicy) -> None:
        if importlib.util.find_spec("aiohttp") is None:
            raise ConfigError("policy.engine=http needs aiohttp. Run: python -m pip install 'embodied-loop[serve]'")
        self.config, self.policy, self.slots = config, policy, config.max_running
        self.stops, self.max_length = sorted(policy.tokenizer.stops), policy.max_length
        self.exact = config.dtype == "float64"
        self.asked: dict[int, tuple[Request, Future]] = {}
        self.ended: list[Answer] = []  # of conversations that have no room for an answer
        self.done: queue.SimpleQueue[tuple[int, Answer | Exception]] = queue.SimpleQueue()
        self.added = 0
        self.away = False  # whether the last call found the server away
        self.totals = dict.fromkeys(("asked_again", "unusable"), 0)
        self.round: tuple[int, str, SamplingRule] = (0, "", SamplingRule())
        self.name, self.pairs = "", {}  # of the weights that are to answer, and what they are
        self.patience_s = config.answer_s + config.away_s
        self.server = RemoteServer(config.url, token_of(config), config.answer_s)
        self.folder, self.lock = own_folder(Path(config.weights).absolute()) if config.weights else (None, -1)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="http", daemon=True)
        self.thread.start()
        self.mending = asyncio.Lock()  # one request at a time finds out what the server has
        try:
            self.wait(self.patiently(self.server.look, at_most_s=min(AT_FIRST_S, config.away_s)))
            if (longest := self.server.max_length) and longest < self.max_length:
                raise ConfigError(
                    f"{self.server.name} has conversations of {longest} tokens at most, and this policy of "
                    f"{self.max_length}; try policy.max_length={longest}"
                )
        except BaseException:
            self.close()
            raise

    @property
    def running(self) -> int:
        return len(self.asked) + len(self.ended)

    def begin(self, version: int, seed: int, stream: str, rule: SamplingRule) -> None:
        assert not self.running, "a round begins while answers of the one before are being written"
        assert self.name.startswith(f"v{version}-"), f"the server has {self.name}, and is to write with v{version}"
        self.round = (seed, stream, rule)

    def add(self, request: Request) -> None:
        self.check(request)
        if (most := self.longest_answer(request)) <= 0:
            self.ended.append(unanswered(request))
            return
        number, self.added = self.added, self.added + 1
        body = body_of(request, most, self.stops, *self.round, self.server.model)
        self.asked[number] = request, asyncio.run_coroutine_threadsafe(self.answer(number, request, body), self.loop)

    def step(self) -> list[Answer]:
        """The answers that have come; waits a moment where there are none."""
        answers, self.ended = self.ended, []
        wait = bool(self.asked) and not answers
        with contextlib.suppress(queue.Empty):
            while self.asked:
                number, answer = self.done.get(timeout=LOOK_S) if wait else self.done.get_nowait()
                wait = False
                if number not in self.asked:  # it was aborted meanwhile
                    continue
                if isinstance(answer, Exception):
                    self.abort()
                    raise answer
                del self.asked[number]
                self.totals["unusable"] += bool(answer.dropped)
                answers.append(answer)
        return answers

    def abort(self) -> list[Answer]:
        for _, future in self.asked.values():
            future.cancel()  # closes its connection, by which the server knows
        answers = [*self.ended, *(unanswered(request) for request, _ in self.asked.values())]
        self.asked, self.ended = {}, []
        return answers

    def load(self, weights: dict[str, Tensor], version: int) -> None:
        assert not self.running, "new weights come while answers are being written"
        self.pairs, before = self.as_served(weights), self.name
        self.name = fingerprint(version, ((name, blob_of(tensor)) for name, tensor in self.pairs.items()))
        self.wait(self.patiently(self.hand_over if self.folder else self.compare))
        if self.folder and before not in ("", self.name):  # no server has to read them again
            shutil.rmtree(self.folder / before, ignore_errors=True)

    def close(self) -> None:
        self.abort()
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self.server.close(), self.loop).result(5)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(5)
        if not self.thread.is_alive():
            self.loop.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self.lock)
            self.folder = None

    # Weights

    def as_served(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The weights as the server knows them: with adapters beside them, or merged where it has none."""
        if not self.config.lora_rank or self.server.adapters == self.config.lora_rank:
            return dict(weights)
        return dict(merged(weights.items(), self.config.lora_scale))

    async def hand_over(self) -> None:
        """Make the server have the current weights, unless it has."""
        if self.folder is None or await self.server.weights() == self.name:
            return
        at = self.folder / self.name
        if not at.is_dir():
            aside = self.folder / "new"
            aside.mkdir(parents=True, exist_ok=True)
            write_tensors(aside / WEIGHTS, as_published(self.policy.model, self.pairs.items()))
            aside.rename(at)
        await self.server.load(at, self.name, self.policy.tied)

    async def compare(self) -> None:
        """Refuse a server that has other weights than these, which are not to be changed."""
        has = await self.server.weights()
        if self.server.ours:
            if not same_numbers(has, self.name):
                raise ConfigError(
                    f"{self.server.name} has other weights ({has}) than this policy ({self.name}); {KEEPS}"
                )
            return
        begin = Request("probe", [self.stops[0]], PROBED, 0)
        found = await self.ask(body_of(begin, PROBED, [], 0, "probe", SamplingRule(0.0), self.server.model))
        if found.dropped:
            raise ConfigError(f"{self.server.name}: {found.dropped} in its answers, so its weights cannot be compared")
        ids = torch.tensor([[*begin.tokens, *found.tokens]], device=self.policy.device)
        if self.policy.model.config._attn_implementation != "sdpa":  # learning may choose another
            self.policy.model.set_attn_implementation("sdpa")
        with torch.no_grad():
            likely = self.policy.model(ids).logits[0, :-1].double().log_softmax(-1)
        own = likely.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
        gap = float(np.abs(own - found.logprobs).mean()) if len(own) else 0.0
        if not gap <= FAR:
            raise ConfigError(
                f"{self.server.name} has other weights than this policy: their log-probs differ by {gap:.2g} a token; "
                f"{KEEPS}"
            )
        print(f"{self.server.name}: its log-probs differ from this policy's by {gap:.2g} a token", flush=True)

    # Requests, in the thread of the calls

    async def answer(self, number: int, request: Request, body: dict[str, Any]) -> None:
        try:
            answer: Answer | Exception = await self.written(request, body)
        except Exception as err:  # raised again by the next step
            answer = err
        self.done.put((number, answer))

    async def written(self, request: Request, body: dict[str, Any]) -> Answer:
        """The answer to a request, which is asked again as long as the server is away or has other weights."""
        changed = 0

        async def attempt() -> Answer | None:
            found = await self.ask(body)
            others = self.server.ours and not same_numbers(found.fingerprint, self.name)
            if not found.dropped and (found.finish == "abort" or others):
                return None
            exact = np.float64 if self.exact else np.float32
            tokens, logprobs = np.array(found.tokens, np.int32), np.array(found.logprobs, exact)
            return Answer(request.key, tokens, logprobs, found.finish != "stop", found.dropped)

        while (answer := await self.patiently(attempt, again=True)) is None:
            self.totals["asked_again"] += 1
            changed += 1
            if changed == CHANGES:
                raise EmbodiedError(
                    f"{self.server.name} has had other weights than this run's {CHANGES} times: another program loads "
                    "weights there; give every run a server of its own"
                )
            await self.patiently(self.mend)
        return answer

    async def ask(self, body: dict[str, Any]) -> Read:
        try:
            return read_answer(await self.server.ask(body))
        except ValueError as err:
            raise EmbodiedError(f"{self.server.name}: {err}") from None

    async def patiently(self, call: Any, again: bool = False, at_most_s: float | None = None) -> Any:
        """Returns what the call does; while the server is away it is tried again, for `policy.away_s`, or shorter."""
        began, pause, limit = None, SHORTEST_S, self.config.away_s if at_most_s is None else at_most_s
        while True:
            try:
                if began is not None and again:
                    await self.mend()
                found = await call()
                self.away = False
                return found
            except ServerUnavailable as err:
                now = time.monotonic()
                began = began or now
                left = began + limit - now
                if left <= 0:
                    key = " (policy.away_s)" if at_most_s is None else "; start the server first"
                    raise EmbodiedError(f"{self.server.name} has not answered for {limit:g} s{key}: {err}") from None
                if not self.away:
                    print(f"{self.server.name}: {err}; trying again for {left:.3g} s", flush=True)
                self.away = True
                self.totals["asked_again"] += again
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_S)

    async def mend(self) -> None:
        """Find out, after something went wrong, which weights the server has."""
        async with self.mending:
            await self.hand_over()

    def wait(self, work: Coroutine) -> Any:
        """The result of work in the other thread."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(self.patience_s + LONGEST_S)
        except TimeoutError:
            future.cancel()
            raise EmbodiedError(f"{self.server.name} has not answered for {self.patience_s:g} s") from None
        except CancelledError:
            raise EmbodiedError(f"{self.server.name}: given up") from None


CHANGES = 5  # of a server's weights by others, in the time of one request


def own_folder(parent: Path) -> tuple[Path, int]:
    """A new folder for weights, and a lock on it that ends with this process: what others left is removed."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob("weights-*"):
            with contextlib.suppress(OSError):  # somebody else removes it, or is at work there
                lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(left)
                finally:
                    os.close(lock)
        name = secrets.token_hex(8)
        (aside := parent / f"new-{name}").mkdir()
        lock = os.open(aside, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return aside.rename(parent / f"weights-{name}"), lock
    except OSError as err:
        raise ConfigError(f"policy.weights={parent} cannot be written: {err.strerror or err}") from None


KEEPS = "name the checkpoint that it serves, or let it take new weights: policy.weights=FOLDER"


def same_numbers(one: str | None, other: str) -> bool:
    """True if two names are of the same weights, whatever version they are called."""
    return one is not None and one.partition("-")[2] == other.partition("-")[2]


def token_of(config: LanguageConfig) -> str | None:
    """The server's token, from where `policy.token_from` says; None where there is none."""
    if "/" not in config.token_from:
        return os.environ.get(config.token_from) or None
    try:
        return as_path(config.token_from).read_text(encoding="utf-8").strip() or None
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"policy.token_from={config.token_from} cannot be read: {err}") from None


class ServerUnavailable(EmbodiedError):
    """The server is not there, or not able to answer now."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status  # of its answer, where there is one


class RemoteServer:
    """One server. All but the constructor runs in the loop of its first call."""

    def __init__(self, url: str, token: str | None, answer_s: float) -> None:
        self.url, self.token, self.answer_s = url.rstrip("/").removesuffix("/v1"), token, answer_s
        self.name = f"policy.url={url}"
        self.session: Any = None
        self.model, self.owner = "", ""
        self.max_length: int | None = None
        self.adapters: int | None = None  # their rank

    @property
    def ours(self) -> bool:
        return self.owner == OWNER

    async def look(self) -> None:
        """Find out which model it has, and what kind of server it is."""
        found = await self.call("GET", "/v1/models")
        try:
            about = found["data"][0]
            self.model, self.owner = str(about["id"]), str(about.get("owned_by"))
            self.max_length, self.adapters = about.get("max_model_len"), about.get("lora_rank")
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ConfigError(
                f"{self.name}/v1/models does not name a model: is it a server of OpenAI's kind?"
            ) from None

    async def ask(self, body: dict[str, Any]) -> Any:
        """The answer of /v1/completions."""
        return await self.call("POST", "/v1/completions", body)

    async def weights(self) -> str:
        """The name that it has for its weights; empty where it does not say."""
        if not self.ours and self.owner != "vllm":
            return ""
        found = await self.call("GET", "/weight_info", missing={})
        return str(found.get("weight_version", ""))

    async def load(self, folder: Path, name: str, tied: bool) -> None:
        """Make it load the weights in a folder, and call them so."""
        if self.ours:
            version = int(name.partition("-")[0].removeprefix("v"))
            body = {"path": str(folder), "version": version, "weight_version": name}
            found = await self.call("POST", "/update_weights", body)
            if found.get("weight_version") != name:
                raise EmbodiedError(f"{self.name} has read other weights from {folder} than were written there")
        elif self.owner == "vllm":
            await self.load_into_vllm(folder, name, tied)
        else:
            raise ConfigError(
                f"{self.name} is a server of {self.owner or 'another kind'}, which has no way to take weights that is "
                "known here; python -m embodied.serve and vllm serve have one"
            )

    async def load_into_vllm(self, folder: Path, name: str, tied: bool) -> None:
        """Load weights by vLLM's development routes, while nothing is being written."""
        method, why = ("load_folder", f"--worker-extension-cls {EXTENSION}") if tied else ("reload_weights", "")
        await self.call("POST", "/pause?mode=wait", missing=None)
        try:
            arguments = {"args": [str(folder)]} if tied else {"kwargs": {"weights_path": str(folder)}}
            try:
                await self.call("POST", "/collective_rpc", {"method": method} | arguments)
            except ServerUnavailable as err:
                if err.status != 500:
                    raise
                raise EmbodiedError(
                    f"{self.name} did not load {folder} ({err}){why and f'; start it with {why}'}"
                ) from None
            if not (await self.call("POST", "/reset_prefix_cache")).get("success", True):
                raise ServerUnavailable("it did not forget its prefixes")
            await self.call("POST", "/update_weight_version", {"new_version": name})
        finally:
            await self.call("POST", "/resume")

    async def call(self, method: str, path: str, body: Any = None, missing: Any = ...) -> Any:
        """The JSON of an answer. Raises ServerUnavailable where trying again may help. `missing`: what a route
        that is not there stands for."""
        import aiohttp

        if self.session is None:
            headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            limits = aiohttp.ClientTimeout(total=self.answer_s, sock_connect=10)
            self.session = aiohttp.ClientSession(
                headers=headers, timeout=limits, connector=aiohttp.TCPConnector(limit=0), trust_env=False
            )
        try:
            async with self.session.request(method, self.url + path, json=body, allow_redirects=False) as response:
                status, text = response.status, await response.text()
        except TimeoutError:
            raise ServerUnavailable(f"{path} took longer than {self.answer_s:g} s (policy.answer_s)") from None
        except aiohttp.ClientConnectorError as err:
            raise ServerUnavailable(f"no connection ({err.os_error.strerror or err.os_error})") from None
        except (aiohttp.ClientError, OSError) as err:
            raise ServerUnavailable(f"{type(err).__name__}: {err}" if str(err) else type(err).__name__) from None
        if status == 404 and missing is not ...:
            return missing
        try:
            found = json.loads(text) if text.strip() else {}
        except ValueError:
            found = text[:200]
        if status < 300:
            return found
        said, code = read_error(found)
        if status == 500 and code == NOT_FINITE:
            return UNUSABLE
        if status in BUSY:
            raise ServerUnavailable(f"{path} answers {status}: {said}", status)
        raise ConfigError(f"{self.name}: {path} answers {status}: {said}{self.hint(status, path)}")

    def hint(self, status: int, path: str) -> str:
        if status in (401, 403):
            return "; policy.token_from says where the token is" + ("" if self.token else ", and there is none")
        if status == 404 and self.owner == "vllm" and path in ("/collective_rpc", "/resume"):
            return "; only with VLLM_SERVER_DEV_MODE=1 in its environment does vllm serve take new weights"
        return ""

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()
            await asyncio.sleep(0)


UNUSABLE = {"choices": [{"token_ids": [0], "finish_reason": "stop", "logprobs": {"token_logprobs": [None]}}]}
