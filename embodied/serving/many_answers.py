"""Answers many requests in one HTTP request; each answer is sent as soon as it has ended.

An HTTP request costs as much as about ten tokens of a small model. So policy workers send as many conversations as a
server has room for in one request, and read the answers from the open connection:

    {"requests": [BODY, BODY, ...]}             bodies of /v1/completions, of one prompt and one answer each
    {"number": 1, "status": 200, "body": ...}   a line of an answer: its tokens and their log-probs; or of an error
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import web

from embodied.core.errors import EmbodiedError
from embodied.policies.language.http_messages import MOST_TOGETHER, NOT_FINITE
from embodied.serving import openai_protocol as openai
from embodied.serving.generation import Written
from embodied.serving.http_requests import TOKEN_BYTES, body_of
from embodied.serving.openai_protocol import Ask, BadRequest

if TYPE_CHECKING:
    from embodied.serving.language_server import LanguageServer

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
