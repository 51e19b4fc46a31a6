"""A server that answers for a language policy: its kind, its weights, and how it loads new ones.

It is ours (`python -m embodied.serve`), vLLM's (`vllm serve`), or another server with OpenAI's completions and token
ids, which keeps its weights. New weights come in one of two ways: from a folder that the server sees, or in checksummed
buckets. vLLM takes both by its development routes (`VLLM_SERVER_DEV_MODE=1`); buckets and tied heads need our worker
extension (`vllm.FromFolder`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from embodied.core.errors import ConfigError, EmbodiedError, in_a_line
from embodied.core.options import SERVERS
from embodied.policies.language.config import LanguageConfig
from embodied.policies.language.http_messages import (
    NOT_FINITE,
    OWNER,
    UNSEEN,
    bucket_bytes,
    read_error,
    read_json,
    read_line,
    version_of,
)
from embodied.policies.policy_folder import WEIGHTS
from embodied.policies.remote.client import token_of
from embodied.runtime.published_weights import buckets_of, read_safetensors

AT_FIRST_S = 5.0  # wait for missing servers at the start
SHORTEST_S = 0.1  # first pause between two attempts
BUSY = (408, 425, 429, 500, 502, 503, 504)  # status codes after which a retry may help
LONGEST_NAME = 400  # letters of a model's name, or its weights'
SIZES = ("max_model_len", "lora_rank", "max_running")
RPC = "/collective_rpc"
KNOWN = (OWNER, "vllm")
MANY = "/v1/completions/many"
MOST_BYTES = 1 << 24  # of a response, or of a line of it: an answer with its proof is far smaller
EXTENSION = "embodied.policies.language.vllm.FromFolder"  # loads our weights in vLLM's workers


def check_servers(config: LanguageConfig) -> None:
    """Refuse servers of another kind, or if none answers. Called before workers start."""
    SERVERS.check("policy.engine=http")

    async def look() -> None:
        servers = servers_of(config)
        try:
            await first_look(servers, config.away_s)
        finally:
            await asyncio.gather(*(server.close() for server in servers))

    with ThreadPoolExecutor(1) as thread:  # a notebook has an event loop in its own thread
        thread.submit(asyncio.run, look()).result()


async def first_look(servers: Sequence[RemoteServer], away_s: float) -> None:
    """Returns once all servers have answered, or some after a few seconds; raises EmbodiedError if none has."""
    problems = await asyncio.gather(*(server.first_look(away_s) for server in servers))
    if all(problems):
        raise EmbodiedError("; ".join(problems))


def servers_of(config: LanguageConfig) -> list[RemoteServer]:
    """The servers of `policy.url`; their token by `policy.token_from`."""
    token = token_of(config)
    return [RemoteServer(url, token, config.answer_s) for url in config.urls]


class ServerUnavailable(EmbodiedError):
    """The server cannot be reached or cannot answer now."""


class InsideFailed(ServerUnavailable):
    """The server answers with status 500."""


class Overdue(ServerUnavailable):
    """The server has not answered in time."""


class Refused(ConfigError):
    """The server has refused a request."""

    def __init__(self, text: str, code: Any = None) -> None:
        super().__init__(text)
        self.code = code


class RemoteServer:
    """One server. All methods except the constructor run in the event loop of the first call."""

    max_length: int | None = None  # the most tokens of a conversation
    adapters: int | None = None  # rank of its adapters
    slots: int | None = None  # concurrent conversations that fit into its cache
    settings: dict[str, Any] = {}  # noqa: RUF012  replaced whole
    session: Any = None
    model, owner = "", ""
    divided_by = 1.0  # temperature by which it divides all logits before it samples; requests are relative to it

    def __init__(self, url: str, token: str | None, answer_s: float) -> None:
        self.url, self.token, self.answer_s = url.rstrip("/").removesuffix("/v1"), token, answer_s
        self.name = f"policy.url={url}"
        self.sender = secrets.token_hex(8)  # identifies this sender of weights

    @property
    def is_ours(self) -> bool:
        return self.owner == OWNER

    async def look(self, limit_s: float) -> None:
        """Find out the server's kind and model."""
        listing = await self.call("GET", "/v1/models", limit_s=limit_s)
        try:
            model = listing["data"][0]
            self.model, self.owner = (str(text)[:LONGEST_NAME] for text in (model["id"], model.get("owned_by") or ""))
            settings = model.get("settings") or {}
        except (KeyError, IndexError, TypeError, AttributeError):
            raise ConfigError(f"{self.name}/v1/models names no model: is it a server of OpenAI's kind?") from None
        sizes = {name: model.get(name) for name in SIZES}
        odd = {name: size for name, size in sizes.items() if size is not None and (type(size) is not int or size < 1)}
        if odd or not isinstance(settings, dict):
            odd = odd or {"settings": settings}
            raise ConfigError(f"{self.name}/v1/models describes its model wrongly: {str(odd)[:200]}")
        self.max_length, self.adapters, self.slots = sizes.values()
        self.settings = settings | ({"lora_rank": self.adapters} if self.is_ours else {})

    async def first_look(self, away_s: float) -> str:
        """Why the server does not answer within a few seconds; "" if it does."""
        limit = min(AT_FIRST_S, away_s)
        until, pause = time.monotonic() + limit, SHORTEST_S
        while True:
            try:
                await self.look(limit)
                return ""
            except ServerUnavailable as err:
                if (left := until - time.monotonic()) <= 0:
                    return f"{self.name} has not answered for {limit:g} s; start the server first: {err}"
            await asyncio.sleep(min(pause, left))
            pause *= 2

    async def answers(self, bodies: dict[int, dict[str, Any]]) -> AsyncIterator[tuple[int, Any]]:
        """Yields the answers of /v1/completions to these requests, by number, as they arrive; for a failed request an
        error. Our servers get all requests in one call."""
        if not self.is_ours:
            for number, body in bodies.items():
                yield number, await self.call("POST", "/v1/completions", body)
            return
        waited = dict(enumerate(bodies))
        body = {"requests": [*bodies.values()]}
        async with self.requested("POST", MANY, body) as response:
            if response.status >= 300:
                self.content_of(response.status, read_json(await self.text(response)), MANY)
            async for line in self.lines(response):
                number, status, content = read_line(line)
                if number not in waited:
                    raise ValueError(f"{MANY} answers request {number}, which does not wait for an answer")
                try:
                    answer = self.content_of(status, content, MANY)
                except ServerUnavailable as err:
                    answer = err
                yield waited.pop(number), answer
        if waited:
            raise ServerUnavailable(f"{MANY} ends before {len(waited)} of its answers")

    async def weights(self, limit_s: float | None = None) -> str:
        """The server's name for its weights; "" if unknown."""
        return str((await self.status("/weight_info", limit_s)).get("weight_version", ""))[:LONGEST_NAME]

    async def is_paused(self, limit_s: float) -> bool:
        """True if its owner has paused it; False if the server does not say."""
        return bool((await self.status("/is_paused", limit_s)).get("is_paused"))

    async def status(self, path: str, limit_s: float | None) -> dict[str, Any]:
        """What our servers and vLLM's say of themselves; {} from another."""
        if self.owner not in KNOWN:
            return {}
        return await self.call("GET", path, missing={}, limit_s=limit_s)

    def check_settings(self, own: dict[str, Any], max_length: int, shows: bool) -> None:
        """Refuse a server with another model or precision, with shorter conversations, or, if the env `shows` pictures,
        without pictures in prompts of token ids."""
        if shows and not self.is_ours:
            who = f"{self.name} is a server of {self.owner or 'another kind'}"
            raise ConfigError(f"{who}, which takes no pictures in prompts of token ids; ours does (embodied.serve)")
        differing = [key for key in own if self.settings.get(key, own[key]) != own[key]]
        if odd := [f"{key}={str(self.settings[key])[:80]} there, {own[key]} here" for key in differing]:
            raise ConfigError(f"{self.name} is of other settings than this policy: {'; '.join(odd)}")
        if self.max_length and self.max_length < max_length:
            limits = f"{self.max_length} tokens at most, and this policy of {max_length}"
            raise ConfigError(f"{self.name} has conversations of {limits}; try policy.max_length={self.max_length}")

    async def divide_logits(self, temperature: float, draws_from_all: bool) -> None:
        """Make vLLM divide its logits, so that log-probs are those among all tokens at this temperature, whichever
        tokens requests leave out. Without our extension nothing changes, and requests must draw from all tokens."""
        self.divided_by = 1.0
        if self.owner == "vllm":
            with contextlib.suppress(InsideFailed, Refused):
                asked = {"method": "divide_logits", "args": [temperature]}
                if await self.call("POST", RPC, asked, missing=None) is not None:
                    self.divided_by = temperature
        if not (self.is_ours or draws_from_all or self.divided_by == temperature):
            raise ConfigError(
                f"{self.name} is no server of ours, and policy.top_p, policy.top_k or policy.min_p is set: it tells "
                "log-probs of all tokens at temperature 1 alone; try policy.temperature=1, or vLLM's server with "
                f"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}"
            )

    async def load(self, folder: Path, name: str, tied: bool) -> None:
        """Make the server load the weights of a folder under this name; of a folder that it does not see, in
        buckets."""
        if self.owner == "vllm":
            return await self.load_into_vllm(folder, name, tied)
        if not self.is_ours:
            who = f"{self.name} is a server of {self.owner or 'another kind'}"
            raise ConfigError(f"{who}, which has no way to take weights that is known here; ours and vLLM's have one")
        body = {"path": str(folder), "version": version_of(name), "weight_version": name}
        try:
            loaded = await self.call("POST", "/update_weights", body)
        except Refused as err:
            if err.code != UNSEEN:
                raise
            for data in self.buckets(folder, name):
                loaded = await self.call("POST", "/receive_weights", data)
        if loaded.get("weight_version") != name:
            raise EmbodiedError(f"{self.name} has read other weights from {folder} than were written there")

    def buckets(self, folder: Path, name: str) -> Iterator[bytes]:
        """The encoded buckets of a folder's weights."""
        blobs = read_safetensors(folder / WEIGHTS)
        specs = {name: blob.spec for name, blob in blobs.items()}
        for bucket in buckets_of(version_of(name), ((name, blob.data) for name, blob in blobs.items())):
            yield bucket_bytes(bucket, self.sender, name, {} if bucket.number else specs)

    async def load_into_vllm(self, folder: Path, name: str, tied: bool) -> None:
        """Load weights by vLLM's development routes, while no answer is being generated. Buckets come first."""
        extends = f"start it with --worker-extension-cls {EXTENSION}"
        load: dict[str, Any] = {"method": "load_from", "args": [str(folder)]}
        try:
            seen = (await self.call("POST", RPC, {"method": "sees_folder", "args": [str(folder)]}))["results"]
        except InsideFailed as err:  # it lacks our extension
            if tied:
                raise EmbodiedError(f"{self.name} cannot load {folder} ({err}); {extends}") from None
            seen, load = (), {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        if not all(answer == "True" for answer in seen):
            for data in self.buckets(folder, name):
                sent = {"method": "receive_bucket", "args": [base64.b64encode(data).decode()]}
                await self.call("POST", RPC, sent)
            load = {"method": "load_received"}
        await self.call("POST", "/pause?mode=wait", missing=None)
        try:
            await self.call("POST", RPC, load)
            if not (await self.call("POST", "/reset_prefix_cache")).get("success", True):
                raise ServerUnavailable("it did not forget its prefixes")
            await self.call("POST", "/update_weight_version", {"new_version": name})
        except InsideFailed as err:
            why = f"{self.name} did not load {folder} ({err}); if it does not see this folder, {extends}"
            raise EmbodiedError(why) from None
        finally:
            await self.call("POST", "/resume")

    async def call(
        self, method: str, path: str, body: Any = None, missing: Any = ..., limit_s: float | None = None
    ) -> Any:
        """Returns the JSON of an answer. Raises ServerUnavailable if a retry may help. `missing`: the meaning of a
        missing route."""
        async with self.requested(method, path, body, limit_s) as response:
            status, text = response.status, await self.text(response)
        return missing if status == 404 and missing is not ... else self.content_of(status, read_json(text), path)

    async def text(self, response: Any) -> str:
        """The body of a response."""
        data = bytearray()
        async for chunk in response.content.iter_any():
            data += chunk
            if len(data) > MOST_BYTES:
                raise ConfigError(f"{self.name}: {response.url.path} answers with more than {MOST_BYTES >> 20} MB")
        return data.decode(errors="replace")

    async def lines(self, response: Any) -> AsyncIterator[bytes]:
        """The lines of a response as they arrive."""
        begun = bytearray()
        async for chunk in response.content.iter_any():
            begun += chunk
            if b"\n" in chunk:
                *lines, begun = begun.split(b"\n")
                for line in lines:
                    yield bytes(line)
            if len(begun) > MOST_BYTES:
                raise ConfigError(f"{self.name}: {MANY} sends a line of more than {MOST_BYTES >> 20} MB")
        if begun:
            yield bytes(begun)

    @contextlib.asynccontextmanager
    async def requested(self, method: str, path: str, body: Any, limit_s: float | None = None) -> AsyncIterator[Any]:
        """Gives the open response. Errors on the way raise ServerUnavailable."""
        import aiohttp

        if self.session is None:
            headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
            headers["Accept-Encoding"] = "identity"  # a compressed response may be of any size
            self.session = aiohttp.ClientSession(
                headers=headers,
                timeout=aiohttp.ClientTimeout(total=self.answer_s, sock_connect=10),
                connector=aiohttp.TCPConnector(limit=0),
                trust_env=False,
                auto_decompress=False,
            )
        try:
            what: dict[str, Any] = {"data": body} if isinstance(body, bytes) else {"json": body}
            if limit_s is not None:
                what["timeout"] = aiohttp.ClientTimeout(total=limit_s)
            if path == RPC:  # vLLM closes a connection after an error inside, in the middle of the next request
                what["headers"] = {"Connection": "close"}
            async with self.session.request(method, self.url + path, allow_redirects=False, **what) as response:
                if (encoding := response.headers.get("Content-Encoding", "identity")) != "identity":
                    raise ConfigError(f"{self.name}: {path} answers with Content-Encoding: {encoding}, unasked")
                yield response
        except TimeoutError:
            raise Overdue(f"{path} took longer than {limit_s or self.answer_s:g} s") from None
        except aiohttp.ClientConnectorError as err:
            raise ServerUnavailable(f"no connection ({err.os_error.strerror or err.os_error})") from None
        except (aiohttp.ClientError, OSError) as err:
            raise ServerUnavailable(in_a_line(err)[:300]) from None

    def content_of(self, status: int, content: Any, path: str) -> Any:
        """The JSON of an answer; raises an error for an error status."""
        if status < 300:
            if not isinstance(content, dict):
                raise ConfigError(f"{self.name}: {path} answers {status} without an object of JSON")
            return content
        message, code = read_error(content)
        if status == 500 and code == NOT_FINITE:
            return UNUSABLE
        if status in BUSY:
            raise (InsideFailed if status == 500 else ServerUnavailable)(f"{path} answers {status}: {message}")
        raise Refused(f"{self.name}: {path} answers {status}: {message}{self.hint(status, path)}", code)

    def hint(self, status: int, path: str) -> str:
        if status in (401, 403):
            return "; policy.token_from says where the token is" + ("" if self.token else ", and there is none")
        if status == 404 and self.owner == "vllm" and path in (RPC, "/resume"):
            return "; only with VLLM_SERVER_DEV_MODE=1 in its environment does vllm serve take new weights"
        return ""

    async def close(self) -> None:
        if self.session is not None:
            await self.session.close()
            await asyncio.sleep(0)


UNUSABLE = {"choices": [{"token_ids": [0], "finish_reason": "stop", "logprobs": {"token_logprobs": [None]}}]}
