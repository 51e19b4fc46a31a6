"""Evaluating a policy that is a server, in vla-eval's model protocol: ours, and servers that fail."""

import contextlib
import csv
import json
import shlex
import threading
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from pages import Page
from served_robot import served

from embodied.envs import make_env
from embodied.envs.pointmass.config import PointMassConfig
from embodied.evaluate import main
from embodied.policies import make_policy
from embodied.policies.config import CNNConfig
from embodied.serving.config import TOKEN

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from websockets.sync.server import serve

from embodied.core.robot_messages import pack_typed, unpack

ENV = ["env.name=pointmass", "env.cameras=[top,near]", "env.instruction=true", "env.max_episode_steps=20"]
ONE_HOST = 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}'
PLAYED = [*ENV, "eval.episodes=6", "eval.num_envs=3", "cluster.backend=inline", ONE_HOST]
SECRET = "a-secret-of-enough-letters"
ON_PAGE, LIBERO_ON_PAGE = (
    shlex.split(command)[3:] for command in Page("evaluation.md").commands if "policy.url" in command
)


def asking(address, words):
    """The words of a command on the page, for the server at this address."""
    return [word.replace("ws://127.0.0.1:8000", address) for word in words]


@pytest.fixture(scope="module")
def policy():
    env = make_env(PointMassConfig(name="pointmass", cameras=("top", "near"), instruction=True), 1)
    config = CNNConfig(name="cnn", chunk=3, hidden=(8,), channels=(4,), kernels=(8,), strides=(8,), features=8)
    made = make_policy(config, env.env_spec, seed=0)
    with torch.no_grad():
        for parameter in made.parameters():  # its first actions would hardly move the point
            parameter.mul_(4)
    return made


def episodes(folder):
    (file,) = folder.glob("**/episodes.csv")
    return list(csv.DictReader(file.read_text().splitlines()))


def same(ours, theirs):
    assert [row["index"] for row in ours] == [row["index"] for row in theirs]
    for one, other in zip(ours, theirs, strict=True):
        floats = "total_reward"
        assert float(one.pop(floats)) == pytest.approx(float(other.pop(floats)), abs=1e-4)  # batches round otherwise
        assert one == other


@pytest.fixture(scope="module")
def here(policy, tmp_path_factory):
    """The same policy's episodes, played without a server."""
    folder = tmp_path_factory.mktemp("here")
    policy.save_pretrained(folder / "policy")
    assert main([f"checkpoint={folder / 'policy'}", *PLAYED, "eval.videos=0"]) == 0
    return episodes(folder)


