"""Plug-ins: ours are registered as those of other packages are, and another package's need no change of ours."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from embodied.core.plugins import OURS, Plugins, entries_of_packages

ROOT = Path(__file__).parents[2]
PACKAGE = {  # a robot package with one plug-in of each kind
    "config": """
from typing import Literal
from pydantic import Field
from embodied.envs.config import CommonEnvConfig
from embodied.policies.config import ActorCriticConfig

class DialConfig(CommonEnvConfig):
    env = "arm_kit.dial:DialEnv"
    name: Literal["dial"] = Field(description="A dial.")
    task: str = Field("turn", description="Its only task.")
    reach: float = Field(1.0, description="How far it turns.")

class LinearConfig(ActorCriticConfig):
    policy = "arm_kit.linear:LinearPolicy"
    name: Literal["linear"] = Field(description="One layer.")

    @classmethod
    def recognise(cls, folder):
        return "linear" if folder.config.get("type") == "linear" else None
""",
    "dial": '''
import numpy as np
from embodied.core.rng import generator
from embodied.envs import ActionSpec, EnvSpec, Observation, StepResult, VectorEnv

class DialEnv(VectorEnv):
    """Turn a dial to 0."""

    def __init__(self, config, num_envs):
        self.angle = np.zeros(num_envs)
        self.reach = config.reach
        super().__init__(config, num_envs, EnvSpec(ActionSpec(1), state_dim=1, max_episode_steps=8, has_success=True))

    def _reset_rows(self, rows, episodes):
        self.angle[rows] = [self.reach * generator(episode.seed, "dial").uniform(-1, 1) for episode in episodes]
        return np.zeros(len(rows), bool)

    def _observe(self):
        return Observation(state=self.angle[:, None].astype(np.float32))

    def _step(self, actions, active):
        self.angle += np.where(active, 0.2 * actions[:, 0], 0)
        close = np.abs(self.angle) < 0.1
        return StepResult(-np.abs(self.angle), close, close)
''',
    "linear": """
from embodied.policies.networks import MLPPolicy

class LinearPolicy(MLPPolicy):
    pass
""",
    "engine": """
from embodied.policies.language.slot_engine import SlotEngine

class CountingEngine(SlotEngine):
    def add(self, request):
        self.totals = {**self.totals, "arm_kit_requests": self.totals.get("arm_kit_requests", 0) + 1}
        super().add(request)
""",
    "logger": """
from embodied.records.loggers import Logger

class LineLogger(Logger):
    def __init__(self, run):
        self.file = (run / "lines.txt").open("a")

    def describe(self):
        return "one line an iteration"

    def add(self, step, numbers):
        self.file.write(f"{step}\\n")

    def close(self, failed=False):
        self.file.close()
""",
    "leaves": "raise SystemExit(3)\n",
}
ENTRIES = """
[embodied.envs]
dial = arm_kit.config:DialConfig
leaves = arm_kit.leaves:Nothing
misplaced = arm_kit.dial:DialEnv
[embodied.families]
misplaced = arm_kit.dial:DialEnv
linear = arm_kit.config:LinearConfig
mlp = arm_kit.config:LinearConfig
nowhere = arm_kit.nowhere:Nothing
[embodied.engines]
counting = arm_kit.engine:CountingEngine
nowhere = arm_kit.nowhere:Nothing
[embodied.loggers]
lines = arm_kit.logger:LineLogger
"""


def install(folder, name, entries):
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_bytes(entries)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder on Python's path that holds the package."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "arm_kit").mkdir()
    (folder / "arm_kit" / "__init__.py").touch()
    for module, text in PACKAGE.items():
        (folder / "arm_kit" / f"{module}.py").write_text(text)
    install(folder, "arm_kit", ENTRIES.encode())
    return folder


def run(installed, *command, cwd=None):
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(installed), *filter(None, sys.path)])}
    command = [sys.executable, "-W", "default", *command]
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=600)


def test_our_plugins_are_registered_like_those_of_other_packages():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"] == OURS
    for group in OURS:
        plugins = Plugins(group, "key")
        assert {*plugins.names} >= {*OURS[group]} and all(isinstance(plugins[name], type) for name in OURS[group])


TRAINED = """
import json, sys
from embodied.train import main
for words in json.loads(sys.argv[1]):
    print(words[0], "ends with", main(words), file=sys.stderr)
