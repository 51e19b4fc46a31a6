"""OpenAI's messages for language models, as plain functions: what a request asks for, and the JSON of an answer.

Tokens come and go as numbers where a client wants them: `prompt` may be a list of them, and `return_token_ids` (vLLM's
option) adds those of prompt and answer. What is asked for is done or refused by name, never left out in silence.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from embodied.core.conversations import Message
from embodied.core.errors import EmbodiedError
from embodied.policies.language.http_messages import OWNER

MOST_CHOICES = 1024  # answers to one request
MOST_STOPS = 16
LARGEST_SEED = 2**63 - 1
NEUTRAL = {  # options that we have no use for, at the values that change nothing
    "best_of": (None, 1), "echo": (None, False), "frequency_penalty": (None, 0), "presence_penalty": (None, 0),
    "logit_bias": (None, {}), "suffix": (None, ""), "min_p": (None, 0),
    "repetition_penalty": (None, 1), "min_tokens": (None, 0), "use_beam_search": (False,), "top_logprobs": (None, 0),
    "response_format": (None, {"type": "text"}), "tools": (None, []), "tool_choice": (None, "none"),
    "functions": (None, []), "skip_special_tokens": (None, False), "spaces_between_special_tokens": (None, False),
    "include_stop_str_in_output": (None, False), "prompt_logprobs": (None,), "add_special_tokens": (None, True),
    "priority": (None, 0), "add_generation_prompt": (None, True), "return_tokens_as_token_ids": (None, False),
    "modalities": (None, ["text"]),
}  # fmt: skip
ABOUT = ("user", "metadata", "store", "request_id", "safety_identifier", "service_tier", "cache_salt")
READ = {"model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "n", "seed", "noise"}
READ |= {
    "top_p",
    "top_k",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "return_token_ids",
    "stream",
    "stream_options",
}


class BadRequest(EmbodiedError):
    """A request that cannot be answered as it is; the client gets the text."""

    def __init__(self, text: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(text)
        self.param, self.status = param, status


Asked = str | list[int] | tuple[Message, ...]  # what is continued: text, tokens, or messages to be answered


@dataclass(frozen=True)
class NoiseAddress:
    """The random numbers that choose the tokens, as the engines in a policy worker address them."""

    seed: int
    stream: str
    episode: int


@dataclass(frozen=True)
class Ask:
    """A request: P prompts, to each of which n answers are wanted."""

    prompts: tuple[Asked, ...]
    chat: bool
    max_tokens: int | None = None  # None: as many as the server gives
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    n: int = 1
    seed: int | None = None
    noise: NoiseAddress | None = None  # of the only answer
    stop: tuple[str, ...] = ()  # texts at which an answer ends, before them
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # the model's own stop tokens do not end an answer
    logprobs: bool = False
    return_token_ids: bool = False
    stream: bool = False
    usage: bool = False  # a stream ends with the number of tokens
    model: str | None = None


@dataclass(frozen=True)
class AnswerChoice:
    """An answer to one prompt: A tokens."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]  # at temperature 1
    pieces: Sequence[str]  # the tokens as text, where log-probs are asked for
    text: str  # without the token that ends it
    finish: str  # stop, length or abort


@dataclass(frozen=True)
class Served:
    """The model and weights that answer; part of every reply."""

    model: str
    version: int  # of the weights
    fingerprint: str  # of the weights
    created: int = field(default_factory=lambda: int(time.time()))


# Requests


def read_completion(body: Any) -> Ask:
    """Parses a body of /v1/completions."""
    fields = checked(body, "prompt", ("messages", "max_completion_tokens"))
    prompts = prompts_of(fields["prompt"])
    wanted = fields.get("logprobs")
    if wanted is not None and (type(wanted) is not int or wanted != 0):
        raise BadRequest("logprobs: only chosen tokens have log-probs here; send 0 or null", "logprobs")
    return asked(fields, prompts, chat=False, logprobs=wanted is not None)


def read_chat(body: Any) -> Ask:
    """Parses a body of /v1/chat/completions."""
    fields = checked(body, "messages", ("prompt",))
    said = fields["messages"]
    if not isinstance(said, list) or not said:
        raise BadRequest("messages should be a list of messages", "messages")
    messages = tuple(message_of(one, number) for number, one in enumerate(said))
    if fields.get("max_completion_tokens") is not None:
        fields = fields | {"max_tokens": fields["max_completion_tokens"]}
    return asked(fields, (messages,), chat=True, logprobs=flag(fields, "logprobs"))


