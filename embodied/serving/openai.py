"""OpenAI's protocol for language models, as plain functions: parses requests and writes the JSON of answers.

Clients may use token numbers: `prompt` may be a list of them, and `return_token_ids` (vLLM's option) adds the token
numbers of prompt and answer. Chat messages get the form of chat templates. Every option is obeyed or refused by name,
never silently ignored.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embodied.core.conversations import TOOL_CALL, pictures_in
from embodied.core.errors import EmbodiedError
from embodied.core.pictures import DATA, PictureError
from embodied.policies.language.http_messages import MOST_TOGETHER

if TYPE_CHECKING:
    from embodied.policies.language.engine import Block

MOST_CHOICES = 1024  # answers to one request
MOST_PICTURES = 64  # of a prompt of token numbers
MOST_PLACES = 2**20  # of a picture
MOST_STOPS = 16
LARGEST_SEED = 2**63 - 1
MOST_LIKELY = 20  # limit of reported tokens at every place
NEUTRAL: dict[str, Any] = {  # options without effect here, with the values that change nothing, besides null
    **dict.fromkeys(("frequency_penalty", "presence_penalty", "min_tokens", "priority"), (0,)),
    **dict.fromkeys(("best_of", "repetition_penalty"), (1,)),
    **dict.fromkeys(("use_beam_search", "skip_special_tokens", "spaces_between_special_tokens"), (False,)),
    **dict.fromkeys(("include_stop_str_in_output", "continue_final_message", "return_token_strs"), (False,)),
    **dict.fromkeys(("parallel_tool_calls", "add_special_tokens", "add_generation_prompt"), (True,)),
    **{"logit_bias": [{}], "suffix": [""], "functions": [[]], "modalities": [["text"]]},
    **{"response_format": [{"type": "text"}], "tool_choice": ["none", "auto"]},
}
ABOUT = ("user", "metadata", "store", "safety_identifier", "service_tier", "cache_salt")


Asked = str | list[int] | tuple[dict[str, Any], ...]  # text or tokens to continue, or messages to answer
TokenNumber = Annotated[int, Field(ge=0)]
Body = TypeVar("Body", bound="Options")


class BadRequest(EmbodiedError):
    """An invalid request; the client gets the text."""

    def __init__(self, text: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(text)
        self.param, self.status, self.code = param, status, code


class Options(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


class NoiseAddress(Options):
    """The address of the random numbers that choose tokens, as in a policy worker's engine."""

    seed: int = Field(ge=0, le=LARGEST_SEED)
    stream: str = Field(max_length=64)
    episode: int = Field(ge=0, le=LARGEST_SEED)


class StreamOptions(Options):
    include_usage: bool | None = False  # a stream ends with the number of tokens


class Ask(Options):
    """A request: P prompts with n answers each."""

    prompts: tuple[Any, ...]  # of `Asked`
    chat: bool
    max_tokens: int | None = Field(None, ge=0, le=2**31)  # None: the server's limit; 0: only the prompt's log-probs
    temperature: float = Field(1.0, ge=0, le=2)
    logprob_temperature: float = Field(1.0, gt=0, le=2)  # of the log-probs, among all tokens
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, le=2**31)  # up to 0: all
    min_p: float = Field(0.0, ge=0, le=1)
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-LARGEST_SEED - 1, le=LARGEST_SEED)
    noise: NoiseAddress | None = None  # noise of the only answer
    stop: list[Annotated[str, Field(min_length=1)]] = Field([], max_length=MOST_STOPS)  # an answer ends before them
    stop_token_ids: list[TokenNumber] = []
    ignore_eos: bool = False  # the model's own stop tokens do not end an answer
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MOST_LIKELY)  # likeliest tokens reported at every place, with log-probs
    echo: bool = False  # the prompt is returned before the answer
    pictures: list[str] = Field([], max_length=MOST_PICTURES)  # data URLs, of the places in a prompt of token numbers
    proof: bool = False  # each answer comes with a proof of its computation (policies/language/trust.py)
    prompt_logprobs: int | None = Field(None, ge=0, le=MOST_LIKELY)  # like `top_logprobs`, for the prompt
    tools: tuple[dict[str, Any], ...] = ()
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False  # tokens with log-probs are named token_id:NUMBER, not by text
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    model: str | None = None
    request_id: str | None = Field(None, max_length=256)


