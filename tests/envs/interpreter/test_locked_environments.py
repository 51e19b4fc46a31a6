"""Environments of simulators that are made from a lock, for env.python=auto."""

import re
import sysconfig
import zipfile

import pytest
from pydantic import TypeAdapter

from embodied import sims
from embodied.core.errors import ConfigError
from embodied.envs import make_env
from embodied.envs.config import EnvConfig
from embodied.envs.interpreter import locked
from embodied.list import LISTS
from embodied.system.machine import Machine

PIN = re.compile(r"[\w.-]+(\[\w+\])?==[\w.+!-]+")


@pytest.mark.parametrize("name", locked.names())
def test_a_lock_says_what_it_is_for_and_pins_every_package(name):
    purpose, packages = locked.about(name)
    assert len(purpose) > 20 and packages
    lines = [line for line in locked.lock_of(name).read_text().splitlines() if line and not line.startswith("#")]
    assert all(PIN.fullmatch(line.partition(" ;")[0]) for line in lines)
    assert {"numpy", "gymnasium"} <= {line.partition("==")[0] for line in lines}


@pytest.fixture
def lock(tmp_path, monkeypatch):
    """A lock of the env pointmass. Its package makes the environment find the packages of this interpreter."""
    monkeypatch.setattr(locked, "LOCKS", tmp_path / "locks")
    for name, value in (("XDG_CACHE_HOME", tmp_path), ("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", tmp_path / "wheels")):
        monkeypatch.setenv(name, str(value))
    for folder in ("locks", "wheels"):
        (tmp_path / folder).mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "borrowed-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("borrowed.pth", f"{sysconfig.get_path('purelib')}\n")
        about = "borrowed-1.0.dist-info"
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: borrowed\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    path = tmp_path / "locks" / "pointmass.txt"
    path.write_text("# A mass on a plane, for this test\nborrowed==1.0\n")
    return path


def test_auto_takes_the_environment_that_the_command_makes(lock, monkeypatch, capsys):
    config = TypeAdapter(EnvConfig).validate_python({"name": "pointmass", "python": "auto"})
    with pytest.raises(ConfigError, match=r"not made yet: python -m embodied.sims pointmass"):
        make_env(config, 2)
    assert sims.main(["pointmass"]) == 0
    env = make_env(config, 2)
    assert env._process.process.args[0] == str(locked.folder("pointmass") / "bin" / "python")
    env.close()
    (item,) = LISTS["sims"](Machine())
    assert (item.purpose, item.problem) == ("A mass on a plane, for this test: borrowed 1.0.", "")
    capsys.readouterr()
    assert sims.main(["pointmass"]) == 0 and "packages" not in capsys.readouterr().out  # it stays as it is
    lock.write_text("# A mass on a plane, for this test\nborrowed==2.0\n")
    with pytest.raises(ConfigError, match="made from another lock"):
        make_env(config, 2)
    run = locked.run
    monkeypatch.setattr(locked, "run", lambda command: "venv" in command or run(command))  # the empty one is there
    assert sims.main(["pointmass"]) == 1 and "No matching distribution" in capsys.readouterr().err
    (item,) = LISTS["sims"](Machine())
    assert item.problem.startswith("not made yet")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "the names are pointmass"),
        (["pointmas"], "the names are pointmass"),
        (["pointmass", "python=/nowhere/python"], "/nowhere/python: No such file"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(lock, words, told, capsys):
    assert sims.main(words) == 2 and told in capsys.readouterr().err


def test_an_env_without_a_lock_is_refused_with_the_names_of_locks(lock):
    config = TypeAdapter(EnvConfig).validate_python({"name": "gym:CartPole-v1", "python": "auto"})
    with pytest.raises(ConfigError, match=r"called 'gym' \(known: pointmass\); name yours: env.python="):
        make_env(config, 2)
