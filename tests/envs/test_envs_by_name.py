"""env.name picks the env: ours, Gymnasium's, the user's; and mistakes are explained."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import TypeAdapter

from embodied.core.errors import ConfigError
from embodied.envs import env_class, make_env
from embodied.envs.config import EnvConfig, ExternalEnvConfig, env_that_knows
from embodied.envs.gym.config import GymConfig
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.pointmass.config import PointMassConfig

ADAPTER = TypeAdapter(EnvConfig)


def config(**values):
    return ADAPTER.validate_python(values)


@pytest.mark.parametrize(
    ("values", "kind", "task"),
    [
        ({}, ManiSkillConfig, "PushCube-v1"),
        ({"name": "maniskill", "task": "PickCube-v1"}, ManiSkillConfig, "PickCube-v1"),
        ({"name": "pointmass"}, PointMassConfig, "reach"),
        ({"name": "gym:CartPole-v1"}, GymConfig, "CartPole-v1"),
        ({"name": "my_pkg.mod:MyEnv"}, ExternalEnvConfig, "MyEnv"),
        ({"name": "my_pkg.mod:MyEnv", "task": "lift", "kwargs": {"a": [1]}}, ExternalEnvConfig, "lift"),
    ],
)
def test_the_name_chooses_the_options(values, kind, task):
    chosen = config(**values)
    assert type(chosen) is kind
    assert chosen.task == task
    assert ADAPTER.validate_python(ADAPTER.dump_python(chosen, mode="json")) == chosen


USER_ENV = """
from embodied.envs.pointmass.env import PointMassEnv
from embodied.envs.pointmass.config import PointMassConfig


class Mine(PointMassEnv):
    def __init__(self, config, num_envs):
        super().__init__(PointMassConfig(name="pointmass", size=config.kwargs["size"]), num_envs)


number = 3
"""


@pytest.fixture
def user_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def test_a_users_class_is_found_in_the_working_directory(user_folder):
    (user_folder / "user_env_here.py").write_text(USER_ENV)
    env = make_env(config(name="user_env_here:Mine", kwargs={"size": 3.0}), 2)
    assert env.config.size == 3.0


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("user_env_typo:Minee", "has no Minee; did you mean 'Mine'"),
        ("user_env_number:number", "not a class of .*VectorEnv or gymnasium.Env, and not a task of a simulator: 3"),
    ],
)
def test_mistakes_in_a_users_class_are_explained(user_folder, where, message):
    (user_folder / f"{where.partition(':')[0]}.py").write_text(USER_ENV)
    with pytest.raises(ConfigError, match=message):
        env_class(config(name=where))


def test_a_bridge_task_says_by_its_name_who_plays_it_and_what_files_it_lacks(tmp_path):
    carrot = "PutOnPlateInScene25Single-v1"
    assert env_that_knows(carrot) == env_that_knows([carrot, "PutCarrotOnPlateInScene-v1"]) == "maniskill"
    assert env_that_knows("PushCube-v1") is None and env_that_knows("libero_goal") is None
    found = config(name="maniskill", task=carrot)
    bare = SimpleNamespace(environ={"MS_ASSET_DIR": str(tmp_path)}, exists=Path.exists)
    lost = env_class(found).missing_files(found, bare)
    assert [*lost] == ["widowx250s", "put_on_plate_25"] and "download_asset widowx250s" in lost["widowx250s"]
    assert not env_class(found).missing_files(found, SimpleNamespace(environ={}, exists=lambda path: True))
    toy = config(name="pointmass")
    assert env_class(toy).missing_files(toy, bare) == {}


def test_names_for_own_envs_and_policies_are_listed_and_imported_on_use():
    code = (
        "import sys, embodied.envs as envs, embodied.policies as policies\n"
        "assert not {'torch', 'gymnasium'} & sys.modules.keys()\n"
        "for package in (envs, policies):\n"
        "    assert all(getattr(package, name) is not None for name in package.__all__)\n"
        "assert not hasattr(envs, 'Nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