class Together(Options):
    """A body of /v1/completions/many."""

    requests: list[dict[str, Any]] = Field(min_length=1, max_length=MOST_TOGETHER)


class TokenNumbers(Options):
    """A body of /detokenize."""

    tokens: list[TokenNumber]


class NewWeights(Options):
    """A body of /update_weights."""

    path: str  # prime-rl's weight_dir
    version: int = Field(ge=0, lt=2**63)
    mode: Literal["wait", "abort"] = "wait"
    weight_version: str | None = None


class RequestNames(Options):
    """A body of /abort_requests."""

    request_ids: list[str] | None = None


READ = {"prompt", "messages", "max_completion_tokens", *Ask.model_fields} - {"prompts", "chat"}


@dataclass(frozen=True)
class TokenScore:
    """The model's score of a given token."""

    token: int
    logprob: float
    rank: int  # 1: the likeliest
    likeliest: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class AnswerChoice:
    """An answer to one prompt, or the part of it that a stream sends next: A tokens."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]  # at temperature 1
    likeliest: Sequence[Sequence[tuple[int, float]]]  # tokens and their log-probs, by place; () if not requested
    text: str  # without the end token
    finish: str  # stop, length or abort; "": it is open
    words: Callable[[int], str]  # name of a token
    scores: Sequence[TokenScore] = ()  # of the prompt's tokens except the first
    proof: Sequence[Block] = ()


class StreamedAnswer:
    """Divides an answer into its sent and new parts."""

    def __init__(self, held: int) -> None:
        """`held`: letters at the end that may begin a stop text."""
        self.held, self.tokens, self.letters, self.begun = held, 0, 0, False

    def open_part(self, answer: AnswerChoice) -> AnswerChoice:
        """The new part of an open answer. A letter may take several tokens."""
        text = answer.text[: max(len(answer.text) - self.held, 0)].rstrip("\ufffd")
        return self.rest(replace(answer, text=text))

    def rest(self, answer: AnswerChoice) -> AnswerChoice:
        """The new part at the end."""
        begin, self.tokens, self.begun = self.tokens, len(answer.tokens), True
        text, self.letters = answer.text[self.letters :], max(self.letters, len(answer.text))
        new = {name: getattr(answer, name)[begin:] for name in ("tokens", "logprobs", "likeliest")}
        return replace(answer, **new, text=text)


# Requests


def read_completion(body: Any) -> Ask:
    """Parses a body of /v1/completions."""
    fields = known_fields(body, "prompt", ("messages", "max_completion_tokens"))
    if fields.get("tools") or "top_logprobs" in fields:
        raise BadRequest("tools and top_logprobs are options of /v1/chat/completions; logprobs=5 returns five tokens")
    if "logprobs" in fields:
        fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
    shown = fields.get("pictures") or []
    if shown and not (isinstance(shown, list) and all(isinstance(url, str) and DATA.match(url) for url in shown)):
        raise BadRequest("pictures should be a list of data URLs, data:image/png;base64,...", "pictures")
    prompts = prompts_of(fields["prompt"], least=-MOST_PLACES if shown else 0)
    if shown and not (len(prompts) == 1 and isinstance(prompts[0], list)):
        raise BadRequest("pictures belong to one prompt of token numbers; texts show pictures in a chat", "pictures")
    return ask_of(fields, prompts, chat=False)


def read_chat(body: Any) -> Ask:
    """Parses a body of /v1/chat/completions."""
    fields = known_fields(body, "messages", ("prompt", "pictures"))
    said = fields["messages"]
    if not isinstance(said, list) or not said:
        raise BadRequest("messages should be a list of messages", "messages")
    messages = tuple(message_of(message, number) for number, message in enumerate(said))
    fields["max_tokens"] = fields.get("max_completion_tokens", fields.get("max_tokens"))
    ask = ask_of(fields, (messages,), chat=True)
    if ask.top_logprobs and not ask.logprobs:
        raise BadRequest("top_logprobs needs logprobs=true", "top_logprobs")
    if ask.echo:
        raise BadRequest("echo is an option of /v1/completions", "echo")
    return ask


def read_tokenize(body: Any) -> Ask:
    """Parses a body of /tokenize."""
    if not isinstance(body, dict) or (body.get("prompt") is None) == (body.get("messages") is None):
        raise BadRequest("send prompt, a text, or messages")
    ask = read_completion(body) if body.get("messages") is None else read_chat(body)
    if len(ask.prompts) > 1:
        raise BadRequest("send one prompt", "prompt")
    return ask


def read_many(body: Any) -> list[Ask]:
    """Parses a body of /v1/completions/many."""
    asks = [read_completion(request) for request in read(Together, body).requests]
    for ask in asks:
        more = ask.stream, ask.echo, ask.stop, ask.top_logprobs, ask.prompt_logprobs is not None
        if any(more) or len(ask.prompts) * ask.n > 1:
            why = "have one answer each, without stream, echo, stop, prompt_logprobs and logprobs above 0"
            raise BadRequest(f"requests sent together {why}; send the others to /v1/completions", "requests")
    return asks


def read(kind: type[Body], body: Any, **names: str) -> Body:
    """Parses a body of this kind; `names`: how its client calls a field."""
    try:
        return kind.model_validate(body)
    except ValidationError as err:
        wrong = err.errors()[0]
        name = str(wrong["loc"][0]) if wrong["loc"] else "the request"
        name = names.get(name, name)
        raise BadRequest(f"{name}: {wrong['msg']}", name) from None


def known_fields(body: Any, needed: str, others: Sequence[str]) -> dict[str, Any]:
    """The fields of a request that are not null; unknown fields are refused."""
    if not isinstance(body, dict):
        raise BadRequest("the request should be a JSON object")
    if body.get(needed) is None:
        raise BadRequest(f"the request lacks {needed!r}", needed)
    for name, value in body.items():
        if name in NEUTRAL:
            usual = [
                (value_without_effect, isinstance(value_without_effect, bool))
                for value_without_effect in (None, *NEUTRAL[name])
            ]
            if (value, isinstance(value, bool)) not in usual:
                raise BadRequest(f"{name}={str(value)[:40]} is not supported; leave it out", name)
        elif name in others or (name not in READ and name not in ABOUT):
            raise BadRequest(f"{str(name)[:40]!r} is not known here; leave it out", str(name)[:40])
    return {name: value for name, value in body.items() if value is not None}


def ask_of(fields: dict[str, Any], prompts: tuple[Asked, ...], chat: bool) -> Ask:
    given = {name: value for name, value in fields.items() if name in Ask.model_fields and value is not None}
    if isinstance(stop := given.get("stop"), str):
        given["stop"] = [stop] if stop else []
    given["tools"] = tools_of(given.get("tools") or []) if fields.get("tool_choice") != "none" else ()
    names = {} if chat else {"top_logprobs": "logprobs"}
    ask = read(Ask, {**given, "prompts": prompts, "chat": chat}, **names)
    if ask.max_tokens == 0 and not ask.echo and ask.prompt_logprobs is None:
        raise BadRequest("max_tokens=0 writes nothing; it is for echo or prompt_logprobs", "max_tokens")
    if ask.n * len(prompts) > MOST_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts with n={ask.n} are more than {MOST_CHOICES} answers", "n")
    if ask.noise and ask.n * len(prompts) > 1:
        raise BadRequest("noise is that of one answer, and more than one is asked for", "noise")
    if ask.stream and (ask.echo or ask.prompt_logprobs is not None or ask.proof):
        raise BadRequest("echo, proof and prompt_logprobs come with a whole answer; leave out stream", "stream")
    return ask


def tools_of(tools: Any) -> tuple[dict[str, Any], ...]:
    """Tools in the form of chat templates."""
    for tool in tools if isinstance(tools, list) else [None]:
        of = tool.get("function") if isinstance(tool, dict) and tool.get("type", "function") == "function" else None
        if not isinstance(of, dict) or not isinstance(of.get("name"), str):
            raise BadRequest("tools should be a list of functions, each with a name", "tools")
    return tuple(tools)


def prompts_of(prompt: Any, least: int = 0) -> tuple[Asked, ...]:
    """`least`: the lowest number of a token; places of pictures are below 0."""
    if isinstance(prompt, str) or (is_ids(prompt, least) and prompt):
        return (prompt,)
    several = isinstance(prompt, list) and 0 < len(prompt) <= MOST_CHOICES
    if not several or not all(isinstance(item, str) or (is_ids(item, least) and item) for item in prompt):
        raise BadRequest(
            f"prompt should be text or a list of token numbers, or a list of at most {MOST_CHOICES} of these", "prompt"
        )
    return tuple(prompt)


def is_ids(value: Any, least: int = 0) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= least for item in value)


def calls_in(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text around the tool calls in an answer, and the calls. A call without valid JSON stays text."""
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        try:
            call = json.loads(match[1])
            function = {"name": str(call["name"]), "arguments": json.dumps(call.get("arguments", {}))}
        except (KeyError, ValueError, AttributeError, RecursionError):
            return match[0]
        calls.append({"id": f"call_{secrets.token_hex(8)}", "type": "function", "function": function})
        return ""

    rest = TOOL_CALL.sub(take, text)
    return (rest.strip(), calls) if calls else (text, [])