def checked(body: Any, needed: str, others: Sequence[str]) -> dict[str, Any]:
    """The fields of a request, of which every one means something here."""
    if not isinstance(body, dict):
        raise BadRequest("the request should be a JSON object")
    if body.get(needed) is None:
        raise BadRequest(f"the request lacks {needed!r}", needed)
    for name, value in body.items():
        if name in NEUTRAL:
            if not any(
                value == usual and isinstance(value, bool) == isinstance(usual, bool) for usual in NEUTRAL[name]
            ):
                raise BadRequest(f"{name}={str(value)[:40]} is not supported; leave it out", name)
        elif name in others or (name not in READ and name not in ABOUT):
            raise BadRequest(f"{str(name)[:40]!r} is not known here; leave it out", str(name)[:40])
    return body


def asked(fields: dict[str, Any], prompts: tuple[Asked, ...], *, chat: bool, logprobs: bool) -> Ask:
    stop = fields.get("stop") or []
    stop = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, list) else (stop,)
    if len(stop) > MOST_STOPS or not all(isinstance(text, str) and text for text in stop):
        raise BadRequest(f"stop should be text, or a list of at most {MOST_STOPS} texts", "stop")
    ids = fields.get("stop_token_ids") or []
    if not is_ids(ids):
        raise BadRequest("stop_token_ids should be a list of token numbers", "stop_token_ids")
    n = whole(fields, "n", 1, 1, MOST_CHOICES)
    if n * len(prompts) > MOST_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts with n={n} are more than {MOST_CHOICES} answers", "n")
    noise = noise_of(fields.get("noise"))
    if noise and n * len(prompts) > 1:
        raise BadRequest("noise is that of one answer, and more than one is asked for", "noise")
    stream = flag(fields, "stream")
    if stream and n * len(prompts) > 1:
        raise BadRequest("stream: one answer at a time; leave out n, and send one prompt", "stream")
    options = fields.get("stream_options") or {}
    if not isinstance(options, dict) or options.keys() - {"include_usage"}:
        raise BadRequest("stream_options should hold include_usage alone", "stream_options")
    temperature = 1.0 if fields.get("temperature") is None else fields["temperature"]
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature <= 2:
        raise BadRequest("temperature should be a number from 0 to 2", "temperature")
    top_p = 1.0 if fields.get("top_p") is None else fields["top_p"]
    if isinstance(top_p, bool) or not isinstance(top_p, int | float) or not 0 < top_p <= 1:
        raise BadRequest("top_p should be a number above 0, at most 1", "top_p")
    top_k = whole(fields, "top_k", 0, -1, 2**31)
    drawn = float(temperature), float(top_p), max(top_k or 0, 0)
    model = fields.get("model")
    if model is not None and not isinstance(model, str):
        raise BadRequest("model should be text", "model")
    most, usage = whole(fields, "max_tokens", None, 1, 2**31), bool(options.get("include_usage"))
    seed = whole(fields, "seed", None, -LARGEST_SEED - 1, LARGEST_SEED)
    ignore_eos, token_ids = flag(fields, "ignore_eos"), flag(fields, "return_token_ids")
    ends = stop, tuple(ids), ignore_eos
    return Ask(prompts, chat, most, *drawn, n, seed, noise, *ends, logprobs, token_ids, stream, usage, model)


def prompts_of(prompt: Any) -> tuple[Asked, ...]:
    if isinstance(prompt, str) or (is_ids(prompt) and prompt):
        return (prompt,)
    several = isinstance(prompt, list) and 0 < len(prompt) <= MOST_CHOICES
    if not several or not all(isinstance(one, str) or (is_ids(one) and one) for one in prompt):
        raise BadRequest(
            f"prompt should be text or a list of token numbers, or a list of at most {MOST_CHOICES} of these", "prompt"
        )
    return tuple(prompt)


