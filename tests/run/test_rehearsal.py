"""What a dry run refuses, each in a line that says what to do; nothing is started."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from needed import without_files
from safetensors.torch import save_file

from embodied.check import main as check
from embodied.core.types import ActionSpec, EnvSpec
from embodied.evaluate import main as evaluate
from embodied.policies import make_policy
from embodied.policies.config import MLPConfig
from embodied.policies.openvla.config import OpenVLAConfig
from embodied.policies.pi0.config import Pi0Config
from embodied.run import rehearsal
from embodied.train import main as train

POINT = EnvSpec(ActionSpec(2), state_dim=6)
ARM = EnvSpec(ActionSpec(7), state_dim=8, images={"agentview": (64, 64, 3)}, instruction=True)
CODE = """
import numpy as np
from embodied.envs import TextEnv
from embodied.policies import NoiseSpec, Policy, PolicyOutput


class Former(Policy):
    def noise_spec(self): ...
    def act(self, obs, noise, temperature=1.0): ...


class Unready(Former):
    def __init__(self, config, spec):
        super().__init__(config, spec)
        raise RuntimeError("no weights")

    def initialise(self, rng): ...


class Crooked(Unready):
    def __init__(self, config, spec):
        Policy.__init__(self, config, spec)

    def noise_spec(self):
        return NoiseSpec("normal", 1)

    def act(self, obs, noise, temperature=1.0):
        return PolicyOutput(np.zeros((1, 1, 3)), np.zeros((1, 1, 3)), np.zeros(1))


def broken(env, actions, step):
    return step.rewards[99]


def praise(asked, answer):
    return float("good" if asked else answer)


class Muddled(TextEnv):
    def reset(self, spec):
        raise KeyError("question")
"""
DEADLY = """
import os
import signal

import gymnasium
import numpy as np
from embodied.envs import ActionSpec, EnvSpec, VectorEnv


class Crash(VectorEnv):
    def __init__(self, config, num_envs):
        super().__init__(config, num_envs, EnvSpec(ActionSpec(1), state_dim=1, max_episode_steps=9))

    def _reset_rows(self, rows, episodes): ...

    def _observe(self):
        return {"state": np.zeros((self.num_envs, 1), np.float32)}

    def _step(self, actions, active):
        os.kill(os.getpid(), signal.SIGSEGV)


class Speck(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(0, 255, (16, 24, 3), np.uint8)
    action_space = gymnasium.spaces.Box(-1, 1, (2,))

    def reset(self, seed=None, options=None):
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 0.0, False, False, {}


class Killer(Speck):
    def __init__(self, at):
        self.at = at
        self.strike("make")

    def strike(self, at):
        if at == self.at:
            os.kill(os.getpid(), signal.SIGSEGV)

    def step(self, action):
        self.strike("step")
        if self.at == "raises":
            raise ValueError("a motor is off")
        return super().step(action)[: 4 if self.at == "old" else 5]


gymnasium.register("Killer-v0", Killer, max_episode_steps=9)
"""  # a module without policies: importing it does not import torch


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Folders in the working directory, of which none is a model that the recipes below can begin with."""
    root = tmp_path_factory.mktemp("folders")
    (root / "empty").mkdir()
    make_policy(OpenVLAConfig(name="openvla"), ARM, 0).save_published(root / "no_ranges")
    config = json.loads((root / "no_ranges" / "config.json").read_text())
    config.pop("norm_stats", None)
    (root / "no_ranges" / "config.json").write_text(json.dumps(config))
    for name, content in {"bert": {"model_type": "bert"}, "no_weights": config}.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(content))
    save_file({"weight": torch.zeros(1)}, root / "bert" / "model.safetensors")
    make_policy(Pi0Config(name="pi0"), ARM, 0).save_pretrained(root / "pi0")
    make_policy(MLPConfig(hidden=(8,)), POINT, 0).save_pretrained(root / "mlp")
    for module, code in {"my_former": CODE, "my_deadly": DEADLY}.items():
        (root / f"{module}.py").write_text(code)
    yield root
    for module in ("my_former", "my_deadly"):
        sys.modules.pop(module, None)