# Answers


def head_of(ask: Ask, number: int, model: str, version: int, fingerprint: str) -> dict[str, Any]:
    """The part of every answer that names the request, the model and its weights."""
    kind, prefix = ("chat.completion", "chatcmpl") if ask.chat else ("text_completion", "cmpl")
    return {
        "id": f"{prefix}-{number}",
        "object": f"{kind}.chunk" if ask.chat and ask.stream else kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
        "policy_version": version,
    }


def reply(ask: Ask, choices: Sequence[AnswerChoice], head: dict[str, Any]) -> dict[str, Any]:
    """The JSON of an answer, `choices` by prompt; `head` by `head_of`."""
    said = [
        {"message": message_in(ask, each)} if ask.chat else {"text": each.text, **prompt_in(ask, each)}
        for each in choices
    ]
    content = [{"index": at, **said[at], **end_of_choice(ask, choice)} for at, choice in enumerate(choices)]
    return head | (prompt_in(ask, choices[0]) if ask.chat else {}) | {"choices": content, "usage": usage(ask, choices)}


def chunk(ask: Ask, new: AnswerChoice, head: dict[str, Any], first: bool, index: int) -> dict[str, Any]:
    """The new part of a streamed answer."""
    prompt = prompt_in(ask, new) if first else {}
    if not ask.chat:
        return head | {"choices": [{"index": index, "text": new.text, **prompt, **end_of_choice(ask, new)}]}
    delta = message_in(ask, new)
    if not first:
        del delta["role"]
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
    return head | prompt | {"choices": [{"index": index, "delta": delta, **end_of_choice(ask, new)}]}


