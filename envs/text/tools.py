"""Tools that a policy calls in the middle of a conversation: Python in a box, search in documents, functions of yours.

Calls have the format of the model's own chat template: the tags of Qwen and Hermes, the bare JSON of Llama 3, or
Mistral's list. The template gets the tools with the first message (`with_tools`), and a tool's reply as a message of
the role `tool`.

The Python that a policy wrote runs in a child process that can only compute. The child imports a few modules; then the
kernel (seccomp) forbids it to open files or sockets, to start processes or threads, to signal other processes, and to
wait: one thread would wait for ever. Limits end it after some seconds of work, some memory, or some output. It has no
environment variables. Linux on x86-64 only: elsewhere it is refused.
"""

from __future__ import annotations

import json
import math
import os
import platform
import re
import select
import signal
import subprocess
import sys
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from embodied.core.conversations import TOOL_CALL, Message, Said
from embodied.core.errors import ConfigError
from embodied.envs.text.text_env import Turn

MISTRAL = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)
LLAMA = re.compile(r"\A\s*(?:<\|python_tag\|>)?\s*(\{.*\})\s*\Z", re.DOTALL)
MOST_CALLS = 8  # in an answer; further ones are left out
LONGEST_REPLY = 4_000  # characters


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call with named arguments. If it raises or takes too long, the reply is an error."""

    name: str
    about: str
    run: Callable[..., str]
    arguments: Mapping[str, str] = field(default_factory=dict)  # name -> description; all are text
    seconds: float = 60.0  # for a call

    def schema(self) -> dict[str, Any]:
        """The description for chat templates."""
        parameters = {name: {"type": "string", "description": about} for name, about in self.arguments.items()}
        shape = {"type": "object", "properties": parameters, "required": [*parameters]}
        return {"type": "function", "function": {"name": self.name, "description": self.about, "parameters": shape}}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


class ToolUser:
    """A mixin for text envs, placed before `TextEnv`. A subclass implements `answered` instead of `step`."""

    tools: Sequence[Tool] = ()

    @abstractmethod
    def answered(self, answer: str) -> Turn:
        """Score an answer that calls no tool."""

    def step(self, answer: str) -> Turn:
        calls = parsed_calls(answer)
        if not calls:
            return self.answered(answer)
        replies = [reply_of(self.tools, call) for call in calls]
        said = tuple(
            {"role": "tool", "name": call.name, "content": reply} for call, reply in zip(calls, replies, strict=True)
        )
        return Turn(said=said, done=False, facts={"called": [call.name for call in calls]})


def with_tools(said: Sequence[Message], tools: Iterable[Tool]) -> Said:
    """The first messages of a conversation in which these tools may be called."""
    first, *others = said
    return ({**first, "tools": [tool.schema() for tool in tools]}, *others)  # type: ignore[dict-item]


def parsed_calls(answer: str) -> list[ToolCall]:
    """The calls in an answer, in any of the formats above; incomplete calls are ignored."""
    contents: list[Any] = [json_in(text) for text in TOOL_CALL.findall(answer)]
    if not contents and (listed := MISTRAL.search(answer)):
        contents = calls if isinstance(calls := json_in(listed[1]), list) else []
    if not contents and (bare := LLAMA.match(answer)):
        contents = [json_in(bare[1])]
    return [call for content in contents[:MOST_CALLS] if (call := call_of(content))]


def json_in(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def call_of(entry: Any) -> ToolCall | None:
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return None
    arguments = entry.get("arguments", entry.get("parameters"))
    arguments = json_in(arguments) if isinstance(arguments, str) else arguments
    return ToolCall(entry["name"], arguments) if isinstance(arguments, dict) else None


def reply_of(tools: Iterable[Tool], call: ToolCall) -> str:
    by_name = {tool.name: tool for tool in tools}
    if call.name not in by_name:
        return f"error: there is no tool {call.name}; there are {', '.join(by_name)}"
    tool = by_name[call.name]
    if call.arguments.keys() != tool.arguments.keys():
        return f"error: {call.name} takes {', '.join(tool.arguments) or 'nothing'}"
    done: Future[str] = Future()

    def run() -> None:
        try:
            done.set_result(tool.run(**{name: str(value) for name, value in call.arguments.items()}))
        except BaseException as err:  # a tool may raise anything
            done.set_exception(err)

    Thread(target=run, name=f"tool-{tool.name}", daemon=True).start()  # a tool that never ends is abandoned
    if not wait([done], tool.seconds).done:
        return f"error: {tool.name} took longer than {tool.seconds:g} seconds"
    err = done.exception()
    reply = f"error: {type(err).__name__}: {err}" if err else done.result()
    return reply if len(reply) <= LONGEST_REPLY else f"{reply[:LONGEST_REPLY]} ..."


# Search


class Search:
    """Finds documents by the words of a query, the best first (BM25)."""

    K, B = 1.5, 0.75

    def __init__(self, documents: Mapping[str, str]) -> None:
        """`documents`: texts by title."""
        self.documents = dict(documents)
        self.counts = {title: Counter(words_of(f"{title} {text}")) for title, text in self.documents.items()}
        self.mean = sum(sum(counts_of_tool.values()) for counts_of_tool in self.counts.values()) / max(
            1, len(self.counts)
        )
        self.holding: dict[str, list[str]] = {}  # titles of the documents that have a word
        for title, counts in self.counts.items():
            for word in counts:
                self.holding.setdefault(word, []).append(title)

    def find(self, query: str, count: int = 3) -> list[str]:
        """The titles of the best documents that have a word of the query."""
        matching = [word for word in words_of(query) if word in self.holding]
        scores = {title: self.score(matching, title) for word in matching for title in self.holding[word]}
        return sorted((title for title in scores if scores[title] > 0), key=lambda title: (-scores[title], title))[
            :count
        ]

    def score(self, words: Sequence[str], title: str) -> float:
        counts, total = self.counts[title], len(self.documents)
        norm = self.K * (1 - self.B + self.B * sum(counts.values()) / self.mean)
        held = {word: len(self.holding[word]) for word in words}
        rarity = {word: math.log(1 + (total - held[word] + 0.5) / (held[word] + 0.5)) for word in words}
        return sum(rarity[word] * counts[word] * (self.K + 1) / (counts[word] + norm) for word in words)

    def tool(self, count: int = 3) -> Tool:
        def search(query: str) -> str:
            titles = self.find(query, count)
            return "\n\n".join(f"{title}\n{self.documents[title]}" for title in titles) or "nothing was found"

        return Tool("search", "Finds documents by words.", search, {"query": "words to look for"})


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


MODULES = (
    "math cmath statistics fractions decimal itertools functools collections re random string datetime json bisect "
    "heapq operator"
)
MEMORY = 512 << 20  # bytes of address space
LONGEST = 10_000  # characters of a program, and of its output
MOST_BYTES = 4 * LONGEST + 1_000  # of output; a program can write past its own `print`
START_S = 60.0  # for the child to start, on a busy machine
PATIENCE = 10  # seconds of the clock for a second of work; other programs may use the cores, too
END_S = 10.0  # for a child that was killed to be gone

CHILD = r"""
import ast, contextlib, ctypes, io, resource, struct, sys, traceback
seconds, memory, longest, modules = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4].split()
source = sys.stdin.read()
modules = [name for name in modules if name in source]  # each costs some milliseconds
for name in modules:
    __import__(name)
