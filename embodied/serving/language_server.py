"""The server of language models: OpenAI's routes, and routes for a trainer's new weights.

Programs of this machine need no token unless one is set; all other programs do (ServeConfig refuses anything else).
Routes that change the server (weights, pause) always need the token.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, get_args

from aiohttp import web

from embodied.core.conversations import SamplingRule, pictures_in
from embodied.core.errors import EmbodiedError
from embodied.policies.language.arriving_weights import ArrivingWeights
from embodied.policies.language.engine import Answer, Sampling
from embodied.policies.language.http_messages import UNSEEN, read_bucket, settings_of
from embodied.policies.language.policy import LanguagePolicy
from embodied.runtime.device_memory import num_bytes
from embodied.runtime.published_weights import BUCKET_BYTES, Blob
from embodied.serving import openai as openai
from embodied.serving.config import FOREIGN_HOST, TOKEN, ServeConfig, is_token_shown
from embodied.serving.generation import ROUND, Generation, Mode, ServedConversation, Written
from embodied.serving.http_requests import (
    NOT_SERVED,
    SEND_S,
    TOKEN_BYTES,
    Connections,
    UnusableAnswer,
    answer_many,
    body_of,
    long_body_of,
    refusal,
)
from embodied.serving.openai import AnswerChoice, Ask, BadRequest, PictureReader, Served, TokenScore, with_tools

CHANGE_S = 3600.0  # limit for open answers to end and new weights to load
REQUESTS = 1024  # simultaneous requests, unless max_clients is set
SPARE = 64  # further connections, for health checks and refused requests
IDLE_S = 75.0  # seconds that a connection is kept after an answer
HEAD_BYTES = 16 << 20  # head of a bucket: names, shapes and offsets of tensors
OTHERS = 1_000_000  # bytes of a request besides the tokens of its prompt


@dataclass(frozen=True)
class Origin:
    """The source of a server's first weights."""

    name: str  # of the model, for clients
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
        self.word = cache(lambda token: self.policy.tokenizer.decode([token]))  # answers repeat tokens
        self.arriving: ArrivingWeights | None = None
        self.pictures = PictureReader(self.policy.sight, self.policy.max_length)

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
        app.router.add_post("/v1/completions/many", partial(answer_many, self))
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/detokenize", self.detokenize)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/weight_info", self.weight_info)
        app.router.add_get("/is_paused", self.is_paused)
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
            self.pictures.close()
            await asyncio.to_thread(self.generation.close)
        if failed := self.generation.failed:
            raise EmbodiedError(f"the engine failed ({type(failed).__name__}: {failed}), so the server ends")

    # Access

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
            why = NOT_SERVED.get(request.path.rstrip("/"), err.reason) if err.status == 404 else err.reason
            return refusal(err.status, f"{request.method} {request.path}: {why}")
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
        if "Origin" in request.headers:  # pages in a browser may not use this server
            return refusal(403, "pages of browsers are not answered")
        if self.token is None and request.path in CONTROL:
            return refusal(401, f"{request.path} needs a token: start the server with {TOKEN} in its environment")
        if self.token is not None:
            shown = request.headers.getall("Authorization", [])
            if not is_token_shown(shown, "Bearer", self.token):
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

    @contextlib.contextmanager
    def admitted(self, *asks: Ask) -> Iterator[None]:
        """Count a request while it is answered; refuses requests above the limit or for another model."""
        if model := next((ask.model for ask in asks if ask.model and ask.model != self.origin.name), None):
            raise BadRequest(f"model={model[:80]}: this server has {self.origin.name}", "model", 404)
        if self.active >= (self.config.max_clients or REQUESTS):
            raise BadRequest(f"{self.active} requests are being answered, which is the most (max_clients)", status=503)
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def answer(self, request: web.Request, ask: Ask) -> web.StreamResponse:
        number = next(self.numbers)
        with self.admitted(ask):
            await self.pictures.process(ask.prompts)
            conversations = await asyncio.to_thread(self.conversations, ask, number)
            if ask.stream:
                return await self.stream(request, ask, conversations, number)
            futures = [*map(asyncio.wrap_future, self.generation.ask(*conversations))]
            try:
                written = await asyncio.gather(*futures)
            finally:
                for future in futures:  # the client has disconnected, or an answer has failed
                    future.cancel()
        scores = [written[at - at % ask.n].prompt for at in range(len(written))]
        choices = [self.choice(ask, *each) for each in zip(conversations, written, scores)]
        served = Served(self.origin.name, written[-1].version, written[-1].fingerprint)
        return web.json_response(openai.reply(ask, str(number), choices, served))

    def conversations(self, ask: Ask, number: int) -> list[ServedConversation]:
        """The conversations of a request, n for each prompt."""
        stops = frozenset(ask.stop_token_ids) | (frozenset() if ask.ignore_eos else self.policy.tokenizer.stops)
        most = self.policy.config.max_tokens if ask.max_tokens is None else ask.max_tokens
        scores = ask.top_logprobs if ask.echo and ask.logprobs else ask.prompt_logprobs
        names = (f"cmpl-{number}", f"chatcmpl-{number}", *([ask.request_id] if ask.request_id else []))
        asked: list[ServedConversation] = []
        for prompt in ask.prompts:
            tokens = self.encoded(prompt, ask.tools)
            pictures = () if isinstance(prompt, list) else pictures_in(prompt)
            if pictures and (ask.tools or scores is not None):
                raise BadRequest("tools and prompt_logprobs are not done with pictures; leave them out", "messages")
            for copy in range(ask.n):
                noise = ask.noise
                episode = noise.episode if noise else len(asked)
                if noise:
                    seed, stream = noise.seed, f"act/{noise.stream}"
                elif ask.seed is not None:
                    seed, stream = ask.seed, f"act/{ROUND}"
                else:  # without a noise address no two answers share noise
                    seed, stream = self.config.seed, f"act/{ROUND}/{number}"
                rule = SamplingRule(ask.temperature, ask.top_p, max(ask.top_k, 0))
                sampling = Sampling(seed, stream, rule, stops, ask.top_logprobs, ask.proof)
                scored = None if copy else scores
                asked.append(
                    ServedConversation(tokens, most, episode, sampling, names, ask.stop, pictures, scores=scored)
                )
        return asked

    def encoded(self, prompt: openai.Asked, tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """A prompt as tokens; refuses prompts that leave no room for an answer."""
        if tools:
            prompt = with_tools(self.policy.tokenizer, prompt, tools)
        if isinstance(prompt, list):
            tokens, words = prompt, self.policy.model.config.get_text_config().vocab_size
            if max(tokens) >= words:
                raise BadRequest(f"prompt: token {max(tokens)} is none of this model's {words}", "prompt")
        else:
            try:
                first = not tools  # else the chat template has added the begin token
                tokens = self.policy.tokenizer.encode(prompt, first=first, max_tokens=self.policy.max_length)
            except EmbodiedError as err:  # the chat template refuses it, or it is far too long
                raise BadRequest(str(err), "prompt" if isinstance(prompt, str) else "messages") from None
        if len(tokens) >= self.policy.max_length:
            raise BadRequest(
                f"a prompt of {len(tokens)} tokens leaves no room for an answer within {self.policy.max_length}, the "
                "longest conversation",
                "prompt",
            )
        return tokens

    def choice(
        self,
        ask: Ask,
        conversation: ServedConversation,
        written: Written,
        scores: Sequence[TokenScore] = (),
    ) -> AnswerChoice:
        """The client's result of an answer; `scores`: of the prompt."""
        answer = written.answer
        if answer.dropped:
            raise UnusableAnswer(answer.dropped)
        ids = answer.tokens.tolist()
        ended = ids and ids[-1] in conversation.sampling.stops  # without the end token
        text, stopped = cut(self.policy.tokenizer.decode(ids[:-1] if ended else ids), ask.stop)
        if ask.echo:
            text = self.policy.tokenizer.decode(conversation.tokens) + text
        whole = self.part(ask, conversation, answer, 0, text, "stop" if stopped else written.finish)
        return replace(whole, scores=scores, words=self.words(ask), proof=answer.proof)

    def words(self, ask: Ask) -> Callable[[int], str]:
        """The names of an answer's tokens."""
        return "token_id:{}".format if ask.return_tokens_as_token_ids else self.word

    def served(self) -> Served:
        return Served(self.origin.name, self.generation.version, self.generation.fingerprint)

    async def stream(
        self, request: web.Request, ask: Ask, conversations: list[ServedConversation], number: int
    ) -> web.StreamResponse:
        """The answers as they are generated, in server-sent events."""
        loop, news = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Answer | None]]()

        def tell(place: int, answer: Answer | None) -> None:
            news.put_nowait((place, answer))

        def tell_of(place: int, answer: Answer) -> None:
            loop.call_soon_threadsafe(tell, place, answer)

        for place, conversation in enumerate(conversations):
            if not ask.tools:  # a partial tool call is not sent
                conversation.on_progress = partial(tell_of, place)
        done = [*map(asyncio.wrap_future, self.generation.ask(*conversations))]
        for place, future in enumerate(done):
            future.add_done_callback(partial(lambda place, _: tell(place, None), place))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        parts = [StreamedAnswer(self, ask, each) for each in conversations]
        served, whole = self.served(), []

        async def send(event: Any) -> None:
            async with asyncio.timeout(SEND_S):
                await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")

        try:
            await response.prepare(request)
            for _ in conversations:
                place, answer = await news.get()
                while answer is not None:
                    first = not parts[place].begun
                    await send(openai.chunk(ask, str(number), parts[place].more(answer), served, first, place))
                    place, answer = await news.get()
                written, first = await done[place], not parts[place].begun
                served = Served(self.origin.name, written.version, written.fingerprint)
                whole.append(self.choice(ask, conversations[place], written))
                rest = parts[place].rest(written.answer, whole[-1])
                await send(openai.chunk(ask, str(number), rest, served, first, place))
            if ask.usage:
                counted = {"choices": [], "usage": openai.usage(ask, whole)}
                await send(openai.about(ask, str(number), served, ".chunk") | counted)
        except EmbodiedError as err:  # after the head only an event can carry the error
            await send(openai.error(str(err), "server_error", code=getattr(err, "code", None)))
        except TimeoutError:  # the client does not read
            if request.transport is not None:
                request.transport.abort()
            return response
        except ConnectionResetError:  # the client has disconnected
            return response
        finally:
            for future in done:
                future.cancel()
        with contextlib.suppress(ConnectionResetError):
            await response.write(b"data: [DONE]\n\n")
        return response

    def part(
        self, ask: Ask, conversation: ServedConversation, answer: Answer, begin: int, text: str, finish: str = ""
    ) -> AnswerChoice:
        ids, logprobs = answer.tokens[begin:].tolist(), answer.logprobs[begin:].tolist()
        word = self.words(ask)
        pieces = [word(one) for one in ids] if ask.logprobs else ()
        likeliest = [[(word(token), logprob) for token, logprob in each] for each in answer.likeliest[begin:]]
        return AnswerChoice(
            self.policy.shown_tokens(conversation.tokens),
            ids,
            logprobs,
            pieces,
            text,
            finish,
            likeliest or [()] * len(ids),
        )

    # About the server

    async def tokenize(self, request: web.Request) -> web.Response:
        """{"prompt": TEXT} or {"messages": [...]}: their tokens."""
        ask = openai.read_tokenize(await body_of(request))
        await self.pictures.process(ask.prompts)
        tokens = self.policy.shown_tokens(await asyncio.to_thread(self.encoded, ask.prompts[0], ask.tools))
        return web.json_response({"count": len(tokens), "max_model_len": self.policy.max_length, "tokens": tokens})

    async def detokenize(self, request: web.Request) -> web.Response:
        """{"tokens": [...]}: their text."""
        fields = await body_of(request)
        tokens: Any = fields.get("tokens") if isinstance(fields, dict) else None
        words = self.policy.model.config.get_text_config().vocab_size
        if not openai.is_ids(tokens) or max(tokens, default=0) >= words or len(tokens) > self.policy.max_length:
            raise BadRequest(
                f"tokens should be a list of numbers below {words}, not longer than a conversation", "tokens"
            )
        return web.json_response({"prompt": self.policy.tokenizer.decode(tokens)})

    async def metrics(self, _: web.Request) -> web.Response:
        """The server's numbers, in Prometheus' format."""
        return web.Response(text=openai.prometheus(self.generation.numbers() | {"requests_active": self.active}))

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.generation.paused})

    # Control

    async def weight_info(self, _: web.Request) -> web.Response:
        info = self.served()
        return web.json_response({"weight_version": info.fingerprint, "policy_version": info.version})

    async def update_weights(self, request: web.Request) -> web.Response:
        """{"path": FOLDER, "version": N}: load its weights when all open answers have ended, or, with "mode": "abort",
        at once. "weight_version" is their name in /weight_info; known weights are not loaded again."""
        fields = await body_of(request)
        if not isinstance(fields, dict) or fields.keys() - {"path", "version", "mode", "weight_version"}:
            raise BadRequest("send path (for prime-rl's weight_dir), version and, if you like, mode and weight_version")
        version, mode = fields.get("version"), fields.get("mode", "wait")
        if type(version) is not int or not 0 <= version < 2**63 or not isinstance(fields.get("path"), str):
            raise BadRequest("send the path of a folder, and the version of its weights, a whole number")
        return await self.change(Path(fields["path"]), version, mode, fields.get("weight_version"))

    async def reload_weights(self, _: web.Request) -> web.Response:
        """Load the checkpoint's own weights again."""
        return await self.change(self.origin.folder, self.origin.version, "wait")

    async def receive_weights(self, request: web.Request) -> web.Response:
        """A bucket of a version (`bucket_bytes`), in order; the last one loads it as /update_weights does."""
        try:
            head, bucket, specs = read_bucket(await long_body_of(request, BUCKET_BYTES + HEAD_BYTES))
            if bucket.number == 0:
                if self.arriving is not None and self.arriving.is_in_the_way(head["sender"]):
                    raise BadRequest("another program is sending weights; try again later", status=503)
                size_bytes = num_bytes(self.policy.state_dict().values())
                self.arriving = ArrivingWeights(head["sender"], bucket.version, specs, size_bytes)
            if self.arriving is None or not self.arriving.add(head["sender"], bucket):
                raise BadRequest("this is not the next bucket of the weights that are coming; begin again", status=503)
        except ValueError as err:
            raise BadRequest(str(err)) from None
        except BadRequest:
            raise
        except EmbodiedError as err:  # damaged or incomplete: the client may send again
            self.arriving = None
            raise BadRequest(str(err), status=503) from None
        if not bucket.last:
            return web.json_response({"status": "received", "number": bucket.number})
        blobs, self.arriving = self.arriving.blobs, None
        return await self.change(blobs, bucket.version, "wait", head["weight_version"])

    async def change(
        self, source: Path | dict[str, Blob], version: int, mode: Any, known: str | None = None
    ) -> web.Response:
        if mode not in ("wait", "abort"):
            raise BadRequest("mode should be wait or abort", "mode")
        if isinstance(source, Path) and not (source.is_absolute() and os.path.isdir(source)):  # is_dir may raise
            return refusal(400, f"path: {str(source)[:200]} is not a folder that this server sees", code=UNSEEN)
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
        fields = (await body_of(request)) if request.can_read_body else {}
        names = fields.get("request_ids") if isinstance(fields, dict) else 0
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise BadRequest("request_ids should be a list of texts", "request_ids")
        return web.json_response({"aborted": await self.changed(self.generation.abort_requests(names))})

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