@pytest.mark.parametrize("hosts", ["inline", pytest.param("local", marks=pytest.mark.slow)])
def test_a_server_plays_the_episodes_that_its_policy_plays_here(policy, here, hosts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(TOKEN, SECRET)
    with served(policy) as (address, _):
        words = [*asking(address, ON_PAGE), *PLAYED[1:]]
        words += [f"run.dir={tmp_path}", "eval.videos=1", "eval.failure_videos=2"]
        processes = {"cluster.backend=inline", ONE_HOST} if hosts == "local" else ()  # else two sims, in processes
        assert main([word for word in words if word not in processes]) == 0
    same(episodes(tmp_path), [dict(row) for row in here])
    (file,) = tmp_path.glob("*/results.json")
    about = json.loads(file.read_text())["policy"]
    assert about["family"] == "remote" and about["server"]["model_server"] == "embodied-loop"
    assert "127.0.0.1" in file.parent.name and SECRET not in file.read_text()
    assert len([*file.parent.glob("videos/*.mp4")]) == 2


def test_a_delay_and_overlapping_chunks_play_the_same_here_and_through_a_server(policy, here, tmp_path):
    policy.save_pretrained(tmp_path / "policy")
    late = [*PLAYED, "eval.delay=1", "policy.chunks={overlap: 1}", "eval.videos=0"]
    assert main([f"checkpoint={tmp_path / 'policy'}", *late]) == 0
    ours = episodes(tmp_path)
    assert [row["total_reward"] for row in ours] != [row["total_reward"] for row in here]
    (file,) = tmp_path.glob("**/results.json")
    played = json.loads(file.read_text())["protocol"]
    assert played["chunks"] == {"length": 3, "delay": 1, "overlap": 1, "real_time": False}
    with served(policy) as (address, _):
        assert main([f"policy.url={address}", *late, f"run.dir={tmp_path / 'there'}"]) == 0
    same(episodes(tmp_path / "there"), ours)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")
def test_libero_is_observed_as_published_models_need_it(tmp_path):
    seen = []

    def act(connection, number):
        give(np.zeros(7))(connection, number)

    short = ["eval.protocol=as-trained-v1", "env.max_episode_steps=2", "env.fast_images=true", "cluster.backend=inline"]
    few = ["eval.episodes=1", "eval.videos=0", "env.num_envs=1", ONE_HOST, f"run.dir={tmp_path}"]
    with failing(act, asks=["send_state", "send_wrist_image"], seen=seen) as address:
        assert main([*asking(address, LIBERO_ON_PAGE), *short, *few]) == 0
    asked = seen[0]["payload"]
    assert {camera: image.shape for camera, image in asked["images"].items()} == dict.fromkeys(
        ("agentview", "wrist"), (256, 256, 3)
    )
    assert asked["states"].shape == (8,)
    assert asked["task_description"] == "pick up the alphabet soup and place it in the basket"


def test_a_server_is_compared_with_others_on_the_same_episodes(policy, tmp_path, capsys):
    with served(policy) as (address, _):
        assert main([f"checkpoint=[zero,{address}]", *PLAYED, f"run.dir={tmp_path}", "eval.videos=0"]) == 0
    assert "zero" in capsys.readouterr().out and [*tmp_path.glob("*/comparison.html")]


@contextlib.contextmanager
def failing(fail, after=0, asks=(), seen=None):
    """A server that gives zeros, and after so many observations what `fail` does with the connection and the number
    of the observation. Gives its address; `seen` gets the observations."""
    seen, lock = [] if seen is None else seen, threading.Lock()

    def talk(connection):
        with contextlib.suppress(Exception):
            for data in connection:
                message = unpack(data)
                kind, number = message["type"], message["seq"]
                if kind == "hello":
                    params = {"observation_params": dict.fromkeys(asks, True)}
                    connection.send(pack_typed("hello", params, number))
                elif kind == "observation":
                    with lock:
                        seen.append(message)
                    if len(seen) > after:
                        fail(connection, number)
                    else:
                        connection.send(pack_typed("action", {"actions": np.zeros(2)}, number))

    with serve(talk, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        finally:
            server.shutdown()
            thread.join(30)


def give(actions):
    return lambda connection, number: connection.send(pack_typed("action", {"actions": actions}, number))


FAULTS = {
    "it dies": (lambda connection, number: connection.close_socket(), "the connection has ended"),
    "it hangs": (lambda *_: threading.Event().wait(7), "has not answered for 4 s (policy.answer_s)"),
    "nonsense": (lambda connection, number: connection.send(b"\xc1"), "answers nonsense"),
    "another answer": (
        lambda connection, number: connection.send(pack_typed("hello", {}, number)),
        "not with 'action'",
    ),
    "an older answer": (lambda connection, number: connection.send(pack_typed("action", {}, 1)), "to message 1, not"),
    "an error": (
        lambda connection, number: connection.send(pack_typed("error", {"error": "out of memory"}, number)),
        "refuses: out of memory",
    ),
    "too many numbers": (give(np.zeros(7)), "an action of the shape [7], this env takes 2 numbers"),
    "no numbers": (give("left"), "actions that are no numbers"),
    "NaN": (give(np.array([0, np.nan])), "NaN or infinity"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_server_that_fails_ends_the_evaluation_with_a_line_and_nothing_played_is_lost(fault, tmp_path, capsys):
    fail, reason = FAULTS[fault]
    patience = ["policy.answer_s=4"] * (fault == "it hangs")  # else the default
    words = [*PLAYED, f"run.dir={tmp_path}", "eval.videos=0", *patience]
    with failing(fail, after=70) as address:  # three episodes are over by then
        assert main([f"policy.url={address}", *words]) == 1
    told = capsys.readouterr()
    assert reason in told.err and "Traceback" not in told.err
    assert "3 of 6 episodes" in told.out


def test_the_same_command_plays_the_episodes_that_a_failed_server_left(tmp_path, capsys):
    words = [*PLAYED, f"run.dir={tmp_path}", "eval.videos=0"]
    broken, played = [True], [0]

    def fail(connection, number):
        played[0] += 1
        if broken[0] and played[0] > 70:
            connection.close_socket()
        else:
            give(np.zeros(2))(connection, number)

    with failing(fail) as address:
        assert main([f"policy.url={address}", *words]) == 1
        broken[0] = False
        assert main([f"policy.url={address}", *words]) == 0
    assert "going on    3 of 6 episodes" in capsys.readouterr().out
    assert played[0] < 70 + 3 + 3 * 20 + 20  # only what was missing
    assert [row["index"] for row in episodes(tmp_path)] == list("012345")


def test_observations_that_a_server_wants_and_the_env_lacks_are_named(capsys, tmp_path):
    blind = [word for word in PLAYED if "cameras" not in word]
    with failing(give(np.zeros(2)), asks=["send_wrist_image", "send_state"]) as address:
        assert main([f"policy.url={address}", *blind, f"run.dir={tmp_path}"]) == 2
    assert "wants two cameras, which this env does not observe" in capsys.readouterr().err
