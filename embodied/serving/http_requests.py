"""HTTP requests, limited in number, length and time: checks before a request is parsed."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from embodied.serving import openai_protocol as openai
from embodied.serving.openai_protocol import BadRequest

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
