"""A language model's server: OpenAI's clients are answered as our own engine answers, and only who may changes it."""

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from language_models import answers
from served_language import SECRET, served, until
from tiny_language import PLAIN, SEES, build, publish

from embodied import serve
from embodied.core.errors import EmbodiedError
from embodied.core.pictures import data_url, drawing, load_picture
from embodied.policies.language.engine import Request, make_engine
from embodied.policies.language.slot_engine import SlotEngine
from embodied.runtime.published_weights import blob_of, spec_of, write_safetensors
from embodied.serve import find_language, load_language, with_options
from embodied.serving import language_server, openai
from embodied.serving.config import TOKEN, ServeConfig
from embodied.serving.language_server import LanguageServer, Origin
from embodied.serving.openai import OF_TOOLS, READ, BadRequest, read_chat, read_completion

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ALLOWED = {"Authorization": f"Bearer {SECRET}"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return publish(tmp_path_factory.mktemp("model") / "pub", "qwen3", tied=False, template=PLAIN)


@pytest.fixture(scope="module")
def open_server(folder):
    """One without a token."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(TOKEN, raising=False)
        with served(model_of(folder), folder) as server:
            yield server


@pytest.fixture
def server(folder, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    monkeypatch.chdir(folder.parent)
    with served(model_of(folder), Path(folder.name), version=4) as server:
        monkeypatch.chdir("/")
        yield server


def model_of(folder, *words):
    target = find_language(str(folder))
    return load_language(with_options(target.config, ["policy.max_running=4", *words]), target)


def ask(server, path, body=None, headers=ALLOWED, method="POST"):
    """Status and JSON, or text, of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=60)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json"} | headers)
        reply = connection.getresponse()
        text = reply.read().decode()
        return reply.status, json.loads(text) if reply.headers["Content-Type"].startswith("application/json") else text
    finally:
        connection.close()


def completed(server, **body):
    status, found = ask(server, COMPLETIONS, body)
    assert status == 200, found
    return found


def written(model, tokens, most, seed, temperature=1.0, episode=0, pictures=()):
    """What an engine in this process answers."""
    engine = make_engine(model.config, model)
    (answer,) = answers(
        engine, [Request(0, tokens, most, episode, pictures=pictures)], temperature, seed, "serve"
    ).values()
    return answer


def test_the_answer_is_what_our_engine_writes(open_server, folder):
    asked = {"prompt": [5, 6, 7], "max_tokens": 9, "logprobs": 0, "return_token_ids": True}
    for temperature in (1.0, 0.6, 0.0):
        found = completed(open_server, **asked, seed=3, temperature=temperature, n=2)
        for number, choice in enumerate(found["choices"]):
            want = written(model_of(folder), [5, 6, 7], 9, 3, temperature, number)
            assert choice["token_ids"] == want.tokens.tolist() and choice["prompt_token_ids"] == [5, 6, 7]
            np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], want.logprobs, rtol=0, atol=1e-6)
            assert "".join(choice["logprobs"]["tokens"]).startswith(choice["text"])
            assert choice["finish_reason"] == ("length" if want.truncated else "stop")
    assert found["usage"] == {"prompt_tokens": 3, "completion_tokens": 18, "total_tokens": 21}
    assert found["policy_version"] == 0 and found["system_fingerprint"].startswith("v0-")
    assert found["model"] == "m"


def test_without_a_seed_every_answer_has_noise_of_its_own_and_with_one_none(open_server):
    several = [completed(open_server, prompt="abc", max_tokens=12)["choices"][0]["text"] for _ in range(4)]
    assert len({*several}) == 4
    seeded = [completed(open_server, prompt="abc", max_tokens=12, seed=5)["choices"][0]["text"] for _ in range(4)]
    assert len({*seeded}) == 1