def message_in(ask: Ask, choice: AnswerChoice) -> dict[str, Any]:
    """An answer as a message, with the calls of tools in it."""
    text, calls = calls_in(choice.text) if ask.tools else (choice.text, [])
    return {"role": "assistant", "content": text or (None if calls else "")} | ({"tool_calls": calls} if calls else {})


def prompt_in(ask: Ask, choice: AnswerChoice) -> dict[str, Any]:
    """The requested data of a prompt: its tokens, and their log-probs in vLLM's form, with those of likelier tokens."""
    fields: dict[str, Any] = {"prompt_token_ids": list(choice.prompt)} if ask.return_token_ids else {}
    if ask.prompt_logprobs is None:
        return fields
    fields["prompt_logprobs"] = [None]
    for score in choice.scores:
        ranked = [(token, logprob, rank) for rank, (token, logprob) in enumerate(score.likeliest, 1)]
        fields["prompt_logprobs"].append(
            {
                str(token): {"logprob": logprob, "rank": rank, "decoded_token": choice.words(token)}
                for token, logprob, rank in [*ranked, (score.token, score.logprob, score.rank)]
            }
        )
    return fields


def end_of_choice(ask: Ask, choice: AnswerChoice) -> dict[str, Any]:
    """The reason why an answer ended (null while it is open), and its log-probs and tokens if requested."""
    called = bool(ask.tools and choice.finish == "stop" and calls_in(choice.text)[1])
    fields: dict[str, Any] = {"finish_reason": "tool_calls" if called else choice.finish or None, "logprobs": None}
    if ask.logprobs:
        fields["logprobs"] = {"content": chat_logprobs(choice)} if ask.chat else text_logprobs(ask, choice)
    if ask.proof:
        fields["proof"] = [block.to_text() for block in choice.proof]
    return fields | ({"token_ids": list(choice.tokens)} if ask.return_token_ids else {})


