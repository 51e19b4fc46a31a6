"""The HTTP messages between a policy worker and a server, as plain functions: OpenAI's completions with token ids.

vLLM, our server (`embodied.serve`) and other servers get the same body, which switches off all options that would
change samples. Only our server knows `noise`, which makes its tokens equal to our engine's.

The folder in which a policy worker writes new weights for its servers, one folder per version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from embodied.core.conversations import SamplingRule
from embodied.core.errors import ConfigError
from embodied.core.files import locked_folder
from embodied.policies.language.engine import Request, seed_of
from embodied.policies.policy_folder import WEIGHTS, write_tensors
from embodied.runtime.published_weights import ITEM_BYTES, Blob, Bucket, Spec, checksum

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

OWNER = "embodied"  # owner of the model in our server's /v1/models
NOT_FINITE = "not_finite"  # error code: the weights give non-finite numbers
UNSEEN = "folder_not_seen"  # error code: the server does not see the folder with weights
MOST_TOGETHER = 256  # requests in one call
LEAST = -9999.0  # what vLLM writes for minus infinity


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer: tokens and their log-probs, or why they cannot be used."""

    tokens: list[int]
    logprobs: list[float]
    finish: str  # how it ended: stop, length or abort
    fingerprint: str | None  # fingerprint of the weights, if given
    dropped: str = ""
    proof: Sequence[Any] = ()  # its blocks as text


def body_of(
    request: Request, most: int, stops: Sequence[int], seed: int, stream: str, rule: SamplingRule, proves: bool = False
) -> dict[str, Any]:
    """The JSON for /v1/completions to continue a conversation by at most `most` tokens, without `model`."""
    return ({"proof": True} if proves else {}) | {
        "prompt": [int(token) for token in request.tokens],
        "max_tokens": most,
        "temperature": rule.temperature,
        "seed": seed_of(seed, f"act/{stream}", request),
        "noise": {"seed": seed, "stream": stream, "episode": int(request.episode)},
        "stop_token_ids": [int(stop) for stop in stops],
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "top_p": rule.top_p,
        "top_k": rule.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def read_answer(body: Any) -> ParsedAnswer:
    """Parses the only choice of a /v1/completions answer; raises ValueError if it has no token ids."""
    try:
        (choice,) = body["choices"]
        tokens, given, finish = choice.get("token_ids"), choice.get("logprobs") or {}, str(choice["finish_reason"])
        proof = [*(choice.get("proof") or ())]
        logprobs, fingerprint = given.get("token_logprobs"), body.get("system_fingerprint")
        fingerprint = None if fingerprint is None else str(fingerprint)
    except (KeyError, TypeError, AttributeError, ValueError) as err:
        raise ValueError(f"the answer is none of OpenAI's ({one_line(err)})") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("the answer has no token_ids; the server has to know return_token_ids, as vLLM and ours do")
    if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
        return ParsedAnswer([], [], finish, fingerprint, "log-probs are missing")
    if not all(type(x) in (int, float) and x > LEAST for x in logprobs):
        return ParsedAnswer([], [], finish, fingerprint, "a log-prob is not finite")
    if any(x >= 1 for x in logprobs):
        raise ValueError("a log-prob of the answer is above 0")
    return ParsedAnswer(tokens, [float(x) for x in logprobs], finish, fingerprint, proof=proof)


def read_line(data: bytes) -> tuple[int, int, Any]:
    """The number of a request among requests that were sent together, and the status and JSON of its answer; raises
    ValueError if the line has none."""
    try:
        content = json.loads(data)
        number, status, body = content["number"], content["status"], content["body"]
        if type(number) is not int or type(status) is not int:
            raise TypeError("its number or status is no whole number")
        return number, status, body
    except (KeyError, TypeError, RecursionError, ValueError) as err:
        raise ValueError(f"a line is none of an answer ({one_line(err)})") from None


def read_json(text: str) -> Any:
    """The JSON of a response; for other content its beginning as text."""
    try:
        return json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError):
        return text[:200]


