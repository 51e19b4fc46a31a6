"""The server for robots: admits clients, batches their requests, and answers with the policy.

It speaks openpi's protocol: msgpack with numpy arrays (bytes, type and shape). No message is trusted: only plain
numbers become arrays, and every count has a limit, since objects cost more than bytes: 30 MB of empty maps would take
ten seconds and 2 GB. Images are looked up under `images/CAMERA`, `observation/CAMERA` and CAMERA; as in openpi's LIBERO
example, the first camera is `observation/image` as well and the second `observation/wrist_image`. Errors are sent to
the client as text, without internal details; these are printed by the server.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import math
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from embodied.core import rng
from embodied.core.arrays import finite_rows, host, join_rows, text_arrays, text_lists
from embodied.core.errors import EmbodiedError
from embodied.core.types import EnvSpec, Observation
from embodied.policies.base import Policy
from embodied.serving.config import FOREIGN_HOST, ServeConfig, is_token_shown

ANSWER_S, SEND_S = 120.0, 30.0  # limits for making an answer, and for sending it
# Codes of closing; 1007: the request is bad, 1011: the policy failed
AWAY, REFUSED, BROKEN, FULL = 1001, 1007, 1011, 1013
NOT_HTTP = "this server answers robots, over openpi's websocket protocol; policy.url takes servers of language models"
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
        """The images' shapes by camera; one pass of the policy needs images of equal sizes."""
        return sorted((camera, image.shape) for camera, image in self.obs.get("images", {}).items())


class Answers:
    """Reads requests and computes answers; called by one thread at a time."""

    def __init__(self, policy: Policy, config: ServeConfig) -> None:
        self.policy = policy.eval().to(config.device)
        self.config = config
        self.noise = policy.noise_spec()

    def metadata(self) -> dict[str, Any]:
        """The first message to a client: the policy's observations and its actions."""
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
        """The most bytes a request may have."""
        if self.config.max_request_mb is None and not self.policy.any_image_size:
            return sum(array_bytes(self.policy.spec)) + OTHERS
        return (self.config.max_request_mb or ANY_SIZE_MB) * 1_000_000

    def read(self, data: bytes, client: int, number: int) -> ClientRequest:
        """The request in a client's message; raises BadMessage if it is invalid."""
        any_size, spec = self.policy.any_image_size, self.policy.spec
        request = unpack(data, None if any_size else max(*array_bytes(spec), OTHERS))
        return ClientRequest(observation_of(request, spec, any_size), client, number)

    def answer(self, requests: list[ClientRequest]) -> list[bytes | BadMessage]:
        """Answers in the order of the requests; requests with images of equal sizes share a pass."""
        replies: dict[int, bytes | BadMessage] = {}
        order = sorted(range(len(requests)), key=lambda at: requests[at].shapes)
        for _, alike in itertools.groupby(order, key=lambda at: requests[at].shapes):
            places = list(alike)
            replies |= dict(zip(places, self._answer([requests[at] for at in places]), strict=True))
        return [replies[at] for at in range(len(requests))]

    def _answer(self, requests: list[ClientRequest]) -> list[bytes | BadMessage]:
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
        replies = [pack({"actions": row, "policy_timing": {"infer_ms": spent}}) for row in actions]
        return [answer if fine else odd for answer, fine in zip(replies, sound, strict=True)]


@dataclass
class Batching:
    """Answers simultaneous requests in one pass of the policy.

    A request waits for further requests while a connected client has sent none, but never longer than `wait_s`.
    """

    answer: Callable[[list[ClientRequest]], Sequence[bytes | Exception]]  # runs in a thread; `ask` raises exceptions
    most: int
    wait_s: float
    clients: Callable[[], int]  # number of connected clients
    asked: asyncio.Queue[tuple[ClientRequest, asyncio.Future]] = field(default_factory=asyncio.Queue)

    async def ask(self, request: ClientRequest) -> bytes:
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
        ) as server:
            ready(server.sockets[0].getsockname()[1])
            answering = asyncio.create_task(self.batching.run())
            await stop.wait()
            answering.cancel()

    def admit(self, connection: Any, request: Any) -> Any:
        """The HTTP response that refuses a connection, or None to admit it."""
        refused, token = None, self.config.token
        if not self.config.names_this_server(request.headers.get_all("Host")):
            refused = http.HTTPStatus.FORBIDDEN, FOREIGN_HOST
        elif request.path == "/healthz":
            refused = http.HTTPStatus.OK, "OK"
        elif not any(value.lower() == "websocket" for value in request.headers.get_all("Upgrade")):
            refused = http.HTTPStatus.UPGRADE_REQUIRED, NOT_HTTP
        elif token is not None and not is_token_shown(request.headers.get_all("Authorization"), "Api-Key", token):
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
        client = self.clients[number] = Client(connection)
        self.notify(f"client {number} connected")
        try:
            await asyncio.wait_for(connection.send(pack(self.answers.metadata())), SEND_S)
            for asked in itertools.count():
                data = await connection.recv()
                client.silent_since = None
                await self._reply(connection, data, number, asked)
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

    async def _reply(self, connection: Any, data: bytes | str, client: int, number: int) -> None:
        failure = None
        try:
            if isinstance(data, str):
                raise BadMessage("requests are bytes, not text")
            async with asyncio.timeout(ANSWER_S):
                request = await asyncio.to_thread(self.answers.read, data, client, number)
                reply: bytes | str = await self.batching.ask(request)
        except BadMessage as err:
            reply, failure = f"error: {err}", (REFUSED, "the request cannot be answered")
        except Exception:
            self.notify(f"client {client}: {traceback.format_exc()}")
            reply, failure = "error: the policy failed; the server's log says why", (BROKEN, "the policy failed")
        await asyncio.wait_for(connection.send(reply), SEND_S)
        if failure:
            await connection.close(*failure)