import encodings.idna, linecache
traceback.format_exception_only(ValueError("what this imports is there now"))
if "datetime" in modules:
    sys.modules["datetime"].datetime.strptime("1", "%d")
float("1").hex()
libc = ctypes.CDLL(None, use_errno=True)
resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
allowed = [0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 25, 28, 39, 60, 79, 96, 98, 102, 104, 107, 108,
           131, 186, 201, 204, 228, 231, 273, 318, 334]
LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06
ALLOW, REFUSE, KILL = (RETURN, 0, 0, 0x7FFF0000), (RETURN, 0, 0, 0x00050000 | 1), (RETURN, 0, 0, 0x80000000)
rules = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, 0xC000003E), KILL, (LOAD, 0, 0, 0)]
futex = 202, 24, 127, 1  # its number, where its operation is, without the flags, and the one that wakes: others wait
rules += [(EQUAL, 0, 5, futex[0]), (LOAD, 0, 0, futex[1]), (AND, 0, 0, futex[2]), (EQUAL, 0, 1, futex[3]), ALLOW, KILL]
for place, number in enumerate(allowed):
    rules.append((EQUAL, len(allowed) - place, 0, number))
rules += [REFUSE, ALLOW]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
class Program(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ushort), ("rules", ctypes.c_void_p)]
program = Program(len(rules), ctypes.addressof(code))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.byref(program), 0, 0):
    sys.exit("the kernel offers no seccomp")
