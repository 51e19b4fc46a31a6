"""What a policy worker and its servers exchange: OpenAI's completions with token ids, and new weights.

vLLM, our server (`embodied.serve`) and other servers get the same body, which switches off all options that would
change samples. Only our server knows `noise`, which makes its tokens equal to our engine's. New weights are written to
a folder, one per version (`WeightFolder`); a server that does not see it gets them in buckets (`bucket_bytes`,
`ArrivingWeights`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from embodied.core.errors import ConfigError, EmbodiedError, in_a_line
from embodied.core.files import locked_folder
from embodied.core.pictures import as_data_url
from embodied.policies.language.engine import Request, seed_of
from embodied.policies.policy_folder import WEIGHTS, write_tensors
from embodied.runtime.published_weights import ITEM_BYTES, Blob, Bucket, Spec, TensorsFromBuckets, checksum

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

OWNER = "embodied"  # owner of the model in our server's /v1/models
NOT_FINITE = "not_finite"  # error code: the weights give non-finite numbers
UNSEEN = "folder_not_seen"  # error code: the server does not see the folder with weights
MOST_TOGETHER = 256  # requests in one call
SILENT_S = 30.0  # after this silence another program may send weights
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


def body_of(request: Request, model: str, proves: bool = False, divided_by: float = 1.0) -> dict[str, Any]:
    """The JSON for /v1/completions to continue a conversation. `divided_by`: what the server divides its logits by."""
    how, rule = request.sampling, request.sampling.rule
    stream = how.stream.removeprefix("act/")
    ours = {"proof": True} if proves else {}  # vLLM's server has an option for all of its log-probs
    ours |= {"pictures": [*map(as_data_url, request.pictures)]} if request.pictures else {}
    ours |= {"logprob_temperature": rule.logprob_temperature} if rule.logprob_temperature != 1 else {}
    return ours | {
        "model": model,
        "prompt": [int(token) for token in request.tokens],
        "max_tokens": request.max_tokens,
        "temperature": rule.temperature / divided_by,
        "seed": seed_of(request),
        "noise": {"seed": how.seed, "stream": stream, "episode": int(request.episode)},
        "stop_token_ids": sorted(map(int, how.stops)),
        "ignore_eos": True,
        "logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "top_p": rule.top_p,
        "top_k": rule.top_k,
        "min_p": rule.min_p,
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
        raise ValueError(f"the answer is none of OpenAI's ({in_a_line(err)[:300]})") from None
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
        raise ValueError(f"a line is none of an answer ({in_a_line(err)[:300]})") from None


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


def settings_of(policy: LanguagePolicy) -> dict[str, Any]:
    """The settings that a policy and its servers must share."""
    shape = policy.model.config.get_text_config()
    sizes = {key: getattr(shape, key) for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    return {"dtype": policy.config.dtype, **sizes}


def bucket_bytes(bucket: Bucket, sender: str, name: str, specs: Mapping[str, Spec]) -> bytes:
    """Encodes a bucket of the version `name` for HTTP: the length of the head, the head as JSON, and the tensors'
    bytes. The first bucket has all tensors' `specs`."""
    head = {
        **{"sender": sender, "weight_version": name},
        **{key: getattr(bucket, key) for key in ("version", "number", "last")},
        "specs": {name: [spec.dtype, spec.shape] for name, spec in specs.items()},
        "parts": [[name, start, len(data)] for name, start, data in bucket.parts],
        "checksums": [str(each) for each in bucket.checksums],  # as text, since JSON numbers do not hold 64 bits
    }
    words = json.dumps(head).encode()
    return b"".join([len(words).to_bytes(8, "little"), words, *(data.tobytes() for _, _, data in bucket.parts)])


def read_bucket(data: bytes) -> tuple[dict[str, str], Bucket, dict[str, Spec]]:
    """Decodes `bucket_bytes`: the names in its head, bucket and specs; raises ValueError if the data is invalid."""
    try:
        begin = 8 + int.from_bytes(data[:8], "little")
        head, raw = json.loads(data[8:begin]), np.frombuffer(data, np.uint8)
        specs = {str(name): Spec(str(kind), tuple(map(int, shape))) for name, (kind, shape) in head["specs"].items()}
        if any(spec.dtype not in ITEM_BYTES or min(spec.shape, default=0) < 0 for spec in specs.values()):
            raise ValueError("a tensor is of no type or shape that is known here")
        parts = []
        for name, start, size in head["parts"]:
            if min(start, size) < 0:
                raise ValueError("a part of it has no place")
            parts.append((str(name), start, raw[begin : begin + size]))
            begin += size
        sums = tuple(map(int, head["checksums"]))
        bucket = Bucket(int(head["version"]), int(head["number"]), tuple(parts), sums, bool(head["last"]))
        return {name: str(head[name]) for name in ("sender", "weight_version")}, bucket, specs
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as err:
        raise ValueError(f"this is no bucket of weights ({type(err).__name__}: {err})") from None


class ArrivingWeights:
    """Collects the buckets of a version that a trainer sends to a server, one sender at a time."""

    def __init__(self, most_bytes: float = math.inf) -> None:
        """`most_bytes`: of this model's weights."""
        self.most_bytes = most_bytes
        self.take()

    def add(self, data: bytes) -> tuple[Bucket, str]:
        """Keep the next bucket; returns it and the name of its version. Raises ValueError for other data, and
        EmbodiedError for a bucket that is damaged or not the next: its version may be sent again."""
        head, bucket, specs = read_bucket(data)
        if not bucket.number:
            if self.sender not in ("", head["sender"]) and time.monotonic() - self.heard < SILENT_S:
                raise EmbodiedError("another program is sending weights; try again later")
            if (size := sum(spec.size_bytes for spec in specs.values())) > 2 * self.most_bytes:
                raise ValueError(f"these weights have {size} bytes, and this model's have {self.most_bytes}")
            self.sender, self.number = head["sender"], 0
            self.blobs = {name: Blob(spec, np.zeros(spec.size_bytes, np.uint8)) for name, spec in specs.items()}
            self.tensors = TensorsFromBuckets(bucket.version, {name: blob.data for name, blob in self.blobs.items()})
        if (head["sender"], bucket.number) != (self.sender, self.number):
            raise EmbodiedError("this is not the next bucket of the weights that are coming; begin again")
        try:
            self.tensors.add(bucket)
        except EmbodiedError:
            self.take()
            raise
        self.number, self.heard = self.number + 1, time.monotonic()
        return bucket, head["weight_version"]

    def take(self) -> dict[str, Blob]:
        """The received weights, which are forgotten here."""
        blobs = getattr(self, "blobs", {})
        self.sender, self.number, self.blobs = "", 0, {}
        return blobs


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
            try:
                aside.mkdir(parents=True, exist_ok=True)
                write_tensors(aside / WEIGHTS, tensors)
                aside.rename(self.path / name)
            except OSError as err:
                why = err.strerror or err
                raise EmbodiedError(
                    f"new weights cannot be written to policy.weights={self.path.parent}: {why}"
                ) from None

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
