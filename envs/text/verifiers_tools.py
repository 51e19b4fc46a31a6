"""Tools of an environment in words: models that call tools mostly learned to as Qwen and Hermes write it, with the
functions in the system message, calls as `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` and results between
`<tool_response>` tags. Chat templates differ here, so no template is asked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from embodied.core.conversations import Message

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
FUNCTIONS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{functions}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def in_words(messages: Iterable[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> tuple[Message, ...]:
    """Messages as they are said to a policy; `tools` are described in the system message."""
    said: list[Message] = []
    for one in messages:
        role, content = one["role"], one["content"]
        if role == "tool":
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        for call in one.get("tool_calls", ()):
            content += f"\n<tool_call>\n{written(call)}\n</tool_call>"
        if said and said[-1]["role"] == role == "user" and one["role"] == "tool":
            said[-1]["content"] += f"\n{content}"
        else:
            said.append({"role": role, "content": content})
    if tools:
        functions = FUNCTIONS.format(functions="\n".join(json.dumps(tool) for tool in tools))
        system = said.pop(0)["content"] + "\n\n" if said[0]["role"] == "system" else ""
        said.insert(0, {"role": "system", "content": system + functions})
    return tuple(said)


def written(call: dict[str, Any]) -> str:
    """A call in an environment's message, as JSON."""
    function = call["function"]
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'


def heard(answer: str, tools: Sequence[dict[str, Any]], turn: int) -> dict[str, Any]:
    """An answer as a message of OpenAI's protocol. Calls that are not well-formed, all or one, stay text."""
    found = CALL.findall(answer) if tools else []
    calls = [call_of(text) for text in found]
    if not calls or None in calls:
        return {"role": "assistant", "content": answer}
    named = [
        {"id": f"call_{turn}_{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for at, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": answer[: answer.index("<tool_call>")], "tool_calls": named}


def call_of(text: str) -> tuple[str, dict[str, Any]] | None:
    try:
        call = json.loads(text)
    except ValueError:
        return None
    name, arguments = call.get("name"), call.get("arguments")
    return (name, arguments) if isinstance(name, str) and isinstance(arguments, dict) else None