def test_a_picture_in_the_request_is_answered_to_and_others_are_refused(open_server, tmp_path):
    model, url = build(SEES, preset="tiny_vl", max_running=4), data_url(load_picture(drawing("add", 1, 48)))
    shown = {"type": "image_url", "image_url": {"url": url}}
    body = {"messages": [{"role": "user", "content": [shown, {"type": "text", "text": "sum: "}]}], "max_tokens": 8}
    with served(model, tmp_path) as server:
        status, found = ask(server, CHAT, body | {"seed": 1, "return_token_ids": True})
        assert status == 200, found
        said = ({"role": "user", "content": [{"type": "image", "image": url}, {"type": "text", "text": "sum: "}]},)
        tokens = model.tokenizer.encode(said, first=True)
        assert found["prompt_token_ids"] == model.shown_tokens(tokens) and found["usage"]["prompt_tokens"] == len(
            tokens
        )
        want = written(model, tokens, 8, 1, pictures=(url,))
        assert found["choices"][0]["token_ids"] == want.tokens.tolist()
        for odd in ("http://127.0.0.1/a.png", "/etc/passwd", "drawn:add?seed=1&pixels=48", f"{url[:40]}AAAA"):
            shown["image_url"]["url"] = odd
            status, found = ask(server, CHAT, body)
            assert status == 400 and "picture" in found["error"]["message"]
    shown["image_url"]["url"] = url
    status, found = ask(open_server, CHAT, body)
    assert status == 400 and "reads only text" in found["error"]["message"]


def test_pictures_are_counted_before_they_are_processed_and_forgotten_if_their_clients_leave(tmp_path):
    model, release = build(SEES, preset="tiny_vl", max_running=4, max_length=20), threading.Event()

    def body(*names):
        parts = [{"type": "image_url", "image_url": {"url": data_url(load_picture(name))}} for name in names]
        return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}

    with served(model, tmp_path) as server, ExitStack() as clients:
        status, found = ask(server, CHAT, body(drawing("add", 1, 48), drawing("add", 2, 64)))
        assert status == 400 and "the pictures have 25 tokens" in found["error"]["message"]
        for _ in range(openai.PICTURE_THREADS):
            server.pictures.threads.submit(release.wait, 60)
        for seed in range(8):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", int(server.url.split(":")[-1]))))
            data = json.dumps(body(drawing("add", seed, 48))).encode()
            client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: ")
            client.sendall(b"%d\r\n\r\n%s" % (len(data), data))
        until(lambda: server.active == 8)
        assert ask(server, COMPLETIONS, {"prompt": "1+1=", "max_tokens": 2})[0] == 200  # nobody else waits
        clients.close()
        until(lambda: server.active == 0)
        release.set()
        assert ask(server, CHAT, body(drawing("count", 3, 48)))[0] == 200
        assert len(model.sight.kept) == 1


def test_an_answer_ends_before_a_text_to_stop_at_and_its_row_is_free(open_server):
    whole = completed(open_server, prompt="hello", max_tokens=40, seed=3)["choices"][0]["text"]
    stop = whole[6:8]
    assert stop not in whole[:7]
    found = completed(open_server, prompt="hello", max_tokens=40, seed=3, stop=[stop, "zzzz"], return_token_ids=True)
    (choice,) = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == (whole[:6], "stop") and len(choice["token_ids"]) == 8
    one = completed(open_server, prompt="hello", max_tokens=40, seed=3, stop_token_ids=[choice["token_ids"][2]])
    assert one["choices"][0]["text"] == whole[:2] and one["choices"][0]["finish_reason"] == "stop"


