"""The server of language models: OpenAI's routes, and those by which a trainer hands over weights.

Who may ask: programs of this machine without a token, others with it (ServeConfig refuses anything else). What changes
the server itself, its weights or whether it answers, needs the token always.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from embodied.core.conversations import SamplingRule
from embodied.core.errors import EmbodiedError
from embodied.policies.language.engine import Answer, Sampling
from embodied.policies.language.http_messages import NOT_FINITE, UNSEEN, read_bucket, settings_of
from embodied.policies.language.policy import LanguagePolicy
from embodied.runtime.device_memory import num_bytes
from embodied.runtime.tensor_bytes import Blob
from embodied.runtime.weights import BUCKET_BYTES
from embodied.serving import openai_protocol as openai
from embodied.serving.arriving_weights import ArrivingWeights
from embodied.serving.config import FOREIGN_HOST, TOKEN, ServeConfig, is_token_shown
from embodied.serving.generation import ROUND, Generation, Mode, ServedConversation, Written
from embodied.serving.openai_protocol import AnswerChoice, Ask, BadRequest, Served

CHANGE_S = 3600.0  # at most until what is being written has ended and new weights are loaded
REQUESTS = 1024  # at a time, unless max_clients says otherwise
SPARE = 64  # connections beyond these, for health checks and for requests that are told to come again
IDLE_S = 75.0  # that a connection is kept after an answer
HEAD_S, BODY_S, SEND_S = 15.0, 60.0, 30.0  # for a first request's head, a request's body, and a part of an answer
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON: half of a character, or one of two halves
TOKEN_BYTES, OTHERS = 16, 1_000_000  # of a request: for each token of a prompt, and for all else
HEAD_BYTES = 16 << 20  # of a bucket: names, shapes and places of tensors


@dataclass(frozen=True)
class Origin:
    """The source of the weights that a server begins with."""

    name: str  # of the model, as clients see it
    folder: Path
    version: int


class LanguageServer:
    """Answers clients over HTTP."""

    def __init__(
        self, policy: LanguagePolicy, config: ServeConfig, origin: Origin, notify: Callable[[str], None] = print
    ) -> None:
        self.policy, self.config, self.notify = policy.eval().to(config.device), config, notify
        self.origin = replace(origin, folder=origin.folder.resolve())
        self.token = config.token
        self.numbers = itertools.count()
        self.active = 0
        self.arriving: ArrivingWeights | None = None

    async def run(self, ready: Callable[[int], None], stop: asyncio.Event) -> None:
        """Serve until `stop` is set; calls `ready` with the port."""
        loop = asyncio.get_running_loop()
        on_failure = partial(loop.call_soon_threadsafe, stop.set)
        self.generation = await asyncio.to_thread(Generation, self.policy, self.origin.version, on_failure)
        app = web.Application(client_max_size=self.longest, middlewares=[self.guard])
        app.router.add_get("/healthz", self.health)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_get("/weight_info", self.weight_info)
        for path in CONTROL:
            app.router.add_post(path, getattr(self, path.removeprefix("/")))
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=IDLE_S
        )
        server = None
        try:
            await runner.setup()
            assert runner.server is not None, "setup makes it"
            self.connections = Connections(runner.server, (self.config.max_clients or REQUESTS) + SPARE)
            server = await loop.create_server(self.connections.accept, self.config.host, self.config.port, backlog=128)
            ready(server.sockets[0].getsockname()[1])
            await stop.wait()
        finally:
            if server is not None:
                server.close()
            await runner.cleanup()
            await asyncio.to_thread(self.generation.close)
        if failed := self.generation.failed:
            raise EmbodiedError(f"the engine failed ({type(failed).__name__}: {failed}), so the server ends")

    # Who may ask

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests without the token, and report errors as OpenAI does."""
        self.connections.asked(request)
        try:
            if refused := self.refuse(request):
                return refused
            return await handler(request)
        except BadRequest as err:
            return refusal(err.status, str(err), param=err.param)
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"a request has {self.longest} bytes at most (max_request_mb)")
        except web.HTTPException as err:
            return refusal(err.status, f"{request.method} {request.path}: {err.reason}")
        except EmbodiedError as err:
            return refusal(500, str(err), "server_error", code=getattr(err, "code", None))
        except Exception:
            self.notify(f"{request.method} {request.path}: {traceback.format_exc()}")
            return refusal(500, "the server failed; its log says why", "server_error")

    def refuse(self, request: web.Request) -> web.Response | None:
        if not self.config.names_this_server(request.headers.getall("Host", [])):
            return refusal(403, FOREIGN_HOST)
        if request.path in ("/healthz", "/health"):
            return None
        if "Origin" in request.headers:  # no page in a browser may use this server behind its user's back
            return refusal(403, "pages of browsers are not answered")
        token = self.token
        if token is None and request.path in CONTROL:
            return refusal(401, f"{request.path} needs a token: start the server with {TOKEN} in its environment")
        if token is not None:
            shown = request.headers.getall("Authorization", [])
            if not is_token_shown(shown, "Bearer", token):
                return refusal(401, "a valid token is needed: Authorization: Bearer TOKEN", code="invalid_api_key")
        return None

    @property
    def longest(self) -> int:
        """The most bytes that a request may have."""
        most = self.config.max_request_mb
        return self.policy.max_length * TOKEN_BYTES + OTHERS if most is None else most * 1_000_000

    # Answers

    async def health(self, _: web.Request) -> web.Response:
        if self.generation.failed:
            return refusal(503, "the engine has failed", "server_error")
        return web.Response(text="OK\n")

    async def models(self, _: web.Request) -> web.Response:
        limits = self.policy.max_length, self.policy.config.lora_rank, self.generation.engine.slots
        return web.json_response(openai.models(self.served(), *limits, settings_of(self.policy)))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, openai.read_completion(await body_of(request)))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, openai.read_chat(await body_of(request)))

    async def answer(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        if ask.model and ask.model != self.origin.name:
            raise BadRequest(f"model={ask.model[:80]}: this server has {self.origin.name}", "model", 404)
        number = next(self.numbers)
        if self.active >= (self.config.max_clients or REQUESTS):
            raise BadRequest(f"{self.active} requests are being answered, which is the most (max_clients)", status=503)
        self.active += 1
        try:
            conversations = await asyncio.to_thread(self.conversations, ask, number)
            if ask.stream:
                return await self.stream(request, ask, conversations[0], number)
            found = [asyncio.wrap_future(self.generation.ask(each)) for each in conversations]
            try:
                written = await asyncio.gather(*found)
            finally:
                for future in found:  # the client is gone, or one has failed
                    future.cancel()
        finally:
            self.active -= 1
        choices = [self.choice(ask, *each) for each in zip(conversations, written)]
        finished = written[-1]
        served = Served(self.origin.name, finished.version, finished.fingerprint)
        return web.json_response(openai.reply(ask, str(number), choices, served))

    def conversations(self, ask: Ask, number: int) -> list[ServedConversation]:
        """The conversations that a request asks to continue, n for each prompt."""
        stops = frozenset(ask.stop_token_ids) | (frozenset() if ask.ignore_eos else self.policy.tokenizer.stops)
        most = ask.max_tokens or self.policy.config.max_tokens
        found: list[ServedConversation] = []
        for prompt in ask.prompts:
            tokens = self.encoded(prompt)
            for _ in range(ask.n):
                noise = ask.noise
                episode = noise.episode if noise else len(found)
                if noise:
                    seed, stream = noise.seed, f"act/{noise.stream}"
                elif ask.seed is not None:
                    seed, stream = ask.seed, f"act/{ROUND}"
                else:  # nobody names the noise, so no two answers share it
                    seed, stream = self.config.seed, f"act/{ROUND}/{number}"
                sampling = Sampling(seed, stream, SamplingRule(ask.temperature, ask.top_p, ask.top_k), stops)
                found.append(ServedConversation(tokens, most, episode, sampling, ask.stop))
        return found

    def encoded(self, prompt: openai.Asked) -> list[int]:
        """A prompt as tokens that leave room for an answer."""
        if isinstance(prompt, list):
            tokens, words = prompt, self.policy.model.config.get_text_config().vocab_size
            if max(tokens) >= words:
                raise BadRequest(f"prompt: token {max(tokens)} is none of this model's {words}", "prompt")
        else:
            try:
                tokens = self.policy.tokenizer.encode(prompt, first=True, max_tokens=self.policy.max_length)
            except EmbodiedError as err:  # the chat template refuses it, or it is far too long
                raise BadRequest(str(err), "prompt" if isinstance(prompt, str) else "messages") from None
        if len(tokens) >= self.policy.max_length:
            raise BadRequest(
                f"a prompt of {len(tokens)} tokens leaves no room for an answer within {self.policy.max_length}, the "
                "longest conversation",
                "prompt",
            )
        return tokens

    def choice(self, ask: Ask, conversation: ServedConversation, written: Written) -> AnswerChoice:
        """The result that a client gets of an answer."""
        answer = written.answer
        if answer.dropped:
            raise UnusableAnswer(answer.dropped)
        ids = answer.tokens.tolist()
        ended = ids and ids[-1] in conversation.sampling.stops  # the token that ends it is no word of it
        text, found = cut(self.policy.tokenizer.decode(ids[:-1] if ended else ids), ask.stop)
        return self.part(ask, conversation, answer, 0, text, "stop" if found else written.finish)

    def served(self) -> Served:
        return Served(self.origin.name, self.generation.version, self.generation.fingerprint)

    async def stream(
        self, request: web.Request, ask: Ask, conversation: ServedConversation, number: int
    ) -> web.StreamResponse:
        """The answer as it is written, in server-sent events."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[Answer | None]()
        conversation.on_progress = lambda answer: loop.call_soon_threadsafe(news.put_nowait, answer)
        done = asyncio.wrap_future(self.generation.ask(conversation))
        done.add_done_callback(lambda _: news.put_nowait(None))
        served = self.served()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        held = max(map(len, ask.stop), default=1) - 1  # letters that may be the beginning of a text to stop at
        tokens, letters = 0, 0

        async def send(event: Any) -> None:
            async with asyncio.timeout(SEND_S):
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        try:
            await response.prepare(request)
            for first in itertools.chain([True], itertools.repeat(False)):
                if (answer := await news.get()) is None:
                    break
                ids = answer.tokens.tolist()
                text = self.policy.tokenizer.decode(ids)
                text = text[: len(text) - held].rstrip("\ufffd")  # a letter may take several tokens
                part = self.part(ask, conversation, answer, tokens, text[letters:])
                await send(openai.chunk(ask, str(number), part, served, first))
                tokens, letters = len(ids), max(letters, len(text))
            whole = self.choice(ask, conversation, await done)
            served = Served(self.origin.name, done.result().version, done.result().fingerprint)
            rest = self.part(ask, conversation, done.result().answer, tokens, whole.text[letters:], whole.finish)
            await send(openai.chunk(ask, str(number), rest, served, first))
            if ask.usage:
                await send(openai.last_chunk(ask, str(number), whole, served))
        except EmbodiedError as err:  # after the head was sent an event alone can say it
            await send(openai.error(str(err), "server_error", code=getattr(err, "code", None)))
        except TimeoutError:  # the client reads nothing
            if request.transport is not None:
                request.transport.abort()
            return response
        finally:
            done.cancel()
        await response.write(b"data: [DONE]\n\n")
        return response

    def part(
        self, ask: Ask, conversation: ServedConversation, answer: Answer, begin: int, text: str, finish: str = ""
    ) -> AnswerChoice:
        ids, logprobs = answer.tokens[begin:].tolist(), answer.logprobs[begin:].tolist()
        pieces = [self.policy.tokenizer.decode([one]) for one in ids] if ask.logprobs else ()
        return AnswerChoice(conversation.tokens, ids, logprobs, pieces, text, finish)

    # Control

    async def weight_info(self, _: web.Request) -> web.Response:
        about = self.served()
        return web.json_response({"weight_version": about.fingerprint, "policy_version": about.version})

    async def update_weights(self, request: web.Request) -> web.Response:
        """{"path": FOLDER, "version": N}: load its weights when all that is being written has ended, or, with
        "mode": "abort", at once. "weight_version": what /weight_info will call them; those it has are not loaded."""
        fields = await body_of(request)
        if not isinstance(fields, dict) or fields.keys() - {"path", "version", "mode", "weight_version"}:
            raise BadRequest("send path, version and, if you like, mode and weight_version")
        version, mode = openai.whole(fields, "version", None, 0, openai.LARGEST_SEED), fields.get("mode", "wait")
        if version is None or not isinstance(fields.get("path"), str):
            raise BadRequest("send the path of a folder, and the version of its weights")
        return await self.change(Path(fields["path"]), version, mode, fields.get("weight_version"))

    async def reload_weights(self, _: web.Request) -> web.Response:
        """The checkpoint's own weights once more."""
        return await self.change(self.origin.folder, self.origin.version, "wait")

    async def receive_weights(self, request: web.Request) -> web.Response:
        """A bucket of a version (`bucket_bytes`), in order; the last one loads it as /update_weights does."""
        try:
            head, bucket, specs = read_bucket(await long_body_of(request))
            if bucket.number == 0:
                if self.arriving is not None and self.arriving.is_in_the_way(head["sender"]):
                    raise BadRequest("another program is sending weights; come again", status=503)
                self.arriving = ArrivingWeights(head["sender"], bucket.version, specs, self.size_bytes)
            if self.arriving is None or not self.arriving.add(head["sender"], bucket):
                raise BadRequest("this is not the next bucket of the weights that are coming; begin again", status=503)
        except ValueError as err:
            raise BadRequest(str(err)) from None
        except BadRequest:
            raise
        except EmbodiedError as err:  # damaged on its way, or incomplete: worth another attempt
            self.arriving = None
            raise BadRequest(str(err), status=503) from None
        if not bucket.last:
            return web.json_response({"status": "received", "number": bucket.number})
        blobs, self.arriving = self.arriving.blobs, None
        return await self.change(blobs, bucket.version, "wait", head["weight_version"])

    @property
    def size_bytes(self) -> int:
        return num_bytes(self.policy.state_dict().values())

    async def change(
        self, source: Path | dict[str, Blob], version: int, mode: Any, known: str | None = None
    ) -> web.Response:
        if mode not in ("wait", "abort"):
            raise BadRequest("mode should be wait or abort", "mode")
        if isinstance(source, Path) and not (source.is_absolute() and os.path.isdir(source)):  # is_dir may raise
            return refusal(400, f"path: {str(source)[:200]} is not a folder that this server sees", code=UNSEEN)
        try:
            before = self.generation.fingerprint
            found = await self.changed(self.generation.update(source, version, mode, known))
        except BadRequest:
            raise
        except (EmbodiedError, OSError) as err:  # another model's weights, damaged, or not readable
            raise BadRequest(str(err), "path") from None
        if found != before:
            self.notify(f"weights     version {version}")
        return web.json_response({"status": "updated", "weight_version": found, "policy_version": version})

    async def pause(self, request: web.Request) -> web.Response:
        said = request.query.get("mode", "abort")
        mode: Mode | None = next((one for one in get_args(Mode) if one == said), None)
        if mode is None:
            raise BadRequest(f"mode should be {', '.join(get_args(Mode))}", "mode")
        await self.changed(self.generation.pause(mode))
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await self.changed(self.generation.resume())
        return web.json_response({"status": "resumed"})

    async def changed(self, done: Any) -> Any:
        async with asyncio.timeout(CHANGE_S):
            return await asyncio.shield(asyncio.wrap_future(done))


CONTROL = ("/update_weights", "/receive_weights", "/reload_weights", "/pause", "/resume")


class Connections:
    """Bounds how many connections are open, and closes those that send no request: aiohttp keeps them for ever."""

    def __init__(self, server: web.Server, most: int) -> None:
        self.server, self.most = server, most
        self.silent: set[Any] = set()  # have not asked anything yet
        self.new: set[Any] = set()  # of the last second: the server may not know them yet

    def accept(self) -> asyncio.BaseProtocol:
        """The protocol of a new connection."""
        if len({*self.server.connections, *self.new}) >= self.most:
            return TurnedAway()
        connection, loop = self.server(), asyncio.get_running_loop()
        self.silent.add(connection)
        self.new.add(connection)
        loop.call_later(1.0, self.new.discard, connection)
        loop.call_later(HEAD_S, self.close_silent, connection)
        return connection

    def asked(self, request: web.Request) -> None:
        self.silent.discard(request.protocol)

    def close_silent(self, connection: Any) -> None:
        if connection in self.silent:
            self.silent.remove(connection)
            connection.force_close()


class TurnedAway(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


class UnusableAnswer(EmbodiedError):
    """The weights make no numbers for this prompt."""

    code = NOT_FINITE


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the first of these, and whether there is one."""
    places = [at for at in map(text.find, stops) if at >= 0]
    return (text[: min(places)], True) if places else (text, False)


async def long_body_of(request: web.Request) -> bytes:
    """The bytes of a request that may be as long as a bucket of weights."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_chunked(1 << 20):
                data += part
                if len(data) > BUCKET_BYTES + HEAD_BYTES:
                    raise BadRequest(f"a bucket has {BUCKET_BYTES} bytes at most", status=413)
    except TimeoutError:
        raise BadRequest(f"the request's body did not arrive within {BODY_S:g} s", status=408) from None
    return bytes(data)


async def body_of(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(BODY_S):
            text = (await request.read()).decode()
        body = json.loads(text, parse_constant=lambda _: math.nan)
    except TimeoutError:
        raise BadRequest(f"the request's body did not arrive within {BODY_S:g} s", status=408) from None
    except (ValueError, RecursionError):
        raise BadRequest("the request is no JSON") from None
    except (web.RequestPayloadError, BadHttpMessage):
        raise BadRequest("the request's body is not what its headers (Content-Encoding) say") from None
    if SURROGATE.search(text):
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest("the request's text has half of a character (a lone surrogate)") from None
    return body


def refusal(status: int, text: str, kind: str = "invalid_request_error", **more: Any) -> web.Response:
    return web.json_response(openai.error(text, kind, **more), status=status)
