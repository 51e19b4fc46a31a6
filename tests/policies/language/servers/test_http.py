"""A server as the engine: its tokens are those of our own engine, and what fails on the way is asked again or said."""

import asyncio
import contextlib
import errno
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from aiohttp import web
from language_models import answers, drained
from served_language import SECRET, engine_at, scripted, served, until
from tiny_language import build, publish

from embodied.config.recipe import load
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.types import SamplingRule
from embodied.policies.language import http_messages
from embodied.policies.language.engine import Request, make_engine
from embodied.policies.language.folder import as_published
from embodied.policies.language.servers import server_pool
from embodied.policies.language.vllm import FromFolder
from embodied.run import launch
from embodied.runtime import published_weights
from embodied.serving.config import TOKEN

ASKED = [Request(n, [5 + n % 7, 6, 7 + n], 4 + 2 * n, episode=n) for n in range(20)]
SIZES = {"preset": "tiny_gpt2", "max_length": 64, "max_running": 8}


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)


@pytest.fixture
def policy():
    policy = build(dtype="float64", **SIZES)
    policy.tokenizer.stops = frozenset({1, *range(20, 25)})  # so that some answers end, and the server has to be told
    return policy


def of_other_weights(**options):
    return build(seed=5, **({"dtype": "float64"} | SIZES | options))


def counts_of(engine):
    found = engine.metrics()
    return found["asked_again"], found["unusable"]


def of_own_engine(policy, temperature=1.0, **rule):
    return answers(make_engine(policy.config, policy), ASKED, temperature, **rule)


def check_same(found, want, tolerance=1e-12):
    assert found.keys() == want.keys()
    for key, answer in want.items():
        got = found[key]
        assert got.tokens.tolist() == answer.tokens.tolist() and got.tokens.dtype == np.int32
        assert (got.truncated, got.dropped) == (answer.truncated, "")
        assert got.logprobs.dtype == answer.logprobs.dtype
        np.testing.assert_allclose(got.logprobs, answer.logprobs, rtol=0, atol=tolerance)


def test_tokens_are_those_of_our_own_engine_in_any_order_and_from_a_server_that_was_started_again(policy, tmp_path):
    want = of_own_engine(policy)
    assert len({tuple(answer.tokens.tolist()) for answer in want.values()}) > 15
    assert {answer.truncated for answer in want.values()} == {True, False}
    with contextlib.ExitStack() as stack:
        with served(of_other_weights(), tmp_path) as server:
            engine = stack.enter_context(engine_at(server.url, policy, tmp_path))
            engine.load(policy.state_dict(), 1)
            check_same(answers(engine, ASKED), want)
            assert counts_of(engine) == (0, 0)
        port = int(server.url.rpartition(":")[2])
        with served(of_other_weights(max_running=3), tmp_path, port=port):
            check_same(answers(engine, ASKED[::-1]), want)
    assert not [*(tmp_path / "weights").iterdir()]


def test_weights_are_taken_once_they_are_new_and_answers_follow(policy, tmp_path):
    with served(of_other_weights(), tmp_path) as server, engine_at(server.url, policy, tmp_path) as engine:
        engine.load(policy.state_dict(), 1)
        assert len([*(tmp_path / "weights").glob("*/*/model.safetensors")]) == 1  # for a server that starts again
        for temperature, narrow in ((0.7, {}), (1.0, {"top_p": 0.8, "top_k": 7}), (0.0, {})):
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter += 0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
            engine.load(policy.state_dict(), 1)
            check_same(answers(engine, ASKED, temperature, **narrow), of_own_engine(policy, temperature, **narrow))
            kept = [*(tmp_path / "weights").glob("*/*")]
            assert [at.name for at in kept] == [engine.name]  # of other versions nothing is left


