"""The server for robots: admits clients, batches their requests, and answers with the policy.

It speaks openpi's protocol and vla-eval's (`core/robot_messages.py`), and knows them apart by the messages: the first
one is openpi's metadata and vla-eval's greeting at once. openpi's clients get a whole chunk of actions. vla-eval's
clients get one action for each observation, so the rest of a chunk waits here until the next observations come.

Images are looked up under `images/CAMERA`, `observation/CAMERA` and CAMERA; as in openpi's LIBERO example, the first
camera is `observation/image` as well and the second `observation/wrist_image`. Errors are sent to the client as text,
without internal details; these are printed by the server.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import math
import time
import traceback
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied.core import rng
from embodied.core.arrays import finite_rows, host, join_rows, text_arrays, text_lists
from embodied.core.pictures import PictureError, load_picture
from embodied.core.robot_messages import BadMessage, is_typed, pack, pack_typed, typed, unpack
from embodied.core.types import EnvSpec, Observation
from embodied.policies.base import Policy
from embodied.serving.config import FOREIGN_HOST, ServeConfig, is_token_shown

ANSWER_S, SEND_S = 120.0, 30.0  # limits for making an answer, and for sending it
# Codes of closing; 1007: the request is bad, 1011: the policy failed
AWAY, REFUSED, BROKEN, FULL = 1001, 1007, 1011, 1013
NOT_HTTP = "this server answers robots, over the websocket protocols of openpi and vla-eval; try policy.url=ws://..."
ANY_SIZE_MB = 32
CLIENTS = 8


@dataclass(frozen=True)
class ClientRequest:
    """One observation that waits for an action."""

    obs: Observation  # of one row
    client: int
    number: int  # counts a client's requests, so noise does not depend on other clients

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """The images' shapes by camera, and those of a chunk to continue; a pass of the policy needs equal ones."""
        parts = {**self.obs.get("images", {}), **self.obs.get("previous", {})}
        return sorted((name, array.shape) for name, array in parts.items())


class Answers:
    """Reads requests and computes answers; called by one thread at a time."""

    def __init__(self, policy: Policy, config: ServeConfig) -> None:
        self.policy = policy.eval().to(config.device)
        self.config = config
        self.noise = policy.noise_spec()

    def metadata(self) -> dict[str, Any]:
        """The policy's observations and its actions."""
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

    def greeting(self) -> bytes:
        """The first message to a client: the metadata, which in vla-eval's protocol also answers the client's greeting
        (its first message, number 1) and says which observations a benchmark has to send."""
        spec = self.policy.spec
        wanted = {"send_wrist_image": len(spec.images) > 1, "send_state": bool(spec.state_dim)}
        wanted["quat_no_antipodal"] = wanted["send_state"]  # rotations as robosuite has them, which policies learned
        asks = {name: True for name, is_wanted in wanted.items() if is_wanted}
        about = {"protocol_version": 1, "model_server": "embodied-loop", "observation_params": asks}
        about["action_chunk"] = self.policy.config.chunk
        return pack(self.metadata() | typed("hello", about, 1))

    @property
    def longest(self) -> int:
        """The most bytes a request may have."""
        if self.config.max_request_mb is None and not self.policy.any_image_size:
            return sum(array_bytes(self.policy.spec)) + OTHERS
        return (self.config.max_request_mb or ANY_SIZE_MB) * 1_000_000

    def read(self, data: bytes) -> dict:
        """The content of a client's message; raises BadMessage if it is invalid."""
        return unpack(data, None if self.policy.any_image_size else max(*array_bytes(self.policy.spec), OTHERS))

    def request(self, asked: dict, client: int, number: int) -> ClientRequest:
        """The observation that a client asks about; raises BadMessage if it is not the policy's."""
        policy = self.policy
        obs = observation_of(asked, policy.spec, policy.any_image_size)
        if "previous" in asked:
            if not policy.config.continues_chunks:
                raise BadMessage(f"a {policy.config.name} cannot continue 'previous' actions; try blend=linear")
            obs["previous"] = previous_of(asked["previous"], policy.horizon, policy.spec.action.dim)
        return ClientRequest(obs, client, number)

    def answer(self, requests: list[ClientRequest]) -> list[dict[str, Any] | BadMessage]:
        """Answers in the order of the requests; requests with images of equal sizes share a pass."""
        replies: dict[int, dict[str, Any] | BadMessage] = {}
        order = sorted(range(len(requests)), key=lambda at: requests[at].shapes)
        for _, alike in itertools.groupby(order, key=lambda at: requests[at].shapes):
            places = list(alike)
            replies |= dict(zip(places, self._answer([requests[at] for at in places]), strict=True))
        return [replies[at] for at in range(len(requests))]

    def _answer(self, requests: list[ClientRequest]) -> list[dict[str, Any] | BadMessage]:
        began = time.perf_counter()
        draw = rng.normal if self.noise.kind == "normal" else rng.uniform
        clients, numbers = (np.array([getattr(request, key) for request in requests]) for key in ("client", "number"))
        noise = draw(self.config.seed, "act/serve", clients, numbers, self.noise.width)
        obs = text_lists(join_rows([text_arrays(request.obs) for request in requests]))
        output = self.policy.act(obs, noise, self.config.temperature)
        actions = host(output.actions)
        sound = finite_rows(actions) & finite_rows(output.logprobs)  # tokens are finite even if all else is NaN
        spent = 1000 * (time.perf_counter() - began)
        odd = BadMessage("the policy's actions or their log-probs are not finite for this observation")
        replies = [{"actions": row, "policy_timing": {"infer_ms": spent}} for row in actions]
        return [answer if fine else odd for answer, fine in zip(replies, sound, strict=True)]


