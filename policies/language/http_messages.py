"""What a policy worker and a server say to each other over HTTP, as plain functions: OpenAI's completions with token
ids.

The body asks vLLM, our own server (`embodied.serve`) and others alike: everything that would make their samples others
than a policy's is switched off by name. `noise` is understood by ours alone, whose tokens it makes those of our own
engine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.conversations import SamplingRule
from embodied.policies.language.engine import Request, seed_of
from embodied.runtime.published_weights import Bucket
from embodied.runtime.tensor_bytes import ITEM_BYTES, Blob, Spec, checksum

if TYPE_CHECKING:
    from embodied.policies.language.policy import LanguagePolicy

OWNER = "embodied"  # of the model, as our server's /v1/models names it
NOT_FINITE = "not_finite"  # an error's code where the weights make no numbers
UNSEEN = "folder_not_seen"  # an error's code where a server does not see the folder that weights are in
LEAST = -9999.0  # what vLLM writes for minus infinity


@dataclass(frozen=True)
class Read:
    """An answer that was read: tokens and their log-probs, or why they cannot be used."""

    tokens: list[int]
    logprobs: list[float]
    finish: str  # stop, length or abort
    fingerprint: str | None  # of the weights, where the server says
    dropped: str = ""
    proof: Sequence[Any] = ()  # of its blocks, as text


def body_of(
    request: Request, most: int, stops: Sequence[int], seed: int, stream: str, rule: SamplingRule, proves: bool = False
) -> dict[str, Any]:
    """The JSON that asks /v1/completions to continue a conversation by `most` tokens at most; lacks the `model`."""
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


def read_answer(body: Any) -> Read:
    """The only choice of an answer of /v1/completions; raises ValueError where there is none with token ids."""
    try:
        (choice,) = body["choices"]
        tokens, given, finish = choice.get("token_ids"), choice.get("logprobs") or {}, str(choice["finish_reason"])
        proof = [*(choice.get("proof") or ())]
        logprobs, fingerprint = given.get("token_logprobs"), body.get("system_fingerprint")
    except (KeyError, TypeError, AttributeError, ValueError) as err:
        raise ValueError(f"the answer is none of OpenAI's ({type(err).__name__}: {err})") from None
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError("the answer has no token_ids; the server has to know return_token_ids, as vLLM and ours do")
    if not isinstance(logprobs, list) or len(logprobs) != len(tokens):
        return Read([], [], finish, fingerprint, "log-probs are missing")
    if not all(type(x) in (int, float) and LEAST < x < float("inf") for x in logprobs):
        return Read([], [], finish, fingerprint, "a log-prob is not finite")
    return Read(tokens, [float(x) for x in logprobs], finish, fingerprint, proof=proof)


def read_error(body: Any) -> tuple[str, Any]:
    """The text and the code of a refusal; servers differ in how they wrap them."""
    found = body.get("error", body) if isinstance(body, dict) else body
    if isinstance(found, dict):
        text = found.get("message") or found.get("detail") or found
        return str(text).replace("\n", " ")[:300], found.get("code")
    return str(found).replace("\n", " ")[:300], None


def settings_of(policy: LanguagePolicy) -> dict[str, Any]:
    """What a policy and a server of it have to have in common."""
    shape = policy.model.config.get_text_config()
    sizes = {key: getattr(shape, key) for key in ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")}
    return {"dtype": policy.config.dtype, **sizes}


def bucket_bytes(bucket: Bucket, sender: str, name: str, specs: Mapping[str, Spec]) -> bytes:
    """A part of a version that is called `name`, as it goes over HTTP: the length of a head, the head as JSON, and the
    tensors' bytes one after the other. The first bucket has all tensors' `specs`."""
    head = {
        "sender": sender,
        "weight_version": name,
        "version": bucket.version,
        "number": bucket.number,
        "last": bucket.last,
        "specs": {name: [spec.dtype, spec.shape] for name, spec in specs.items()},
        "parts": [[name, start, len(data)] for name, start, data in bucket.parts],
        "checksums": [str(each) for each in bucket.checksums],  # of 64 bits, which JSON numbers have not
    }
    words = json.dumps(head).encode()
    return b"".join([len(words).to_bytes(8, "little"), words, *(data.tobytes() for _, _, data in bucket.parts)])


def read_bucket(data: bytes) -> tuple[dict[str, Any], Bucket, dict[str, Spec]]:
    """The head, the bucket and the specs of `bucket_bytes`; raises ValueError where it is none."""
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
    """Names a version and its very numbers: v3-5f0c2a..."""
    sums = sorted(f"{name} {blob.spec.dtype} {blob.spec.shape} {checksum(blob.data)}" for name, blob in blobs)
    return f"v{version}-{hashlib.blake2b(' '.join(sums).encode(), digest_size=8).hexdigest()}"
