"""Options of `python -m embodied.serve`. Free of torch."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Iterator, Sequence
from typing import ClassVar
from urllib.parse import urlsplit

from pydantic import Field

from embodied.core.options import Strict

TOKEN = "EMBODIED_SERVE_TOKEN"
FOREIGN_HOST = "the Host header does not name this machine"
SHORTEST = 16


class ServeConfig(Strict):
    checkpoint: str = Field(description="A run's folder, one of its checkpoints, a policy folder, or a hub id.")
    host: str = Field("127.0.0.1", description="Address to listen at; another than loopback asks clients for a token.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen at; 0: a free one, which is printed.")
    device: str = Field("cpu", pattern="^(cpu|cuda(:[0-9]+)?)$", description="Where the policy computes.")
    temperature: float = Field(
        0.0,
        ge=0,
        le=1,
        description="How random actions are: 0 takes the best one, 1 samples as in training. Requests to a language "
        "model say so themselves.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="All randomness of the answers follows from it.")
    max_request_mb: int | None = Field(
        None,
        gt=0,
        le=1024,
        description="Longer requests end the connection; null: enough for the policy's observations, or the longest "
        "conversation, and 1 MB more, or 32 where it takes images of any size.",
    )
    batch: int = Field(8, gt=0, description="Requests that are answered in one pass at most; 1: one at a time.")
    wait_ms: float = Field(
        5.0,
        ge=0,
        le=10_000,
        description="How long a request waits for other clients' requests, to be answered together.",
    )
    max_clients: int | None = Field(
        None,
        gt=0,
        description="Connections of robots (null: 8), or requests to a language model (1024), at a time; more are "
        "turned away.",
    )
    idle_s: float = Field(
        60.0, gt=0, description="A client that asks nothing for so long loses its place as soon as another wants it."
    )

    of_robots: ClassVar = ("temperature", "batch", "wait_ms", "idle_s")  # options of robot servers only

    @property
    def token(self) -> str | None:
        """The token that clients must send, from the environment: other users of a machine can see command lines."""
        return os.environ.get(TOKEN) or None

    @property
    def loopback(self) -> bool:
        """True if only programs of this machine can connect."""
        return is_loopback(f"[{self.host}]" if ":" in self.host else self.host)

    def names_this_server(self, hosts: Sequence[str]) -> bool:
        """True if a request's Host headers name this machine; checked if only this machine's programs may connect. A
        browser page whose domain points to loopback (DNS rebinding) names its own domain."""
        return not self.loopback or all(map(is_loopback, hosts))

    def conflicts(self) -> Iterator[str]:
        if self.token is None and not self.loopback:
            yield (
                f"host={self.host} can be reached from other machines, so clients must send a token: set the "
                f"environment variable {TOKEN} (python -c 'import secrets; print(secrets.token_urlsafe())' makes one)"
            )
        if self.token is not None and len(self.token) < SHORTEST:
            yield f"the token in {TOKEN} has fewer than {SHORTEST} letters; take a longer one"


def is_loopback(host: str) -> bool:
    """True if this host, as in a Host header with or without a port, is the loopback of this machine."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def is_token_shown(authorization: Sequence[str], scheme: str, token: str) -> bool:
    """True if the only Authorization header of a request holds the token. A header's bytes need not be UTF-8."""
    shown, wanted = (text.encode(errors="surrogateescape") for text in ("".join(authorization), f"{scheme} {token}"))
    return len(authorization) == 1 and hmac.compare_digest(shown, wanted)