def test_at_another_temperature_log_probs_are_of_it_and_are_compared_with_the_learners(tmp_path):
    policy, rule = build(dtype="float64", temperature=0.7, **SIZES), {"logprob_temperature": 0.7, "top_k": 9}
    with served(of_other_weights(), tmp_path) as server, engine_at(server.url, policy, tmp_path) as engine:
        engine.load(policy.state_dict(), 1)
        found = answers(engine, ASKED, 0.7, **rule)
        check_same(found, of_own_engine(policy, 0.7, **rule))
        gap = engine.metrics()["largest_gap_0"]
        assert 0 < gap < 1e-9
        answers(engine, ASKED, 0.4)  # an evaluation, whose log-probs are of temperature 1
        assert engine.metrics()["largest_gap_0"] == gap


@pytest.mark.parametrize("status", [200, 404, 500])
def test_vllms_server_draws_from_few_tokens_at_another_temperature_if_its_workers_divide_the_logits(status):
    """404: without development routes; 500: without our extension."""
    policy, asked = build(dtype="float64", temperature=0.8, **SIZES), []

    def reply(request, body):
        asked.append((request.path, body))
        said = {"results": [None], "choices": [], "data": [{"id": "m", "owned_by": "vllm"}]}
        return web.json_response(said, status=status if request.path == "/collective_rpc" else 200)

    few = {"temperature": 0.8, "top_k": 5}
    with scripted(reply) as url:
        if status != 200:
            with pytest.raises(ConfigError, match="--worker-extension-cls"), engine_at(url, policy, None, top_k=5):
                pass
            return
        with engine_at(url, policy, None, top_k=5, away_s=0.2) as engine:
            engine.load(policy.state_dict(), 1)
            with pytest.raises(EmbodiedError):  # its answers are empty
                answers(engine, ASKED, **few, logprob_temperature=0.8)
    assert ("/collective_rpc", {"method": "divide_logits", "args": [0.8]}) in asked
    (body, *_) = (body for path, body in asked if path == "/v1/completions")
    assert (body["temperature"], body["top_k"]) == (1.0, 5)


@pytest.mark.parametrize("served_rank", [None, 2])
def test_adapters_are_merged_for_a_server_that_has_none(served_rank, tmp_path):
    folder = publish(tmp_path / "model", "qwen3", tied=True)
    options = {"pretrained": str(folder), "max_length": 64, "max_running": 8}
    policy = build(lora_rank=2, **options)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    with served(build(lora_rank=served_rank, **options), folder) as server:
        with engine_at(server.url, policy, tmp_path) as engine:
            engine.load(policy.state_dict(), 1)
            check_same(answers(engine, ASKED), of_own_engine(policy), 2e-5)


def test_weights_that_make_no_numbers_make_answers_that_are_dropped(policy, tmp_path):
    with served(of_other_weights(), tmp_path) as server, engine_at(server.url, policy, tmp_path) as engine:
        engine.load(policy.state_dict(), 1)
        with torch.no_grad():
            for parameter in server.policy.parameters():
                parameter *= float("nan")
        assert {answer.dropped for answer in answers(engine, ASKED).values()} == {"a log-prob is not finite"}
        assert counts_of(engine) == (0, 20)


def test_aborted_requests_leave_the_server_at_once(policy, tmp_path):
    long = [Request(n, [5, 6, n + 5], 60, episode=n) for n in range(8)]
    with served(build(dtype="float64", **SIZES), tmp_path) as server:
        with engine_at(server.url, policy, tmp_path) as engine:
            engine.load(policy.state_dict(), 1)
            engine.begin(1, 3, "train", SamplingRule())
            step, server.generation.engine.step = server.generation.engine.step, never_ends
            for request in long:
                engine.add(request)
            until(lambda: engine.step() or len(server.generation.writing) == 8)
            given_up = engine.abort()
            assert sorted(answer.key for answer in given_up) == [*range(8)]
            assert engine.running == 0 and engine.room == 8
            until(lambda: not server.generation.writing)
            server.generation.engine.step = step
            check_same(answers(engine, ASKED), of_own_engine(policy))


def never_ends():
    time.sleep(0.01)
    return []


