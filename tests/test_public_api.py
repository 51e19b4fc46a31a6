"""What `import embodied` offers: names, and the commands as functions."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest

import embodied
from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env

FAST = ["run.iterations=2", "eval.episodes=4", "eval.videos=0", "cluster.backend=inline"]


def test_every_public_name_is_there_and_documented():
    assert len(embodied.__all__) <= 28
    missing = [name for name in embodied.__all__ if not getattr(embodied, name).__doc__]
    assert not missing and {*embodied.__all__} <= {*dir(embodied)}
    with pytest.raises(AttributeError, match="embodied has no trane; it has train, sft, evaluate"):
        _ = embodied.trane


def test_a_recipe_is_loaded_by_name_with_words_and_values():
    config = embodied.load_recipe("pointmass_ppo", "env.num_envs=8", {"algo.lr": 1e-3, "run.eval_every": None})
    assert (config.env.num_envs, config.algo.lr, config.run.eval_every) == (8, 1e-3, None)
    with pytest.raises(ConfigError, match=r"did you mean 'algo\.lr'"):
        embodied.load_recipe("pointmass_ppo", {"algo.learning": 1})


def test_a_trained_policy_drives_an_env_by_hand_as_the_evaluation_did(tmp_path, monkeypatch, capsys):
    """The program of docs/own_policy.md; greedy episodes with the same seeds have the same returns."""
    monkeypatch.chdir(tmp_path)
    run = embodied.train("pointmass_ppo", *FAST)
    page = (Path(__file__).parents[1] / "docs" / "own_policy.md").read_text()
    (program,) = re.findall(r"^```python\n# drive.py\n(.*?)^```", page, re.M | re.S)
    exec(program.replace("runs/pointmass_ppo-DATE", str(run.folder)), {})
    assert capsys.readouterr().out.splitlines()[-1].startswith("succeeded: [")
    env, played = make_env(embodied.load_recipe("pointmass_ppo").env, 4), run.last.episodes
    policy, returns, done = embodied.load_policy(run), np.zeros(4), np.zeros(4, bool)
    specs = [EpisodeSpec(one.task, one.init_state_id, one.seed, one.index) for one in played]
    obs, _ = env.reset(options={"episodes": specs})
    while not done.all():
        chunk = env.step_chunk(policy.act_on(obs))
        obs, done, returns = chunk.obs, done | chunk.done, returns + chunk.rewards.sum(axis=1)
    np.testing.assert_allclose(returns, [one.total_reward for one in played], rtol=1e-5)
    with pytest.raises(ConfigError, match="random has no weights to load; name a run"):
        embodied.load_policy("random")


def test_demonstrations_imitation_and_a_page_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("pyarrow")
    few = ["cluster.backend=inline", "env.num_envs=4", "eval.episodes=2", "eval.videos=0"]
    data = embodied.collect("pointmass_ppo", *few, "out=demos", "collect.episodes=4")
    clone = embodied.sft("pointmass_ppo", *few, "sft.data=demos", "sft.epochs=1")
    assert clone.info["state"] == "finished" and clone.info["command"] == "sft"
    page = embodied.report(clone, str(clone.folder), out=tmp_path / "two.html")
    assert page == tmp_path / "two.html" and clone.name in page.read_text() and len(data) >= 1
    with pytest.raises(ConfigError, match="which run"):
        embodied.report()
    for command in (embodied.collect, embodied.sft, embodied.check):
        with pytest.raises(ConfigError, match="for the command line"):
            command("pointmass_ppo", "--cfg", *(["out=x"] if command is embodied.collect else []))


def test_a_check_from_python_returns_its_findings():
    found = embodied.check("env.name=pointmass")
    assert found["observed"].startswith("state of 6 numbers") and found["contract"].startswith("kept")
    with pytest.raises(ConfigError, match="nmae"):
        embodied.check("env.nmae=pointmass")


def test_a_plan_from_python_is_what_the_command_writes(tmp_path):
    plan = embodied.plan("profile=published_maniskill_openvla", {"cluster": "8xGPU", "out": str(tmp_path)})
    assert plan == json.loads((tmp_path / "plan.json").read_text()) and plan["equal"] == ["hybrid", "collocated"]


@pytest.mark.parametrize("command", embodied._COMMANDS)
def test_a_command_is_both_a_module_and_a_function(command):
    module = importlib.import_module(f"embodied.{command}")
    assert module is getattr(embodied, command) and callable(module) and module.main