def message_of(message: Any, number: int) -> Message:
    """A message as chat templates take it. Contents of several texts are joined; anything but text is refused."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} should be an object with role and content", "messages")
    if odd := {name for name, value in message.items() if value} - {"role", "content", "name"}:
        raise BadRequest(f"{where}: {sorted(odd)[0][:40]!r} is not supported", "messages")
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str):
        raise BadRequest(f"{where}: content should be text", "messages")
    return {"role": message["role"], "content": content}


def noise_of(value: Any) -> NoiseAddress | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.keys() != {"seed", "stream", "episode"}:
        raise BadRequest("noise should hold seed, stream and episode", "noise")
    seed, episode = (whole(value, name, 0, 0, LARGEST_SEED) for name in ("seed", "episode"))
    if not isinstance(value["stream"], str) or len(value["stream"]) > 64:
        raise BadRequest("noise: stream should be a short text", "noise")
    return NoiseAddress(seed, value["stream"], episode)


def whole(fields: dict[str, Any], name: str, usual: Any, least: int, most: int) -> Any:
    value = fields.get(name)
    if value is None:
        return usual
    if type(value) is not int or not least <= value <= most:
        raise BadRequest(f"{name} should be a whole number from {least} to {most}", name)
    return value


def flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value not in (None, True, False) or type(value) is int:
        raise BadRequest(f"{name} should be true or false", name)
    return bool(value)


def is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(one) is int and one >= 0 for one in value)


# Answers


def reply(ask: Ask, name: str, choices: Sequence[AnswerChoice], served: Served) -> dict[str, Any]:
    """The JSON of an answer, `choices` by prompt; `name` is the request's."""
    found = about(ask, name, served)
    prompts = [{"prompt_token_ids": list(one.prompt)} if ask.return_token_ids else {} for one in choices]
    if ask.chat:
        said: list[dict[str, Any]] = [{"message": {"role": "assistant", "content": one.text}} for one in choices]
        found |= prompts[0]
    else:
        said = [{"text": one.text, **prompt} for one, prompt in zip(choices, prompts)]
    found["choices"] = [{"index": at, **said[at], **ending(ask, one)} for at, one in enumerate(choices)]
    return found | {"usage": usage(ask, choices)}


def chunk(ask: Ask, name: str, new: AnswerChoice, served: Served, first: bool) -> dict[str, Any]:
    """A part of a streamed answer: what is new of it; `finish` is empty while there is more."""
    prompt = {"prompt_token_ids": list(new.prompt)} if first and ask.return_token_ids else {}
    found = about(ask, name, served, ".chunk")
    if ask.chat:
        said: dict[str, Any] = {"delta": {"content": new.text} | ({"role": "assistant"} if first else {})}
        found |= prompt
    else:
        said = {"text": new.text} | prompt
    return found | {"choices": [{"index": 0, **said, **ending(ask, new)}]}


def last_chunk(ask: Ask, name: str, whole: AnswerChoice, served: Served) -> dict[str, Any]:
    """The last chunk of a stream, with the number of tokens."""
    return about(ask, name, served, ".chunk") | {"choices": [], "usage": usage(ask, [whole])}


def about(ask: Ask, name: str, served: Served, part: str = "") -> dict[str, Any]:
    kind, prefix = (f"chat.completion{part}", "chatcmpl") if ask.chat else ("text_completion", "cmpl")
    return {
        "id": f"{prefix}-{name}",
        "object": kind,
        "created": served.created,
        "model": served.model,
        "system_fingerprint": served.fingerprint,
        "policy_version": served.version,
    }


def ending(ask: Ask, choice: AnswerChoice) -> dict[str, Any]:
    """Why an answer ends, null while there is more of it; its log-probs and tokens where they are asked for."""
    found: dict[str, Any] = {"finish_reason": choice.finish or None, "logprobs": None}
    if ask.logprobs:
        found["logprobs"] = {"content": chat_logprobs(choice)} if ask.chat else text_logprobs(choice)
    return found | ({"token_ids": list(choice.tokens)} if ask.return_token_ids else {})


def text_logprobs(choice: AnswerChoice) -> dict[str, Any]:
    ends = itertools.accumulate(map(len, choice.pieces), initial=0)
    return {
        "tokens": list(choice.pieces),
        "token_logprobs": list(choice.logprobs),
        "top_logprobs": None,
        "text_offset": list(ends)[: len(choice.pieces)],
    }


def chat_logprobs(choice: AnswerChoice) -> list[dict[str, Any]]:
    return [
        {"token": piece, "logprob": logprob, "bytes": list(piece.encode()), "top_logprobs": []}
        for piece, logprob in zip(choice.pieces, choice.logprobs)
    ]


def usage(ask: Ask, choices: Sequence[AnswerChoice]) -> dict[str, int]:
    asked, written = sum(len(c.prompt) for c in choices[:: ask.n]), sum(len(c.tokens) for c in choices)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}


def error(text: str, kind: str = "invalid_request_error", param: str | None = None, code: Any = None) -> dict[str, Any]:
    """The JSON of a refusal."""
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def models(served: Served, max_length: int, lora_rank: int | None, slots: int, settings: Any) -> dict[str, Any]:
    """The JSON of /v1/models. Trainers compare the settings with their own."""
    found = {"id": served.model, "object": "model", "created": served.created, "owned_by": OWNER}
    found |= {"max_model_len": max_length, "lora_rank": lora_rank, "policy_version": served.version}
    found |= {"max_running": slots, "settings": settings}
    return {"object": "list", "data": [found]}