def read_error(body: Any) -> tuple[str, Any]:
    """The text and code of an error, which servers wrap in different ways."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(error, dict):
        text = error.get("message") or error.get("detail") or error
        return str(text).replace("\n", " ")[:300], error.get("code")
    return str(error).replace("\n", " ")[:300], None


def one_line(error: BaseException) -> str:
    """An error in words that may be foreign, of any length and over several lines."""
    return " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())[:300]


def settings_of(policy: LanguagePolicy) -> dict[str, Any]:
    """The settings that a policy and its servers must share."""
    shape = policy.model.config.get_text_config()
    sizes = {key: getattr(shape, key) for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    return {"dtype": policy.config.dtype, **sizes}


def bucket_bytes(bucket: Bucket, sender: str, name: str, specs: Mapping[str, Spec]) -> bytes:
    """Encodes a bucket of the version `name` for HTTP: the length of the head, the head as JSON, and the tensors'
    bytes. The first bucket has all tensors' `specs`."""
    head = {
        "sender": sender,
        "weight_version": name,
        "version": bucket.version,
        "number": bucket.number,
        "last": bucket.last,
        "specs": {name: [spec.dtype, spec.shape] for name, spec in specs.items()},
        "parts": [[name, start, len(data)] for name, start, data in bucket.parts],
        "checksums": [str(each) for each in bucket.checksums],  # as text, since JSON numbers do not hold 64 bits
    }
    words = json.dumps(head).encode()
    return b"".join([len(words).to_bytes(8, "little"), words, *(data.tobytes() for _, _, data in bucket.parts)])


def read_bucket(data: bytes) -> tuple[dict[str, Any], Bucket, dict[str, Spec]]:
    """Decodes `bucket_bytes`: head, bucket and specs; raises ValueError if the data is invalid."""
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        head, raw = json.loads(data[8:begin]), np.frombuffer(data, np.uint8)
        specs = {str(name): Spec(str(kind), tuple(map(int, shape))) for name, (kind, shape) in head["specs"].items()}
        if any(spec.dtype not in ITEM_BYTES or min(spec.shape, default=0) < 0 for spec in specs.values()):
            raise ValueError("a tensor is of no type or shape that is known here")
        parts = []
        for name, start, size in head["parts"]:
            if type(start) is not int or type(size) is not int or start < 0 or not 0 <= size <= len(raw) - begin:
                raise ValueError("its parts are longer than itself")
            parts.append((str(name), start, raw[begin : begin + size]))
            begin += size
        sums = tuple(map(int, head["checksums"]))
        if (
            len(sums) != len(parts)
            or not isinstance(head["sender"], str)
            or not isinstance(head["weight_version"], str)
        ):
            raise ValueError("its head is not complete")
        return head, Bucket(int(head["version"]), int(head["number"]), tuple(parts), sums, bool(head["last"])), specs
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as err:
        raise ValueError(f"this is no bucket of weights ({type(err).__name__}: {err})") from None


def fingerprint(version: int, blobs: Iterable[tuple[str, Blob]]) -> str:
    """A name of a version that depends on its weights: v3-5f0c2a..."""
    sums = sorted(f"{name} {blob.spec.dtype} {blob.spec.shape} {checksum(blob.data)}" for name, blob in blobs)
    return f"v{version}-{hashlib.blake2b(' '.join(sums).encode(), digest_size=8).hexdigest()}"


def version_of(name: str) -> int:
    """The version in a name of `fingerprint`."""
    return int(name.partition("-")[0].removeprefix("v"))


class WeightFolder:
    """Keeps the current version, and an earlier version until all servers that load it have confirmed it or left. All
    methods except `write` are called in one thread.

        folder.write("v3-5f0c", tensors)
        folder.use("v3-5f0c")
        with folder.reading() as at:       # a server loads v3
            ...                            # meanwhile v4 is written and used: v3 stays
                                           # and is removed here
    """

    def __init__(self, parent: Path) -> None:
        """Creates a folder, with a lock that ends with this process. Unlocked folders of ended processes are
        removed."""
        try:
            parent.mkdir(parents=True, exist_ok=True)
            self.path, self.lock = locked_folder(parent, "weights")
        except OSError as err:
            raise ConfigError(f"policy.weights={parent} cannot be written: {err.strerror or err}") from None
        self.current = ""
        self.readers: Counter[str] = Counter()

    def write(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Write these tensors, by their published names. Servers load them after `use`."""
        if name != self.current:
            aside = self.path / "new"
            aside.mkdir(parents=True, exist_ok=True)
            write_tensors(aside / WEIGHTS, tensors)
            aside.rename(self.path / name)

    def use(self, name: str) -> None:
        """Make a written version the current one."""
        before, self.current = self.current, name
        self.remove(before)

    @contextlib.contextmanager
    def reading(self) -> Iterator[Path]:
        """Yields the folder of the current version, which is kept inside."""
        name = self.current
        self.readers[name] += 1
        try:
            yield self.path / name
        finally:
            self.readers[name] -= 1
            self.remove(name)

    def remove(self, name: str) -> None:
        """Remove a version, unless it is the current one or a server still reads it."""
        if name and name != self.current and not self.readers[name]:
            shutil.rmtree(self.path / name, ignore_errors=True)

    def close(self) -> None:
        if self.lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self.lock)
            self.lock = -1
