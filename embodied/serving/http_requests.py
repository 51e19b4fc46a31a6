"""HTTP requests of a language model's clients: limits of number, length and time, before a request is parsed."""

from __future__ import annotations

import asyncio
import json
import math
import re
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from embodied.serving import openai as openai
from embodied.serving.openai import BadRequest

TOKEN_BYTES = 16  # of a request, for each prompt token
HEAD_S, BODY_S = 15.0, 60.0  # limits for a first request's head, and for a request's body
SEND_S = 30.0  # limit for sending a part of an answer
SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")  # in JSON: half of a surrogate pair


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
            async for part in request.content.iter_chunked(1 << 20):
                data += part
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
