"""The server of language models: OpenAI's routes, and routes for a trainer's new weights.

Programs of this machine need no token unless one is set; all other programs do (ServeConfig refuses anything else).
Routes that change the server (weights, pause) always need the token.

A request over HTTP costs as much as about ten tokens of a small model. So policy workers send as many conversations as
a server has room for in one request to /v1/completions/many, and read the answers from the open connection:

    {"requests": [BODY, BODY, ...]}             bodies of /v1/completions, of one prompt and one answer each
    {"number": 1, "status": 200, "body": ...}   a line of an answer: its tokens and their log-probs; or of an error
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import re
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from embodied.core.conversations import pictures_in
from embodied.core.errors import EmbodiedError
from embodied.core.types import SamplingRule
from embodied.policies.language.engine import Answer, Sampling
from embodied.policies.language.http_messages import (
    MOST_TOGETHER,
    NOT_FINITE,
    OWNER,
    UNSEEN,
    ArrivingWeights,
    settings_of,
)
from embodied.policies.language.policy import LanguagePolicy
from embodied.runtime.device_memory import num_bytes
from embodied.runtime.published_weights import BUCKET_BYTES, Blob
from embodied.serving import openai as openai
from embodied.serving.config import FOREIGN_HOST, TOKEN, ServeConfig, is_token_shown
from embodied.serving.generation import ROUND, Generation, Mode, ServedConversation, Written
from embodied.serving.openai import AnswerChoice, Ask, BadRequest, PictureReader, StreamedAnswer, with_tools

HEAD_S, BODY_S = 15.0, 60.0  # limits for a first request's head, and for a request's body
SEND_S = 30.0  # limit for sending a part of an answer
CHANGE_S = 3600.0  # limit for open answers to end and new weights to load
REQUESTS = 1024  # simultaneous requests, unless max_clients is set
SPARE = 64  # further connections, for health checks and refused requests
IDLE_S = 75.0  # seconds that a connection is kept after an answer
TOKEN_BYTES = 16  # of a request, for each prompt token
HEAD_BYTES = 16 << 20  # head of a bucket: names, shapes and offsets of tensors
OTHERS = 1_000_000  # bytes of a request besides the tokens of its prompt
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON: half of a surrogate pair
HEALTH = ("/healthz", "/health")
ASKING = ("/v1/models", *HEALTH, "/metrics", "/weight_info", "/is_paused")
ANSWERING = ("/v1/completions", "/v1/completions/many", "/v1/chat/completions", "/tokenize", "/detokenize")
CONTROL = ("/update_weights", "/receive_weights", "/reload_weights", "/pause", "/resume", "/abort_requests")


class UnusableAnswer(EmbodiedError):
    """The weights give non-finite log-probs for this prompt."""

    code = NOT_FINITE


@dataclass(frozen=True)
class Origin:
    """The source of a server's first weights."""

    name: str  # of the model, for clients
    folder: Path
    version: int


