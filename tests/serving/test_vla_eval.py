"""The package vla-eval itself: its client and its LIBERO ask our server, and our evaluation asks its server.

It may be installed in an interpreter of its own, which VLA_EVAL_PYTHON names.
"""

import json
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
import yaml
from pages import Page
from served_robot import served

from embodied.core.types import ActionSpec, EnvSpec, EpisodeSpec, PolicyOutput
from embodied.envs import make_env
from embodied.envs.libero.config import LiberoConfig
from embodied.evaluate import main
from embodied.policies import make_policy
from embodied.policies.base import Policy
from embodied.policies.config import CNNConfig, ExternalPolicyConfig

PYTHON = os.environ.get("VLA_EVAL_PYTHON")
PAGE = Page("serving.md")
pytestmark = pytest.mark.skipif(
    not PYTHON and find_spec("vla_eval") is None,
    reason="needs vla-eval 0.8, here or in the interpreter that VLA_EVAL_PYTHON names",
)
needs_libero = pytest.mark.skipif(find_spec("libero") is None, reason="needs LIBERO")


def started(*words, **more):
    """A program of the package's interpreter."""
    own = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([PYTHON or sys.executable, *words], env=own, **output, **more)


def run(*words, **more):
    with started(*words, **more) as process:
        try:
            told, _ = process.communicate(timeout=900)
        finally:
            process.kill()
    assert process.returncode == 0, told
    return told


CLIENT = """
import json, sys
import anyio, numpy as np
from vla_eval.connection import Connection

async def ask():
    draw, told = np.random.default_rng(0), []
    async with Connection(sys.argv[1], max_retries=1) as connection:
        for episode in range(2):
            await connection.start_episode({"task": {"name": "x", "places": list(range(1000))}})
            for step in range(3):
                front, hand = draw.integers(0, 256, (16, 16, 3), np.uint8), np.zeros((16, 16, 3), np.uint8)
                images = {"front": front, "hand": hand}
                obs = {"images": images, "states": draw.normal(size=3), "task_description": "go"}
                told.append((await connection.act(obs))["actions"].tolist())
            await connection.end_episode({"metrics": {"success": False}})
        try:
            await connection.act({"task_description": "go"})
        except RuntimeError as err:
            refused = str(err)
        return {"actions": told, "refused": refused, "server": connection.server_info}

print(json.dumps(anyio.run(ask)))
"""


def test_the_vla_eval_client_gets_the_actions_of_a_chunk_one_by_one():
    spec = EnvSpec(ActionSpec(2), state_dim=3, images={"top": (16, 16, 3), "wrist": (16, 16, 3)}, instruction=True)
    options = {"hidden": (8,), "channels": (4,), "kernels": (4,), "strides": (4,), "features": 8}
    policy = make_policy(CNNConfig(name="cnn", chunk=2, **options), spec, seed=0)
    with served(policy) as (address, _):
        told = json.loads(run("-c", CLIENT, address).splitlines()[-1])
    assert "lacks 'images/top'" in told["refused"]
    assert told["server"]["observation_params"]["send_wrist_image"] is True
    draw, expected = np.random.default_rng(0), []
    for _ in range(2):
        for step in range(3):
            images = {
                "top": draw.integers(0, 256, (1, 16, 16, 3), np.uint8),
                "wrist": np.zeros((1, 16, 16, 3), np.uint8),
            }
            state = draw.normal(size=(1, 3)).astype(np.float32)
            if step != 1:  # then a chunk of two goes on
                chunk = policy.act_on({"images": images, "state": state, "instruction": ["go"]})[0]
            expected.append(chunk[step % 2])
    np.testing.assert_allclose(told["actions"], expected, atol=1e-6)


SERVER = """
import sys
import anyio, numpy as np
from vla_eval.api import serve_background
from vla_eval.model_servers.predict import PredictModelServer

class Mover(PredictModelServer):
    # A chunk of two forces towards the target, computed from the state; in batches where episodes ask together.
    def predict_batch(self, observations, contexts):
        assert all(obs["task_description"] and obs["images"]["top"].shape == (32, 32, 3) for obs in observations)
        states = np.stack([obs["states"] for obs in observations])
        force = np.clip(6 * states[:, 4:6] - 10 * states[:, 2:4], -1, 1)
        return [{"actions": np.stack([one, one])} for one in force]

    def get_observation_params(self):
        return {"send_state": True}

server = serve_background(Mover(chunk_size=2, max_batch_size=4, max_wait_time=0.01))
print(server.url, flush=True)
sys.stdin.read()
server.close()
"""


