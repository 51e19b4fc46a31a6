"""docs/own_policy.md: what it says of observations holds in every call, and its policy trains."""

import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from embodied import check, evaluate, train

PAGE = (Path(__file__).parents[1] / "docs" / "own_policy.md").read_text()
(SNIPPET,) = re.findall(r"^```python\n(# my_seeing.py\n.*?)^```", PAGE, re.M | re.S)
(TRAIN,) = re.findall(r"^python -m embodied.train (.*my_seeing.*)", PAGE, re.M)
SHORT = ["run.iterations=2", "eval.episodes=4", "eval.videos=0"]
WATCHED = '''
"""The page's policy, which writes down what it is shown."""
import json

import my_seeing

SEEN = {}


def kind(part):
    if isinstance(part, dict):
        return {name: kind(one) for name, one in part.items()}
    if isinstance(part, list):
        return ["texts", len(part), type(part[0]).__name__]
    return [type(part).__name__, str(part.dtype), list(part.shape)]


class Watched(my_seeing.Seeing):
    def act(self, obs, noise, temperature=1.0):
        out = super().act(obs, noise, temperature)
        SEEN["act"] = {"obs": kind(obs), "noise": kind(noise), "actions": kind(out.actions), "values": kind(out.values)}
        return out

    def value(self, obs):
        SEEN["value"] = {"obs": kind(obs)}
        return super().value(obs)

    def forward(self, inputs):
        SEEN.setdefault("forward", []).append({"obs": kind(inputs["obs"]), "actions": kind(inputs["actions"])})
        return super().forward(inputs)
'''


@pytest.fixture(autouse=True)
def mine(monkeypatch, tmp_path):
    (tmp_path / "my_seeing.py").write_text(SNIPPET)
    (tmp_path / "watched_seeing.py").write_text(WATCHED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    for name in ("my_seeing", "watched_seeing"):
        sys.modules.pop(name, None)


def test_the_policy_of_the_page_trains_and_is_evaluated():
    assert train.main([*shlex.split(TRAIN), *SHORT, "cluster.backend=inline"]) == 0
    (run,) = Path("runs").glob("pointmass_ppo-*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert all(row["train/logprob_gap"] < 1e-4 for row in rows), "act and forward agree"
    assert evaluate.main([f"checkpoint={run}", "eval.episodes=4", "eval.videos=0", "cluster.backend=inline"]) == 0


def test_observations_are_what_the_page_says():
    command = TRAIN.replace("my_seeing:Seeing", "watched_seeing:Watched")
    more = ["cluster.backend=inline", "env.image_size=[24,40]", "env.privileged=true"]
    assert train.main([*shlex.split(command), *SHORT, *more]) == 0
    seen = sys.modules["watched_seeing"].SEEN
    rows = seen["act"]["obs"]["state"][2][0]
    wanted = {
        "state": ["ndarray", "float32", [rows, 4]],
        "images": {"top": ["ndarray", "uint8", [rows, 24, 40, 3]]},
        "instruction": ["texts", rows, "str"],
    }
    for_the_critic = {"privileged": ["ndarray", "float32", [rows, 2]]}
    assert wanted.items() <= seen["act"]["obs"].items() <= (wanted | for_the_critic).items()
    assert seen["act"]["noise"][2] == [rows, 2]
    assert seen["act"]["actions"][2] == [rows, 1, 2] and seen["act"]["values"][2] == [rows]
    assert set(seen["value"]["obs"]) == {"state", "images", "instruction", "privileged"}
    assert seen["value"]["obs"]["privileged"][2] == [seen["value"]["obs"]["state"][2][0], 2]
    learned = [one for one in seen["forward"] if one["actions"][2][0] != rows][-1]
    items = learned["actions"][2][0]
    assert learned["obs"]["instruction"] == ["texts", items, "str"]
    assert learned["obs"]["images"]["top"] == ["Tensor", "torch.uint8", [items, 24, 40, 3]]
    assert learned["obs"]["state"] == ["Tensor", "torch.float32", [items, 4]]


def test_the_env_says_what_each_number_of_its_state_is(capsys):
    assert check.main(["env.name=pointmass"]) == 0
    told = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    parts = [int(count) for count in re.findall(r"[a-z] (\d+)", told["state"])]
    assert told["observed"] == f"state of {sum(parts)} numbers"


def test_liberos_state_is_described_to_the_last_number():
    from embodied.envs.libero.env import HAND, PLACE, PROPRIO, StateLayout

    layout = StateLayout(movable=3, fixtures=2, joints=4)
    arm, places, joints = layout.describe(proprio=False).split("; ")
    assert sum(map(int, re.findall(r" (\d+)", arm))) == HAND
    assert sum(map(int, re.findall(r" (\d+)", places.partition(": ")[2]))) == PLACE
    assert joints.endswith(" 4") and "3 objects and 2 pieces" in places
    assert sum(map(int, re.findall(r" (\d+)", layout.describe(proprio=True)))) == PROPRIO


def test_maniskills_state_is_described_to_the_last_number():
    pytest.importorskip("mani_skill")
    from embodied.envs import make_env
    from embodied.envs.config import ManiSkillConfig

    for state in ("full", "proprio"):
        env = make_env(ManiSkillConfig(task="PushCube-v1", state=state), 2)
        told = env.facts()["state"]
        assert sum(int(part.split()[1]) for part in told.split(", ")) == env.env_spec.state_dim
        assert told.startswith("agent.qpos 9, agent.qvel 9") and (f"{told}`" in PAGE) == (state == "full")
        env.close()


def test_the_drawn_weights_are_finite_and_differ():
    import my_seeing

    from embodied.core.types import ActionSpec, EnvSpec

    spec = EnvSpec(ActionSpec(2), state_dim=4, images={"top": (32, 32, 3)}, instruction=True)
    policy = my_seeing.Seeing(type("Config", (), {"kwargs": {"std": 0.1}}), spec)
    policy.initialise(np.random.default_rng(0))
    obs = {"state": np.zeros((2, 4), np.float32), "images": {"top": np.zeros((2, 32, 32, 3), np.uint8)}}
    values = policy.value({**obs, "instruction": ["push the cube", "pull"]})
    assert np.isfinite(values).all() and values[0] != values[1], "words matter"
