"""The client of a server that acts, in vla-eval's model protocol: WebSocket and msgpack (`core/robot_messages.py`).

A server may remember an episode: the rest of a chunk, earlier images. So every open episode has a connection of its
own, and what a server remembered of an episode cannot be had again: if a connection breaks, the evaluation ends, and
the same command plays the missing episodes from their beginnings.
"""

from __future__ import annotations

import os
import socket
import struct
from contextlib import ExitStack
from math import ceil
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError, EmbodiedError, in_a_line
from embodied.core.files import as_path
from embodied.core.options import WEBSOCKETS
from embodied.core.robot_messages import LONGEST_TEXT, BadMessage, pack_typed, unpack
from embodied.core.types import EnvSpec, Observation

MOST_BYTES = 1 << 22  # of an answer
HELLO = {"harness_version": "embodied-loop", "protocol_version": 1}
OFFERS = {"send_wrist_image": "two cameras", "send_state": "a state"}  # what a server may ask for


class Connection:
    """One connection, for one episode after the other."""

    def __init__(self, config: Any) -> None:
        WEBSOCKETS.check("policy.url")
        from websockets.exceptions import InvalidHandshake, InvalidURI
        from websockets.sync.client import connect

        self.name, self.answer_s, self.number = f"policy.url={config.url}", config.answer_s, 0
        self.opened = ExitStack()
        token = token_of(config)
        try:
            opened = connect(
                config.url,
                additional_headers={"Authorization": f"Api-Key {token}"} if token else None,
                compression=None,
                max_size=MOST_BYTES,
                open_timeout=config.answer_s,
                close_timeout=1,
                ping_interval=None,  # a server that computes may not answer pings
            )
            self.socket = self.opened.enter_context(opened)
        except (OSError, EOFError, InvalidHandshake, InvalidURI) as err:
            raise EmbodiedError(f"{self.name} cannot be reached: {in_a_line(err)}; is the server running?") from None
        limit = struct.pack("ll", ceil(config.answer_s), 0)  # a server that reads nothing would block us forever
        self.socket.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        self.hello = self.ask("hello", HELLO, "hello")

    def ask(self, kind: str, payload: dict[str, Any], wanted: str) -> dict[str, Any]:
        """Send a message, and return the content of its answer, of the type `wanted`."""
        self.send(kind, payload)
        return self.receive(wanted)

    def send(self, kind: str, payload: dict[str, Any]) -> None:
        from websockets.exceptions import ConnectionClosed

        self.number += 1
        try:
            self.socket.send(pack_typed(kind, payload, self.number))
        except (ConnectionClosed, OSError) as err:
            raise self.gone(err) from None

    def receive(self, wanted: str) -> dict[str, Any]:
        """The content of the answer to the last message."""
        from websockets.exceptions import ConnectionClosed

        try:
            data = self.socket.recv(timeout=self.answer_s, decode=False)
            message = unpack(data)
        except TimeoutError:
            raise EmbodiedError(f"{self.name} has not answered for {self.answer_s:g} s (policy.answer_s)") from None
        except (ConnectionClosed, OSError) as err:
            raise self.gone(err) from None
        except BadMessage as err:
            raise EmbodiedError(f"{self.name} answers nonsense: {err}; does it speak vla-eval's protocol?") from None
        kind, content = message.get("type"), message.get("payload")
        if kind == "error" and isinstance(content, dict):
            raise EmbodiedError(f"{self.name} refuses: {str(content.get('error'))[:LONGEST_TEXT]}")
        if kind != wanted or not isinstance(content, dict) or message.get("seq") != self.number:
            raise EmbodiedError(
                f"{self.name} answers message {self.number} with {str(kind)[:40]!r} to message "
                f"{str(message.get('seq'))[:40]}, not with {wanted!r}; does it speak vla-eval's protocol?"
            )
        return content

    def gone(self, err: Exception) -> EmbodiedError:
        return EmbodiedError(
            f"{self.name}: the connection has ended ({in_a_line(err)}); start the server again, and the same command "
            "plays the missing episodes"
        )

    def close(self) -> None:
        self.opened.close()


def token_of(config: Any) -> str | None:
    """The server's token, by `policy.token_from`."""
    try:
        of_file = as_path(config.token_from).read_text(encoding="utf-8").strip() if "/" in config.token_from else ""
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"policy.token_from={config.token_from} cannot be read: {err}") from None
    return of_file or os.environ.get(config.token_from) or None


