"""Training on real LIBERO: both recipes, sims in hosts of their own, and what becomes of one that dies or hangs."""

import json
import re
from pathlib import Path

import pytest

from embodied.collect import main as collect
from embodied.evaluate import main as evaluate
from embodied.sft import main as sft
from embodied.train import main as train

pytestmark = [
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('libero')", reason="needs LIBERO"),
    pytest.mark.filterwarnings("ignore"),  # robosuite's, numba's and bddl's own
]
PAGE = (Path(__file__).parents[2] / "docs" / "libero.md").read_text()
SMALL = {
    "env.num_envs": 4,
    "env.max_episode_steps": 16,
    "policy.hidden": "[32]",
    "eval.episodes": 2,
    "eval.videos": 0,
    "eval.protocol": "as-trained-v1",  # which ends as early
}
PPO = {"recipe": "libero_ppo", "algo.rollout_decisions": 2, "algo.minibatch_size": 8, "run.env_steps": 128}
GRPO = {
    "recipe": "libero_grpo",
    "algo.groups": 2,
    "algo.group_size": 2,
    "algo.filter": "none",
    "algo.max_rounds": 1,
    "run.iterations": 2,
}
TWO = {"env.task": "[libero_object/2,libero_object/4]"}
FROM_SFT = {**PPO, "recipe": "libero_ppo_from_sft"}
HYBRID = 'placement={"sim": "cpu:0", "policy,learner": "cpu:0"}'  # sims on cores, policy and learner together


def told(folder, options):
    return [*(f"{key}={value}" for key, value in {**SMALL, **options}.items()), f"run.dir={folder / 'runs'}"]


def outcome(folder):
    (run,) = (folder / "runs").iterdir()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return json.loads((run / "run.json").read_text()), rows


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [PPO, GRPO], ids=["ppo", "grpo"])
def test_two_iterations_with_sims_on_cores_and_policy_and_learner_together(recipe, tmp_path):
    assert train([*told(tmp_path, recipe), HYBRID, "cluster.backend=local"]) == 0
    info, rows = outcome(tmp_path)
    assert info["state"] == "finished"
    assert [row["env_steps"] for row in rows] == [64, 128], "4 envs play 2 decisions of 8 env steps"
    assert all(row["train/logprob_gap"] < 1e-4 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [{**FROM_SFT, **TWO}, {**GRPO, **TWO}], ids=["ppo", "grpo"])
def test_two_tasks_are_demonstrated_imitated_and_trained_in_one_run_each(recipe, tmp_path):
    options = [f"{key}={value}" for key, value in {**SMALL, **TWO, "recipe": "libero_sft"}.items()]
    demos, runs = tmp_path / "demos", f"run.dir={tmp_path / 'imitated'}"
    tasks = f"env.task={TWO['env.task']}"
    played = ["recipe=libero_sft", tasks, "env.num_envs=2", "collect.episodes=2", f"out={demos}"]
    assert collect([*played, "cluster.backend=inline"]) == 0
    assert sft([*options, f"sft.data={demos}", "sft.epochs=1", runs, "cluster.backend=inline"]) == 0
    (start,) = (tmp_path / "imitated").iterdir()
    asked = {**recipe, "policy.hidden": "[32]", "cluster.backend": "inline", "run.start_from": start}
    assert train(told(tmp_path, asked)) == 0
    info, _ = outcome(tmp_path)
    assert info["state"] == "finished"
    (run,) = (tmp_path / "runs").iterdir()
    results = json.loads(max(run.glob("eval/*/results.json")).read_text())
    assert set(results["per_task"]) == {"libero_object/2", "libero_object/4"}


@pytest.mark.slow
def test_a_policy_is_evaluated_on_a_suite_and_its_perturbations(tmp_path, capsys):
    """The command of docs/libero.md, with a task of each suite."""
    (command,) = re.findall(r"^python -m embodied.evaluate (.*libero_object_swap.*)", PAGE, re.M)
    suites = re.search(r"env.task=\[(.*?)\]", command)[1].split(",")
    words = re.sub(r"(libero_\w+)", r"\1/3", command).replace("runs/RUN", "random").split()
    replaced = [word for word in words if not word.startswith("eval.episodes")]
    short = ["eval.episodes=5", "eval.videos=0", "eval.protocol=as-trained-v1", "env.max_episode_steps=8"]
    assert evaluate([*replaced, *short, "env.name=libero", f"run.dir={tmp_path}", "cluster.backend=inline"]) == 0
    (found,) = tmp_path.glob("**/results.json")
    results = json.loads(found.read_text())
    assert {suite: figures["episodes"] for suite, figures in results["per_suite"].items()} == dict.fromkeys(suites, 1)
    assert "mujoco 3.3.2" in results["protocol"]["backend"]
    said = capsys.readouterr().out
    assert all(re.search(rf"^  {suite} +success_once", said, re.M) for suite in suites)