def text_logprobs(ask: Ask, choice: AnswerChoice) -> dict[str, Any]:
    """The log-probs of an answer's tokens. With `echo` the prompt's come first; its first token has none."""
    scores: list[tuple[int, float, Sequence[tuple[int, float]]]]
    scores = [(score.token, score.logprob, score.likeliest) for score in (choice.scores if ask.echo else ())]
    scores += zip(choice.tokens, choice.logprobs, choice.likeliest or [()] * len(choice.tokens))
    unscored = [choice.words(token) for token in (choice.prompt[:1] if ask.echo else ())]
    pieces = [*unscored, *(choice.words(token) for token, _, _ in scores)]
    likeliest = [
        {choice.words(token): logprob} | {choice.words(other): number for other, number in others}
        for token, logprob, others in scores
    ]
    return {
        "tokens": pieces,
        "token_logprobs": [*[None for _ in unscored], *(logprob for _, logprob, _ in scores)],
        "top_logprobs": [*[None for _ in unscored], *likeliest],
        "text_offset": [*itertools.accumulate(map(len, pieces), initial=0)][: len(pieces)],
    }


def chat_logprobs(choice: AnswerChoice) -> list[dict[str, Any]]:
    def named(token: int, logprob: float) -> dict[str, Any]:
        return {"token": choice.words(token), "logprob": logprob, "bytes": list(choice.words(token).encode())}

    others = choice.likeliest or [()] * len(choice.tokens)
    return [
        {**named(token, logprob), "top_logprobs": [named(*other) for other in each]}
        for token, logprob, each in zip(choice.tokens, choice.logprobs, others)
    ]


def as_event(event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text before the first of these stop texts, and True if there is one."""
    places = [at for at in map(text.find, stops) if at >= 0]
    return (text[: min(places)], True) if places else (text, False)


def usage(ask: Ask, choices: Sequence[AnswerChoice]) -> dict[str, int]:
    asked, written = sum(len(c.prompt) for c in choices[:: ask.n]), sum(len(c.tokens) for c in choices)
    return {"prompt_tokens": asked, "completion_tokens": written, "total_tokens": asked + written}


def error(text: str, kind: str = "invalid_request_error", param: str | None = None, code: Any = None) -> dict[str, Any]:
    """The JSON of a refusal."""
    return {"error": {"message": text, "type": kind, "param": param, "code": code}}


def prometheus(numbers: Mapping[str, float]) -> str:
    """Numbers in the text format of Prometheus; names that end in _total are counters."""
    lines = []
    for name, number in numbers.items():
        kind = "counter" if name.endswith("_total") else "gauge"
        lines += [f"# TYPE embodied_{name} {kind}", f"embodied_{name} {number:g}"]
    return "\n".join([*lines, ""])


OF_TOOLS = ("tool_calls", "tool_call_id")
PICTURE_THREADS = 2  # pictures that are processed at the same time


def message_of(message: Any, number: int) -> dict[str, Any]:
    """A message in the form of chat templates. Several texts are joined; pictures are data URLs."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} should be an object with role and content", "messages")
    if odd := {name for name, value in message.items() if value} - {"role", "content", "name", *OF_TOOLS}:
        raise BadRequest(f"{where}: {sorted(odd)[0][:40]!r} is not supported", "messages")
    content = message.get("content")
    if isinstance(content, list):
        parts = [part_of(part, where) for part in content]
        texts = [part["text"] for part in parts if part["type"] == "text"]
        content = "".join(texts) if len(texts) == len(parts) else parts
    if not isinstance(calls := message.get("tool_calls") or [], list):
        raise BadRequest(f"{where}: tool_calls should be a list", "messages")
    calls = [call_of(call, where) for call in calls]
    if content is None and calls:
        content = ""
    if not isinstance(content, str | list):
        raise BadRequest(f"{where}: content should be text, or a list of texts and pictures", "messages")
    more = {name: message[name] for name in ("name", "tool_call_id") if isinstance(message.get(name), str)}
    return {"role": message["role"], "content": content} | more | ({"tool_calls": calls} if calls else {})