def test_a_stream_is_the_answer_in_parts(open_server):
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "seed": 2, "logprobs": True}
    _, whole = ask(open_server, CHAT, body)
    text, stop = whole["choices"][0]["message"]["content"], None
    for more in ({}, {"stop": text[9:11]}, {"stop": text[:6]}):
        asked = body | more | {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        _, events = ask(open_server, CHAT, asked)
        lines = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
        *chunks, usage, done = [line if line == "[DONE]" else json.loads(line) for line in lines]
        parts = [chunk["choices"][0] for chunk in chunks]
        said = "".join(part["delta"]["content"] for part in parts)
        stop = more.get("stop")
        assert said == (text if stop is None else text[: text.index(stop)])
        assert done == "[DONE]" and usage["choices"] == [] and len(parts) > 4
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == ("stop" if stop else whole["choices"][0]["finish_reason"])
        count = sum(len(part["token_ids"]) for part in parts)
        assert count == usage["usage"]["completion_tokens"] == sum(len(p["logprobs"]["content"]) for p in parts)


SAID = {"role": "user", "content": "a"}
REFUSED = [  # body, words of the answer
    ({}, "lacks 'prompt'"),
    ({"prompt": [5, -1]}, "prompt should be text or a list"),
    ({"prompt": [100]}, "token 100 is none of this model's 100"),
    ({"prompt": [5] * 256}, "a prompt of 256 tokens leaves no room for an answer within 256"),
    ({"prompt": "1" * 1_000_000}, "a prompt of 1000000 characters leaves no room for an answer within 256"),
    ({"prompt": "a\ud800"}, "lone surrogate"),
    (b'{"prompt": "\xed\xa0\x80"}', "no JSON"),
    (b"[" * 100_000, "no JSON"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens=0 writes nothing"),
    ({"prompt": ["a"] * 600, "n": 2}, "more than 1024 answers"),
    ({"prompt": "a", "logprobs": 21}, "logprobs: Input should be less than or equal to 20"),
    ({"prompt": "a", "top_logprobs": 2}, "options of /v1/chat/completions; logprobs=5 returns five"),
    ({"prompt": "a", "stream": True, "echo": True}, "come with a whole answer; leave out stream"),
    ({"prompt": "a", "tool_choice": "required"}, "tool_choice=required is not supported"),
    ({"prompt": "a", "tempature": 1}, "'tempature' is not known here"),
    ({"messages": []}, "should be a list of messages"),
    ({"messages": ["hi"]}, r"messages[0] should be an object"),
    ({"messages": [SAID | {"content": [{"type": "image_url"}]}]}, "as a data URL"),
    ({"messages": [SAID | {"tool_calls": [{}]}]}, "tool_calls should hold functions"),
    ({"messages": [SAID | {"content": "1" * 900_000}]}, "characters leaves no room for an answer within 256"),
]


@pytest.mark.parametrize(("body", "reason"), REFUSED)
def test_an_impossible_request_is_refused_by_name(open_server, body, reason):
    path = CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS
    status, found = ask(open_server, path, body)
    assert (status, found["error"]["type"]) == (400, "invalid_request_error") and reason in found["error"]["message"]


def test_a_request_that_is_too_long_or_for_another_model_is_refused(open_server):
    assert ask(open_server, COMPLETIONS, b" " * 1_100_000)[0] == 413
    status, found = ask(open_server, COMPLETIONS, {"prompt": "a", "model": "gpt-4"})
    assert status == 404 and "model=gpt-4: this server has m" in found["error"]["message"]
    status, found = ask(open_server, "/v1/embeddings", {})
    assert status == 404 and "/v1/embeddings" in found["error"]["message"]
    assert ask(open_server, COMPLETIONS, method="GET")[0] == 405
    assert [ask(open_server, "/" + "a" * count)[0] for count in (5_000, 50_000)] == [404, 400]


OF_CALLS = [5], [{"function": 5}], [{"function": {"name": [], "arguments": "[" * 99_999}}]
OF_PARTS = [None], [{"text": 5}], [{"type": "text"}], [{"type": "image_url", "image_url": 5}]
ODD = [True, 5, -1, float("inf"), 10**400, "x", [], {"a": 1}, {"type": 5}, *OF_CALLS, *OF_PARTS]


@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:20])
def test_an_odd_value_of_any_field_is_read_or_refused(value):
    chats = [{"messages": [SAID | {name: value}]} for name in (*SAID, *OF_TOOLS)]
    chats += [{"messages": [SAID]} | {name: value} for name in READ]
    for read, bodies in ((read_chat, chats), (read_completion, [value, *({"prompt": "a", n: value} for n in READ)])):
        for body in bodies:
            with suppress(BadRequest):
                read(body)


def test_a_body_in_another_encoding_than_its_header_says_is_refused(open_server):
    for encoding in ("gzip", "deflate"):
        status, found = ask(open_server, COMPLETIONS, b"xxxx", {"Content-Encoding": encoding})
        assert status == 400 and "Content-Encoding" in found["error"]["message"]


def test_other_clients_are_answered_while_a_prompt_is_encoded(server, monkeypatch):
    encode, begun, go_on = server.policy.tokenizer.encode, threading.Event(), threading.Event()

    def encode_slowly(*args, **options):
        begun.set()
        assert go_on.wait(60)
        return encode(*args, **options)

    monkeypatch.setattr(server.policy.tokenizer, "encode", encode_slowly)
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(completed, server, prompt="a", max_tokens=1)
        try:
            assert begun.wait(60)
            health = pool.submit(ask, server, "/healthz", None, {}, "GET")
            assert health.result(60) == (200, "OK\n")
        finally:
            go_on.set()
        assert slow.result(60)["choices"]


# Who may ask