"""


def test_another_packages_env_family_logger_and_engine_train(installed, tmp_path):
    """A dry run imports an engine that is missing."""
    robot = ["recipe=pointmass_ppo", "env.name=dial", "env.reach=0.5", "env.num_envs=4", "policy.name=linear"]
    robot += ["policy.hidden=[8]", "run.log=[tensorboard,lines]", "run.iterations=2", "run.name=robot"]
    robot += ["algo.rollout_decisions=8", "algo.minibatch_size=16", "eval.videos=0"]
    talker = ["recipe=sums_grpo", "policy.engine=counting", "run.start_from=null", "run.iterations=1"]
    talker += ["run.name=talker", "algo.groups=4", "algo.group_size=2", "env.num_envs=8", "cluster.backend=inline"]
    talker.append("placement={'sim,policy': cpu:0, learner: cpu:0}")
    missing = ["recipe=sums_grpo", "policy.engine=nowhere", "--dry-run"]
    told = json.dumps([*([*words, "eval.episodes=4", f"run.dir={tmp_path}"] for words in (robot, talker)), missing])
    done = run(installed, "-c", TRAINED, told, cwd=tmp_path)
    codes = [line.split()[-1] for line in done.stderr.splitlines() if " ends with " in line]
    assert codes == ["0", "0", "2"], done.stderr
    assert "one line an iteration" in done.stdout
    (robots,), (talkers,) = tmp_path.glob("robot-*"), tmp_path.glob("talker-*")
    assert len((robots / "lines.txt").read_text().split()) >= 2
    assert [*robots.glob("eval/*/results.json")]
    (row,) = map(json.loads, (talkers / "metrics.jsonl").read_text().splitlines())
    assert row["engine/arm_kit_requests"] >= 8
    assert "policy.engine=nowhere: importing arm_kit.nowhere:Nothing of the package arm-kit failed: " in done.stderr


LISTED = """
import sys
from embodied.list import main
main(["envs", "policies", "engines"])
print(*(name for name in sys.modules if name.startswith("arm_kit")), "imported")
"""
USED = """
import sys
from pathlib import Path
from embodied.policies.policy_folder import families_of
from embodied.config.recipe import load_recipe
load_recipe("pointmass_ppo", "env.name=dial")
print(*(name for name in sys.modules if name.startswith("arm_kit")), "imported")
print(families_of(Path(sys.argv[1])))
"""


def test_names_are_listed_without_an_import_and_a_run_imports_what_it_names(installed, tmp_path):
    listed = run(installed, "-c", LISTED).stdout.splitlines()
    assert {line.split()[0] for line in listed if "of the package arm-kit." in line} == {
        *("dial", "leaves", "misplaced", "linear", "nowhere", "counting")
    }
    assert listed[-1].split() == ["imported"]
    (tmp_path / "config.json").write_text(json.dumps({"type": "linear"}))
    used = run(installed, "-c", USED, str(tmp_path))
    assert used.stdout.splitlines() == ["arm_kit arm_kit.config imported", "('linear',)"]
    assert "policy.name=nowhere: importing arm_kit.nowhere:Nothing of the package arm-kit failed" in used.stderr
    assert "mlp of the package arm-kit is left out, since the name is taken" in used.stderr


MISTAKEN = """
import sys
from embodied.train import main
for option in sys.argv[1:]:
    print(option, "ends with", main(["recipe=pointmass_ppo", option, "--cfg"]), file=sys.stderr)
"""
MISTAKES = {
    "env.name=dail": "did you mean 'dial'?",
    "policy.name=linaer": "did you mean 'linear'?",
    "run.log=line": "did you mean 'lines'?",
    "env.name=leaves": "env.name=leaves: importing arm_kit.leaves:Nothing of the package arm-kit failed: ",
    "env.name=misplaced": "is no class derived from embodied.envs.config:CommonEnvConfig",
}


def test_mistakes_with_the_names_of_other_packages_are_explained(installed):
    told = run(installed, "-c", MISTAKEN, *MISTAKES).stderr
    for option, answer in MISTAKES.items():
        error, end, told = told.partition(f"{option} ends with 2\n")
        assert end and answer in error and "Traceback" not in error


@pytest.mark.parametrize("content", [b"\xff", b"[embodied.families]\n\xff = a:b"])
def test_a_package_with_a_damaged_list_of_entry_points_stops_nothing(tmp_path, monkeypatch, content):
    install(tmp_path, "another", content)
    install(tmp_path, "whole", b"[embodied.engines]\nfast = a:b")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    entries_of_packages.cache_clear()
    with pytest.warns(UserWarning, match="plug-ins of a package are missing: .*Unicode"):
        assert [*entries_of_packages()["embodied.engines"]] == ["fast"]
    entries_of_packages.cache_clear()
