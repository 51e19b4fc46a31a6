"""Commands of the pages on placement do what they say, and their placements can be read."""

import re
import shlex
from pathlib import Path

import pytest

from embodied import benchmark, plan, train
from embodied.benchmark import MODES
from embodied.placement import make_plan
from embodied.placement.topology import read_topology
from embodied.profiling import measure
from embodied.reporting.timeline import read_trace

PAGES = ("placement.md", "placement_reference.md", "results.md")
PAGE = "\n".join((Path(__file__).parents[1] / "docs" / name).read_text() for name in PAGES)
COMMANDS = re.findall(r"^python -m embodied\.(\w+) (.*)", PAGE, re.M)
PUBLISHED = [arguments for command, arguments in COMMANDS if command == "plan" and "recipe=" not in arguments]
SNIPPET = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]


@pytest.mark.parametrize("arguments", PUBLISHED)
def test_published_workloads_are_planned_as_shown(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert plan.main(arguments.split()) == 0
    assert re.search(r" (wins|are predicted equal)\n", capsys.readouterr().out)


@pytest.mark.slow
def test_profile_plan_and_benchmark_follow_each_other(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    small = ["env.num_envs=4", "algo.rollout_decisions=8", "algo.minibatch_size=16"]
    mains = {"profiling": measure.main, "plan": plan.main, "benchmark": benchmark.main}
    for command, arguments in COMMANDS:
        if command in mains and "recipe=" in arguments:
            short = {"seconds": "seconds=20", "rounds": "rounds=2"}
            words = [short.get(word.partition("=")[0], word) for word in arguments.split()]
            assert mains[command]([*words, *small]) == 0, capsys.readouterr().err
    found = {}
    exec(SNIPPET.replace('"rounds=7"', f'"rounds=2", *{small}'), found)
    assert found["plan"]["modes"].keys() >= {"collocated", "hybrid"} and found["bench"]["results"]
    assert list(tmp_path.glob("runs/profiles/*.json"))
    assert list(tmp_path.glob("runs/bench/*/bench.html"))


@pytest.mark.slow
def test_roles_that_do_not_fit_together_swap_as_the_page_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (arguments,) = [shlex.split(told) for command, told in COMMANDS if command == "train" and "--dry-run" not in told]
    small = ["run.env_steps=2048", "eval.episodes=2", "eval.videos=0", "eval.failure_videos=0"]
    assert train.main([*arguments, *small]) == 0
    (trace,) = tmp_path.glob("runs/*/trace.json")
    spans = {(span.worker, span.name) for span in read_trace(trace)}
    assert {("learner-0", "offload"), ("learner-0", "onload"), ("driver", "switch")} <= spans


@pytest.mark.slow
def test_a_recipe_is_planned_for_machines_that_are_not_there(capsys):
    (arguments,) = [shlex.split(told) for command, told in COMMANDS if command == "train" and "--dry-run" in told]
    assert train.main(arguments) == 0
    row = re.search(r"`libero_grpo_openvla_oft` \| (.*) on cores \| (.*) GPUs \| (.*) \| (.*) \|", PAGE)
    told = capsys.readouterr().out
    assert f"{row[1]} x sim on cores" in told and f"{row[2]} x policy + learner on gpu:0-7" in told
    assert all(part in told for part in row[3].split(", ")) and f"= {row[4]} of" in told


def test_recipes_of_small_vlas_limit_memory_so_that_policy_and_learner_swap():
    from embodied.config.recipe import load
    from embodied.learners.memory_estimate import estimate

    for recipe in ("maniskill_ppo_openvla_tiny", "libero_ppo_openvla_tiny"):
        config = load([f"recipe={recipe}"]).config
        found, limit = estimate(config), 1e9 * config.cluster.memory_gb
        alone = found.weights + 3 * 4 * found.num_trained  # with gradients and two averages
        assert alone < limit < alone + 0.233e6  # the keys and values of one env row


def test_the_cluster_file_can_be_read(tmp_path):
    (tmp_path / "lab.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.S)[1])
    assert [node.name for node in read_topology(str(tmp_path / "lab.yaml")).nodes] == ["big-0", "big-1", "desk"]


def test_the_map_can_be_planned_and_the_modes_are_all_there_are():
    import yaml

    placement = yaml.safe_load(re.search(r"`placement='(.*?)'`", PAGE)[1])
    assert make_plan(placement, (0, 1), 8).count("sim") == 2
    named = re.findall(r"^\| `(\w+)` \|", PAGE[: PAGE.index("\n## ")], re.M)
    assert set(named) == {*MODES, "auto"}