@dataclass
class Batching:
    """Answers simultaneous requests in one pass of the policy.

    A request waits for further requests while a connected client has sent none, but never longer than `wait_s`.
    """

    answer: Callable[[list[ClientRequest]], Sequence[Any]]  # runs in a thread; `ask` raises exceptions
    most: int
    wait_s: float
    clients: Callable[[], int]  # number of connected clients
    asked: asyncio.Queue[tuple[ClientRequest, asyncio.Future]] = field(default_factory=asyncio.Queue)

    async def ask(self, request: ClientRequest) -> Any:
        """Wait for the answer to this request."""
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((request, answer))
        return await answer

    async def run(self) -> None:
        """Answer requests until cancelled."""
        while True:
            batch = [await self.asked.get()]
            try:
                async with asyncio.timeout(self.wait_s):
                    while len(batch) < min(self.most, self.clients()):
                        batch.append(await self.asked.get())
            except TimeoutError:
                pass  # answer the requests received so far
            # The future of a disconnected client is already done.
            if waiting := [(request, answer) for request, answer in batch if not answer.done()]:
                await self._answer(waiting)

    async def _answer(self, batch: list[tuple[ClientRequest, asyncio.Future]]) -> None:
        requests = [request for request, _ in batch]
        try:
            answers = await asyncio.to_thread(self.answer, requests)
        except Exception as err:
            if len(batch) > 1:  # a bad request must not fail other requests
                for one in batch:
                    await self._answer([one])
                return
            answers = [err]
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)


@dataclass
class Client:
    """An admitted connection."""

    connection: Any
    number: int
    is_typed: bool = False  # True: it speaks vla-eval's protocol
    actions: deque[np.ndarray] = field(default_factory=deque)  # the rest of a chunk, for its next observations
    silent_since: float | None = field(default_factory=lambda: time.monotonic())  # None while it is being answered
    farewell: asyncio.Task | None = None

    @property
    def silent_s(self) -> float:
        return 0.0 if self.silent_since is None else time.monotonic() - self.silent_since


