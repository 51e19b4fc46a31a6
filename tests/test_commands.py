"""`embodied` lists the commands and recipes at once, and runs a command as `python -m embodied.NAME` does."""

import json
import subprocess
import sys

import pytest

from embodied import __main__ as commands
from embodied.config.recipe_files import RECIPES, recipe_names

LISTING = """
import json, sys
from embodied.__main__ import main
main([])
print(json.dumps(sorted(sys.modules)))
"""


def test_the_list_imports_nothing_of_a_run():
    told = subprocess.run([sys.executable, "-c", LISTING], capture_output=True, text=True).stdout
    assert not {"pydantic", "numpy", "torch", "yaml"} & {*json.loads(told.splitlines()[-1])}
    for name in ("train", "evaluate", "profiling", *recipe_names(RECIPES)):
        assert f" {name}" in told


def test_every_command_says_what_it_does():
    for name, path in commands.commands().items():
        assert len(commands.purpose(path).split()) > 2 and "python" not in commands.purpose(path), name


def test_a_command_sees_the_arguments_that_it_would_have_by_its_own_name(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["embodied", "list", "engines"])
    assert commands.main() == 0
    assert sys.argv[1:] == ["engines"] and sys.argv[0].endswith("list.py")
    assert capsys.readouterr().out.startswith("engines")


def test_every_command_explains_itself(capsys):
    for name in commands.commands():
        assert commands.main([name, "--help"]) == 0
        assert "python -m embodied" in capsys.readouterr().out, name


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (
            "train recipe=pointmass_ppo run.start_from=EMPTY --dry-run",
            "run.start_from=EMPTY: no policy in it; name a run",
        ),
        ("train recipe=pointmass_ppo resume=EMPTY --dry-run", "EMPTY is not a run folder: run.json is missing"),
        ("train recipe=pointmass_ppo run.dir=LONG --dry-run", "has 300 bytes; a file's name has at most 255"),
        ("train recipe=pointmass_ppo resume=[1]", "resume=[1]: should be a path"),
        (
            "sft recipe=pointmass_ppo sft.data=EMPTY --dry-run",
            "sft.data=EMPTY is no LeRobot dataset: there is no meta/",
        ),
        ("evaluate checkpoint=EMPTY", "checkpoint=EMPTY: no policy in it; name a run"),
        ("evaluate recipe=pointmass_ppo checkpoint=ws://h:x", "policy.url=ws://h:x is no address (Port could not be"),
        ("train recipe=pointmass_ppo eval.sets={a:1} --dry-run", "a space is missing after a colon"),
        (
            "train recipe=pointmass_ppo eval.sets=q.jsonl",
            "eval.sets='q.jsonl': should be a map, such as eval.sets='{name",
        ),
        ("train recipe=pointmass_ppo algo.imitation=d", "such as algo.imitation='{data: ...}'; its keys: data, names,"),
        (
            "train recipe=pointmass_ppo algo.imitation.weigth=1",
            "algo.imitation.weigth: unknown key, did you mean 'weight'",
        ),
        (
            "train recipe=pointmass_ppo algo.name=dagger policy.chunk=4",
            "policy.chunk=4 does not go with algo.name=dagger",
        ),
        ("sweep recipe=pointmass_ppo seeds=0-1 group=/dev/null/x --dry-run", "/dev/null is not a folder; name another"),
    ],
)
def test_an_option_whose_value_cannot_be_is_named_with_it(asked, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    words = asked.replace("EMPTY", str(tmp_path / "EMPTY")).replace("LONG", "x" * 300).split()
    assert commands.main(words) == 2
    assert told.replace("EMPTY", str(tmp_path / "EMPTY")) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["trian"], "did you mean 'train'? Commands: benchmark, "),
        (["recipe=pointmass_ppo"], "embodied train recipe=pointmass_ppo"),
        (["qqqq"], "no such command. Commands: "),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(words, told, capsys):
    assert commands.main(words) == 2
    assert told in capsys.readouterr().err


def test_a_reader_that_has_seen_enough_is_no_error():
    command = ["sh", "-c", '"$0" -m embodied train --help | head -1', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.stdout and done.stderr == ""
