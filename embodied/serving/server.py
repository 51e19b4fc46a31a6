"""The connections: who may come in, how much may be said, and what the policy answers.

What surprises: an error goes over the wire as text, in openpi's protocol the sign of one, and never says more than the
client needs; what went wrong inside is printed here.
"""

from __future__ import annotations

import asyncio
import hmac
import http
import itertools
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from embodied.core import rng
from embodied.core.arrays import finite_rows, host, join_rows
from embodied.core.types import Observation
from embodied.policies.base import Policy
from embodied.serving.batching import Batching
from embodied.serving.codec import BadMessage, pack, unpack
from embodied.serving.config import ServeConfig
from embodied.serving.requests import OTHERS, largest_array, longest_question, observation_of

ANSWER_S, SEND_S = 120.0, 30.0  # most that an answer, and taking it, may last
AWAY, REFUSED, BROKEN, FULL = (
    1001,
    1007,
    1011,
    1013,
)  # codes of closing; 1007: what was sent is bad, 1011: what is here is
ANY_SIZE_MB = 32


@dataclass(frozen=True)
class Question:
    obs: Observation  # of one row
    client: int
    number: int  # counts a client's questions: noise does not depend on what others ask

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """Of its images: those of one pass are of the same sizes."""
        return sorted((camera, image.shape) for camera, image in self.obs.get("images", {}).items())


class Answers:
    """The policy, asked by one thread at a time."""

    def __init__(self, policy: Policy, config: ServeConfig) -> None:
        self.policy = policy.eval().to(config.device)
        self.config = config
        self.noise = policy.noise_spec()

    def metadata(self) -> dict[str, Any]:
        """What clients are told first."""
        spec, config = self.policy.spec, self.policy.config
        return {
            "policy": config.name,
            "cameras": {camera: list(size) for camera, size in spec.images.items()},
            "state_dim": spec.state_dim or 0,
            "instruction": spec.instruction,
            "action_dim": spec.action.dim,
            "discrete": spec.action.discrete,
            "action_chunk": config.chunk,
        }

    @property
    def longest(self) -> int:
        """Bytes of a question, at most."""
        if self.config.max_request_mb is None and not self.policy.any_image_size:
            return longest_question(self.policy.spec)
        return (self.config.max_request_mb or ANY_SIZE_MB) * 1_000_000

    def read(self, data: bytes, client: int, number: int) -> Question:
        any_size, spec = self.policy.any_image_size, self.policy.spec
        question = unpack(data, None if any_size else max(largest_array(spec), OTHERS))
        return Question(observation_of(question, spec, any_size), client, number)

    def answer(self, questions: list[Question]) -> list[bytes | BadMessage]:
        """In their order; those with images of one size in one pass."""
        found: dict[int, bytes | BadMessage] = {}
        order = sorted(range(len(questions)), key=lambda at: questions[at].shapes)
        for _, alike in itertools.groupby(order, key=lambda at: questions[at].shapes):
            places = list(alike)
            found |= dict(zip(places, self._answer([questions[at] for at in places]), strict=True))
        return [found[at] for at in range(len(questions))]

    def _answer(self, questions: list[Question]) -> list[bytes | BadMessage]:
        began = time.perf_counter()
        draw = rng.normal if self.noise.kind == "normal" else rng.uniform
        clients, numbers = (np.array([getattr(one, key) for one in questions]) for key in ("client", "number"))
        noise = draw(self.config.seed, "act/serve", clients, numbers, self.noise.width)
        output = self.policy.act(join_rows([one.obs for one in questions]), noise, self.config.temperature)
        actions = host(output.actions)
        sound = finite_rows(actions) & finite_rows(output.logprobs)  # tokens are numbers even where all else is NaN
        spent = 1000 * (time.perf_counter() - began)
        return [
            pack({"actions": row, "policy_timing": {"infer_ms": spent}})
            if fine
            else BadMessage("the policy's actions or their log-probs are not finite for this observation")
            for row, fine in zip(actions, sound, strict=True)
        ]