class LanguageServer:
    """Answers clients over HTTP. A route is answered by the method of its last word."""

    def __init__(
        self, policy: LanguagePolicy, config: ServeConfig, origin: Origin, notify: Callable[[str], None] = print
    ) -> None:
        self.policy, self.config, self.notify = policy.eval().to(config.device), config, notify
        self.origin = replace(origin, folder=origin.folder.resolve())
        self.token, self.numbers = config.token, itertools.count()
        self.active = 0
        self.most = config.max_clients or REQUESTS
        self.word = cache(lambda token: self.policy.tokenizer.decode([token]))  # answers repeat tokens
        self.arriving = ArrivingWeights(num_bytes(policy.state_dict().values()))
        self.pictures = PictureReader(self.policy.sight, self.policy.max_length)

    async def run(self, ready: Callable[[int], None], stop: asyncio.Event) -> None:
        """Serve until `stop` is set; calls `ready` with the port."""
        loop = asyncio.get_running_loop()
        on_failure = partial(loop.call_soon_threadsafe, stop.set)
        self.generation = await asyncio.to_thread(Generation, self.policy, self.origin.version, on_failure)
        app = web.Application(client_max_size=self.longest, middlewares=[self.guard])
        for method, paths in (("GET", ASKING), ("POST", (*ANSWERING, *CONTROL))):
            for path in paths:
                handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
                handler = self.chat if "chat" in path else getattr(self, path.rpartition("/")[2])
                app.router.add_route(method, path, handler)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, keepalive_timeout=IDLE_S
        )
        server = None
        try:
            await runner.setup()
            assert runner.server is not None, "setup makes it"
            self.connections = Connections(runner.server, self.most + SPARE)
            server = await loop.create_server(self.connections.accept, self.config.host, self.config.port, backlog=128)
            ready(server.sockets[0].getsockname()[1])
            await stop.wait()
        finally:
            if server is not None:
                await stop_accepting(server)
            await runner.cleanup()
            self.pictures.close()
            await asyncio.to_thread(self.generation.close)
        if failed := self.generation.failed:
            raise EmbodiedError(f"the engine failed ({type(failed).__name__}: {failed}), so the server ends")

    # Access

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse requests without the token, and report errors as OpenAI does."""
        self.connections.note_request(request)
        try:
            self.check_access(request)
            return await handler(request)
        except BadRequest as err:
            return refusal(err.status, str(err), param=err.param, code=err.code)
        except web.HTTPRequestEntityTooLarge:
            return refusal(413, f"a request has {self.longest} bytes at most (max_request_mb)")
        except web.HTTPException as err:
            return refusal(err.status, f"{request.method} {request.path}: {err.reason}")
        except EmbodiedError as err:
            return refusal(500, str(err), "server_error", code=getattr(err, "code", None))
        except Exception:
            self.notify(f"{request.method} {request.path}: {traceback.format_exc()}")
            return refusal(500, "the server failed; its log says why", "server_error")

    def check_access(self, request: web.Request) -> None:
        token, shown = self.token, request.headers.getall("Authorization", [])
        if not self.config.names_this_server(request.headers.getall("Host", [])):
            raise BadRequest(FOREIGN_HOST, status=403)
        if request.path in HEALTH:
            return
        if "Origin" in request.headers:  # pages in a browser may not use this server
            raise BadRequest("pages of browsers are not answered", status=403)
        if token is None and request.path in CONTROL:
            why = f"{request.path} needs a token: start the server with {TOKEN} in its environment"
            raise BadRequest(why, status=401)
        if token is not None and not is_token_shown(shown, "Bearer", token):
            why = "a valid token is needed: Authorization: Bearer TOKEN"
            raise BadRequest(why, status=401, code="invalid_api_key")

    @property
    def longest(self) -> int:
        """The most bytes that a request may have."""
        most = self.config.max_request_mb
        return self.policy.max_length * TOKEN_BYTES + OTHERS if most is None else most * 1_000_000

    # Answers

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, openai.read_completion(await body_of(request)))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self.answer(request, openai.read_chat(await body_of(request)))

    @contextlib.contextmanager
    def admitted(self, *asks: Ask) -> Iterator[None]:
        """Count a request while it is answered; refuses requests above the limit or for another model."""
        if model := next((ask.model for ask in asks if ask.model and ask.model != self.origin.name), None):
            raise BadRequest(f"model={model[:80]}: this server has {self.origin.name}", "model", 404)
        if self.active >= self.most:
            raise BadRequest(f"{self.active} requests are being answered, which is the most (max_clients)", status=503)
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def answer(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        number = next(self.numbers)
        with self.admitted(ask):
            await self.pictures.process(ask)
            conversations = await asyncio.to_thread(self.conversations, ask, number)
            if ask.stream:
                return await self.stream(request, ask, conversations, number)
            futures = [*map(asyncio.wrap_future, self.generation.ask(*conversations))]
            try:
                written = await asyncio.gather(*futures)
            finally:
                for future in futures:  # the client has disconnected, or an answer has failed
                    future.cancel()
        choices = [self.choice(ask, *each) for each in zip(conversations, written)]
        scores = [written[at - at % ask.n].prompt for at in range(len(written))]  # of the first answer to a prompt
        choices = [replace(choice, scores=each) for choice, each in zip(choices, scores)]
        return web.json_response(openai.reply(ask, choices, self.head(ask, number, written[-1])))

    def head(self, ask: Ask, number: int, weights: Written | Generation) -> dict[str, Any]:
        return openai.head_of(ask, number, self.origin.name, weights.version, weights.fingerprint)

    def conversations(self, ask: Ask, number: int) -> list[ServedConversation]:
        """The conversations of a request, n for each prompt."""
        stops = frozenset(ask.stop_token_ids) | (frozenset() if ask.ignore_eos else self.policy.tokenizer.stops)
        most = self.policy.config.max_tokens if ask.max_tokens is None else ask.max_tokens
        scores = ask.top_logprobs if ask.echo and ask.logprobs else ask.prompt_logprobs
        names = (f"cmpl-{number}", f"chatcmpl-{number}", *([ask.request_id] if ask.request_id else []))
        if ask.noise:
            seed, stream = ask.noise.seed, ask.noise.stream
        elif ask.seed is not None:
            seed, stream = ask.seed, ROUND
        else:  # without a noise address no two answers share noise
            seed, stream = self.config.seed, f"{ROUND}/{number}"
        drawn = ask.temperature, ask.top_p, max(ask.top_k, 0)
        rule = SamplingRule(*drawn, logprob_temperature=ask.logprob_temperature, min_p=ask.min_p)
        sampling = Sampling(seed, f"act/{stream}", rule, stops, ask.top_logprobs, ask.proof)
        asked: list[ServedConversation] = []
        for prompt in ask.prompts:
            tokens = self.encoded(prompt, ask.tools)
            pictures = tuple(ask.pictures) if isinstance(prompt, list) else pictures_in(prompt)
            if pictures and (ask.tools or ask.echo or scores is not None):
                raise BadRequest("tools, echo and prompt_logprobs are not done with pictures", "messages")
            if ask.pictures:
                openai.check_places(tokens, pictures, self.policy.sight)
            for copy in range(ask.n):
                episode, scored = ask.noise.episode if ask.noise else len(asked), None if copy else scores
                asked.append(
                    ServedConversation(tokens, most, episode, sampling, names, ask.stop, pictures, scores=scored)
                )
        return asked

    def encoded(self, prompt: openai.Asked, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """A prompt as tokens; refuses prompts that leave no room for an answer."""
        most, words = self.policy.max_length, self.policy.model.config.get_text_config().vocab_size
        if isinstance(prompt, list):
            tokens = prompt
            if max(tokens) >= words:
                raise BadRequest(f"prompt: token {max(tokens)} is none of this model's {words}", "prompt")
        else:
            where = "prompt" if isinstance(prompt, str) else "messages"
            try:  # with tools the chat template has added the begin token
                text = with_tools(self.policy.tokenizer, prompt, tools) if tools else prompt
                tokens = self.policy.tokenizer.encode(text, first=not tools, max_tokens=most)
            except BadRequest:
                raise
            except EmbodiedError as err:  # the chat template refuses it, or it is far too long
                raise BadRequest(str(err), where) from None
        if len(tokens) >= most:
            why = f"a prompt of {len(tokens)} tokens leaves no room for an answer within {most}"
            raise BadRequest(f"{why}, the longest conversation", "prompt")
        return tokens

    def choice(self, ask: Ask, conversation: ServedConversation, written: Written) -> AnswerChoice:
        """The client's result of an answer."""
        if written.answer.dropped:
            raise UnusableAnswer(written.answer.dropped)
        ids = written.answer.tokens.tolist()
        ended = ids and ids[-1] in conversation.sampling.stops  # without the end token
        text, stopped = openai.cut_at_stop(self.policy.tokenizer.decode(ids[:-1] if ended else ids), ask.stop)
        if ask.echo:
            text = self.policy.tokenizer.decode(conversation.tokens) + text
        return self.part_of_answer(ask, conversation, written.answer, text, "stop" if stopped else written.finish)

    def part_of_answer(
        self, ask: Ask, conversation: ServedConversation, answer: Answer, text: str, finish: str = ""
    ) -> AnswerChoice:
        words: Callable[[int], str] = "token_id:{}".format if ask.return_tokens_as_token_ids else self.word
        numbers = answer.tokens.tolist(), answer.logprobs.tolist(), answer.likeliest
        shown = self.policy.shown_tokens(conversation.tokens)
        return AnswerChoice(shown, *numbers, text, finish, words, proof=answer.proof)

    async def stream(
        self, request: web.Request, ask: Ask, conversations: list[ServedConversation], number: int
    ) -> web.StreamResponse:
        """The answers as they are generated, in server-sent events."""
        parts = [StreamedAnswer(max(map(len, ask.stop), default=1) - 1) for _ in conversations]
        heads, whole = [self.head(ask, number, self.generation)], list[AnswerChoice]()

        def event(place: int, news: Answer | Future[Written]) -> bytes:
            first = not parts[place].begun
            try:
                if isinstance(news, Future):
                    written = news.result()
                    heads.append(self.head(ask, number, written))
                    whole.append(self.choice(ask, conversations[place], written))
                    new = parts[place].rest(whole[-1])
                else:
                    text = self.policy.tokenizer.decode(news.tokens.tolist())
                    new = parts[place].open_part(self.part_of_answer(ask, conversations[place], news, text))
            except EmbodiedError as err:  # after the head only an event can carry the error
                return openai.as_event(openai.error(str(err), "server_error", code=getattr(err, "code", None)))
            return openai.as_event(openai.chunk(ask, new, heads[-1], first, place))

        def end() -> bytes:
            usage = {"choices": [], "usage": openai.usage(ask, whole)}
            last = openai.as_event(heads[-1] | usage) if ask.stream_options.include_usage else b""
            return last + b"data: [DONE]\n\n"

        partial_calls = bool(ask.tools)  # are not sent
        return await self.send(request, "text/event-stream", conversations, event, not partial_calls, end)

    async def many(self, request: web.Request) -> web.StreamResponse:
        """{"requests": [...]}: sends a line of JSON for each answer, in the order of their ends."""
        most = self.longest + MOST_TOGETHER * self.policy.max_length * TOKEN_BYTES
        asks = openai.read_many(await body_of(request, most))
        with self.admitted(*asks):
            await self.pictures.process(*asks)
            numbered = [(ask, next(self.numbers)) for ask in asks]
            conversations = await asyncio.to_thread(lambda: [self.conversations(*asked)[0] for asked in numbered])
            return await self.send(request, "application/x-ndjson", conversations, line)

    async def send(
        self,
        request: web.Request,
        kind: str,
        conversations: Sequence[ServedConversation],
        part_of: Callable[[int, Any], bytes],
        grows: bool = False,
        end: Callable[[], bytes] = bytes,
    ) -> web.StreamResponse:
        """A response of this kind in parts: `part_of` a conversation's number and its ended answer (a future), or also
        its answer so far if it `grows`. A client that leaves or does not read gives up its answers."""
        loop, news, futures = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Any]](), list[Future[Written]]()

        def tell(place: int, what: Answer | Future[Written]) -> None:
            loop.call_soon_threadsafe(news.put_nowait, (place, what))

        for place, conversation in enumerate(conversations):
            conversation.on_progress = partial(tell, place) if grows else None
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        try:
            futures += self.generation.ask(*conversations)
            for place, future in enumerate(futures):
                future.add_done_callback(partial(tell, place))
            await response.prepare(request)
            left = len(futures)
            while left:
                came = [await news.get()]
                while not news.empty():
                    came.append(news.get_nowait())
                left -= sum(isinstance(what, Future) for _, what in came)
                async with asyncio.timeout(SEND_S):
                    await response.write(b"".join(part_of(*each) for each in came))
            await response.write(end())
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        except ConnectionResetError:
            pass
        finally:
            for future in futures:
                future.cancel()
        return response

    # About the server

    async def health(self, _: web.Request) -> web.Response:
        if self.generation.failed:
            return refusal(503, "the engine has failed", "server_error")
        return web.Response(text="OK\n")

    healthz = health

    async def models(self, _: web.Request) -> web.Response:
        """The model, with the settings that trainers compare with their own."""
        policy, generation = self.policy, self.generation
        model = {"id": self.origin.name, "object": "model", "created": int(time.time()), "owned_by": OWNER}
        model |= {"max_model_len": policy.max_length, "lora_rank": policy.config.lora_rank}
        model |= {"policy_version": generation.version, "max_running": generation.engine.slots}
        return web.json_response({"object": "list", "data": [model | {"settings": settings_of(policy)}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        """{"prompt": TEXT} or {"messages": [...]}: their tokens."""
        ask = openai.read_tokenize(await body_of(request))
        await self.pictures.process(ask)
        tokens = self.policy.shown_tokens(await asyncio.to_thread(self.encoded, ask.prompts[0], ask.tools))
        return web.json_response({"count": len(tokens), "max_model_len": self.policy.max_length, "tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        """{"tokens": [...]}: their text."""
        tokens = openai.read(openai.TokenNumbers, await body_of(request)).tokens
        words = self.policy.model.config.get_text_config().vocab_size
        if max(tokens, default=0) >= words or len(tokens) > self.policy.max_length:
            raise BadRequest(f"tokens should be numbers below {words}, not more than a conversation has", "tokens")
        return web.json_response({"prompt": self.policy.tokenizer.decode(tokens)})

    async def metrics(self, _: web.Request) -> web.Response:
        """The server's numbers, in Prometheus' format."""
        return web.Response(text=openai.prometheus(self.generation.numbers() | {"requests_active": self.active}))

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.generation.paused})

    async def weight_info(self, _: web.Request) -> web.Response:
        generation = self.generation
        return web.json_response({"weight_version": generation.fingerprint, "policy_version": generation.version})

    # Control

    async def update_weights(self, request: web.Request) -> web.Response:
        """{"path": FOLDER, "version": N}: load its weights when all open answers have ended, or, with "mode": "abort",
        at once. "weight_version" is their name in /weight_info; known weights are not loaded again."""
        new = openai.read(openai.NewWeights, await body_of(request))
        if not (os.path.isabs(new.path) and os.path.isdir(new.path)):
            raise BadRequest(f"path: {new.path[:200]} is not a folder that this server sees", code=UNSEEN)
        return await self.change(Path(new.path), new.version, new.mode, new.weight_version)

    async def reload_weights(self, _: web.Request) -> web.Response:
        """Load the checkpoint's own weights again."""
        return await self.change(self.origin.folder, self.origin.version, "wait")

    async def receive_weights(self, request: web.Request) -> web.Response:
        """A bucket of a version; buckets come in order. The last one loads the version as /update_weights does."""
        data = await bytes_of(request, BUCKET_BYTES + HEAD_BYTES)
        try:
            bucket, name = self.arriving.add(data)
        except ValueError as err:
            raise BadRequest(str(err)) from None
        except EmbodiedError as err:  # out of order, damaged or incomplete: the client may send again
            raise BadRequest(str(err), status=503) from None
        if not bucket.last:
            return web.json_response({"status": "received", "number": bucket.number})
        return await self.change(self.arriving.take(), bucket.version, "wait", name)

    async def change(
        self, source: Path | dict[str, Blob], version: int, mode: Mode, known: str | None = None
    ) -> web.Response:
        try:
            before = self.generation.fingerprint
            fingerprint = await self.changed(self.generation.update(source, version, mode, known))
        except BadRequest:
            raise
        except (EmbodiedError, OSError) as err:  # another model's weights, damaged, or not readable
            raise BadRequest(str(err), "path") from None
        if fingerprint != before:
            self.notify(f"weights     version {version}")
        return web.json_response({"status": "updated", "weight_version": fingerprint, "policy_version": version})

    async def abort_requests(self, request: web.Request) -> web.Response:
        """{"request_ids": [...]}, or {} for all: end their answers now."""
        body = (await body_of(request)) if request.can_read_body else {}
        names = openai.read(openai.RequestNames, body).request_ids
        return web.json_response({"aborted": await self.changed(self.generation.abort_requests(names))})

    async def pause(self, request: web.Request) -> web.Response:
        mode: Any = request.query.get("mode", "abort")
        if mode not in get_args(Mode):
            raise BadRequest(f"mode should be {', '.join(get_args(Mode))}", "mode")
        await self.changed(self.generation.pause(mode))
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        await self.changed(self.generation.resume())
        return web.json_response({"status": "resumed"})

    async def changed(self, done: Any) -> Any:
        async with asyncio.timeout(CHANGE_S):
            return await asyncio.shield(asyncio.wrap_future(done))


def line(number: int, future: Future[Written]) -> bytes:
    """A client's line for an answer: its choice as in /v1/completions, without text."""
    try:
        written = future.result()
        if written.answer.dropped:
            raise UnusableAnswer(written.answer.dropped)
    except EmbodiedError as err:
        status, body = 500, openai.error(str(err), "server_error", code=getattr(err, "code", None))
    else:
        answer = written.answer
        choice: dict[str, Any] = {"token_ids": answer.tokens.tolist(), "finish_reason": written.finish}
        choice |= {"logprobs": {"token_logprobs": answer.logprobs.tolist()}}
        choice |= {"proof": [block.to_text() for block in answer.proof]} if answer.proof else {}
        status, body = 200, {"choices": [choice], "system_fingerprint": written.fingerprint}
    return json.dumps({"number": number, "status": status, "body": body}).encode() + b"\n"


# Connections and requests: limits of number, length and time, before a request is parsed


class Connections:
    """Limits the number of open connections, and closes connections without a request: aiohttp keeps them for ever."""

    def __init__(self, server: web.Server, most: int) -> None:
        self.server, self.most = server, most
        self.silent: set[Any] = set()  # connections without a request so far
        self.new: set[Any] = set()  # connections of the last second: the server may not know them yet

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

    def note_request(self, request: web.Request) -> None:
        self.silent.discard(request.protocol)

    def close_silent(self, connection: Any) -> None:
        if connection in self.silent:
            self.silent.remove(connection)
            connection.force_close()


class TurnedAway(asyncio.Protocol):
    """A refused connection, above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def stop_accepting(server: asyncio.Server) -> None:
    """Stops listening. Connections that are being accepted are made first: Python 3.11 neither makes nor closes them
    once their server is closed."""
    loop = asyncio.get_running_loop()
    for listener in server.sockets:
        loop.remove_reader(listener)
    for _ in range(3):  # turns of the loop: accepted, prepared, made
        await asyncio.sleep(0)
    server.close()


async def bytes_of(request: web.Request, most: int | None = None) -> bytes:
    """The body of a request with at most `most` bytes (default: the limit for one prompt)."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            if most is None:
                return await request.read()
            async for chunk in request.content.iter_chunked(1 << 20):
                data += chunk
                if len(data) > most:
                    raise BadRequest(f"a request has {most} bytes at most here", status=413)
    except TimeoutError:
        raise BadRequest(f"the request's body did not arrive within {BODY_S:g} s", status=408) from None
    except (web.RequestPayloadError, BadHttpMessage):
        raise BadRequest("the request's body does not have the encoding of its headers (Content-Encoding)") from None
    return bytes(data)


async def body_of(request: web.Request, most: int | None = None) -> Any:
    """The JSON of a request with at most `most` bytes."""
    data = await bytes_of(request, most)
    try:
        body = json.loads(text := data.decode(), parse_constant=lambda _: math.nan)
        if SURROGATE.search(text):
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise BadRequest("the request's text has half of a character (a lone surrogate)") from None
    except (ValueError, RecursionError):
        raise BadRequest("the request is no JSON") from None
    return body


def refusal(status: int, text: str, kind: str = "invalid_request_error", **more: Any) -> web.Response:
    return web.json_response(openai.error(text, kind, **more), status=status)
