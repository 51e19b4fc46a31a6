"""`env.name=verifiers:<environment>`: environments of the package `verifiers`, played in a process of the interpreter
`env.python`, since they need other versions of libraries.

An example of the environment is a prompt, its rollout a conversation, and its rubric's score the reward at the end.
Evaluations ask the examples of its eval_dataset, or without one the first 5%, at most 500, of its dataset.

An episode of verifiers 0.4 may have several runs of an agent. With `env.together` they are the conversations of a
group, one after the other, with a reward each; otherwise they are parts of one conversation. A request that does not
extend the one before it rewrites the conversation.

An environment calls the model, so the sim worker serves an OpenAI endpoint, on loopback and for clients that know the
token. A chat request waits there until the policy has answered. `Bridge` is the endpoint and holds the process
(`verifiers_child.py`); `Example` is one conversation. A process that dies, or sends no request or score in time, is
replaced. The conversation at which it failed is lost; other conversations are repeated to the new process, which must
ask the same questions.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import signal
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from embodied.core.conversations import Said
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.pictures import DATA, short_name
from embodied.core.types import EpisodeSpec
from embodied.envs.text.text_env import TextEnv, Turn
from embodied.envs.verifiers.tool_messages import assistant_message, in_words

CHILD = Path(__file__).with_name("verifiers_child.py")
# Makes the working directory the first place in which Python finds modules; a script's own folder would be this one.
BOOT = "import sys; path = sys.argv[1]; exec(compile(open(path).read(), path, 'exec'))"
END_S = 15.0  # after a request to end: an environment may have to clean up
PARKED_S = 86_400.0  # that a request waits for the policy; it covers pauses of the run
LARGEST = 64 << 20  # bytes of a request
ROUTE = re.compile(r"/v1/(.+)")
MODEL = re.compile(r"policy-(\d+)")  # the model's name in a request tells its conversation
RUN = "X-Session-ID"  # the header of verifiers 0.4 that tells runs of agents apart
FULL = {"message": "the context length of the policy is reached", "code": "context_length_exceeded"}


class Lost(Exception):
    """A conversation that cannot continue and is dropped, with the reason."""


@dataclass
class ModelRequest:
    """A request that waits to be answered."""

    route: str
    body: dict[str, Any]
    run: str  # the run of an agent that it belongs to
    replies: SimpleQueue = field(default_factory=SimpleQueue)

    def answer(self, status: int, reply: dict[str, Any]) -> None:
        self.replies.put((status, reply))


@dataclass(frozen=True)
class ProcessDied:
    """The process has died."""


class Child:
    """The process and its messages; an example's messages go to `mail[number]`."""

    def __init__(self, config: Any, url: str = "", key: str = "") -> None:
        self.name, self.start_s = config.name, config.start_s
        self.first: SimpleQueue = SimpleQueue()
        self.mail: dict[int, SimpleQueue] = {}
        self.over = threading.Event()
        quiet = {"VF_LOG_LEVEL": "ERROR", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
        try:
            self.process = subprocess.Popen(
                [str(config.python), "-c", BOOT, str(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C goes to the worker only, and its children can be ended with it
                env={**quiet, **os.environ, "OMP_NUM_THREADS": "1"},
                text=True,
            )
        except OSError as err:
            raise ConfigError(f"env.python={config.python}: {err.strerror}; {how_to_install(config.python)}") from None
        environment = config.name.partition(":")[2]
        self.send(environment=environment, kwargs=config.kwargs, url=url, key=key)
        threading.Thread(target=self._listen, daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """The environment's description of itself, once it is loaded."""
        try:
            description = self.first.get(timeout=self.start_s)
        except Empty:
            self.kill()
            raise EmbodiedError(f"env.name={self.name} was not loaded within env.start_s={self.start_s:g}") from None
        if isinstance(description, ProcessDied):
            self.process.wait(END_S)
            raise EmbodiedError(
                f"env.name={self.name}: its process ended with code {self.process.returncode} while loading; "
                "what it printed is above, or in the sim worker's log"
            )
        if "problem" in description:
            raise ConfigError(f"env.name={self.name}: {description['problem']}")
        return description

    def send(self, **message: Any) -> None:
        with suppress(BrokenPipeError, ValueError):  # the process has died, which `_listen` reports, or was closed
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """End the process and its children, at once."""
        if self.process.returncode is None:  # it was not waited for, so no other process has its id
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(END_S)
        self._let_go()

    def close(self) -> None:
        """Let the process clean up and end."""
        self._let_go()
        self.over.wait(END_S)
        self.kill()

    def _let_go(self) -> None:
        with suppress(BrokenPipeError):
            self.process.stdin.close()

    def _listen(self) -> None:
        with self.process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                if "ended" not in message:
                    self.first.put(message)
                elif mail := self.mail.get(message["ended"]):
                    mail.put(message)
        self.over.set()
        self.first.put(ProcessDied())
        for mail in [*self.mail.values()]:
            mail.put(ProcessDied())


def how_to_install(python: Path) -> str:
    """The commands that make this interpreter."""
    return f'python -m venv {python.parent.parent} && {python} -m pip install "verifiers>=0.1.14,<0.5" makes one'


class Bridge(ThreadingHTTPServer):
    """Holds requests until they are answered, each in a thread."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, config: Any) -> None:
        super().__init__(("127.0.0.1", 0), RequestHandler)
        self.config = config
        self.key = secrets.token_urlsafe(32)
        self.numbers = count(1)
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.child: Child | None = None
        try:
            self.facts = self._begin()
        except EmbodiedError:
            self.close()
            raise

    def begin(self, held_out: bool, number: int, runs: int | None) -> tuple[Child, int, SimpleQueue]:
        """Let this example be rolled out; -> the process, the rollout's number there, and the queue of its requests.
        `runs`: the number of answers that are scored together, if the environment does not say."""
        if self.child is not None and self.child.over.is_set():
            self.replace()
        if self.child is None:
            self._begin()
        at, mail = next(self.numbers), SimpleQueue()
        self.child.mail[at] = mail
        if self.child.over.is_set():  # and it ended every rollout before this one began
            mail.put(ProcessDied())
        self.child.send(begin=at, held_out=held_out, number=number, runs=runs)
        return self.child, at, mail

    def replace(self) -> None:
        """Let another process start when the next example begins."""
        if self.child is not None:
            self.child.kill()
        self.child = None

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        if self.child is not None:
            self.child.close()

    def _begin(self) -> dict[str, Any]:
        self.child = Child(self.config, "http://{}:{}".format(*self.server_address), self.key)
        return self.child.ready()

    def park(self, route: str, body: dict[str, Any], run: str) -> tuple[int, dict[str, Any]]:
        """Wait for the answer to a request."""
        child, model = self.child, str(body.get("model"))
        match = MODEL.fullmatch(model)
        mail = child.mail.get(int(match[1])) if child is not None and match else None
        if mail is None:
            return 404, {"error": {"message": f"there is no conversation of {model}"}}
        request = ModelRequest(route, body, run)
        mail.put(request)
        try:
            return request.replies.get(timeout=PARKED_S)
        except Empty:
            return 503, {"error": {"message": "nobody has answered"}}

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A broken connection ends its rollout only; the process is watched elsewhere."""


@dataclass(frozen=True)
class Asked:
    """The environment's next request."""

    said: Said  # the messages that are new, or all of them
    restarts: bool = False  # True: all of them, since earlier ones have changed
    begins_run: bool = False  # True: of an agent that has not asked before


class Example:
    """An example in progress, with the policy's answers."""

    def __init__(self, bridge: Bridge, held_out: bool, number: int, runs: int | None) -> None:
        self.bridge, self.where = bridge, (held_out, number, runs)
        self.answers: list[str] = []
        self._begin()

    def begin(self) -> Asked:
        """Its first request. A process that fails before it is replaced once."""
        try:
            said = self._next()
        except Lost:
            if self.bridge.child is not None:
                raise
            self._begin()
            said = self._next()
        if isinstance(said, dict):
            raise Lost("it ended before its first request")
        return said

    def answer(self, text: str) -> Asked | dict[str, Any]:
        """Its next request, or its result if it has ended."""
        if self.child is not self.bridge.child or self.child.over.is_set():
            self._say_again()
        self.answers.append(text)
        return self._answer(text)

    def stop(self) -> Asked | dict[str, Any]:
        """End the agent's run now; returns the next request, or the result."""
        self.request.answer(400, {"error": {**FULL, "type": "invalid_request_error"}})
        return self._next()

    def forget(self) -> None:
        """Drop the rest of the example."""
        self.child.mail.pop(self.at, None)
        self.child.send(end=self.at)
        if self.request is not None:
            self.request.answer(503, {"error": {"message": "this conversation is over"}})

    def _begin(self) -> None:
        self.child, self.at, self.mail = self.bridge.begin(*self.where)
        self.known: list[dict[str, Any]] = []  # all messages so far, in the environment's form
        self.tools: list[dict[str, Any]] = []
        self.runs: list[str] = []  # in the order of their first requests
        self.run = ""  # of the latest request
        self.request: ModelRequest | None = None

    def _answer(self, text: str) -> Asked | dict[str, Any]:
        # The package treats an empty answer as a server's failure.
        message = assistant_message(text or " ", self.tools, len(self.known))
        self.known.append(role_and_content(message, self))
        reason = "tool_calls" if "tool_calls" in message else "stop"
        choice = {"index": 0, "message": message, "finish_reason": reason}
        reply = {"id": f"{self.at}", "object": "chat.completion", "created": 0, "model": "policy", "choices": [choice]}
        self.request.answer(200, reply)
        return self._next()

    def _next(self) -> Asked | dict[str, Any]:
        """Waits for the next request, or for the end."""
        config, self.request = self.bridge.config, None
        try:
            event = self.mail.get(timeout=config.score_s)
        except Empty:
            self.bridge.replace()
            raise Lost(f"the environment did nothing for env.score_s={config.score_s:g}") from None
        if isinstance(event, ProcessDied):
            self.bridge.replace()
            raise Lost("the environment's process died")
        if isinstance(event, dict):
            self.child.mail.pop(self.at, None)
            if "refused" in event:
                self.refuse(event["refused"])
            if "error" in event:
                raise Lost(f"the environment failed: {event['error']}")
            return event
        self.request = event
        return self._new_messages(event)

    def _new_messages(self, request: ModelRequest) -> Asked:
        """The messages of a request that are new, or all if earlier ones have changed."""
        body = request.body
        if request.route != "chat/completions" or body.get("stream") or body.get("n") not in (None, 1):
            wanted = {"route": request.route, "stream": body.get("stream"), "n": body.get("n")}
            self.refuse(f"it asks for something else than one chat completion: {wanted}")
        messages, tools = [role_and_content(one, self) for one in body["messages"]], body.get("tools") or []
        begins, other = request.run not in self.runs, bool(self.runs) and request.run != self.run
        if other and not begins and self.bridge.config.together:
            self.refuse("its runs ask in turns, but one has to end before the next begins; try env.together=false")
        known = [] if other else self.known
        extends = messages[: len(known)] == known and len(messages) > len(known) and (tools == self.tools or not known)
        known = known if extends else []
        self.runs += [request.run] if begins else []
        restarts, self.known, self.tools, self.run = bool(self.known and not known), messages, tools, request.run
        return Asked(in_words(messages[len(known) :], () if known else tools), restarts, begins)

    def refuse(self, why: str) -> None:
        """Raise an error: this kind of environment cannot be played here."""
        raise EmbodiedError(f"env.name={self.bridge.config.name} ({self.bridge.facts['kind']}): {why}")

    def _say_again(self) -> None:
        """Repeat this conversation to the new process."""
        before = self.known
        self._begin()
        said = self._next()
        for answer in self.answers:
            if isinstance(said, dict):
                break
            said = self._answer(answer)
        if isinstance(said, dict) or self.known != before:
            raise Lost("the environment's process was replaced, and the new one sends other requests")


def role_and_content(message: dict[str, Any], example: Example) -> dict[str, Any]:
    """A message with its role and content only."""
    content = message.get("content") or ""
    if isinstance(content, list):
        pictures = {"image_url"} if example.bridge.config.pictures else set()
        if other := {part.get("type") for part in content} - {"text"} - pictures:
            advice = "" if other - {"image_url"} else "; try env.pictures=true"
            example.refuse(f"it says {', '.join(map(str, other))}, and a conversation here is text{advice}")
        content = [picture_in(part, example) if part["type"] == "image_url" else part for part in content]
        if all(part["type"] == "text" for part in content):
            content = "".join(part["text"] for part in content)
    calls = [
        {"id": call["id"], "function": {name: call["function"][name] for name in ("name", "arguments")}}
        for call in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "content": content} | ({"tool_calls": calls} if calls else {})


def picture_in(part: dict[str, Any], example: Example) -> dict[str, str]:
    """A picture of a message as a part of ours."""
    url = part["image_url"]["url"] if isinstance(part["image_url"], dict) else part["image_url"]
    if not DATA.match(url):
        example.refuse(f"it shows the picture {short_name(url)}; only data URLs are read (data:image/png;base64,...)")
    return {"type": "image", "image": url}


class RequestHandler(BaseHTTPRequestHandler):
    server: Bridge
    protocol_version = "HTTP/1.1"
    timeout = 60  # between requests of a connection

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        match = ROUTE.fullmatch(self.path)
        if not hmac.compare_digest(self.headers.get("Authorization", ""), f"Bearer {self.server.key}"):
            status, reply = 401, {"error": {"message": "the key is wrong"}}
            self.close_connection = True
        elif match is None or length > LARGEST:
            status, reply = 400, {"error": {"message": "this is not a request to a conversation"}}
            self.close_connection = True
        else:
            body = json.loads(self.rfile.read(length))
            status, reply = self.server.park(match[1], body, self.headers.get(RUN, ""))
        data = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Nothing is logged."""


MOST_TURNS = 10  # answers in a conversation, if the environment has no limit
PRECISION = 1e-6  # of a score that is a sum of weighted parts

_facts: dict[str, dict[str, Any]] = {}  # descriptions of environments by config, in this process


class Verifiers(TextEnv):
    example: Example | None = None

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if (facts := facts_of(config))["compares"] and not config.together:
            raise ConfigError(
                f"env.name={config.name} ({facts['kind']}): its rubric scores several answers together; try "
                "env.together=true"
            )

    @classmethod
    def load(cls, config: Any) -> Bridge:
        """The process that has loaded the environment, and the endpoint that it asks."""
        bridge = Bridge(config)
        _facts[key(config)] = bridge.facts
        return bridge

    @classmethod
    def unload(cls, shared: Bridge) -> None:
        shared.close()

    @classmethod
    def held_out(cls, config: Any) -> int:
        return facts_of(config)["held_out"]

    @classmethod
    def rewrites(cls, config: Any) -> bool:
        return True

    @classmethod
    def plays_groups(cls, config: Any) -> bool:
        return config.together

    @classmethod
    def shows_pictures(cls, config: Any) -> bool:
        return config.pictures

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int:
        return facts_of(config)["train"]

    @classmethod
    def longest_episode(cls, config: Any) -> int:
        return config.max_episode_steps or facts_of(config)["turns"] or MOST_TURNS

    def reset(self, spec: EpisodeSpec) -> Said:
        if self.example is not None:
            self.example.forget()
        held_out, facts = spec.init_state_id >= 0, self.shared.facts
        if held_out:
            number = spec.init_state_id % facts["held_out"]
        else:
            number = self.choose(spec, facts["train"])
        runs = self.group_size if self.config.together else None
        self.example = Example(self.shared, held_out, number, runs)
        try:
            asked = self.example.begin()
        except Lost as err:
            which = f"{'held-out' if held_out else 'training'} example {number}"
            raise EmbodiedError(f"env.name={self.config.name}: {which} could not be asked: {err}") from None
        self.asked_for = asked_for(self.example.request.body)
        return asked.said

    def step(self, answer: str) -> Turn:
        try:
            return self.turn_of(self.example.answer(answer))
        except Lost as err:
            return self.lost(err)

    def cut_short(self, turn: Turn) -> Turn:
        """The environment scores the conversation so far, as for a model without room for more."""
        try:
            turn = self.turn_of(self.example.stop())
        except Lost as err:
            return self.lost(err)
        stopped = turn.done or turn.ends_sample
        return turn if stopped else self.lost(Lost("the environment did not stop when asked to"))

    def turn_of(self, message: Asked | dict[str, Any]) -> Turn:
        if isinstance(message, dict):
            return self.last_turn(message)
        ends_sample = message.begins_run and self.config.together
        restarts = message.restarts and not ends_sample
        return Turn(
            said=message.said, done=ends_sample, facts=self.asked_for, restarts=restarts, ends_sample=ends_sample
        )

    def lost(self, err: Lost) -> Turn:
        self.example.forget()
        self.example = None
        return Turn(dropped=str(err))

    def last_turn(self, ended: dict[str, Any]) -> Turn:
        """The last turn of a conversation, or of a group's."""
        runs, self.example = self.example.runs, None
        if not self.config.together:
            return self.scored(ended)
        by_run = {result["run"]: result for result in ended["runs"]}
        if len({*runs} & by_run.keys()) < len(runs):
            return Turn(dropped="the environment has not scored all runs of its agents")
        return Turn(scores=[self.scored(by_run[run]) for run in runs])

    def scored(self, ended: dict[str, Any]) -> Turn:
        reward = float(ended["reward"])
        scores = {name: round(value, 4) for name, value in ended["metrics"].items()}
        facts = {**self.asked_for, "expected": ended["answer"], "scores": scores, "raised": ended["raised"]}
        success = reward >= self.config.full_score - PRECISION
        return Turn(reward=reward, success=success, facts={name: fact for name, fact in facts.items() if fact})


def asked_for(body: dict[str, Any]) -> dict[str, Any]:
    """Sampling arguments of an environment that are ignored, since the recipe sets them."""
    tokens = body.get("max_completion_tokens") or body.get("max_tokens")
    return {"max_tokens asked for": tokens} if tokens else {}


def key(config: Any) -> str:
    return json.dumps([config.name, str(config.python), config.kwargs], sort_keys=True)


def facts_of(config: Any) -> dict[str, Any]:
    """An environment's facts: its number of examples, and the most answers of a rollout."""
    if config.python is None:
        raise ConfigError(
            f"env.name={config.name} runs in an interpreter of its own, env.python=FOLDER/bin/python: "
            f"{how_to_install(Path('FOLDER/bin/python'))}"
        )
    if key(config) not in _facts:
        child = Child(config)
        try:
            _facts[key(config)] = child.ready()
        finally:
            child.close()
    return _facts[key(config)]