def test_a_server_that_is_gone_is_named_with_how_long_it_was_waited_for(policy, tmp_path, capsys):
    with contextlib.ExitStack() as stack:
        with served(build(dtype="float64", **SIZES), tmp_path) as server:
            engine = stack.enter_context(engine_at(server.url, policy, tmp_path, away_s=0.5))
            engine.load(policy.state_dict(), 1)
            engine.begin(1, 3, "train", SamplingRule())
            server.generation.engine.step = never_ends
            for request in ASKED[:8]:
                engine.add(request)
            until(lambda: engine.step() or len(server.generation.writing) == 8)
        with pytest.raises(
            EmbodiedError, match=rf"policy.url={server.url} has not answered for 0.5 s \(policy.away_s\)"
        ):
            drained(engine, [])
        assert engine.running == 0
    assert "trying again" in capsys.readouterr().out
    with pytest.raises(
        EmbodiedError, match=f"policy.url={server.url} has not answered for 0.5 s; start the server first"
    ):
        make_engine(engine.config, policy)


def test_servers_are_looked_for_before_workers_start(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "Cluster", None)
    words = ["recipe=sums_grpo", "run.start_from=null", "policy.engine=http", "policy.weights=/dev/shm"]
    with scripted(lambda request, body: {"data": []}) as url:
        asked = load([*words, f"policy.url={url}", "policy.away_s=0.1"]).config
        with pytest.raises(ConfigError, match="names no model"):
            launch.cluster(asked, None, tmp_path)
    with pytest.raises(EmbodiedError, match=f"policy.url={url} has not answered for 0.1 s; start the server first"):
        launch.cluster(asked, None, tmp_path)


def test_an_engine_without_the_right_token_is_told_why_it_cannot_change_weights(policy, tmp_path, monkeypatch):
    with served(build(dtype="float64", **SIZES), tmp_path) as server:
        monkeypatch.setenv(TOKEN, "another-secret-of-enough-letters")
        with pytest.raises(ConfigError, match=r"401: a valid token is needed.*policy.token_from says where"):
            with engine_at(server.url, policy, tmp_path):
                pass
        secret = tmp_path / "secret"
        secret.write_text(SECRET + "\n")
        with engine_at(server.url, policy, tmp_path, token_from=str(secret)) as engine:
            engine.load(policy.state_dict(), 1)
    monkeypatch.delenv(TOKEN)
    with served(build(dtype="float64", **SIZES), tmp_path) as server:
        with (
            engine_at(server.url, policy, tmp_path) as engine,
            pytest.raises(ConfigError, match="needs a token: start"),
        ):
            engine.load(of_other_weights().state_dict(), 1)


def test_other_models_weights_and_longer_conversations_are_refused(policy, tmp_path):
    others = r"dtype=float32 there, float64 here; model_type=qwen3 there, gpt2 here"
    shorter = r"conversations of 32 tokens at most.*try policy.max_length=32"
    for options, reason in (({"preset": "tiny"}, others), ({"max_length": 32, "dtype": "float64"}, shorter)):
        with served(build(**SIZES | options), tmp_path) as server, pytest.raises(ConfigError, match=reason):
            with engine_at(server.url, policy, tmp_path):
                pass


def test_weights_that_a_killed_worker_left_are_removed_and_those_of_others_stay(policy, tmp_path):
    (left := tmp_path / "weights" / "weights-0123").mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"left")
    with served(build(dtype="float64", **SIZES), tmp_path) as server, engine_at(server.url, policy, tmp_path) as one:
        with engine_at(server.url, policy, tmp_path) as another:
            assert not left.exists() and one.folder.path.is_dir() and another.folder.path.is_dir()
        assert [*(tmp_path / "weights").iterdir()] == [one.folder.path]
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match=r"policy.weights=.*file/weights cannot be written"):
            with engine_at(server.url, policy, tmp_path / "file"):
                pass