CONTROL = ("/update_weights", "/receive_weights", "/reload_weights", "/pause", "/resume", "/abort_requests")


class StreamedAnswer:
    """Divides an open answer into its sent and new parts."""

    def __init__(self, server: LanguageServer, ask: Ask, conversation: ServedConversation) -> None:
        self.server, self.ask, self.conversation = server, ask, conversation
        self.held = max(map(len, ask.stop), default=1) - 1  # letters that may begin a stop text
        self.tokens, self.letters = 0, 0
        self.begun = False

    def more(self, answer: Answer) -> AnswerChoice:
        """The new part of an open answer."""
        text = self.server.policy.tokenizer.decode(answer.tokens.tolist())
        text = text[: len(text) - self.held].rstrip("\ufffd")  # a letter may take several tokens
        return self.new(answer, text)

    def rest(self, answer: Answer, whole: AnswerChoice) -> AnswerChoice:
        """The new part at the end."""
        return self.new(answer, whole.text, whole.finish)

    def new(self, answer: Answer, text: str, finish: str = "") -> AnswerChoice:
        begin, self.tokens = self.tokens, len(answer.tokens)
        letters, self.letters = text[self.letters :], max(self.letters, len(text))
        self.begun = True
        return self.server.part(self.ask, self.conversation, answer, begin, letters, finish)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of these stop texts, and True if there is one."""
    places = [at for at in map(text.find, stops) if at >= 0]
    return (text[: min(places)], True) if places else (text, False)
