"""What `import embodied` offers: names, and the commands as functions."""

import importlib
import json
import subprocess
import sys

import pytest

import embodied
from embodied.core.errors import ConfigError

FAST = ["run.iterations=2", "eval.episodes=4", "eval.videos=0", "cluster.backend=inline"]


def test_every_public_name_is_there_and_documented():
    assert len(embodied.__all__) <= 23
    missing = [name for name in embodied.__all__ if not getattr(embodied, name).__doc__]
    assert not missing and {*embodied.__all__} <= {*dir(embodied)}
    with pytest.raises(AttributeError, match="embodied has no trane; it has train, sweep, evaluate"):
        _ = embodied.trane


def test_names_are_imported_when_they_are_used():
    code = "import embodied, sys; print({'torch', 'ray', 'numpy', 'pydantic'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"


def test_a_recipe_is_loaded_by_name_with_words_and_values():
    config = embodied.load_recipe("pointmass_ppo", "env.num_envs=8", {"algo.lr": 1e-3, "run.eval_every": None})
    assert (config.env.num_envs, config.algo.lr, config.run.eval_every) == (8, 1e-3, None)
    with pytest.raises(ConfigError, match=r"did you mean 'algo\.lr'"):
        embodied.load_recipe("pointmass_ppo", {"algo.learning": 1})


def test_three_lines_train_evaluate_and_say_what_the_commands_wrote(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run = embodied.train("pointmass_ppo", *FAST)
    results = embodied.evaluate(run, "eval.episodes=6", "eval.videos=0", "cluster.backend=inline")
    assert run.folder.is_dir() and len(run.metrics) == 2 and run.info["state"] == "finished"
    assert results["policy_version"] == 2 and results["overall"]["episodes"] == 6
    assert embodied.read_run(run.folder).last.results["overall"] == run.last.results["overall"]


def test_a_plan_from_python_is_what_the_command_writes(tmp_path):
    plan = embodied.plan("profile=published_maniskill_openvla", {"cluster": "8xGPU", "out": str(tmp_path)})
    assert plan == json.loads((tmp_path / "plan.json").read_text()) and plan["winner"] == "hybrid"


def test_the_same_checks_as_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"try algo\.minibatch_size=512"):
        embodied.train("pointmass_ppo", {"algo.minibatch_size": 100_000})
    with pytest.raises(ConfigError, match="for the command line"):
        embodied.train("pointmass_ppo", "--dry-run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "sweep", "evaluate", "benchmark", "plan"])
def test_a_command_is_both_a_module_and_a_function(command):
    module = importlib.import_module(f"embodied.{command}")
    assert module is getattr(embodied, command) and callable(module) and module.main