def test_weights_for_which_there_is_no_room_are_an_error_that_names_their_folder(policy, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with served(build(dtype="float64", **SIZES), tmp_path) as server, engine_at(server.url, policy, tmp_path) as engine:
        monkeypatch.setattr(http_messages, "write_tensors", full)
        with pytest.raises(EmbodiedError, match=rf"policy.weights={tmp_path}/weights.*No space left"):
            engine.load(policy.state_dict(), 1)


MODELS = {"data": [{"id": "m", "owned_by": "someone"}]}


def answer_of(body, logprobs="all", finish="length", **more):
    (body,) = body.get("requests", [body])
    tokens = [9] * body["max_tokens"]
    told = {"token_logprobs": [-1.0] * len(tokens) if logprobs == "all" else logprobs}
    return {"choices": [{"token_ids": tokens, "finish_reason": finish, "logprobs": told} | more]}


def script(replies):
    """A server of another kind that answers a prompt's requests with these in turn, then as it should."""
    counts = {}

    def reply(request, body):
        if request.path == "/v1/models":
            return MODELS
        key = tuple(body["prompt"])
        counts[key] = counts.get(key, -1) + 1
        told = replies(key)
        return told[counts[key]](body) if counts[key] < len(told) else answer_of(body)

    return reply, counts


def test_answers_without_sound_logprobs_are_dropped_and_counted(policy):
    bad = {11: None, 12: [], 13: [None] * 3, 14: ["NaN"] * 3, 15: [-9999.0] * 3}
    replies = lambda key: [lambda body: answer_of(body, logprobs=bad[key[0]])] if key[0] in bad else []  # noqa: E731
    reply, _ = script(replies)
    with scripted(reply) as url, engine_at(url, policy, None, gap_limit=None) as engine:
        engine.load(policy.state_dict(), 1)
        found = answers(engine, [Request(n, [n], 3, n) for n in range(10, 17)])
        assert {key: bool(answer.dropped) for key, answer in found.items()} == {n: n in bad for n in range(10, 17)}
        assert found[10].tokens.tolist() == [9] * 3 and found[10].truncated
        assert counts_of(engine) == (0, 5)


def test_failed_requests_are_sent_again_and_answered_once(policy):
    busy = lambda body: web.json_response({"error": {"message": "busy"}}, status=503)  # noqa: E731
    broken = lambda body: web.Response(text="<html>", status=502)  # noqa: E731
    aborted = lambda body: answer_of(body, finish="abort")  # noqa: E731
    reply, counts = script(lambda key: {11: [busy, busy], 12: [broken], 13: [aborted]}.get(key[0], []))
    with scripted(reply) as url, engine_at(url, policy, None, gap_limit=None) as engine:
        engine.load(policy.state_dict(), 1)
        found = answers(engine, [Request(n, [n], 3, n) for n in range(10, 14)])
        assert sorted(found) == [10, 11, 12, 13] and not any(answer.dropped for answer in found.values())
        assert [counts[n,] for n in range(10, 14)] == [0, 2, 1, 1]
        assert counts_of(engine) == (4, 0)


def as_ours(name, many):
    """Replies like a server of ours: `name()` of its weights, and `many(body)` to several requests in one."""

    def reply(request, body):
        if request.path == "/v1/models":
            return {"data": [{"id": "m", "owned_by": "embodied"}]}
        return {"weight_version": name()} if request.path == "/weight_info" else many(body)

    return reply


def test_failed_requests_of_a_batched_call_are_sent_again_alone(policy):
    asked = []

    def many(body):
        asked.append([one["prompt"] for one in body["requests"]])
        failed = {"status": 503, "body": {"error": {"message": "busy"}}}
        told = [{"status": 200, "body": answer_of(one)} for one in body["requests"]]
        if len(asked) == 1:
            told = [told[0], failed, *told[2:3]]  # and then the connection ends, before the fourth
        lines = [json.dumps({"number": number} | each) for number, each in enumerate(told)]
        return web.Response(text="\n".join([*lines[::-1], ""]))

    with scripted(as_ours(lambda: engine.name, many)) as url, engine_at(url, policy, None, gap_limit=None) as engine:
        engine.load(policy.state_dict(), 1)
        found = answers(engine, [Request(n, [n], 3, n) for n in range(10, 14)])
        assert sorted(found) == [10, 11, 12, 13] and counts_of(engine) == (2, 0)
        assert asked[0] == [[10], [11], [12], [13]]
        assert sorted(prompt for call in asked[1:] for prompt in call) == [[11], [13]]


def test_a_server_that_aborts_some_answers_of_a_call_is_named_once_for_the_call(policy, capsys):
    calls = []

    def many(body):
        calls.append(body["requests"])
        odd = [number for number, _ in enumerate(body["requests"]) if number % 2 and len(calls) == 1]
        told = [answer_of(one, **({"finish": "abort"} if n in odd else {})) for n, one in enumerate(body["requests"])]
        return web.Response(text="".join(f"{json.dumps(line_of_many(n, each))}\n" for n, each in enumerate(told)))

    with scripted(as_ours(lambda: engine.name, many)) as url, engine_at(url, policy, None, gap_limit=None) as engine:
        engine.load(policy.state_dict(), 1)
        found = answers(engine, [Request(n, [n], 3, n) for n in range(10, 18)])
        assert len(found) == 8 and counts_of(engine) == (4, 0)
    assert capsys.readouterr().out.count("its answers are aborted") == 1


def line_of_many(number, body):
    return {"number": number, "status": 200, "body": body}


def test_a_server_that_sends_no_answer_is_named_while_it_is_waited_for(policy, monkeypatch):
    monkeypatch.setattr(server_pool, "WATCH_S", 0.02)
    monkeypatch.setattr(server_pool, "QUIET_S", 0.2)
    goes_on = threading.Event()

    async def lines(body):
        while not goes_on.is_set():
            await asyncio.sleep(0.01)
        for number, one in enumerate(body["requests"]):
            yield json.dumps(line_of_many(number, answer_of(one))).encode() + b"\n"

    def let_go():
        remarks = []
        until(lambda: remarks.extend(engine.take_remarks()) or remarks)
        goes_on.set()
        return remarks

    served_by = as_ours(lambda: engine.name, lambda body: web.Response(body=lines(body)) if body else {})
    with (
        scripted(served_by) as url,
        engine_at(url, policy, None, gap_limit=None) as engine,
        ThreadPoolExecutor() as pool,
    ):
        engine.load(policy.state_dict(), 1)
        told = pool.submit(let_go)
        assert len(answers(engine, [Request(n, [n], 3, n) for n in range(4)])) == 4
        silence = f"policy.url={url} has requests of this run, and has sent no answer for 0.2 s; a request waits"
        assert [remark.sentence.partition(" for at most")[0] for remark in told.result(60)] == [silence]


def test_an_engine_closes_while_a_server_leaves_its_response_open(policy):
    async def lines(body):
        for number, one in enumerate(body["requests"]):
            yield json.dumps({"number": number, "status": 200, "body": answer_of(one)}).encode() + b"\n"
        await asyncio.sleep(0.5)  # the server's own task ends before the server does

    with scripted(as_ours(lambda: engine.name, lambda body: web.Response(body=lines(body)))) as url:
        with engine_at(url, policy, None, gap_limit=None) as engine:
            engine.load(policy.state_dict(), 1)
            assert len(answers(engine, [Request(n, [n], 3, n) for n in range(10, 14)])) == 4
        assert not asyncio.all_tasks(engine.loop)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (lambda body: web.json_response({"error": {"message": "no such model"}}, status=404), "404: no such model"),
        (lambda body: {"choices": [{"text": "9", "finish_reason": "stop"}]}, "no token_ids"),
        (lambda body: {"detail": "?"}, "none of OpenAI's"),
    ],
)
def test_a_server_of_another_kind_is_refused_in_a_line(policy, reply, reason):
    scripts, _ = script(lambda key: [reply] if key == (30,) else [])
    with scripted(scripts) as url, engine_at(url, policy, None, gap_limit=None) as engine:
        engine.load(policy.state_dict(), 1)
        with pytest.raises(EmbodiedError, match=reason) as told:
            answers(engine, [Request(0, [30], 3, 0)])
        assert f"policy.url={url}" in str(told.value)