def test_without_a_token_answers_are_for_all_of_this_machine_and_control_for_nobody(open_server):
    assert completed(open_server, prompt="a", max_tokens=1)
    for path in language_server.CONTROL:
        for headers in ({}, ALLOWED):
            status, found = ask(open_server, path, {"path": "/", "version": 1}, headers)
            assert status == 401 and f"start the server with {TOKEN}" in found["error"]["message"]
    assert completed(open_server, prompt="a", max_tokens=1)["policy_version"] == 0


WRONG = [{}, {"Authorization": SECRET}, {"Authorization": "Bearer wrong"}, {"Authorization": b"Bearer \xff\xfe"}]


@pytest.mark.parametrize("headers", WRONG, ids=str)
def test_requests_without_the_token_are_refused(server, headers):
    for path in (COMPLETIONS, CHAT, "/update_weights", "/pause", "/nowhere"):
        assert ask(server, path, {"prompt": "a"}, headers)[0] == 401
    for path in ("/v1/models", "/weight_info"):
        assert ask(server, path, None, headers, "GET")[0] == 401
    assert ask(server, "/healthz", None, headers, "GET") == (200, "OK\n")
    assert ask(server, COMPLETIONS, {"prompt": "a"}, ALLOWED | {"Origin": "https://example.com"})[0] == 403
    assert completed(server, prompt="a", max_tokens=1)["policy_version"] == 4