class PolicyServer:
    """Serves several clients at a time."""

    def __init__(self, answers: Answers, config: ServeConfig, notify: Callable[[str], None] = print) -> None:
        self.answers, self.config, self.notify = answers, config, notify
        self.batching = Batching(answers.answer, config.batch, config.wait_ms / 1000, lambda: len(self.clients))
        self.numbers = itertools.count()
        self.clients: dict[int, Client] = {}  # connected clients, by number

    async def run(self, ready: Callable[[int], None], stop: asyncio.Event) -> None:
        """Serve until `stop` is set; calls `ready` with the port."""
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
            ping_interval=None,  # a benchmark that builds its scene for a minute answers no ping
        ) as server:
            ready(server.sockets[0].getsockname()[1])
            answering = asyncio.create_task(self.batching.run())
            await stop.wait()
            answering.cancel()

    def admit(self, connection: Any, request: Any) -> Any:
        """The HTTP response that refuses a connection, or None to admit it."""
        refused, shown = None, request.headers.get_all("Authorization")
        if not self.config.names_this_server(request.headers.get_all("Host")):
            refused = http.HTTPStatus.FORBIDDEN, FOREIGN_HOST
        elif request.path in ("/healthz", "/health"):
            refused = http.HTTPStatus.OK, "OK"
        elif not any(value.lower() == "websocket" for value in request.headers.get_all("Upgrade")):
            refused = http.HTTPStatus.UPGRADE_REQUIRED, NOT_HTTP
        elif (token := self.config.token) and not any(is_token_shown(shown, *way) for way in ways_to_show(token)):
            refused = http.HTTPStatus.UNAUTHORIZED, "a valid token is needed"
        elif not self.has_room():
            refused = http.HTTPStatus.SERVICE_UNAVAILABLE, "too many clients"
        return refused and connection.respond(refused[0], f"{refused[1]}\n")

    async def talk(self, connection: Any) -> None:
        """Serve one client until it leaves."""
        from websockets.exceptions import ConnectionClosed

        number = next(self.numbers)
        if not self.has_room():  # several clients were admitted at the same time
            await connection.close(FULL, "too many clients")
            return
        client = self.clients[number] = Client(connection, number)
        self.notify(f"client {number} connected")
        try:
            await asyncio.wait_for(connection.send(self.answers.greeting()), SEND_S)
            for asked in itertools.count():
                data = await connection.recv()
                client.silent_since = None
                await self._reply(client, data, asked)
                client.silent_since = time.monotonic()
        except (ConnectionClosed, TimeoutError):
            self.notify(f"client {number} is gone")
        finally:
            self.clients.pop(number, None)

    def has_room(self) -> bool:
        """True if another client may connect. When all connections are in use, the longest idle one is closed."""
        if len(self.clients) < (self.config.max_clients or CLIENTS):
            return True
        number, client = max(self.clients.items(), key=lambda item: item[1].silent_s)
        if client.silent_s < self.config.idle_s:
            return False
        self.notify(f"client {number} has sent no request for {client.silent_s:.0f} s and makes room for another")
        del self.clients[number]
        client.farewell = asyncio.create_task(client.connection.close(AWAY, f"silent for {self.config.idle_s:g} s"))
        return True

    async def _reply(self, client: Client, data: bytes | str, number: int) -> None:
        message: dict[str, Any] = {}
        reply: bytes | str | None = None
        failure = None
        try:
            if isinstance(data, str):
                raise BadMessage("requests are bytes, not text")
            async with asyncio.timeout(ANSWER_S):
                message = await asyncio.to_thread(self.answers.read, data)
                client.is_typed |= is_typed(message)
                answering = self._answer_typed if client.is_typed else self._answer
                reply = await answering(client, message, number)
        except BadMessage as err:
            reply, failure = f"error: {err}", (REFUSED, "the request cannot be answered")
        except Exception:
            self.notify(f"client {client.number}: {traceback.format_exc()}")
            reply, failure = "error: the policy failed; the server's log says why", (BROKEN, "the policy failed")
        if failure and client.is_typed:  # its connection stays open
            reply, failure = pack_typed("error", {"error": reply}, number_of(message)), None
        if reply is not None:
            await asyncio.wait_for(client.connection.send(reply), SEND_S)
        if failure:
            await client.connection.close(*failure)

    async def _answer(self, client: Client, asked: dict[str, Any], number: int) -> bytes:
        """A whole chunk of actions."""
        request = await asyncio.to_thread(self.answers.request, asked, client.number, number)
        return pack(await self.batching.ask(request))

    async def _answer_typed(self, client: Client, message: dict[str, Any], number: int) -> bytes | None:
        """The next action, in vla-eval's protocol, or the whole chunk if it is asked for; None for messages without an
        answer."""
        kind, asked = message.get("type"), message.get("payload")
        if kind in ("hello", "episode_start", "episode_end"):
            client.actions.clear()
            return None
        if kind != "observation" or not isinstance(asked, dict):
            raise BadMessage(f"messages of the type {str(kind)[:40]!r} are not taken, or not with this payload")
        if asked.get("episode_restart"):
            client.actions.clear()
        if not client.actions:
            asked = by_order(asked, self.answers.policy.spec)
            request = await asyncio.to_thread(self.answers.request, asked, client.number, number)
            actions = (await self.batching.ask(request))["actions"]
            if asked.get("whole_chunk") is True:
                return pack_typed("action", {"actions": actions}, number_of(message))
            client.actions.extend(actions)
        return pack_typed("action", {"actions": client.actions.popleft()}, number_of(message))


def ways_to_show(token: str) -> list[tuple[str, str]]:
    """The schemes of an Authorization header, with what each shows: openpi's, and that of ws://token:SECRET@HOST."""
    return [("Api-Key", token), ("Basic", b64encode(f"token:{token}".encode()).decode())]


def number_of(message: dict[str, Any]) -> int:
    """The number of a message in vla-eval's protocol, which its answer has, too."""
    number = message.get("seq")
    return number if isinstance(number, int) else 0


# A request as an observation of the policy

ALIASES = (("observation/image",), ("observation/wrist_image",))
LONGEST = 2000  # letters of an instruction
LARGEST = 4096  # pixels along a side
NUMBER = 8  # bytes of a number at most
OTHERS = 1_000_000  # bytes of a message for keys that the policy does not read