def raw(text):
    return lambda body: web.Response(text=text)


def line_of(body, answer):
    return web.Response(text=json.dumps({"number": 0, "status": 200, "body": answer}) + "\n")


def cut(count, finish, *tokens):
    """An answer of `count` tokens and these."""

    def reply(body):
        ids = [9] * count + [*tokens]
        logprobs = {"token_logprobs": [-1.0] * len(ids)}
        return line_of(body, {"choices": [{"token_ids": ids, "finish_reason": finish, "logprobs": logprobs}]})

    return reply


def with_logprob(text):
    return lambda body: web.Response(text=line_of(body, answer_of(body)).text.replace("-1.0", text, 1))


STRANGE = {  # what our server's place for several answers says to one request, and how it is named
    "a number without end": (raw('{"number": 1e999, "status": 200, "body": {}}\n'), "no whole number"),
    "a log-prob of 400 digits": (with_logprob("9" * 400), "a log-prob of the answer is above 0"),
    "a fingerprint that is a number": (
        lambda body: line_of(body, answer_of(body) | {"system_fingerprint": 7}),
        "other",
    ),
    "a line without end": (raw("x" * ((16 << 20) + 1)), "sends a line of more than 16 MB"),
    "deep lists": (raw("[" * 100_000 + "\n"), "RecursionError"),
    "no JSON": (raw("<html>\n"), "a line is none of an answer"),
    "an answer to another": (raw('{"number": 7, "status": 200, "body": {}}\n'), "answers request 7"),
    "no answer": (raw(""), "ends before 1 of its answers"),
    "no object": (raw('{"number": 0, "status": 200, "body": [1]}\n'), "without an object of JSON"),
    "gzip": (lambda body: web.Response(body=b"x", headers={"Content-Encoding": "gzip"}), "Content-Encoding: gzip"),
    "other weights": (
        lambda body: line_of(body, answer_of(body) | {"system_fingerprint": "v1-00"}),
        "of other weights",
    ),
    "aborted": (lambda body: line_of(body, answer_of(body, finish="abort")), "its answers are aborted"),
    "stopped without a stop token": (cut(2, "stop"), "2 tokens without a stop token"),
    "too short": (cut(2, "length"), "of 3 that were asked for, has finish_reason=length"),
    "too long": (cut(4, "length"), "an answer of 4 tokens, and 3 were asked for"),
    "gone on after its end": (cut(0, "length", 1, 9, 9), "goes on after its stop token, which is number 1"),
    "ended by something else": (cut(3, "tool_calls"), "finish_reason=tool_calls"),
    "a token of another model": (cut(2, "length", 10**9), "token 1000000000 in an answer is none of this"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_answer_is_its_servers_failure_and_others_answer(name, policy, capsys, monkeypatch):
    monkeypatch.setattr(server_pool, "WATCH_S", 600.0)  # on a busy machine no request counts as slow
    reply, reason = STRANGE[name]
    asked = [Request(n, [n], 3, n) for n in range(10, 14)]
    wanted = lambda: engine.name  # noqa: E731
    with scripted(as_ours(wanted, reply)) as liar, scripted(as_ours(wanted, lambda body: many(body))) as honest:
        with engine_at(liar, policy, None, gap_limit=None, away_s=0.3) as engine:
            engine.load(policy.state_dict(), 1)
            with pytest.raises(EmbodiedError, match=reason) as told:
                answers(engine, asked[:1])
            assert f"policy.url={liar}" in str(told.value) and "\n" not in str(told.value)
        with engine_at([liar, honest], policy, None, gap_limit=None) as engine:
            engine.load(policy.state_dict(), 1)
            until(lambda: all(server.takes for server in engine.pool.servers))
            assert sorted(answers(engine, asked)) == [10, 11, 12, 13]
    assert f"policy.url={liar}" in capsys.readouterr().out


def test_a_request_that_fails_slowly_is_given_up_after_some_tries(policy, monkeypatch):
    monkeypatch.setattr(server_pool, "LONGEST_S", 0.0)
    reply, _ = STRANGE["aborted"]
    with scripted(as_ours(lambda: engine.name, reply)) as url, engine_at(url, policy, None, away_s=600.0) as engine:
        engine.load(policy.state_dict(), 1)
        with pytest.raises(EmbodiedError, match=f"policy.url={url} has failed at a request 10 times: its answers are"):
            answers(engine, [Request(0, [30], 3, 0)])
        assert counts_of(engine) == (10, 0)


def test_a_server_that_never_answers_ends_the_run_after_the_time_of_one_answer(policy, monkeypatch):
    monkeypatch.setattr(server_pool, "LONGEST_S", 0.0)

    async def nothing():
        await asyncio.sleep(60)
        yield b""

    silent = as_ours(lambda: engine.name, lambda body: web.Response(body=nothing()))
    with scripted(silent) as url, engine_at(url, policy, None, answer_s=0.5, away_s=0.4) as engine:
        engine.load(policy.state_dict(), 1)
        with pytest.raises(EmbodiedError, match=r"has not answered for 0.4 s .*many took longer than 0.5 s"):
            answers(engine, [Request(0, [30], 3, 0)])
        assert counts_of(engine) == (1, 0)


def many(body):
    lines = [{"number": n, "status": 200, "body": answer_of(one)} for n, one in enumerate(body["requests"])]
    return web.Response(text="".join(json.dumps(each) + "\n" for each in lines))


def described(**more):
    return {"data": [{"id": "m", "owned_by": "embodied"} | more]}


@pytest.mark.parametrize(
    ("listing", "reason"),
    [
        (described(max_running=-5), "/v1/models .* wrongly: {'max_running': -5}"),
        (described(max_running=True), "/v1/models .* wrongly: {'max_running': True}"),
        (described(max_model_len="long"), "/v1/models .* wrongly: {'max_model_len': 'long'}"),
        (described(settings="abc"), "/v1/models .* wrongly: {'settings': 'abc'}"),
        (web.Response(text="[" * 100_000), ": /v1/models answers 200 without an object of JSON"),
    ],
)
def test_a_server_that_describes_itself_wrongly_is_refused_in_a_line(listing, reason, policy):
    with scripted(lambda request, body: listing) as url:
        with pytest.raises(ConfigError, match=f"policy.url={url}{reason}"), engine_at(url, policy, None):
            pass


class VLLMsWorker(FromFolder):
    """As much of vLLM's worker as takes weights."""

    def __init__(self, model):
        self.model_runner = self
        self.get_model = lambda: model
        self.has = {}

    def reload_weights(self, weights_iterator):
        self.has = dict(weights_iterator)


@pytest.mark.parametrize("sees", [True, False])
def test_vllms_server_takes_weights_from_a_folder_or_in_buckets(sees, policy, tmp_path, monkeypatch):
    monkeypatch.setattr(published_weights, "BUCKET_BYTES", 100_000)
    monkeypatch.setattr(VLLMsWorker, "sees_folder", lambda self, folder: sees)
    worker, said, version = VLLMsWorker(policy.model), [], ["none"]

    def reply(request, body):
        if request.path == "/v1/models":
            return {"data": [{"id": "m", "owned_by": "vllm"}]}
        if request.path == "/collective_rpc":
            said.append(body["method"])
            found = getattr(worker, body["method"])(*body.get("args", ()))
            return {"results": [None if found is None else str(found)]}
        if request.path == "/update_weight_version":
            version[0] = body["new_version"]
        return {"weight_version": version[0]}

    with scripted(reply) as url, engine_at(url, policy, tmp_path) as engine:
        engine.load(policy.state_dict(), 1)
        assert version == [engine.name]
    assert list(dict.fromkeys(said)) == [
        "divide_logits",
        "sees_folder",
        *(["load_from"] if sees else ["receive_bucket", "load_received"]),
    ]
    assert (said.count("receive_bucket") > 1) == (not sees)
    want = as_published(policy.model, policy.state_dict().items())
    assert worker.has.keys() == want.keys() and all(torch.equal(worker.has[name], want[name]) for name in want)


def test_a_server_that_has_no_way_to_take_weights_says_so(policy, tmp_path):
    for owner, who in (("someone", "a server of someone"), (None, "a server of another kind")):
        models = {"data": [{"id": "m", "owned_by": owner}]}
        with scripted(lambda request, body, models=models: models) as url, engine_at(url, policy, tmp_path) as engine:
            with pytest.raises(ConfigError, match=f"{who}, which has no way to take weights that is known here"):
                engine.load(policy.state_dict(), 1)
