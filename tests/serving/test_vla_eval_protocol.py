"""vla-eval's model protocol, asked message by message."""

import io

import numpy as np
import pytest
from PIL import Image
from served_robot import served

from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import CNNConfig
from embodied.serving.config import TOKEN

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from embodied.core.robot_messages import pack_typed, unpack
from embodied.serving.robot_server import observation_of

SPEC = EnvSpec(ActionSpec(2), state_dim=3, images={"top": (16, 16, 3), "wrist": (16, 16, 3)}, instruction=True)
SECRET = "a-secret-of-enough-letters"


@pytest.fixture(scope="module")
def policy():
    config = CNNConfig(name="cnn", chunk=4, hidden=(8,), channels=(4,), kernels=(4,), strides=(4,), features=8)
    return make_policy(config, SPEC, seed=0)


def observation(seed=0):
    draw = np.random.default_rng(seed)
    images = [draw.integers(0, 256, (16, 16, 3), np.uint8) for _ in range(2)]
    about = {"states": draw.normal(size=3), "task_description": "go there", "controller_states": np.zeros(8)}
    return {"images": dict(zip(("primary", "gripper"), images, strict=True)), **about}


def chunk_of(policy, asked):
    images = dict(zip(("top", "wrist"), asked["images"].values(), strict=True))
    obs = observation_of(asked | {"images": images}, SPEC, False)
    return policy.act(obs, np.zeros((1, 8)), 0.0).actions[0]


class Benchmark:
    """A client as benchmarks are: it greets first, and reads the greeting then."""

    def __init__(self, connection):
        self.connection, self.number = connection, 0
        self.send("hello", {"harness_version": "0.8.0", "benchmark": "x"})
        self.hello = self.receive()

    def send(self, kind, payload):
        self.number += 1
        self.connection.send(pack_typed(kind, payload, self.number))

    def receive(self):
        message = unpack(self.connection.recv(timeout=30))
        assert message["seq"] == self.number
        return message

    def act(self, payload):
        self.send("observation", payload)
        return self.receive()


@pytest.fixture
def benchmark(policy):
    with served(policy) as (address, _), connect(address) as connection:
        yield Benchmark(connection)


def test_the_greeting_says_which_observations_have_to_be_sent(benchmark):
    assert benchmark.hello["type"] == "hello" and benchmark.hello["payload"]["protocol_version"] == 1
    asked = {"send_wrist_image": True, "send_state": True, "quat_no_antipodal": True}
    assert benchmark.hello["payload"]["observation_params"] == asked


def test_every_observation_gets_the_next_action_of_a_chunk_and_an_episode_begins_with_a_new_chunk(policy, benchmark):
    asked = [observation(number) for number in range(9)]
    first, again, subtask = (chunk_of(policy, asked[number]) for number in (0, 4, 5))
    told = lambda number, **more: benchmark.act(asked[number] | more)["payload"]["actions"]  # noqa: E731
    benchmark.send("episode_start", {"task": {"name": "x", "places": [0] * 1000}})  # of any size
    np.testing.assert_allclose([told(number) for number in range(4)], first, atol=1e-6)
    np.testing.assert_allclose(told(4), again[0], atol=1e-6)
    np.testing.assert_allclose(told(5, episode_restart=True), subtask[0], atol=1e-6)  # as CALVIN's subtasks begin
    benchmark.send("episode_end", {"metrics": {"success": False}})
    benchmark.send("episode_start", {})
    np.testing.assert_allclose(told(0), first[0], atol=1e-6)


def test_images_come_as_files_and_cameras_by_name_where_all_are_named(policy, benchmark):
    asked = observation()
    expected = chunk_of(policy, asked)[0]

    def file(image):
        written = io.BytesIO()
        Image.fromarray(image).save(written, "PNG")
        return {"__image__": True, "format": "png", "data": written.getvalue(), "shape": image.shape}

    as_files = {camera: file(image) for camera, image in asked["images"].items()}
    top, wrist = as_files.values()
    for images in (as_files, {"wrist": wrist, "other": top, "top": top}):
        benchmark.send("episode_start", {})
        np.testing.assert_allclose(benchmark.act(asked | {"images": images})["payload"]["actions"], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "change", "reason"),
    [
        ("observation", {"states": np.zeros(4)}, "array of 3 numbers"),
        ("observation", {"images": {"primary": np.zeros((16, 16, 3), np.uint8)}}, "lacks 'images/wrist'"),
        (
            "observation",
            {"images": {"top": {"__image__": 1, "format": "png", "data": b"x"}, "wrist": 0}},
            "'top'.*no PNG",
        ),
        ("observation", {"task_description": ""}, "instruction should be text"),
        ("reset", {}, "type 'reset' are not taken"),
    ],
)
def test_a_mistake_is_answered_in_the_protocol_and_the_connection_stays(benchmark, kind, change, reason):
    benchmark.send(kind, observation() | change)
    answer = benchmark.receive()
    assert answer["type"] == "error"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(answer["payload"]["error"])
    assert benchmark.act(observation())["payload"]["actions"].shape == (2,)


def test_the_token_may_be_in_the_address(policy, monkeypatch):
    monkeypatch.setenv(TOKEN, SECRET)
    with served(policy) as (address, _):
        for wrong in ("", "token:wrong@", f"{SECRET}:token@"):
            with pytest.raises(InvalidStatus, match="401"):
                connect(address.replace("//", f"//{wrong}"))
        with connect(address.replace("//", f"//token:{SECRET}@")) as connection:
            assert Benchmark(connection).act(observation())["type"] == "action"
