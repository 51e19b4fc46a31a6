"""Tools: calls in the formats of chat templates, Python that is kept in, search."""

import json
import platform
from threading import Event

import pytest
from tiny_language import TALKS, build, publish

from embodied.envs.text.text_env import TextEnv, Turn
from embodied.envs.text.tools import (
    Search,
    Tool,
    ToolCall,
    ToolUser,
    parsed_calls,
    python_tool,
    reply_of,
    run_python,
    with_tools,
)

CALL = {"name": "python", "arguments": {"code": "print(6*7)"}}
WAIT_FOR_EVER = "import _thread\nlock = _thread.allocate_lock()\nlock.acquire(), lock.acquire()"
TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | map(attribute='function.name') | join(' ') }}\n{% endif %}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.mark.parametrize(
    ("answer", "names"),
    [
        (f"I compute.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>", ["python"]),
        (f"<tool_call>{json.dumps(CALL)}</tool_call><tool_call>{json.dumps(CALL)}</tool_call>", ["python"] * 2),
        (f"[TOOL_CALLS] [{json.dumps(CALL)}]", ["python"]),
        ('<|python_tag|>{"name": "search", "parameters": {"query": "x"}}', ["search"]),
        ('{"name": "search", "arguments": "{\\"query\\": \\"x\\"}"}', ["search"]),
        ("<tool_call>{broken</tool_call>", []),
        (f"<tool_call>{{{'[' * 100_000}}}</tool_call>", []),
        (f'<tool_call>{{"a":{"[" * 100_000}}}</tool_call>', []),
        ('{"answer": 42}', []),
        ("The answer is 42.", []),
    ],
)
def test_calls_are_read_as_chat_templates_write_them(answer, names):
    assert [call.name for call in parsed_calls(answer)] == names


class Asked(ToolUser, TextEnv):
    max_turns = 3
    tools = (Search({"Paris": "The capital of France."}).tool(),)

    def reset(self, spec):
        return with_tools(({"role": "user", "content": "Which is the capital of France?"},), self.tools)

    def answered(self, answer):
        return Turn(reward=float("Paris" in answer), success="Paris" in answer)


def test_a_tool_is_described_called_and_answered_in_the_words_of_the_template(tmp_path):
    tokenizer = build(TALKS, pretrained=str(publish(tmp_path, "qwen3", False, TEMPLATE))).tokenizer
    env = Asked(None)
    said = env.reset(None)
    assert tokenizer.decode(tokenizer.encode(said, first=True)).startswith("TOOLS search\n[user]Which")
    turn = env.step('<tool_call>{"name": "search", "arguments": {"query": "capital"}}</tool_call>')
    assert not turn.done and turn.facts == {"called": ["search"]}
    heard = tokenizer.decode(tokenizer.encode(turn.said, first=False))
    assert heard == "\n[tool]Paris\nThe capital of France.<end>\n[assistant]"
    assert env.step("Paris").success
    wrong = env.step('<tool_call>{"name": "find", "arguments": {}}</tool_call>').said[0]["content"]
    assert wrong == "error: there is no tool find; there are search"
    waits = Tool("wait", "Never comes back.", Event().wait, seconds=0.01)
    assert reply_of([waits], ToolCall("wait", {})) == "error: wait took longer than 0.01 seconds"
    raises = Tool("find", "", lambda: {}["x"])
    assert reply_of([raises], ToolCall("find", {})) == "error: KeyError: 'x'"


def test_search_finds_rare_words_first_and_nothing_where_there_is_nothing():
    found = Search({"a": "the cat", "b": "the dog and the cat", "c": "the house"})
    assert found.find("dog cat") == ["b", "a"] and found.find("unicorn") == []


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the box is the kernel's")
@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("x = 6\nprint(x, end=' ')\nfractions.Fraction(1, 3) + 1", "6 4/3"),
        ("open('/etc/passwd').read()", "PermissionError"),
        ("import os\nos.listdir('/')", "PermissionError"),
        ("import _socket\n_socket.socket()", "Error"),
        ("import os\nos.fork()", "PermissionError"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import os\nlist(os.environ)", "['LANG'"),
        ("x = [0] * 10**9", "MemoryError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("while True: pass", "error: more than 1 seconds of work"),
        ("while True: random._os.write(1, b'x' * 10**6)", "error: an output of more than 41,000 bytes"),
        (WAIT_FOR_EVER, "error: it waits, which programs here cannot"),
        (f"random._os.close(1), random._os.close(2)\n{WAIT_FOR_EVER}", "error: it waits, which programs here cannot"),
        ("random._os.sys.modules['ctypes'].CDLL(None).fcntl(1, F_SETOWN := 8, 0)", "-1"),  # the way to send signals
    ],
)
def test_python_computes_and_nothing_else(code, shown):
    assert shown in run_python(code, seconds=1)


def test_programs_are_a_tool():
    (call,) = parsed_calls(json.dumps(CALL))
    assert python_tool().run(**call.arguments) == "42"
    assert len(run_python("print('a' * 10**6)")) == 10_000
