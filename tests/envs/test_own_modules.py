"""A task of one's own is named with its module; what it is follows from its bases, and mistakes are one line."""

import sys

import pytest

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.envs import env_class
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.gym.config import GymConfig
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.own_modules import as_a_task, import_module, own_modules, simulator_of
from embodied.envs.reasoning_gym.config import ReasoningGymConfig
from embodied.envs.verifiers.config import VerifiersConfig

TASK = """
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.utils.registration import register_env


@register_env("OwnPush-v1", max_episode_steps=7)
class OwnPush(PushCubeEnv):
    pass


class Unregistered(PushCubeEnv):
    pass


class NoTask:
    pass
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working directory of a user; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./my_tasks.py", "a module is named without folders and .py: my_tasks"),
        ("my_tasks.py", "a module is named without folders and .py: my_tasks"),
        ("folder/my_tasks.py", "a module is named without folders and .py: folder.my_tasks"),
        ("my tasks", "'my tasks' is not the name of a module"),
        ("no_such_module", "there is no module no_such_module; install it or start from the folder that holds it"),
        ("breaks", r"importing breaks failed: ValueError: bad robot .*breaks.py, line 2"),
        ("lacks", r"importing lacks failed: No module named 'numpyy' .*lacks.py, line 1"),
        ("unfinished", r"importing unfinished failed: .*unfinished.py, line 1"),
        ("leaves", r"importing leaves failed: SystemExit: 3"),
    ],
)
def test_a_module_that_cannot_be_had_is_one_line(folder, name, message):
    (folder / "breaks.py").write_text("x = 1\nraise ValueError('bad\\n robot')\n")
    (folder / "lacks.py").write_text("import numpyy\n")
    (folder / "unfinished.py").write_text("def f(:\n")
    (folder / "leaves.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError, match=message) as caught:
        import_module(name, "env.modules")
    assert "\n" not in str(caught.value)


def test_the_modules_that_other_machines_need_are_those_the_env_section_names():
    own = ManiSkillConfig(task=("a.tasks:One", "PushCube-v1"), modules=["b", "c.d"], reward="e.f:reward")
    assert own_modules(own) == ["b", "c.d", "a.tasks", "e.f"]
    assert own_modules(GymConfig(name="gym:CartPole-v1")) == []
    assert own_modules(ExternalEnvConfig(name="my_pkg.env:Mine", task="stage:2")) == ["my_pkg.env"]
    assert own_modules(ManiSkillConfig()) == []
    assert own_modules(ReasoningGymConfig(name="reasoning_gym:chain_sum")) == []
    assert own_modules(VerifiersConfig(name="verifiers:gsm8k")) == []
    assert as_a_task("verifiers:gsm8k") is None  # nothing is imported here


def test_a_class_is_known_by_its_bases_without_importing_their_simulator():
    base = type("BaseEnv", (), {"__module__": "mani_skill.envs.sapien_env"})
    assert simulator_of(type("Mine", (base,), {})) == "maniskill"
    assert simulator_of(type("BaseEnv", (), {})) is None
    assert simulator_of(3) is None


def test_modules_are_imported_before_an_env_is_made(folder):
    (folder / "noted_here.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    env_class(load(["recipe=pointmass_ppo", "env.modules=noted_here"]).config.env)
    assert (folder / "imported").is_file()


def test_a_class_of_maniskills_kind_means_its_simulator(folder):
    pytest.importorskip("mani_skill")
    (folder / "own_push_here.py").write_text(TASK)
    told = load(["recipe=maniskill_ppo", "env.name=own_push_here:OwnPush", "env.cameras=[base_camera]"]).config.env
    assert (told.name, told.task, told.cameras) == ("maniskill", "own_push_here:OwnPush", ("base_camera",))
    assert env_class(told).__name__ == "ManiSkillEnv"
    with pytest.raises(ConfigError, match=r"is a task of env.name=maniskill: set env.task=own_push_here:OwnPush"):
        env_class(ExternalEnvConfig(name="own_push_here:OwnPush"))


def test_a_task_is_found_by_its_registered_name_or_its_class(folder):
    pytest.importorskip("mani_skill")
    from embodied.envs.maniskill.tasks import find_task

    (folder / "own_push_there.py").write_text(TASK.replace("OwnPush-v1", "OwnPush-v2"))
    for name in ("OwnPush-v2", "OwnPush"):
        assert find_task(f"own_push_there:{name}").uid == "OwnPush-v2"
        assert find_task(f"own_push_there:{name}").max_episode_steps == 7
    found = find_task("own_push_there:Unregistered")
    assert (found.cls.__name__, found.max_episode_steps) == ("Unregistered", None)
    for name, message in {
        "OwnPush-v3": "has the ManiSkill tasks OwnPush-v2, OwnPush, Unregistered, not OwnPush-v3; did you mean",
        "NoTask": "NoTask is no subclass of ManiSkill's BaseEnv; .* has the ManiSkill tasks OwnPush-v2",
        "": "name the task too",
    }.items():
        with pytest.raises(ConfigError, match=message):
            find_task(f"own_push_there:{name}")
    for name, meant in {"MyPush-v1": "MyPush-v1", "MyPush": "MyPush", "my_push.py": "MyTask-v1"}.items():
        with pytest.raises(ConfigError, match=rf"is no ManiSkill task.*env.task=my_tasks:{meant} \(docs/own_task.md"):
            find_task(name)