class Client:
    def __init__(self, connection: Any) -> None:
        self.connection = connection
        self.farewell: asyncio.Task | None = None
        self._since: float | None = time.monotonic()  # None: is being answered

    @property
    def silent_s(self) -> float:
        return 0.0 if self._since is None else time.monotonic() - self._since

    @contextmanager
    def busy(self) -> Iterator[None]:
        self._since = None
        yield
        self._since = time.monotonic()


class Server:
    def __init__(self, answers: Answers, config: ServeConfig, tell: Callable[[str], None] = print) -> None:
        self.answers, self.config, self.tell = answers, config, tell
        self.batching = Batching(answers.answer, config.batch, config.wait_ms / 1000, lambda: len(self.clients))
        self.numbers = itertools.count()
        self.clients: dict[int, Client] = {}  # who has a place

    async def run(self, ready: Callable[[int], None], stop: asyncio.Event) -> None:
        """Serve until asked to stop; `ready` is told the port."""
        from websockets.asyncio.server import serve

        async with serve(
            self.talk,
            self.config.host,
            self.config.port,
            process_request=self.admit,
            origins=[None],  # browsers name the page they come from: no page may use this server behind its user's back
            compression=None,
            max_size=self.answers.longest,
            max_queue=2,
        ) as server:
            ready(server.sockets[0].getsockname()[1])
            answering = asyncio.create_task(self.batching.run())
            await stop.wait()
            answering.cancel()

    def admit(self, connection: Any, request: Any) -> Any:
        if request.path == "/healthz":
            return connection.respond(http.HTTPStatus.OK, "OK\n")
        if self.config.token is not None:
            shown = request.headers.get_all("Authorization")
            wanted = f"Api-Key {self.config.token}"
            if len(shown) != 1 or not hmac.compare_digest(shown[0].encode(), wanted.encode()):
                return connection.respond(http.HTTPStatus.UNAUTHORIZED, "a valid token is needed\n")
        if not self.has_room():
            return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "too many clients\n")
        return None

    async def talk(self, connection: Any) -> None:
        from websockets.exceptions import ConnectionClosed

        number = next(self.numbers)
        if not self.has_room():  # several were admitted at the same time
            await connection.close(FULL, "too many clients")
            return
        client = self.clients[number] = Client(connection)
        self.tell(f"client {number} connected")
        try:
            await asyncio.wait_for(connection.send(pack(self.answers.metadata())), SEND_S)
            for asked in itertools.count():
                data = await connection.recv()
                with client.busy():
                    await self._reply(connection, data, number, asked)
        except (ConnectionClosed, TimeoutError):
            self.tell(f"client {number} is gone")
        finally:
            self.clients.pop(number, None)

    def has_room(self) -> bool:
        """Whether one more may come in. Where all places are taken, who has been silent for too long loses theirs."""
        if len(self.clients) < self.config.max_clients:
            return True
        number, client = max(self.clients.items(), key=lambda item: item[1].silent_s)
        if client.silent_s < self.config.idle_s:
            return False
        self.tell(f"client {number} has asked nothing for {client.silent_s:.0f} s and makes room for another")
        del self.clients[number]
        client.farewell = asyncio.create_task(client.connection.close(AWAY, f"silent for {self.config.idle_s:g} s"))
        return True

    async def _reply(self, connection: Any, data: bytes | str, client: int, number: int) -> None:
        try:
            if isinstance(data, str):
                raise BadMessage("questions are bytes, not text")
            async with asyncio.timeout(ANSWER_S):
                question = await asyncio.to_thread(self.answers.read, data, client, number)
                reply = await self.batching.ask(question)
        except BadMessage as err:
            await asyncio.wait_for(connection.send(f"error: {err}"), SEND_S)
            await connection.close(REFUSED, "the question cannot be answered")
        except Exception:
            self.tell(f"client {client}: {traceback.format_exc()}")
            await asyncio.wait_for(connection.send("error: the policy failed; the server's log says why"), SEND_S)
            await connection.close(BROKEN, "the policy failed")
        else:
            await asyncio.wait_for(connection.send(reply), SEND_S)