# Messages

KINDS = "biuf"
MOST_KEYS = 64  # keys of a map, and entries of a list
MOST_CONTAINERS = 512  # maps and lists in a message; an array is two
LONGEST_TEXT = 8192  # bytes


class BadMessage(EmbodiedError):
    """An invalid request; the client gets the text."""


def pack(message: Any) -> bytes:
    import msgpack

    return msgpack.packb(message, default=_pack_array)


def unpack(data: bytes, largest: int | None = None) -> dict:
    """The map in a message. `largest` limits the bytes of an array."""
    import msgpack

    containers = itertools.count(1)

    def counted(container: Any) -> Any:
        if next(containers) > MOST_CONTAINERS:
            raise BadMessage(f"more than {MOST_CONTAINERS} maps and lists")
        return container

    longest = {"str": LONGEST_TEXT, "bin": largest or len(data), "array": MOST_KEYS, "map": MOST_KEYS, "ext": 0}
    limits = {f"max_{kind}_len": most for kind, most in longest.items()} | {"max_buffer_size": len(data) + 1}
    hooks = {"object_hook": lambda fields: _unpack_array(counted(fields)), "list_hook": counted}
    unpacker = msgpack.Unpacker(strict_map_key=False, **hooks, **limits)
    unpacker.feed(data)
    message, where = {}, "the message"
    try:
        if (keys := unpacker.read_map_header()) > MOST_KEYS:
            raise BadMessage(f"{keys} keys; at most {MOST_KEYS} are taken")
        for _ in range(keys):
            key = unpacker.unpack()
            where = f"{str(key)[:40]!r} in the message"
            message[key] = unpacker.unpack()
        where = "the message"
        if unpacker.tell() != len(data):
            raise BadMessage("something follows its end")
    except BadMessage as err:
        raise BadMessage(f"{where}: {err}") from None
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError, msgpack.UnpackException) as err:
        raise BadMessage(f"{where} cannot be read as msgpack: {str(err) or type(err).__name__}") from None
    return message


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in KINDS:
        return {b"__ndarray__": True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    if isinstance(value, np.generic) and value.dtype.kind in KINDS:
        return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}
    raise TypeError(f"{type(value).__name__} is not sent")


def _unpack_array(fields: dict) -> Any:
    """The array in a map; numpy refuses a shape that its bytes do not fit. Only plain numbers are taken, since objects
    would be pickles."""
    kind = {b"__ndarray__", b"__npgeneric__"} & fields.keys()
    if not kind:
        return fields
    dtype, data = np.dtype(fields[b"dtype"]), fields[b"data"]
    if dtype.kind not in KINDS:
        raise BadMessage(f"arrays of type {str(fields[b'dtype'])[:20]!r} are not taken; send numbers or bytes")
    if b"__npgeneric__" in kind:
        return dtype.type(data)
    return np.frombuffer(data, dtype).reshape(fields[b"shape"])


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
        obs["state"] = state_of(field_of(flat, "observation/state", "state"), spec.state_dim)[None]
    if spec.instruction:
        obs["instruction"] = [text_of(field_of(flat, "prompt", "instruction"))]
    return obs


def field_of(flat: dict[str, Any], *names: str) -> Any:
    for name in names:
        if name in flat:
            return flat[name]
    raise BadMessage(f"the request lacks {' or '.join(repr(name) for name in names)}")


def image_of(image: Any, size: tuple[int, int, int], any_size: bool, camera: str) -> np.ndarray:
    """The image as uint8 [H, W, 3]; like openpi's, it may have the colours first, or floats from 0 to 1."""
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