def test_our_evaluation_plays_a_policy_of_a_vla_eval_server(tmp_path, capsys):
    with started("-c", SERVER, stdin=subprocess.PIPE) as process:
        try:
            address = next(line for line in process.stdout if line.startswith("ws://")).strip()
            words = ["env.name=pointmass", "env.cameras=[top]", "env.instruction=true", f"run.dir={tmp_path}"]
            few = ["eval.episodes=8", "eval.num_envs=4", "eval.videos=1", "cluster.backend=inline"]
            assert main([f"policy.url={address}", *words, *few]) == 0
            process.stdin.close()
            assert process.wait(60) == 0
        finally:
            process.kill()
    (results,) = tmp_path.glob("*/results.json")
    found = json.loads(results.read_text())
    assert found["overall"]["success_once"]["count"] == 8 and found["policy"]["server"]["model_server"] == "Mover"
    assert [*results.parent.glob("videos/*.mp4")]


def steps_of_libero(address, folder, suite, episodes, steps):
    """What vla-eval's LIBERO recorded of each episode: its steps, as it played them with our server's actions."""
    config = yaml.safe_load(PAGE.write(folder).joinpath("benchmark.yaml").read_text())
    (benchmark,) = config["benchmarks"]
    benchmark |= {"episodes_per_task": episodes, "max_tasks": 1, "max_steps": steps}
    benchmark["params"]["suite"] = suite
    (folder / "benchmark.yaml").write_text(yaml.safe_dump(config))
    (command,) = (line for line in PAGE.lines if line.startswith("vla-eval run"))
    words = shlex.split(command.replace("ws://127.0.0.1:8000", address))[1:]
    told = run("-m", "vla_eval.cli.main", *words, cwd=folder)
    played = sorted(folder.glob("results/episodes/**/*.jsonl"))
    assert len(played) == episodes, told
    return [[row for row in map(json.loads, file.read_text().splitlines()) if "action" in row] for file in played]


def check_same(rows, policy, env, number):
    """Our env plays the same episode with the same policy: every action and state, and the success, are the same."""
    episode = EpisodeSpec(env.config.task, number, 0, number)
    obs, _ = env.reset(options={"reset_mask": np.ones(1, bool), "episodes": [episode]})
    actions: list = []
    for row in rows:
        if not actions:
            actions = list(policy.act_on(obs)[0])
        action = actions.pop(0)
        result = env.step_chunk(action[None, None])
        obs = result.obs
        np.testing.assert_allclose(row["action"][:6], action[:6], atol=1e-6)
        assert row["action"][6] == np.sign(action[6])
        np.testing.assert_allclose(row["state"], obs["state"][0], atol=1e-6)
        assert row["success"] == bool(result.success[0, 0])


@needs_libero
@pytest.mark.slow
@pytest.mark.parametrize(("suite", "episodes"), [("libero_object", 2), ("libero_goal", 1)])
def test_libero_through_it_is_libero_here(suite, episodes, tmp_path):
    """Both cameras and the state of a closed loop. vla-eval draws the furniture's places of all episodes from one
    seed, so only the first episode has the same furniture as an episode of that seed here."""
    seen = {"state": "proprio", "cameras": ("agentview", "wrist"), "image_size": 256, "mirrored": True}
    env = make_env(LiberoConfig(name="libero", task=f"{suite}/0", **seen), 1)
    options = {"hidden": (16,), "channels": (4,), "kernels": (8,), "strides": (8,), "features": 16}
    policy = make_policy(CNNConfig(name="cnn", chunk=2, **options), env.env_spec, seed=0)
    with torch.no_grad():
        for parameter in policy.parameters():  # its first actions would hardly move the arm
            parameter.mul_(4)
    with served(policy) as (address, _):
        played = steps_of_libero(address, tmp_path, suite, episodes, steps=8)
    for number, rows in enumerate(played):
        assert len(rows) == 8
        check_same(rows, policy, env, number)
    env.close()


class WholeEpisode(Policy):
    """Answers with all actions of an episode at once."""

    def act(self, obs, noise, temperature=1.0):
        actions = np.repeat(self.actions[None], len(noise), axis=0)
        return PolicyOutput(actions, np.zeros((len(noise), 1, 1)), np.zeros(len(noise)))

    def noise_spec(self):
        from embodied.core.types import NoiseSpec

        return NoiseSpec("uniform", 1)


@needs_libero
@pytest.mark.slow
def test_an_episode_that_succeeds_here_succeeds_there_in_the_same_step(tmp_path):
    env = make_env(LiberoConfig(name="libero", task="libero_object/0", state="proprio"), 1)
    env.reset(options={"reset_mask": np.ones(1, bool), "episodes": [EpisodeSpec("libero_object/0", 0, 0, 0)]})
    expert, actions, over = env.expert(), [], False
    expert.begin(np.arange(1))
    while not over:
        actions.append(expert.act()[0])
        over = bool(env.step_chunk(actions[-1][None, None]).done[0])
    policy = WholeEpisode(ExternalPolicyConfig(name="tests:WholeEpisode"), env.env_spec)
    policy.actions = np.array(actions)
    with served(policy) as (address, _):
        (rows,) = steps_of_libero(address, tmp_path, "libero_object", 1, steps=280)
    assert len(rows) == len(actions) < 280 and rows[-1]["success"]
    check_same(rows, policy, env, 0)
    env.close()