def test_more_requests_than_the_server_takes_are_told_to_come_again(folder, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    with served(model_of(folder), folder, max_clients=1) as server:
        assert ask(server, "/pause?mode=keep")[0] == 200
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(completed, server, prompt="a", max_tokens=1)
            until(lambda: server.active == 1)
            status, found = ask(server, COMPLETIONS, {"prompt": "a"})
            assert status == 503 and "max_clients" in found["error"]["message"]
            assert ask(server, "/resume")[0] == 200
            assert first.result(60)["choices"]


# Weights


def write(folder, model, factor=1.0):
    folder.mkdir()
    weights = {name: tensor * factor for name, tensor in model.state_dict().items()}
    specs = {name: spec_of(tensor) for name, tensor in weights.items()}
    write_safetensors(folder / "model.safetensors", specs, ((name, blob_of(w)) for name, w in weights.items()))
    return str(folder)


def test_new_weights_answer_from_then_on_and_the_checkpoints_own_come_back(server, folder, tmp_path):
    asked = {"prompt": [5, 6], "max_tokens": 12, "seed": 1, "return_token_ids": True}
    before = completed(server, **asked)
    path = write(tmp_path / "new", model_of(folder), 1.5)
    status, told = ask(server, "/update_weights", {"path": path, "version": 9})
    assert status == 200 and told["policy_version"] == 9
    after = completed(server, **asked)
    assert after["policy_version"] == 9 and after["system_fingerprint"] == told["weight_version"]
    assert ask(server, "/weight_info", None, method="GET")[1] == {
        "weight_version": told["weight_version"],
        "policy_version": 9,
    }
    model = model_of(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5
    want = written(model, [5, 6], 12, 1).tokens.tolist()
    assert after["choices"][0]["token_ids"] == want != before["choices"][0]["token_ids"]
    assert ask(server, "/reload_weights")[0] == 200
    assert completed(server, **asked)["choices"] == before["choices"]


def test_weights_of_another_model_or_none_change_nothing(server, folder, tmp_path):
    asked = {"prompt": [5, 6], "max_tokens": 12, "seed": 1}
    before = completed(server, **asked)
    other = write(tmp_path / "other", build(preset="tiny_gpt2"))
    wider = write(tmp_path / "wider", build(preset="tiny"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "odd" / "model.safetensors").mkdir(parents=True)
    nowhere = "not a folder that this server sees"
    for path, reason in (
        (other, "the weights do not belong to this policy"),
        (wider, "differ"),
        (str(tmp_path / "empty"), "no weights"),
        (write(tmp_path / "nan", model_of(folder), float("nan")), "numbers that are not finite"),
        *((path, nowhere) for path in ("nowhere", "/" + "a" * 5_000, str(tmp_path / "loop"))),
        ("/proc/1/root", ""),  # readable by root alone
        (str(tmp_path / "odd"), "model.safetensors"),
    ):
        status, found = ask(server, "/update_weights", {"path": path, "version": 5})
        assert status == 400 and reason in found["error"]["message"]
    assert ask(server, "/update_weights", {"path": other})[0] == 400
    after = completed(server, **asked)
    assert all(after[key] == before[key] for key in ("choices", "system_fingerprint"))


def test_weights_wait_for_what_is_being_written_or_end_it_and_never_mix(server, folder, tmp_path):
    path = write(tmp_path / "new", model_of(folder), 1.5)
    step = server.generation.engine.step
    gate = threading.Semaphore(0)

    def by_gate():  # a token for every release
        return step() if gate.acquire(timeout=0.01) else []

    server.generation.engine.step = by_gate
    body = {"prompt": [5, 6], "max_tokens": 3, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    with ThreadPoolExecutor(4) as pool:
        running = pool.submit(completed, server, **body)
        until(lambda: server.generation.writing)
        update = pool.submit(ask, server, "/update_weights", {"path": path, "version": 5})
        until(lambda: server.generation.changes)
        waiting = pool.submit(completed, server, **body)
        until(lambda: server.generation.queue.waiting)
        assert not update.done() and server.generation.version == 4
        gate.release(3)
        assert running.result(60)["policy_version"] == 4 and update.result(60)[0] == 200
        gate.release(3)
        assert waiting.result(60)["policy_version"] == 5

        running = pool.submit(completed, server, **body)
        until(lambda: server.generation.writing)
        gate.release(1)
        update = pool.submit(ask, server, "/update_weights", {"path": path, "version": 6, "mode": "abort"})
        found = running.result(60)
        assert found["choices"][0]["finish_reason"] == "abort" and found["policy_version"] == 5
        assert len(found["choices"][0]["token_ids"]) <= 2
        assert update.result(60)[1]["policy_version"] == 6


def test_a_pause_keeps_ends_or_waits_for_what_is_being_written(server, folder, tmp_path):
    path = write(tmp_path / "new", model_of(folder), 1.5)
    body = {"prompt": [5, 6], "max_tokens": 200, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    want = completed(server, **body)["choices"]
    with ThreadPoolExecutor(4) as pool:
        step, gate = server.generation.engine.step, threading.Semaphore(9)
        server.generation.engine.step = lambda: step() if gate.acquire(timeout=0.01) else []
        running = pool.submit(completed, server, **body)
        until(lambda: server.generation.writing)
        assert ask(server, "/pause?mode=keep")[1] == {"status": "paused"}
        status, found = ask(server, "/update_weights", {"path": path, "version": 5})
        assert status == 409 and "send /resume first" in found["error"]["message"] and not running.done()
        assert ask(server, "/resume")[0] == 200
        gate.release(200)
        assert running.result(60)["choices"] == want

        running = pool.submit(completed, server, **body)
        until(lambda: server.generation.writing)
        assert ask(server, "/pause")[0] == 200  # abort, as in vLLM
        assert running.result(60)["choices"][0]["finish_reason"] == "abort"
        waiting = pool.submit(completed, server, **body)
        until(lambda: server.generation.queue.waiting)
        assert ask(server, "/pause?mode=wait")[0] == 200 and not waiting.done()
        assert ask(server, "/resume")[0] == 200
        gate.release(250)
        assert waiting.result(60)["choices"] == want
    assert ask(server, "/pause?mode=later")[0] == 400


def test_a_request_at_which_the_engine_fails_harms_no_other(server, capsys):
    body = {"prompt": [5, 6], "max_tokens": 8, "seed": 1, "ignore_eos": True, "return_token_ids": True}
    want = completed(server, **body)["choices"]
    step = server.generation.engine.step

    def failing():
        if any(9 in conversation.tokens for conversation in server.generation.writing):
            raise KeyError("/home/me")
        time.sleep(0.005)
        return step()

    server.generation.engine.step = failing
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(completed, server, **body) for _ in range(3)]
        until(lambda: server.generation.writing)
        status, found = ask(server, COMPLETIONS, body | {"prompt": [9]})
        assert status == 500 and "fails at this request" in found["error"]["message"]
        assert "/home/me" not in found["error"]["message"] and "/home/me" in capsys.readouterr().err
        assert all(other.result(60)["choices"] == want for other in others)
    server.generation.score = lambda *_: {}["broken"]
    status, found = ask(server, COMPLETIONS, body | {"prompt_logprobs": 1})
    assert status == 500 and "fails at this request" in found["error"]["message"]
    assert ask(server, "/healthz", method="GET")[0] == 200 and completed(server, **body)["choices"] == want


def test_requests_that_come_as_one_are_answered_one_by_one_as_they_end(server):
    lengths = [9, 2, 30, 5, 12]
    shared = {"model": "m", "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
    bodies = [shared | {"prompt": [5, n], "max_tokens": length, "seed": n} for n, length in enumerate(lengths)]
    want = [completed(server, **body) for body in bodies]
    lines = many(server, bodies[:4])
    assert [line["number"] for line in lines] == [1, 3, 0, 2] and {line["status"] for line in lines} == {200}
    for line in lines:
        (choice,), (whole,) = line["body"]["choices"], want[line["number"]]["choices"]
        assert all(whole[key] == choice[key] for key in ("token_ids", "finish_reason"))
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(whole["logprobs"]["token_logprobs"], abs=1e-5)
        assert line["body"]["system_fingerprint"] == want[0]["system_fingerprint"]
    step = server.generation.engine.step

    def failing():
        return {}["broken"] if any(9 in one.tokens for one in server.generation.writing) else step()

    server.generation.engine.step = failing
    told = {line["number"]: line for line in many(server, [bodies[0], shared | {"prompt": [9]}])}
    assert told[0]["body"]["choices"][0]["token_ids"] == want[0]["choices"][0]["token_ids"]
    assert told[1]["status"] == 500 and "fails at this request" in told[1]["body"]["error"]["message"]
    for odd in ([], bodies * 60, [bodies[0] | {"stream": True}], [bodies[0] | {"n": 2}], [bodies[0] | {"logprobs": 2}]):
        status, found = ask(server, "/v1/completions/many", {"requests": odd})
        assert status == 400 and found["error"]["param"] == "requests"
    assert ask(server, "/v1/completions/many", {"requests": [bodies[0] | {"model": "other"}]})[0] == 404


def many(server, bodies):
    status, text = ask(server, "/v1/completions/many", {"requests": bodies})
    assert status == 200
    return [json.loads(line) for line in text.splitlines()]


def test_an_engine_that_fails_at_everything_ends_the_server_with_an_error(folder, monkeypatch, capsys):
    monkeypatch.setattr(SlotEngine, "step", lambda engine: {}["broken"])
    ended, ports = [], []

    async def run():
        server = LanguageServer(model_of(folder), ServeConfig(checkpoint="x", port=0), Origin("m", folder, 0))
        await server.run(ports.append, asyncio.Event())

    thread = threading.Thread(target=lambda: ended.append(asyncio.run(caught(run()))))
    thread.start()
    until(lambda: ports)
    server = SimpleNamespace(url=f"http://127.0.0.1:{ports[0]}")
    assert ask(server, COMPLETIONS, {"prompt": "a"})[0] == 500
    thread.join(60)
    assert "the engine failed (KeyError: 'broken'), so the server ends" in str(ended[0])
    assert isinstance(ended[0], EmbodiedError) and "broken" in capsys.readouterr().err


async def caught(work):
    try:
        await work
    except Exception as err:
        return err


def test_connections_that_say_nothing_are_bounded_and_closed(folder, monkeypatch):
    monkeypatch.setattr(language_server, "HEAD_S", 5.0)
    monkeypatch.setattr(language_server, "BODY_S", 1.0)
    monkeypatch.setattr(language_server, "SPARE", 7)
    with served(model_of(folder), folder, max_clients=1) as server, ExitStack() as stack:
        address = "127.0.0.1", int(server.url.rpartition(":")[2])
        silent = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(20)]
        silent[0].sendall(b"GET /healthz HTTP/1.1\r\nHost: local")
        silent[1].sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
        until(lambda: len(server.connections.server.connections) == 8)
        assert b"408" in silent[1].recv(100)
        assert all(ended(each) for each in silent if each is not silent[1])
        assert completed(server, prompt="a", max_tokens=1)


def ended(connection):
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_connection_that_is_made_while_the_server_ends_is_closed(folder):
    server = LanguageServer(
        model_of(folder), ServeConfig(checkpoint="x", port=0), Origin("m", folder, 0), lambda _: None
    )

    async def serve_and_end(client):
        loop, stop = asyncio.get_running_loop(), asyncio.Event()

        def end(port):
            client.connect(("127.0.0.1", port))  # accepted by the loop's turn that ends the server
            loop.call_soon(stop.set)

        await server.run(lambda port: loop.call_later(0.1, end, port), stop)

    with socket.socket() as client:
        client.settimeout(5)
        asyncio.run(serve_and_end(client))
        with suppress(ConnectionResetError):
            assert client.recv(1) == b""


def test_a_foreign_host_is_refused(open_server):
    for host in ("evil.example", "evil.example:80", "169.254.1.1", "localhost.evil.example", "[::", ""):
        assert ask(open_server, "/healthz", headers={"Host": host}, method="GET")[0] == 403
    for own in ("localhost:9", "LOCALHOST", "127.0.0.1:80", "[::1]:9", "[::1]"):
        assert ask(open_server, "/healthz", headers={"Host": own}, method="GET")[0] == 200


# The command


CALLING = "{% for t in tools %}{{ t['function']['name'] }}<tool_call>{% endfor %}" + PLAIN


def test_openais_client_gets_logprobs_prompts_and_several_streams(server, folder):
    openai = pytest.importorskip("openai", reason="comes with vLLM")
    client, model = openai.OpenAI(base_url=f"{server.url}/v1", api_key=SECRET, max_retries=0), model_of(folder)
    asked = {"model": "m", "prompt": "hello", "max_tokens": 6, "seed": 1}

    # The likeliest tokens, at every place of prompt and answer, as the network by itself says.
    (whole,) = client.completions.create(**asked, logprobs=3, echo=True, extra_body={"return_token_ids": True}).choices
    assert whole.text.startswith("hello") and whole.logprobs.tokens[:5] == [*"hello"]
    ids = torch.tensor([[*model.tokenizer.encode_text("hello"), *whole.token_ids]])
    with torch.no_grad():
        likely = model.model(ids).logits[0].double().log_softmax(-1)
    given = [None, *likely[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()]
    assert whole.logprobs.token_logprobs[0] is None
    np.testing.assert_allclose(whole.logprobs.token_logprobs[1:], given[1:], rtol=0, atol=1e-5)
    for told, row in zip(whole.logprobs.top_logprobs[1:], likely):
        best = {model.tokenizer.decode([n]): row[n].item() for n in row.topk(3).indices.tolist()}
        assert best.items() <= {name: pytest.approx(number, abs=1e-5) for name, number in told.items()}.items()
    (none,) = client.completions.create(**asked | {"max_tokens": 0}, logprobs=1, echo=True).choices
    assert none.text == "hello" and none.logprobs.token_logprobs[1:] == pytest.approx(given[1:5], abs=1e-5)
    (scored,) = client.completions.create(**asked, extra_body={"prompt_logprobs": 0}).choices
    assert next(iter(scored.prompt_logprobs[1].values()))["logprob"] == pytest.approx(given[1], abs=1e-5)

    messages = [{"role": "user", "content": "hi"}]
    chat = {"model": "m", "messages": messages, "max_tokens": 9, "seed": 1, "n": 3, "logprobs": True}
    several = client.chat.completions.create(**chat, top_logprobs=2, temperature=0.8, top_p=0.9)
    assert all(len(one.top_logprobs) == 2 for each in several.choices for one in each.logprobs.content)
    said = [""] * 3
    for part in client.chat.completions.create(**chat, stream=True, temperature=0.8, top_p=0.9):
        for choice in part.choices:
            said[choice.index] += choice.delta.content
    assert said == [choice.message.content for choice in several.choices] and len({*said}) > 1


def test_trls_client_of_vllm_is_answered(open_server):
    """`VLLMClient.generate` and `.chat` of trl 1.16: their requests, and what they read of the answers."""
    drawn = {"n": 2, "repetition_penalty": 1.0, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    asked = {"model": "m", "return_token_ids": True, "return_tokens_as_token_ids": True, "max_tokens": 5, **drawn}
    found = completed(open_server, **asked, prompt=[[5, 6], [7]], logprobs=0, seed=1)["choices"]
    assert [choice["prompt_token_ids"] for choice in found[::2]] == [[5, 6], [7]]
    for choice in found:
        told, names = choice["logprobs"], [f"token_id:{token}" for token in choice["token_ids"]]
        assert told["tokens"] == names and len(told["token_logprobs"]) == len(names)
        assert told["top_logprobs"] == [{name: logprob} for name, logprob in zip(names, told["token_logprobs"])]
    said = {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2}
    _, found = ask(open_server, CHAT, asked | said)
    assert found["prompt_token_ids"]
    for choice in found["choices"]:
        for token, place in zip(choice["token_ids"], choice["logprobs"]["content"], strict=True):
            assert place["token"] == f"token_id:{token}"
            assert all(other["token"].startswith("token_id:") for other in place["top_logprobs"])


def test_tools_go_into_the_prompt_and_calls_come_out_of_the_answer(tmp_path, monkeypatch):
    openai = pytest.importorskip("openai", reason="comes with vLLM")
    monkeypatch.setenv(TOKEN, SECRET)
    folder = publish(tmp_path / "pub", "qwen3", tied=False, template=CALLING)
    said = 'so <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    with served(model_of(folder), folder) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key=SECRET, max_retries=0)
        own, decode = server.policy.tokenizer, server.policy.tokenizer.decode
        monkeypatch.setattr(own, "decode", lambda ids: said if len(ids) > 1 else decode(ids))
        tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
        asked = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 200}
        prompt = client.chat.completions.create(**asked, extra_body={"return_token_ids": True, "seed": 3})
        monkeypatch.setattr(own, "decode", decode)
        assert decode(prompt.prompt_token_ids).startswith("add<tool_call>[user]hi")
        (choice,) = prompt.choices
        (call,) = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1})
        assert choice.message.content == "so"
        again = [*asked["messages"], choice.message.model_dump(exclude_none=True)]
        again.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
        assert client.chat.completions.create(**asked | {"messages": again, "max_tokens": 3}).choices


def test_the_server_tells_tokens_texts_and_what_it_does(server):
    _, told = ask(server, "/tokenize", {"prompt": "abc"})
    assert told["count"] == 3 and ask(server, "/detokenize", {"tokens": told["tokens"]})[1] == {"prompt": "abc"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    _, told = ask(server, "/tokenize", {"messages": [{"role": "user", "content": parts}]})
    assert server.policy.tokenizer.decode(told["tokens"]) == "[user]ab<end>\n[assistant]"
    for path, body in (
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [10**6]}),
        ("/abort_requests", {"request_ids": 1}),
    ):
        assert ask(server, path, body)[0] == 400
    completed(server, prompt="a", max_tokens=5, ignore_eos=True)
    _, text = ask(server, "/metrics", method="GET")
    lines = dict(line.split() for line in text.splitlines() if line[0] != "#")
    assert (lines["embodied_answers_total"], lines["embodied_generated_tokens_total"]) == ("1", "5")
    assert lines["embodied_slots"] == "4" and "# TYPE embodied_running gauge" in text
    ask(server, "/pause?mode=keep")
    assert ask(server, "/is_paused", method="GET")[1] == {"is_paused": True}


def test_a_request_is_aborted_by_its_name(server, monkeypatch):
    monkeypatch.setattr(server.generation.engine, "step", lambda: time.sleep(0.01) or [])
    with ThreadPoolExecutor(3) as pool:
        asked = [pool.submit(completed, server, prompt="a", max_tokens=9, request_id=name) for name in "abc"]
        until(lambda: len(server.generation.writing) == 3)
        assert ask(server, "/abort_requests", {"request_ids": ["b"]})[1] == {"aborted": 1}
        assert asked[1].result(60)["choices"][0]["finish_reason"] == "abort"
        assert ask(server, "/abort_requests", {})[1] == {"aborted": 2}
        assert {each.result(60)["choices"][0]["finish_reason"] for each in asked} == {"abort"}


@pytest.mark.parametrize("word", ["temperature=1", "env.name=libero", "policy.engine=vllm", "policy.max_running=many"])
def test_options_of_others_are_refused(word, folder, capsys):
    assert serve.main([f"checkpoint={folder}", word]) == 2
    assert word.partition("=")[0] in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_serves_a_run_until_it_is_asked_to_stop(folder, tmp_path):
    policy = build(preset="tiny", max_running=4, engine="http", url="http://127.0.0.1:1")  # as it was trained
    policy.save_pretrained(tmp_path / "policy")
    for checkpoint, name in ((tmp_path / "policy", "policy"), (folder, "pub")):
        command = [sys.executable, "-m", "embodied.serve", f"checkpoint={checkpoint}", "port=0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                lines = [next(process.stdout) for _ in range(3)]
                url = lines[-1].split()[1].removesuffix("/v1")
                server = type("Server", (), {"url": url})
                assert len(completed(server, prompt="a", max_tokens=2, seed=1)["choices"]) == 1
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
            finally:
                process.kill()
        assert f"{name}, version 0" in lines[0] and "without a token" in lines[1]
