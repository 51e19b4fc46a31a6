"""Converts clients' chat messages into the form of chat templates: texts, pictures, tool calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from embodied.core.conversations import pictures_in
from embodied.core.errors import EmbodiedError
from embodied.core.pictures import DATA, PictureError

OF_TOOLS = ("tool_calls", "tool_call_id")
PICTURE_THREADS = 2  # pictures that are processed at the same time


class BadRequest(EmbodiedError):
    """An invalid request; the client gets the text."""

    def __init__(self, text: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(text)
        self.param, self.status = param, status


def message_of(message: Any, number: int) -> dict[str, Any]:
    """A message in the form of chat templates. Several texts are joined; pictures are data URLs."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} should be an object with role and content", "messages")
    if odd := {name for name, value in message.items() if value} - {"role", "content", "name", *OF_TOOLS}:
        raise BadRequest(f"{where}: {sorted(odd)[0][:40]!r} is not supported", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part_of(part, where) for part in content]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        content = "".join(texts) if len(texts) == len(parts) else parts
    if not isinstance(calls := message.get("tool_calls") or [], list):
        raise BadRequest(f"{where}: tool_calls should be a list", "messages")
    calls = [call_of(call, where) for call in calls]
    if content is None and calls:
        content = ""
    if not isinstance(content, str | list):
        raise BadRequest(f"{where}: content should be text, or a list of texts and pictures", "messages")
    more = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    return {"role": message["role"], "content": content} | more | ({"tool_calls": calls} if calls else {})


def call_of(call: Any, where: str) -> dict[str, Any]:
    """A tool call in the form of chat templates: its arguments are parsed from JSON text."""
    try:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return call | {"function": {"name": str(call["function"]["name"]), "arguments": arguments}}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadRequest(f"{where}: tool_calls should hold functions with a name and arguments in JSON") from None


def part_of(part: Any, where: str) -> dict[str, str]:
    """A part of a message's content. Pictures outside the request are refused."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind != "image_url":
        raise BadRequest(f"{where}: a part of its content should have the type text or image_url", "messages")
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not DATA.match(url):
        raise BadRequest(f"{where}: a picture should come as a data URL, data:image/png;base64,...", "messages")
    return {"type": "image", "image": url}


def with_tools(tokenizer: Any, messages: Any, tools: Sequence[dict[str, Any]]) -> str:
    """Messages formatted by the chat template, which also describes the tools."""
    if not tokenizer.chat or "<tool_call>" not in str(tokenizer.own.chat_template):
        why = "this model's chat template has no calls like <tool_call>{...}</tool_call>; describe tools in the prompt"
        raise BadRequest(f"tools: {why}", "tools")
    try:
        return tokenizer.own.apply_chat_template(
            list(messages), tools=list(tools), tokenize=False, add_generation_prompt=True
        )
    except Exception as err:  # a template may raise anything
        text = " ".join(str(err).split())
        raise BadRequest(f"the model's chat template refuses this conversation ({text})", "messages") from None


class PictureReader:
    """Processes the pictures of requests, which the model's `sight` keeps, before their text is encoded."""

    def __init__(self, sight: Any, max_length: int) -> None:
        self.sight, self.max_length = sight, max_length
        self.threads = ThreadPoolExecutor(PICTURE_THREADS, "pictures")

    async def process(self, prompts: Sequence[Any]) -> None:
        """Process a request's pictures one after the other, so that clients take turns, and the pictures of a client
        that leaves are forgotten. Pictures with more tokens than a conversation are refused unseen."""
        names = [name for prompt in prompts if not isinstance(prompt, list) for name in pictures_in(prompt)]
        if self.sight is None or not names:
            return
        run = asyncio.get_running_loop().run_in_executor
        try:
            await run(self.threads, self.sight.check_room, names, self.max_length)
            for name in dict.fromkeys(names):
                await run(self.threads, self.sight.read, name)
        except PictureError as err:
            raise BadRequest(str(err), "messages") from None

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