def array_bytes(spec: EnvSpec) -> list[int]:
    """The bytes of each image and of the state, in any number type."""
    return [NUMBER * numbers for numbers in (*map(math.prod, spec.images.values()), spec.state_dim or 0)]


def observation_of(request: dict, spec: EnvSpec, any_size: bool) -> Observation:
    """The request as an observation of one row. With `any_size` the policy scales images itself."""
    flat = {key: value for key, value in request.items() if isinstance(key, str)}
    if isinstance(images := flat.get("images"), dict):
        flat |= {f"images/{camera}": image for camera, image in images.items()}
    obs: Observation = {}
    if spec.images:
        obs["images"] = {}
        for (camera, size), alias in zip(spec.images.items(), itertools.chain(ALIASES, itertools.repeat(()))):
            image = field_of(flat, f"images/{camera}", f"observation/{camera}", camera, *alias)
            obs["images"][camera] = image_of(image, size, any_size, camera)[None]
    if spec.state_dim:
        obs["state"] = state_of(field_of(flat, "observation/state", "state", "states", "joint_state"), spec.state_dim)[
            None
        ]
    if spec.instruction:
        obs["instruction"] = [text_of(field_of(flat, "prompt", "instruction", "task_description"))]
    return obs


def previous_of(given: Any, longest: int, width: int) -> Observation:
    """The actions that a chunk should continue [1, K, A], and their weights [1, K]."""
    actions, weights = (given.get(field) if isinstance(given, dict) else None for field in ("actions", "weights"))
    if not (
        isinstance(actions, np.ndarray)
        and isinstance(weights, np.ndarray)
        and (actions.ndim, weights.shape) == (2, actions.shape[:1])
        and (len(actions) <= longest and actions.shape[1] == width)
        and all(np.isfinite(field.astype(np.float32)).all() for field in (actions, weights))
    ):
        raise BadMessage(
            f"'previous' should hold actions [K, {width}], K at most {longest}, and weights [K], of finite numbers"
        )
    return {"actions": actions.astype(np.float32)[None], "weights": weights.astype(np.float32).clip(0, 1)[None]}


def by_order(request: dict, spec: EnvSpec) -> dict:
    """The request with the policy's names of cameras. Benchmarks have names of their own: unless these are all of the
    policy's, cameras count in order, as in vla-eval's own servers."""
    images = request.get("images")
    if not isinstance(images, dict) or spec.images.keys() <= images.keys():
        return request
    return request | {"images": dict(zip(spec.images, images.values()))}


def field_of(flat: dict[str, Any], *names: str) -> Any:
    for name in names:
        if name in flat:
            return flat[name]
    raise BadMessage(f"the request lacks {' or '.join(repr(name) for name in names)}")


def image_of(image: Any, size: tuple[int, int, int], any_size: bool, camera: str) -> np.ndarray:
    """The image as uint8 [H, W, 3]; like openpi's, it may have the colours first, or floats from 0 to 1. Bytes are an
    image file."""
    if isinstance(image, bytes):
        try:
            image = load_picture(image)
        except PictureError as err:
            raise BadMessage(f"{camera!r}: {err}") from None
    if not isinstance(image, np.ndarray) or image.ndim != 3 or 3 not in (image.shape[0], image.shape[2]):
        raise BadMessage(f"the image of {camera!r} should be an array [height, width, 3]")
    if image.shape[2] != 3:
        image = np.moveaxis(image, 0, 2)
    if image.shape != tuple(size) and not any_size:
        raise BadMessage(f"the image of {camera!r} is {list(image.shape)}, this policy wants {list(size)}")
    if not 1 <= min(image.shape[:2]) <= max(image.shape[:2]) <= LARGEST:
        raise BadMessage(f"the image of {camera!r} is {list(image.shape)}; at most {LARGEST} pixels a side are taken")
    if image.dtype.kind == "f":
        image = (255 * np.clip(np.nan_to_num(image), 0, 1)).astype(np.uint8)
    if image.dtype != np.uint8:
        raise BadMessage(f"the image of {camera!r} should be of bytes, or of floats from 0 to 1")
    return np.ascontiguousarray(image)


def state_of(state: Any, width: int) -> np.ndarray:
    if not isinstance(state, np.ndarray) or state.shape != (width,):
        raise BadMessage(f"the state should be an array of {width} numbers")
    state = state.astype(np.float32)
    if not np.isfinite(state).all():
        raise BadMessage("the state holds NaN or infinity")
    return state


def text_of(text: Any) -> str:
    if not isinstance(text, str) or not text.strip() or len(text) > LONGEST:
        raise BadMessage(f"the instruction should be text of at most {LONGEST} letters")
    return text
