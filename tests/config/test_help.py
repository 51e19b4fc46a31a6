"""`--help` names every key and answers before anything heavy is imported."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.config.read import leaves, root
from embodied.config.recipe import RunConfig, load
from embodied.config.recipe_files import RECIPES, TINY, recipe_names

DOCS = Path(__file__).parents[2] / "docs"
HEAVY = ("torch", "ray", "sapien", "mani_skill", "gymnasium", "tensorboard", "imageio")
PROBE = """
import json, sys
from importlib import import_module
codes = [import_module(f"embodied.{command}").main(["--help"]) for command in sys.argv[1:]]
from pydantic import BaseModel
models, built = [BaseModel], 0
for model in models:
    models += model.__subclasses__()
    built += model.__module__.startswith("embodied") and model.__pydantic_complete__
codes.append(import_module("embodied.train").main(["recipe=pointmass_ppo", "env.num_env=3"]))
print(json.dumps({"codes": codes, "modules": sorted(sys.modules), "built": built}))
"""
# Short sleeps: a signal that comes just before one is heard after it.
SLOW_IMPORT = "import time\nprint('importing', flush=True)\nfor _ in range(1200):\n    time.sleep(0.05)\n"
COMMANDS = ["train", "sft", "collect", "evaluate", "report", "doctor", "list", "serve", "plan", "benchmark"]


def test_help_of_all_commands_and_the_answer_to_a_mistake_need_no_torch_ray_or_simulator():
    told = subprocess.run([sys.executable, "-c", PROBE, *COMMANDS], capture_output=True, text=True, check=True)
    facts = json.loads(told.stdout.splitlines()[-1])
    assert facts["codes"] == [*[0] * len(COMMANDS), 2]
    assert not [name for name in HEAVY if name in facts["modules"]]
    assert facts["built"] == 0, "an options model is built though nobody has set an option"


def test_ctrl_c_while_a_command_is_imported_is_a_line(tmp_path):
    (tmp_path / "yaml.py").write_text(SLOW_IMPORT)
    ours = [sys.executable, "-m", "embodied.train", "--help"]  # what answers stands in embodied/__init__.py, for all
    # A shell starts what it puts into the background deaf to Ctrl-C, and so are the tests then.
    ours = ["env", "--default-signal=INT", *ours]
    with subprocess.Popen(ours, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1]
    assert (process.returncode, said) == (130, "stopped at once\n")


def test_a_command_whose_packages_are_missing_says_how_to_install_them():
    without_packages = [sys.executable, "-S", "-m", "embodied.train", "recipe=pointmass_ppo"]
    root = Path(__file__).parents[2]
    done = subprocess.run(without_packages, cwd=root, capture_output=True, text=True)
    told = rf"error: \w+ is not installed for {re.escape(sys.executable)}; make setup installs it in \.venv\n"
    assert done.returncode == 1 and re.fullmatch(told, done.stderr), done.stderr


def test_help_names_recipes_but_for_the_tiny_ones_which_are_found_all_the_same(capsys):
    load(["--help"])
    words = re.findall(r"\w+", capsys.readouterr().out)
    assert {*recipe_names(RECIPES)} <= {*words}
    assert recipe_names(TINY) and not {*recipe_names(TINY)} & {*words}
    assert all(load([f"recipe={name}"]) for name in recipe_names(TINY))


def test_tiny_recipes_are_those_that_documents_show_to_users():
    """What tests alone need is written in the tests."""
    documents = " ".join(path.read_text() for path in DOCS.glob("*.md"))
    assert not {*recipe_names(TINY)} - {*re.findall(r"\w+", documents)}


def test_help_names_every_key_with_its_meaning(capsys):
    assert load(["--help"]) is None
    assert load(["--help"], entry="sft") is None
    assert load(["--help"], entry="collect") is None
    text = capsys.readouterr().out
    for key, field, _ in leaves(root(RunConfig)):
        assert f"  {key} " in text
        assert field.description, f"{key} has no help"
    assert max(map(len, text.splitlines())) <= 120


@pytest.mark.parametrize(
    ("words", "keys", "not_keys"),
    [
        (["lr"], {"algo.lr", "algo.lr_schedule", "algo.value_lr"}, {"algo.gamma", "sft.lr"}),
        (["algo"], {"algo.lr", "algo.gamma"}, {"env.task", "run.dir"}),
        (["learning_rate"], {"algo.lr"}, {"algo.gamma"}),
        (["algo.gamma", "seed"], {"algo.gamma", "seed", "eval.seed"}, {"algo.lr"}),
        (["Metres"], {"env.action_units"}, {"env.task"}),
        (["recipe=pointmass_ppo", "gamma"], {"algo.gamma"}, {"algo.lr"}),
    ],
)
def test_a_word_after_help_picks_the_keys_that_it_names(words, keys, not_keys, capsys):
    assert load(["--help", *words]) is None
    named = {line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r"  \S", line)}
    assert keys <= named and not not_keys & named
