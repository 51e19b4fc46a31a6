"""A server in a thread of its own, asked over real sockets."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from served_robot import served

from embodied import serve
from embodied.core import rng
from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import CNNConfig
from embodied.serving.config import TOKEN, ServeConfig

msgpack = pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from websockets.exceptions import ConnectionClosed, InvalidStatus  # noqa: E402
from websockets.sync.client import connect  # noqa: E402

from embodied.core.robot_messages import BadMessage, pack, unpack  # noqa: E402
from embodied.serving import robot_server  # noqa: E402
from embodied.serving.robot_server import observation_of  # noqa: E402

SPEC = EnvSpec(ActionSpec(2), state_dim=3, images={"top": (16, 16, 3), "wrist": (16, 16, 3)}, instruction=True)
SECRET = "a-secret-of-enough-letters"
KEY = b"dGhlIHNhbXBsZSBub25jZQ=="  # of a handshake, as RFC 6455 shows it


def request(seed=0):
    draw = np.random.default_rng(seed)
    images = (draw.integers(0, 256, (16, 16, 3), np.uint8) for _ in range(2))
    names = ("observation/image", "observation/wrist_image")
    return {**dict(zip(names, images)), "observation/state": draw.normal(size=3), "prompt": "go there"}


@pytest.fixture(scope="module")
def policy():
    config = CNNConfig(name="cnn", chunk=4, hidden=(8,), channels=(4,), kernels=(4,), strides=(4,), features=8)
    return make_policy(config, SPEC, seed=0)


def ask(connection, message):
    connection.send(pack(message))
    reply = connection.recv(timeout=30)
    return reply if isinstance(reply, str) else unpack(reply)


def test_the_answer_is_what_the_policy_does(policy):
    with served(policy, temperature=1.0) as (address, _), connect(address) as connection:
        told = unpack(connection.recv(timeout=30))
        assert told["cameras"] == {"top": [16, 16, 3], "wrist": [16, 16, 3]} and told["action_chunk"] == 4
        replies = [ask(connection, request(number))["actions"] for number in range(2)]
    for number, actions in enumerate(replies):
        noise = rng.normal(0, "act/serve", np.array([0]), np.array([number]), 8)
        obs = observation_of(request(number), SPEC, False)
        assert np.array_equal(actions, policy.act(obs, noise).actions[0]) and actions.shape == (4, 2)


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\xc1", "as msgpack"),
        ("text", "requests are bytes"),
        (pack({"x": np.zeros(1_000_001, np.uint8)}), r"1000001 exceeds max_bin_len\(1000000\)"),
        (msgpack.packb({"prompt": 1}), "lacks 'images/top'"),
    ],
)
def test_a_malformed_request_is_refused_and_the_next_client_is_served(policy, sent, reason):
    with served(policy) as (address, told):
        with connect(address) as connection:
            connection.recv(timeout=30)
            connection.send(sent)
            assert re.search(reason, connection.recv(timeout=30))
            with pytest.raises(ConnectionClosed):
                connection.recv(timeout=30)
        with connect(address) as connection:
            connection.recv(timeout=30)
            assert ask(connection, request())["actions"].shape == (4, 2)
        assert not [line for line in told if "Traceback" in line]


def test_a_request_is_no_longer_than_what_the_policy_can_look_at(policy):
    with served(policy) as (address, _), connect(address) as connection:
        connection.recv(timeout=30)
        connection.send(pack(request() | {"x": np.zeros(1_100_000, np.uint8)}))
        with pytest.raises(ConnectionClosed, match=r"1009.*exceeds limit of 1012312 bytes"):
            connection.recv(timeout=30)


def test_a_silent_client_makes_room_for_another_and_a_busy_one_does_not(policy, monkeypatch):
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    monkeypatch.setattr(robot_server, "time", clock)
    with served(policy, max_clients=2, idle_s=0.5) as (address, told):
        with connect(address) as silent, connect(address) as busy:
            for one in (silent, busy):
                one.recv(timeout=30)
            now[0] += 0.7
            for one in (busy, silent, busy):  # nobody wanted the place of the silent one
                assert ask(one, request())["actions"].shape == (4, 2)
            with pytest.raises(InvalidStatus, match="503"):
                connect(address)
            now[0] += 0.7
            assert ask(busy, request())["actions"].shape == (4, 2)
            with connect(address) as another:
                another.recv(timeout=30)
                assert ask(another, request())["actions"].shape == (4, 2)
                assert ask(busy, request())["actions"].shape == (4, 2)
                with pytest.raises(ConnectionClosed, match=r"1001.*silent for 0\.5 s"):
                    silent.recv(timeout=30)
    assert [line for line in told if "makes room" in line]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"observation/image": np.zeros((8, 16, 3), np.uint8)}, r"'top' is \[8, 16, 3\], this policy wants"),
        ({"observation/image": np.zeros((16, 16, 4), np.uint8)}, r"should be an array \[height, width, 3\]"),
        ({"observation/state": np.zeros(4)}, "array of 3 numbers"),
        ({"observation/state": np.array([0, np.nan, 0])}, "NaN"),
        ({"prompt": ""}, "text of at most 2000"),
    ],
)
def test_a_request_about_something_else_is_refused(change, reason):
    with pytest.raises(BadMessage, match=reason):
        observation_of(request() | change, SPEC, False)


def test_images_come_in_the_forms_that_openpi_takes():
    image = np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8)
    forms = [image, np.moveaxis(image, 2, 0), (image / 255 + 1e-4).astype(np.float32)]
    seen = [observation_of(request() | {"images": {"top": form}}, SPEC, False)["images"]["top"][0] for form in forms]
    assert all(np.array_equal(image, other) for other in seen)
    large = request() | {"top": np.zeros((20, 30, 3), np.uint8)}
    del large["observation/image"]
    assert observation_of(large, SPEC, True)["images"]["top"].shape == (1, 20, 30, 3)


def test_long_requests_strangers_and_pages_of_browsers_are_turned_away(policy, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    with served(policy, max_request_mb=1, max_clients=1) as (address, _):
        for headers in ({}, {"Authorization": "Api-Key wrong"}, {"Authorization": SECRET}):
            with pytest.raises(InvalidStatus, match="401"):
                connect(address, additional_headers=headers)
        right = {"Authorization": f"Api-Key {SECRET}"}
        with pytest.raises(InvalidStatus, match="403"):
            connect(address, additional_headers=right, origin="https://example.com")
        with connect(address, additional_headers=right) as connection:
            connection.recv(timeout=30)
            with pytest.raises(InvalidStatus, match="503"):
                connect(address, additional_headers=right)
            with pytest.raises(InvalidStatus, match="403"):  # a page's own domain, pointed at this machine
                connect(address, additional_headers=right | {"Host": "evil.example"})
            connection.send(b"0" * 1_000_001)
            with pytest.raises(ConnectionClosed, match="1009"):
                connection.recv(timeout=30)


@pytest.mark.parametrize(
    ("path", "token", "status"),
    [("/", b"\xff\xfe", 401), ("/" + "a" * 5_000, b"x", 401), ("/" + "a" * 50_000, SECRET.encode(), 414)],
)
def test_an_odd_handshake_is_refused_and_the_next_client_is_served(policy, monkeypatch, path, token, status):
    monkeypatch.setenv(TOKEN, SECRET)
    with served(policy) as (address, told):
        port = int(address.rpartition(":")[2])
        upgrade = b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + KEY
        with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
            stranger.sendall(
                b"GET %b HTTP/1.1\r\nHost: 127.0.0.1\r\n%b\r\nAuthorization: Api-Key %b\r\n\r\n"
                % (path.encode(), upgrade, token)
            )
            assert stranger.recv(100).startswith(b"HTTP/1.1 %d " % status)
        with connect(address, additional_headers={"Authorization": f"Api-Key {SECRET}"}) as connection:
            connection.recv(timeout=30)
            assert "actions" in ask(connection, request())
        assert not [line for line in told if "Traceback" in line]


def test_an_internal_error_is_logged_by_the_server_and_not_sent_to_the_client(policy, monkeypatch):
    with served(policy) as (address, told), connect(address) as connection:
        connection.recv(timeout=30)
        monkeypatch.setattr(policy, "act", lambda *_: {}["the weights are at /home/me"])
        assert ask(connection, request()) == "error: the policy failed; the server's log says why"
        with pytest.raises(ConnectionClosed):
            connection.recv(timeout=30)
    assert "the weights are at /home/me" in "".join(told)


def test_actions_of_weights_that_are_no_numbers_are_kept_back(policy, monkeypatch):
    act = policy.act

    def broken(*request):  # tokens chosen from NaN are numbers all the same
        output = act(*request)
        return replace(output, logprobs=np.full_like(output.logprobs, np.nan))

    monkeypatch.setattr(policy, "act", broken)
    with served(policy) as (address, _), connect(address) as connection:
        connection.recv(timeout=30)
        assert "log-probs are not finite" in ask(connection, request())


def together(address, count):
    """So many clients that ask one request each before anybody hears an answer; -> the answers."""
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(connect(address)) for _ in range(count)]
        for client in clients:
            client.recv(timeout=30)
        for number, client in enumerate(clients):
            client.send(pack(request(number)))
        replies = [client.recv(timeout=30) for client in clients]
        return [reply if isinstance(reply, str) else unpack(reply)["actions"] for reply in replies]


def watch(policy, monkeypatch, refuses=lambda rows: False):
    """The rows of every pass; those that are refused fail."""
    passes, act = [], policy.act

    def acting(obs, noise, temperature):
        passes.append(len(noise))
        if refuses(len(noise)):
            raise ValueError("too much at once")
        return act(obs, noise, temperature)

    monkeypatch.setattr(policy, "act", acting)
    return passes


def test_requests_that_come_together_are_answered_in_one_pass_as_if_each_were_alone(policy, monkeypatch):
    noise = rng.normal(0, "act/serve", np.arange(4), np.zeros(4, int), 8)
    alone = [policy.act(observation_of(request(i), SPEC, False), noise[i : i + 1]).actions[0] for i in range(4)]
    passes = watch(policy, monkeypatch)
    with served(policy, temperature=1.0, batch=2, wait_ms=10_000) as (address, _):
        replies = together(address, 4)
    np.testing.assert_allclose(replies, alone, atol=1e-6)
    assert passes == [2, 2]


def test_a_pass_that_fails_is_tried_again_for_each_alone(policy, monkeypatch):
    passes = watch(policy, monkeypatch, refuses=lambda rows: rows > 1)
    with served(policy, wait_ms=10_000) as (address, told):
        assert all(actions.shape == (4, 2) for actions in together(address, 3))
    assert passes == [3, 1, 1, 1] and not [line for line in told if "Traceback" in line]


def test_a_request_does_not_wait_for_longer_than_allowed(policy, monkeypatch):
    passes = watch(policy, monkeypatch)
    with served(policy, wait_ms=1) as (address, _), connect(address) as silent, connect(address) as asking:
        silent.recv(timeout=30)
        asking.recv(timeout=30)
        assert ask(asking, request())["actions"].shape == (4, 2)
    assert passes == [1]


@pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning")
def test_openpis_own_client_is_served(policy, monkeypatch):
    client = pytest.importorskip("openpi_client.websocket_client_policy", reason="needs the package openpi-client")
    monkeypatch.setenv(TOKEN, SECRET)
    with served(policy) as (address, _):
        asking = client.WebsocketClientPolicy("127.0.0.1", int(address.rpartition(":")[2]), api_key=SECRET)
        assert asking.get_server_metadata()["policy"] == "cnn"
        answer = asking.infer(request())
        assert answer["actions"].shape == (4, 2) and answer["policy_timing"]["infer_ms"] > 0
        another = client.WebsocketClientPolicy(address, api_key=SECRET)
        broker = pytest.importorskip("openpi_client.action_chunk_broker").ActionChunkBroker(another, 4)
        steps = np.stack([broker.infer(request())["actions"] for _ in range(4)])
        np.testing.assert_allclose(steps, answer["actions"], atol=1e-6)  # greedy, and one request for a whole chunk
        with pytest.raises(RuntimeError, match="lacks 'prompt'"):
            asking.infer({key: value for key, value in request().items() if key != "prompt"})
        assert another.infer(request())["actions"].shape == (4, 2)
        for one in (asking, another):
            one._ws.close()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "which policy"),
        (["checkpoint=x", "prot=1"], "port"),
        (["checkpoint=nowhere", "env.name=libero"], "there is no such folder"),
        (["checkpoint=x", "device=cuda:99"], "device=cuda:99: PyTorch finds"),
        (["checkpoint=x", "host=0.0.0.0"], TOKEN),
        (["checkpoint=nowhere"], "nowhere"),
        (["checkpoint=random"], "no weights to serve"),
    ],
)
def test_a_policy_that_cannot_be_served_is_refused_in_one_line(arguments, reason, capsys):
    assert serve.main(arguments) in (1, 2)
    assert reason in capsys.readouterr().err


def test_other_hosts_need_a_long_token(monkeypatch):
    for token, reason in ((None, "can be reached from other machines"), ("short", "fewer than 16")):
        monkeypatch.setenv(TOKEN, token) if token else monkeypatch.delenv(TOKEN, raising=False)
        with pytest.raises((ConfigError, ValueError), match=reason):
            ServeConfig(checkpoint="x", host="0.0.0.0")
    monkeypatch.setenv(TOKEN, SECRET)
    assert ServeConfig(checkpoint="x", host="0.0.0.0").token == SECRET


def test_a_port_that_is_taken_is_said(policy):
    with served(policy) as (address, _):
        config = ServeConfig(checkpoint="x", port=int(address.rpartition(":")[2]))
        with pytest.raises(ConfigError, match=f"port={config.port}: .*choose others"):
            asyncio.run(serve.serve(policy, config))


def test_a_server_that_a_shell_started_in_the_background_ends_with_sigint_while_it_loads(monkeypatch):
    """Shells ignore SIGINT in what they start there."""
    monkeypatch.setattr(serve, "find_language", lambda *_: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt):
            serve.start(["checkpoint=somewhere"])
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_the_command_serves_a_policy_folder_until_it_is_asked_to_stop(policy, tmp_path):
    policy.save_pretrained(tmp_path / "policy")
    command = [sys.executable, "-m", "embodied.serve", f"checkpoint={tmp_path / 'policy'}", "port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            lines = [next(process.stdout) for _ in range(3)]
            with connect(lines[-1].split()[1]) as connection:
                connection.recv(timeout=30)
                assert ask(connection, request())["actions"].shape == (4, 2)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert "sees top, wrist, state; 4 actions of 2 numbers" in lines[0] and "without a token" in lines[1]
