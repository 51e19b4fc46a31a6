"""Every command and snippet of the README runs, from a folder of the user's that has packages named like ours."""

import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.M | re.S)
COMMANDS = [
    re.sub(r"^embodied\b", "python -m embodied", line)  # the installed command
    for kind, text in BLOCKS
    if kind == "bash"
    for line in text.splitlines()
]
PYTHON = [line for line in COMMANDS if line.startswith("python ")]
SHORT = ["run.iterations=2", "eval.episodes=4", "eval.videos=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The README's files, beside packages that must not be mistaken for ours."""
    folder = tmp_path_factory.mktemp("mine")
    for name in ("envs", "assets", "policies", "placement", "recipes"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("raise RuntimeError('shadowed')")
    for kind, text in BLOCKS:
        if kind != "bash":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text)
    return folder


def run(command, folder, *more):
    """In a process of its own, as a user does."""
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:], *more],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def here(monkeypatch, capsys):
    """The same in this process, for what needs none of its own."""

    def here(command, folder, *more):
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(folder)
        _, _, module, *words = shlex.split(command)
        try:
            code = importlib.import_module(module).main([*words, *more])
        except SystemExit as ended:
            code = ended.code
        output = capsys.readouterr()
        assert not code, output
        return output.out

    return here


def dated(command, folder):
    """`runs/NAME-DATE` as the newest such run."""
    if "-DATE" not in command:
        return command
    name = re.search(r"(runs/\S*)-DATE", command)[1]
    if not list(folder.glob(f"{name}-*")):
        run(f"python -m embodied.train recipe={Path(name).name}", folder, *SHORT)
    newest = max(folder.glob(f"{name}-*"), key=lambda path: path.stat().st_mtime)
    return command.replace(f"{name}-DATE", str(newest.relative_to(folder)))


def trains(command):
    return "embodied.train recipe=" in command and not re.search("--(cfg|dry-run|help)", command)


def short(command):
    """The same command with a run of seconds."""
    if trains(command):
        return SHORT
    return ["run.iterations=3", "eval.episodes=4"] if "resume=" in command else []


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(line, marks=[pytest.mark.slow] if "doctor" in line else [])
        for line in PYTHON
        if "benchmarks" not in line
    ],
)
def test_a_command_does_what_it_says(folder, here, command):
    whole = dated(command, folder)
    words = [word for word in whole.split() if not (short(command) and word.startswith("run.iterations"))]
    own = "my_" in command  # learns in processes of its own below
    apart = (trains(command) and not own) or "-m" not in words or "embodied" in words
    plays = re.search("embodied.(train|evaluate) ", command) and not re.search("--(cfg|dry-run|help)", command)
    more = [*short(command), *(["cluster.backend=inline"] if plays and not apart else [])]
    output = (run if apart else here)(" ".join(words), folder, *more)
    if trains(command):
        assert "finished after" in output and ("processes   local" in output or own)


def test_a_clone_has_what_make_needs(tmp_path):
    (clone,) = (line for line in COMMANDS if line.startswith("git clone "))
    subprocess.run(shlex.split(clone.replace("URL", str(ROOT))), cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "embodied-loop" / "Makefile").is_file() and COMMANDS[1] == "cd embodied-loop"


def test_the_lines_from_python_train_and_evaluate(folder):
    lines = (folder / "from_python.py").read_text()
    (folder / "shorter.py").write_text(lines.replace("run.iterations=40", "run.iterations=2").replace("=200", "=4"))
    assert 0 <= float(run("python shorter.py", folder).splitlines()[-1].split()[1]) <= 1


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in PYTHON if trains(line) and "my_" in line])
def test_what_is_documented_learns(folder, command):
    output = run(command, folder)
    rate = float(re.findall(r"success_once ([\d.]+)%", output)[-1])
    assert rate > 80


@pytest.mark.parametrize("setting", re.findall(r"`(env\.\S+=[^`]+)`", README))
def test_the_settings_in_the_table_are_valid(setting, folder, here):
    recipe = "gym_ppo" if "gym:" in setting else "maniskill_ppo"
    here(f"python -m embodied.train recipe={recipe} {setting} --cfg", folder)
