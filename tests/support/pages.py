"""Pages of the documents: their fenced blocks, the files that blocks hold, and their commands, run in a folder."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from embodied.envs.interpreter import locked

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^(?: {4})?((?:\w+=\S+ )*python -m embodied\.[\w.]+.*|embodied\b.*)", re.M)


class Page:
    def __init__(self, name):
        self.name = name
        self.text = (ROOT / name if name == "README.md" else ROOT / "docs" / name).read_text()
        self.blocks = re.findall(r"^```(\w+)\n(.*?)^```", self.text, re.M | re.S)
        self.lines = [line for kind, text in self.blocks if kind in ("bash", "sh") for line in text.splitlines()]
        self.commands = [line.replace("embodied", "python -m embodied", 1) if line[0] == "e" else line
                         for line in COMMAND.findall(self.text)]  # fmt: skip

    @property
    def files(self):
        """Name -> content of blocks that begin with the name of a file."""
        named = ((re.match(r"[#;] ?([\w/]+\.\w+)$", text.partition("\n")[0]), text) for _, text in self.blocks)
        return {found[1]: text for found, text in named if found}

    def write(self, folder):
        for name, text in self.files.items():
            (folder / name).write_text(text)
        return folder


def replaced(command, folder, more):
    """The words of a command behind `python`, in which `more` replaces keys; runs/NAME-DATE is the newest such run."""
    keys = {word.partition("=")[0] for word in more}

    def dated(found):
        return str(newest(folder, found[1]).relative_to(folder))

    words = [word for word in shlex.split(command)[1:] if word.partition("=")[0] not in keys]
    return [re.sub(r"runs/([\w+-]+)-DATE", dated, word) for word in (*words, *more)]


def newest(folder, name):
    dated = [
        path for path in Path(folder).glob(f"runs/{name}-2*") if re.fullmatch(rf"{re.escape(name)}-[\d-]+", path.name)
    ]
    return max(dated, key=lambda path: path.stat().st_mtime)


def apart(command, folder, *more, code=0):
    """Run a command in a process of its own, as a user does; returns what it printed, in one line."""
    done = subprocess.run(
        [sys.executable, *replaced(command, folder, more)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout if code == 0 else done.stderr).split())


def runner(folder, monkeypatch, capsys):
    """Runs commands in this process, which has imported simulators already; returns what they print, in one line."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)

    def program(text):
        exec(text, {"np": np, "__name__": "__main__"})
        return " ".join(capsys.readouterr().out.split())

    def here(command, *more, code=0):
        _, module, *words = replaced(command, folder, more)
        module = {"embodied": "embodied.__main__", "embodied.profiling": "embodied.profiling.measure"}.get(
            module, module
        )
        try:
            ended = importlib.import_module(module).main(words)
        except SystemExit as exit:
            ended = exit.code or 0
        printed = capsys.readouterr()
        assert ended == code, printed
        return " ".join((printed.out if code == 0 else printed.err).split())

    here.program = program
    return here


def lacks(command):
    """The package that a command of a page needs and that is not here; empty if it can run."""
    absent = {"envpool[_:]": find_spec("envpool") is None, "metaworld[_:]": locked.problem_of("metaworld")}
    absent |= {"(backend|renderer)=warp|runs/(warp|drawn)": locked.problem_of("libero_warp")}
    return next((words for words, problem in absent.items() if problem and re.search(words, command)), "")
