"""Messages of verifiers with tools, as text.

Tools are described in the format of Qwen and Hermes, which most models with tools have learned: functions in the system
message, calls as `<tool_call>{...}</tool_call>` and results between `<tool_response>` tags. Chat templates differ here,
so none is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from embodied.core.conversations import TOOL_CALL, Message
from embodied.envs.text.tools import call_of, json_in

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
    """Messages for a policy; `tools` are described in the system message."""
    said: list[Message] = []
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "tool":
            role, content = "user", between_tags(content)
        for call in message.get("tool_calls", ()):
            content += f"\n<tool_call>\n{written(call)}\n</tool_call>"
        texts = said and isinstance(said[-1]["content"], str) and isinstance(content, str)
        if texts and said[-1]["role"] == role == "user" and message["role"] == "tool":
            said[-1]["content"] += f"\n{content}"
        else:
            said.append({"role": role, "content": content})
    if tools:
        functions = FUNCTIONS.format(functions="\n".join(json.dumps(tool) for tool in tools))
        system = said.pop(0)["content"] + "\n\n" if said[0]["role"] == "system" else ""
        said.insert(0, {"role": "system", "content": system + functions})
    return tuple(said)


def between_tags(content: Any) -> Any:
    """A tool's result, which may have pictures."""
    begin, end = "<tool_response>\n", "\n</tool_response>"
    if isinstance(content, str):
        return begin + content + end
    return [{"type": "text", "text": begin}, *content, {"type": "text", "text": end}]


def written(call: dict[str, Any]) -> str:
    """A call in an environment's message, as JSON."""
    function = call["function"]
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {function["arguments"]}}}'


def assistant_message(answer: str, tools: Sequence[dict[str, Any]], turn: int) -> dict[str, Any]:
    """An answer as a message of OpenAI's protocol. Calls that are not well-formed, all or one, stay text."""
    calls = [call_of(json_in(text)) for text in TOOL_CALL.findall(answer)] if tools else []
    if not calls or None in calls:
        return {"role": "assistant", "content": answer}
    named = [
        {
            "id": f"call_{turn}_{at}",
            "type": "function",
            "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
        }
        for at, c in enumerate(calls)
    ]
    return {"role": "assistant", "content": answer[: answer.index("<tool_call>")], "tool_calls": named}