OFT = "recipe=libero_grpo_openvla_oft policy.pretrained={} cluster.machines=8xH100"
SPECK = "recipe=pointmass_ppo env.name=my_deadly:Speck env.max_episode_steps=9"
KILLER = "env.name=gym:Killer-v0 env.modules=[my_deadly] env.kwargs.at="
KILLED = "the process died with SIGSEGV while building and stepping"
REFUSED = {
    OFT.format("empty"): "policy.pretrained=empty: config.json is missing",
    OFT.format("bert"): "bert/config.json .*openvla",
    OFT.format("mlp"): "the model there is mlp, and policy.name=openvla_oft; set policy.name=mlp",
    OFT.format("pi0"): "the model there is pi0, and policy.name=openvla_oft",
    OFT.format("no_ranges"): "no action statistics",
    "recipe=libero_grpo_openvla_oft policy.pretrained=no_weights": "no weights there, no file .*safetensors",
    "recipe=libero_ppo_pi0 policy.pretrained=pi0 policy.horizon=null policy.chunk=9 cluster.machines=8xH100": (
        "try policy.chunk=8"
    ),
    "recipe=pointmass_ppo policy.name=my_former:Formr": "module 'my_former' has no attribute 'Formr'",
    "recipe=pointmass_ppo policy.name=my_former:Unready": r"act: RuntimeError: no weights \(.*former.py, line",
    "recipe=pointmass_ppo policy.name=my_former:Crooked": r"Crooked cannot .*actions are \[1, 1, 3\], this env takes",
    "recipe=pointmass_ppo env.reward=my_former:broken": r"cannot be called: IndexError: .*my_former.py, line",
    "recipe=sums_grpo env.name=my_former:Muddled run.start_from=null": r"KeyError: 'question' \(.*my_former.py, line",
    "recipe=sums_grpo run.start_from=null roles.verifier=my_former:praise": (
        r"roles.verifier=my_former:praise cannot score an answer: ValueError: .*'good' \(.*my_former.py, line"
    ),
    "recipe=pointmass_ppo env.name=my_deadly:Crash": KILLED,
    f"recipe=pointmass_ppo {KILLER}make": KILLED,
    f"check {KILLER}step": KILLED,
    f"check {KILLER}raises": r"ValueError: a motor is off \(.*my_deadly.py, line",
    f"check {KILLER}old": "step returned 4 values, it must return observation, reward, terminated, truncated, info",
    "recipe=pointmass_ppo policy.name=cnn": "policy.name=cnn needs images, .*set env.cameras",
    "recipe=pointmass_ppo policy.name=cnn env.cameras=[top]": "images of 36x36 .*'top' are 32x32; .*env.image_size=36",
    f"{SPECK} policy.name=cnn": "images of 36x36 pixels or more, .* 16x24",
    "recipe=pointmass_ppo run.start_from=mlp policy.hidden=[8] env.state=proprio": "state 6 there, 4 here",
    "recipe=libero_published_openvla_oft": "evaluates published models.*recipe=libero_grpo_openvla_oft",
    "recipe=sums_sft": "imitates demonstrations: python -m embodied.sft recipe=sums_sft; ",
    "evaluate recipe=pointmass_ppo": "which policy.*checkpoint=",
    "evaluate recipe=pointmass_ppo checkpoint=mlp env.state=proprio": "state 6 there, 4 here",
    "evaluate env.name=libero checkpoint=random eval.reference=openvl": "eval.reference='openvl'.*openvla",
}


DIES = (KILLED, "act: RuntimeError: no weights")  # refused by a child process, as in a user's dry run


@pytest.fixture
def rehearsed_here(monkeypatch):
    """Objects of the user's own are made in this process: a child would first import torch."""

    def run(command, input, **options):
        monkeypatch.setattr("sys.stdin", io.StringIO(input))
        rehearsal.main(Path(command[-1]))
        return subprocess.CompletedProcess(command, 0, stderr="")

    here = SimpleNamespace(**vars(subprocess) | {"run": run})
    return lambda: monkeypatch.setattr(rehearsal, "subprocess", here)


@pytest.mark.parametrize("words", REFUSED)
def test_a_dry_run_refuses_what_a_run_would_end_with(words, folders, rehearsed_here, monkeypatch, capsys):
    if not REFUSED[words].startswith(DIES):
        rehearsed_here()
    monkeypatch.chdir(folders)
    monkeypatch.setattr("sys.path", [str(folders), *sys.path])
    command = {"evaluate": evaluate, "check": check}.get(words.split()[0])
    assert (command or train)([*words.split()[bool(command) :], *["--dry-run"] * (command is not check)]) != 0
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(REFUSED[words], error), error


def test_a_plan_for_other_machines_needs_no_files_that_are_missing_here(tmp_path, monkeypatch, capsys):
    pytest.importorskip("mani_skill")
    without_files(monkeypatch, tmp_path)
    lacking = ["recipe=maniskill_ppo_openvla", "policy.pretrained=/models/openvla-7b", "--dry-run"]
    assert train([*lacking, "cluster.machines=8xH100"]) == 0
    told = capsys.readouterr().out
    told = " ".join(told.split())
    assert "8 x sim + policy on gpu:0-7" in told and "missing on this machine: " in told
    assert "policy.pretrained=/models/openvla-7b is not on this machine; planned for a model of full size" in told
    assert train(lacking) != 0  # here it could not run
