"""Every command in a message, a help text or a docstring exists, and accepts the arguments that stand behind it."""

import ast
import re
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

import pytest

from embodied import benchmark, export, plan, serve, share, workers
from embodied.config.command_line import COMMANDS, FLAGS
from embodied.config.recipe import load
from embodied.config.recipe_files import recipe_names
from embodied.core.errors import ConfigError
from embodied.envs.interpreter import locked
from embodied.list import LISTS
from embodied.profiling import measure
from embodied.run import launch
from embodied.run.run_folder import RunFolder
from embodied.sweep import read_order

ROOT = Path(__file__).parents[1]
COMMAND = re.compile(r"(?<!usage: )python -m embodied\.([\w.]*\w|\x01)([^\n]*)")
RUN, BARE = "\x00", "\x01"  # a quoted value, and one that a blank would break
PLACES = {"NAME": "pointmass_ppo", "RECIPE": "pointmass_ppo", "FILE": "profile.json"}
PLACES |= {"my_tasks:MyTask-v1": "PushCube-v1", "my_pkg.my_module:MyText": "embodied.envs.text.toys:Sort"}


def template(node):
    """The text of a string; of an f-string with RUN and BARE for its values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(part.value if isinstance(part, ast.Constant) else filled(part.value) for part in node.values)


def filled(value):
    called = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
    if called == "join":
        return f"recipe={RUN}"
    if called == "quote":
        inner = value.args[0]
        return template(inner).replace(BARE, RUN) if isinstance(inner, ast.JoinedStr) else RUN
    return BARE


def commands_in(source):
    """(line, command, arguments) of every command in the strings of a module. A word that is no argument ends one."""
    if "-m" not in source:  # most modules; looking through their strings takes seconds
        return
    tree = ast.parse(source)
    nested = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in [*ast.walk(node)][1:]}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr) or id(node) in nested:
            continue
        for name, rest in COMMAND.findall(template(node)):
            words = []
            for word in [] if rest[:1] in (".", ",", "`", ")") else rest.split():
                plain = word.rstrip(",;.:)`")
                known = {*LISTS, *recipe_names(), RUN, BARE, "FOLDER", "RUN", "RECIPE", "runs/NAME-DATE"}
                if not (re.match(r"[\w.]+=|--\w", plain) or plain in known):
                    words = [] if word.startswith("...") else words  # the beginning of a command
                    break
                words.append(plain)
                if plain != word:
                    break
            if name != "COMMAND":
                yield node.lineno, name.replace(BARE, "train"), words


def check(command, words, run):
    """Parse the arguments as the command does, with `run` for folders of runs."""
    found = find_spec(f"embodied.{command}")
    assert found, f"there is no embodied.{command}"
    usage = [*FLAGS] if command in COMMANDS else ["--help", Path(found.origin).read_text(encoding="utf-8")]
    assert all(any(word in text for text in usage) for word in words if word.startswith("--")), f"{words}: no such flag"
    assert not any(BARE in word for word in words), f"{words}: a value that is not quoted"
    for place, value in PLACES.items():
        words = [re.sub(rf"((?<=[=/])|^){place}$", value, word) for word in words]
    words = [word.replace(f"recipe={RUN}", f"recipe={run}/config.yaml") for word in words]
    folder = re.compile(r"(?<==)(RUN_DIR|RUN|FOLDER|DEMOS|runs/\S*)$|^(RUN|FOLDER|runs/\S+)$|" + RUN)
    words = [folder.sub(str(run), word) for word in words]
    words = [word for word in words if not word.startswith("--")]
    _, rest = launch.program_of(words)
    if not rest:
        return
    if command in COMMANDS:
        load(["run.iterations=1", *rest] if command == "check" else rest, entry=command)
    elif command == "sweep":
        order = read_order(rest, sweep=True)
        assert all(load(order.words_of(setting)) for setting in order.settings)
    elif command == "benchmark":
        benchmark.variants(*launch.own_options(benchmark.Options, rest))
    elif command in ("plan", "profiling"):
        _, rest = launch.own_options((plan if command == "plan" else measure).Options, rest)
        assert load(rest)
    elif command == "share":
        assert all(load(words) for words in share.read_order(words).runs)
    elif command == "serve":
        assert serve.read(words)
    elif command == "export":
        assert load(launch.own_options(export.Options, rest)[1], entry="evaluate")
    elif command == "workers":
        assert workers.read_words(words)
    elif command == "list":
        assert {*words} <= {*LISTS}
    elif command == "sims":
        assert {*words} <= {*locked.names(), "NAME", "python=PATH", str(run)}
    elif command in ("report", "push", "datasets.quantiles", "policies.openvla.components"):
        assert all(word == str(run) for word in words)
    else:
        raise AssertionError(f"who reads {words}?")


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(["recipe=pointmass_ppo"]).yaml
    return RunFolder.create(tmp_path / "my runs", "run", config, "train").path


def sources():
    folders = [ROOT / name for name in ("embodied", "envs", "policies", "placement")]
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [file for file in files if file.resolve() == file]  # each once: embodied/envs is a link


def test_commands_in_messages_are_accepted(run):
    seen, wrong = 0, []
    for file in sources():
        for line, command, words in commands_in(file.read_text(encoding="utf-8")):
            seen += 1
            try:
                check(command, words, run)
            except (AssertionError, ConfigError) as err:
                wrong.append(f"{file.relative_to(ROOT)}:{line}: {command} {words}: {err}")
    assert seen > 80 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        "python -m embodied.trian recipe=NAME",
        "python -m embodied.train recipe=NAME env.num_env=3",
        "try python -m embodied.evaluate checkpoint={folder}, then",
        "python -m embodied.list recipe=NAME",
        "python -m embodied.sweep recipe=NAME algo.lr=1,2 seed=1 seeds=0-2",
    ],
)
def test_a_command_that_does_not_work_is_found(text, run):
    ((_, command, words),) = commands_in(f"print(f{text!r})")
    with pytest.raises((AssertionError, ConfigError)):
        check(command, words, run)


def test_values_with_blanks_are_quoted():
    ((_, _, words),) = commands_in("""f"python -m embodied.report {quote(str(folder))} tries again\"""")
    assert words == [RUN] and quote("my runs") == "'my runs'"