def call_of(call: Any, where: str) -> dict[str, Any]:
    """A tool call in the form of chat templates: its arguments are parsed from JSON text."""
    try:
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return call | {"function": {"name": str(call["function"]["name"]), "arguments": arguments}}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise BadRequest(f"{where}: tool_calls should hold functions with a name and arguments in JSON") from None


def part_of(part: Any, where: str) -> dict[str, str]:
    """A part of a message's content. Pictures outside the request are refused."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text":
        return {"type": "text", "text": str(part.get("text", ""))}
    if kind != "image_url":
        raise BadRequest(f"{where}: a part of its content should have the type text or image_url", "messages")
    given = part.get("image_url")
    url = given.get("url") if isinstance(given, dict) else given
    if not isinstance(url, str) or not DATA.match(url):
        raise BadRequest(f"{where}: a picture should come as a data URL, data:image/png;base64,...", "messages")
    return {"type": "image", "image": url}


def with_tools(tokenizer: Any, messages: Any, tools: Sequence[dict[str, Any]]) -> str:
    """Messages formatted by the chat template, which also describes the tools."""
    if not tokenizer.chat or "<tool_call>" not in str(tokenizer.base.chat_template):
        why = "this model's chat template has no calls like <tool_call>{...}</tool_call>; describe tools in the prompt"
        raise BadRequest(f"tools: {why}", "tools")
    return tokenizer.render([messages[0] | {"tools": tools}, *messages[1:]])


def check_places(tokens: Sequence[int], pictures: Sequence[str], sight: Any) -> None:
    """Refuse tokens that show other pictures than these."""
    if sight is None:
        raise BadRequest("pictures: this model reads only text", "pictures")
    rest = [*tokens]
    for name in pictures:
        shown = [*sight.read(name).tokens]
        first, begin = (next((at for at, token in enumerate(one) if token < 0), 0) for one in (shown, rest))
        if rest[max(0, begin - first) :][: len(shown)] != shown:
            raise BadRequest("prompt: its places are not those of the pictures", "prompt")
        rest = rest[begin - first + len(shown) :]
    if min(rest, default=0) < 0:
        raise BadRequest("prompt: it shows more pictures than there are", "prompt")


class PictureReader:
    """Processes the pictures of requests, which the model's `sight` keeps, before their text is encoded."""

    def __init__(self, sight: Any, max_length: int) -> None:
        self.sight, self.max_length = sight, max_length
        self.threads = ThreadPoolExecutor(PICTURE_THREADS, "pictures")

    async def process(self, *asks: Ask) -> None:
        """Process a request's pictures one after the other, so that clients take turns, and the pictures of a client
        that leaves are forgotten. Pictures with more tokens than a conversation are refused unseen."""
        prompts = [prompt for ask in asks for prompt in ask.prompts if not isinstance(prompt, list)]
        names = [name for prompt in prompts for name in pictures_in(prompt)]
        names += [name for ask in asks for name in ask.pictures]
        if self.sight is None or not names:
            return
        run = asyncio.get_running_loop().run_in_executor
        try:
            await run(self.threads, self.sight.check_room, names, self.max_length)
            for name in dict.fromkeys(names):
                await run(self.threads, self.sight.read, name)
        except PictureError as err:
            raise BadRequest(str(err), "messages") from None

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
