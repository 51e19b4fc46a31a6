"""What is installed: every package of the checkout under one name, its recipes and assets, and nothing of the tests."""

import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from embodied.core.plugins import OURS

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "embodied": "embodied",
    **{name: f"embodied/{name}" for name in ("envs", "policies", "placement", "recipes", "assets", "docs")},
}


@pytest.fixture(scope="module")
def tracked():
    """The names of all files that git knows."""
    told = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    return [name for name in told.stdout.split("\0") if name]


@pytest.fixture(scope="module")
def wheel(tracked, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    for name in tracked:
        if (ROOT / name).is_symlink():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    build(source, "sdist", out)
    with tarfile.open(next(out.glob("*.tar.gz"))) as archive:
        archive.extractall(out, filter="data")
    build(next(out.glob("embodied_loop-*/")), "wheel", out)
    return next(out.glob("*.whl"))


def build(source, kind, out):
    """As pip and the package `build` do."""
    hook = "import sys; from setuptools import build_meta; getattr(build_meta, f'build_{sys.argv[1]}')(sys.argv[2])"
    done = subprocess.run([sys.executable, "-c", hook, kind, str(out)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_every_module_and_data_file_and_no_tests(wheel, tracked):
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in tracked:
        folder, _, inside = name.partition("/")
        if folder in FOLDERS and (ROOT / name).is_file() and not (ROOT / name).is_symlink():
            assert f"{FOLDERS[folder]}/{inside}" in names
    assert not [name for name in names if "test" in name.split("/")[0] or name.endswith("conftest.py")]
    assert {name.split("/")[0].split("-")[0] for name in names} == {"embodied", "embodied_loop"}


def test_the_wheel_brings_the_command_and_our_plug_ins(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
    entries = ConfigParser(delimiters="=")
    entries.read_string(archive.read(name).decode())
    assert {group: dict(entries[group]) for group in entries.sections()} == {
        "console_scripts": {"embodied": "embodied.__main__:main"},
        **OURS,
    }


def test_a_folder_of_the_same_name_in_the_working_directory_shadows_nothing(wheel, tmp_path):
    target = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(target)
    for name in ("envs", "assets", "policies", "placement"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        (tmp_path / "mine" / name / "__init__.py").write_text("raise RuntimeError('shadowed')")
    probe = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from embodied.config.recipe import load; print(load(sys.argv[2:]).name)"
    )
    command = [sys.executable, "-c", probe, str(target), "recipe=pointmass_ppo"]
    told = subprocess.run(command, cwd=tmp_path / "mine", capture_output=True, text=True)
    assert (told.stdout, told.stderr) == ("pointmass_ppo\n", "")


@pytest.mark.slow
def test_the_wheel_is_installed_with_its_extras_and_trains_without_the_checkout(wheel, tmp_path, monkeypatch):
    """Dependencies are those of this environment, borrowed by links, without the link to the checkout."""
    for name in ("PYTHONPATH", "PIP_REQUIRE_VIRTUALENV"):
        monkeypatch.delenv(name, raising=False)
    venv.create(tmp_path / "env")  # empty: pip is borrowed, too
    (site,) = (tmp_path / "env").glob("lib/python*/site-packages")
    borrowed = tmp_path / "borrowed"
    borrowed.mkdir()
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if "embodied_loop" not in one.name:
            (borrowed / one.name).symlink_to(one)
    (site / "borrowed.pth").write_text(f"{borrowed}\n")
    mine = tmp_path / "mine"
    for name in ("envs", "assets"):
        (mine / name).mkdir(parents=True)
        (mine / name / "__init__.py").write_text("raise RuntimeError('shadowed')")

    def here(*words):
        done = subprocess.run([tmp_path / "env/bin" / words[0], *words[1:]], cwd=mine, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    extras = "embodied-loop[maniskill,libero,language]"
    here("python", "-m", "pip", "install", "--no-index", "--find-links", str(wheel.parent), extras)
    listing = here("embodied", "--help")
    pages = Path(re.search(r"pages that messages name are in (.*)", listing)[1])
    assert pages.is_relative_to(site.resolve()) and (pages / "text_envs.md").is_file()
    assert "maniskill_ppo" in listing and "pointmass_ppo" in here("embodied", "list")
    assert "PushCube-v1" in here("embodied", "train", "recipe=maniskill_ppo", "--dry-run")
    here("embodied", "train", "recipe=pointmass_ppo", "run.iterations=2", "eval.episodes=4")
    (run,) = (mine / "runs").iterdir()
    assert (run / "checkpoints").is_dir() and (run / "report.html").is_file()