class Printed(io.StringIO):
    def write(self, text):
        return super().write(text[: max(0, longest - self.tell())])
sys.__stdout__.write("\n")
sys.__stdout__.flush()
printed = Printed()
names = {"__name__": "__main__", **{name: sys.modules[name] for name in modules}}
with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
    try:
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "program", "exec"), names)
        value = eval(compile(ast.Expression(last.value), "program", "eval"), names) if last else None
        if value is not None:
            print(value)
    except BaseException as err:
        print("".join(traceback.format_exception_only(err)).strip())
sys.__stdout__.write(printed.getvalue())
sys.__stdout__.flush()
"""


def check_box() -> None:
    """Raise ConfigError if the kernel cannot confine a program."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise ConfigError(
            f"Python that a policy writes runs only on Linux and x86-64, where the kernel confines it, not on "
            f"{sys.platform} {platform.machine()}; leave the tool out"
        )


def run_python(code: str, seconds: int = 2) -> str:
    """A program's output, with the value of its last line, or why it was ended."""
    check_box()
    if len(code) > LONGEST:
        return f"error: a program of more than {LONGEST:,} characters"
    words = [sys.executable, "-I", "-S", "-c", CHILD, str(seconds), str(MEMORY), str(LONGEST), MODULES]
    with open(os.memfd_create("program"), "w+b") as source:
        source.write(code.encode(errors="replace"))
        source.seek(0)
        pipes = {"stdin": source, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        child = subprocess.Popen(words, **pipes, env={"LANG": "C.UTF-8"}, cwd="/", start_new_session=True)
    with child:
        try:
            out = output_of(child, PATIENCE * seconds)
        except subprocess.TimeoutExpired:
            return f"error: it did not end within {PATIENCE * seconds} seconds"
        finally:
            child.kill()
    if len(out) > MOST_BYTES:
        return f"error: an output of more than {MOST_BYTES:,} bytes"
    if child.returncode == -signal.SIGSYS:
        return "error: it waits, which programs here cannot"
    text = out.decode(errors="replace").strip()
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return f"error: more than {seconds} seconds of work"
    if child.returncode:
        return f"error: it died ({text.splitlines()[-1][:200] if text else child.returncode})"
    return text[:LONGEST]


def output_of(child: subprocess.Popen[bytes], seconds: float) -> bytes:
    """A child's output until it ends or has written too much; TimeoutExpired `seconds` after its first byte."""
    assert child.stdout is not None
    out, end = b"", time.monotonic() + START_S
    ready = select.poll()  # takes files of any number
    ready.register(child.stdout)
    while len(out) <= MOST_BYTES:
        if not ready.poll(1000 * max(0.0, end - time.monotonic())):
            raise subprocess.TimeoutExpired(child.args, seconds)
        if not (more := os.read(child.stdout.fileno(), MOST_BYTES)):
            child.wait(max(0.0, end - time.monotonic()))
            break
        end, out = end if out else time.monotonic() + seconds, out + more
    return out


def python_tool(seconds: int = 2) -> Tool:
    """A tool that runs programs."""
    check_box()
    about = "Runs a Python program and returns what it prints; files, network and other processes are out of reach."
    words = {"code": "the program"}
    return Tool("python", about, lambda code: run_python(code, seconds), words, START_S + PATIENCE * seconds + END_S)
