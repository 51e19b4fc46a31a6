"""HTTP requests, limited in number, length and time: checks before a request is parsed.

Answers many requests in one HTTP request; each answer is sent as soon as it has ended.

An HTTP request costs as much as about ten tokens of a small model. So policy workers send as many conversations as a
server has room for in one request, and read the answers from the open connection:

    {"requests": [BODY, BODY, ...]}             bodies of /v1/completions, of one prompt and one answer each
    {"number": 1, "status": 200, "body": ...}   a line of an answer: its tokens and their log-probs; or of an error
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from embodied.core.errors import EmbodiedError
from embodied.policies.language.http_messages import MOST_TOGETHER, NOT_FINITE
from embodied.serving import openai as openai
from embodied.serving.generation import Written
from embodied.serving.openai import Ask, BadRequest

if TYPE_CHECKING:
    from embodied.serving.language_server import LanguageServer

TOKEN_BYTES = 16  # of a request, for each prompt token
HEAD_S, BODY_S = 15.0, 60.0  # limits for a first request's head, and for a request's body
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON: half of a surrogate pair
ADAPTERS = "adapters come with the weights (/update_weights), and all clients are answered with the same ones"
NO_NCCL = "weights come from a folder or in buckets (/update_weights, /receive_weights), not by NCCL"
NOT_SERVED = {  # paths of other servers
    "/v1/responses": "conversations are answered at /v1/chat/completions",
    "/v1/embeddings": "this server writes text; it has no embeddings",
    "/load_lora_adapter": ADAPTERS,
    "/v1/load_lora_adapter": ADAPTERS,
    "/init_broadcaster": NO_NCCL,
    "/init_communicator": NO_NCCL,
    "/init_weight_transfer_engine": NO_NCCL,
    "/get_world_size": NO_NCCL,
    "/server_info": NO_NCCL,
    "/reset_prefix_cache": "what is kept of prompts is forgotten with every change of the weights",
    "/v1/chat/completions/render": "send the messages to /tokenize",
    "/liveness": "ask /healthz",
    "/version": "/v1/models has the model, its settings and the version of its weights",
    "/inference/v1/generate": "send the tokens as the prompt of /v1/completions, with return_token_ids=true",
    "/generate": "send the prompts to /v1/completions",
    "/chat": "send the messages to /v1/chat/completions",
}


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

    def asked(self, request: web.Request) -> None:
        self.silent.discard(request.protocol)

    def close_silent(self, connection: Any) -> None:
        if connection in self.silent:
            self.silent.remove(connection)
            connection.force_close()


class TurnedAway(asyncio.Protocol):
    """A refused connection, above the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


async def long_body_of(request: web.Request, most: int) -> bytes:
    """The body of a request that may be longer than usual."""
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_chunked(1 << 20):
                data += part
                if len(data) > most:
                    raise BadRequest(f"a request has {most} bytes at most here", status=413)
    except TimeoutError:
        raise BadRequest(f"the request's body did not arrive within {BODY_S:g} s", status=408) from None
    return bytes(data)


async def body_of(request: web.Request, most: int | None = None) -> Any:
    """The JSON of a request with at most `most` bytes (default: the limit for one prompt)."""
    try:
        async with asyncio.timeout(BODY_S):
            text = (await (request.read() if most is None else long_body_of(request, most))).decode()
        body = json.loads(text, parse_constant=lambda _: math.nan)
    except TimeoutError:
        raise BadRequest(f"the request's body did not arrive within {BODY_S:g} s", status=408) from None
    except (ValueError, RecursionError):
        raise BadRequest("the request is no JSON") from None
    except (web.RequestPayloadError, BadHttpMessage):
        raise BadRequest("the request's body does not have the encoding of its headers (Content-Encoding)") from None
    if SURROGATE.search(text):
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadRequest("the request's text has half of a character (a lone surrogate)") from None
    return body


def refusal(status: int, text: str, kind: str = "invalid_request_error", **more: Any) -> web.Response:
    return web.json_response(openai.error(text, kind, **more), status=status)


SEND_S = 30.0  # limit for sending a part of an answer


class UnusableAnswer(EmbodiedError):
    """The weights give non-finite log-probs for this prompt."""

    code = NOT_FINITE


async def answer_many(server: LanguageServer, request: web.Request) -> web.StreamResponse:
    """{"requests": [...]}: sends a line of JSON for each answer, in the order of their ends."""
    longest = server.longest + MOST_TOGETHER * server.policy.max_length * TOKEN_BYTES
    asks = read_many(await body_of(request, longest))
    loop, news = asyncio.get_running_loop(), asyncio.Queue[int]()
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    with server.admitted(*asks):
        numbered = [(ask, next(server.numbers)) for ask in asks]
        conversations = await asyncio.to_thread(lambda: [server.conversations(*each)[0] for each in numbered])
        futures = server.generation.ask(*conversations)

        def tell(number: int, _: Future[Written]) -> None:
            loop.call_soon_threadsafe(news.put_nowait, number)

        for number, future in enumerate(futures):
            future.add_done_callback(partial(tell, number))
        try:
            await response.prepare(request)
            left = len(futures)
            while left:
                ended = [await news.get()]
                while not news.empty():
                    ended.append(news.get_nowait())
                left -= len(ended)
                async with asyncio.timeout(SEND_S):
                    await response.write(b"".join(line(number, futures[number]) for number in ended))
            await response.write_eof()
        except TimeoutError:  # the client reads nothing
            if request.transport is not None:
                request.transport.abort()
        except ConnectionResetError:  # the client is gone
            pass
        finally:
            for future in futures:
                future.cancel()
    return response


def read_many(body: Any) -> list[Ask]:
    bodies = body.get("requests") if isinstance(body, dict) and body.keys() == {"requests"} else None
    if not isinstance(bodies, list) or not 0 < len(bodies) <= MOST_TOGETHER:
        raise BadRequest(f"send requests, a list of at most {MOST_TOGETHER} bodies of /v1/completions", "requests")
    asks = [openai.read_completion(each) for each in bodies]
    for ask in asks:
        more = ask.stream, ask.echo, ask.stop, ask.top_logprobs, ask.prompt_logprobs is not None
        if any(more) or len(ask.prompts) * ask.n > 1:
            raise BadRequest(
                "each of the requests is of one answer, without stream, echo, stop, prompt_logprobs and logprobs above "
                "0; send the others to /v1/completions",
                "requests",
            )
    return asks


def line(number: int, future: Future[Written]) -> bytes:
    """A client's line for an answer: its choice as in /v1/completions, without text."""
    try:
        written = future.result()
        if written.answer.dropped:
            raise UnusableAnswer(written.answer.dropped)
        status, body = 200, short_reply(written)
    except EmbodiedError as err:
        status, body = 500, openai.error(str(err), "server_error", code=getattr(err, "code", None))
    return json.dumps({"number": number, "status": status, "body": body}).encode() + b"\n"


def short_reply(written: Written) -> dict[str, Any]:
    answer = written.answer
    choice = {"token_ids": answer.tokens.tolist(), "finish_reason": written.finish}
    choice |= {"logprobs": {"token_logprobs": answer.logprobs.tolist()}}
    choice |= {"proof": [block.to_text() for block in answer.proof]} if answer.proof else {}
    return {"choices": [choice], "system_fingerprint": written.fingerprint}