def first_look(config: Any) -> dict[str, Any]:
    """What the server says of itself; raises EmbodiedError if there is none."""
    connection = Connection(config)
    connection.close()
    return {name: value for name, value in connection.hello.items() if isinstance(value, str | int | dict)}


class OpenEpisodes:
    """The connections of all open episodes of a policy worker, by episode."""

    def __init__(self, config: Any, spec: EnvSpec) -> None:
        self.config, self.spec = config, spec
        self.playing: dict[str, dict[int, Connection]] = {}  # by source of requests, which names its open episodes
        self.idle: list[Connection] = []

    def end(self, source: str, playing: set[int]) -> None:
        """The open episodes of a source are only these."""
        of_source = self.playing.setdefault(source, {})
        for episode in of_source.keys() - playing:
            connection = of_source.pop(episode)
            connection.send("episode_end", {})
            self.idle.append(connection)

    def begin(self, source: str, episode: int, task: str) -> None:
        """An episode begins on a connection that is free."""
        connection = self.idle.pop() if self.idle else self.connect()
        connection.send("episode_start", {"task": {"name": task}})
        self.playing[source][episode] = connection

    def connect(self) -> Connection:
        connection = Connection(self.config)
        asked, length = connection.hello.get("observation_params"), connection.hello.get("action_chunk", 1)
        if self.config.chunk_length not in (1, length):
            connection.close()
            raise ConfigError(
                f"{connection.name} answers with chunks of {length}; set policy.chunk_length={length}, or 1"
            )
        has = {"send_wrist_image": len(self.spec.images) > 1, "send_state": bool(self.spec.state_dim)}
        if missing := [
            OFFERS[name] for name in OFFERS if isinstance(asked, dict) and asked.get(name) and not has[name]
        ]:
            raise ConfigError(
                f"{connection.name} wants {' and '.join(missing)}, which this env does not observe; set env.cameras, "
                "env.state or env.obs, or ask a server that was made for these observations"
            )
        return connection

    def close(self) -> None:
        for connection in (*self.idle, *(one for playing in self.playing.values() for one in playing.values())):
            connection.close()

    def of(self, source: str, episode: int) -> Connection:
        try:
            return self.playing[source][episode]
        except KeyError:
            raise EmbodiedError(
                f"policy.url={self.config.url}: episode {episode} began on a connection that is lost; the same command "
                "plays it again"
            ) from None

    def act(self, connections: list[Connection], obs: Observation) -> np.ndarray:
        """The next actions [N, C, A] of each connection's episode. All are asked before the first answer is awaited."""
        for row, connection in enumerate(connections):
            connection.send("observation", observation_of_row(obs, row, whole=self.config.chunk > 1))
        return np.stack([self.actions_of(connection) for connection in connections])

    def actions_of(self, connection: Connection) -> np.ndarray:
        wanted, content, length = self.spec.action.dim, connection.receive("action"), self.config.chunk
        given = content.get("actions", content.get("action"))
        try:
            action = np.asarray(given, np.float64)
        except (TypeError, ValueError):
            raise EmbodiedError(f"{connection.name} answers with actions that are no numbers") from None
        fits = action.shape in ((length, wanted), (wanted,) * (length == 1))
        if not fits or not np.isfinite(action).all():
            what = "NaN or infinity" if fits else f"an action of the shape {list(action.shape)}"
            chunk = "; start it with a chunk_size, so that it keeps the rest of a chunk" if action.ndim == 2 else ""
            raise EmbodiedError(f"{connection.name} answers with {what}, this env takes {wanted} numbers{chunk}")
        return action.reshape(length, wanted).astype(np.int64 if self.spec.action.discrete else np.float32)


def observation_of_row(obs: Observation, row: int, whole: bool = False) -> dict[str, Any]:
    """One row of an observation, with vla-eval's names. Servers of ours answer it with a `whole` chunk, too."""
    sent: dict[str, Any] = {"task_description": str(obs["instruction"][row]) if "instruction" in obs else ""}
    if "images" in obs:
        sent["images"] = {camera: np.asarray(images[row]) for camera, images in obs["images"].items()}
    if "state" in obs:
        sent["states"] = np.asarray(obs["state"][row])
    if "previous" in obs:
        sent["previous"] = {name: np.asarray(array[row]) for name, array in obs["previous"].items()}
    return sent | ({"whole_chunk": True} if whole else {})
