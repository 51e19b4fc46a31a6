"""Which tasks are measured, in which order, what is measured again, and the table."""

import json

import pytest

from benchmarks.common import resolved, settings, still_says
from benchmarks.learning import tasks
from embodied.config.merge import recipe_of_task
from embodied.config.recipe import load
from embodied.config.recipe_files import BY_TASK, recipe_names
from embodied.core.errors import ConfigError

RATE = {"count": 190, "of": 200, "rate": 0.95, "interval": [0.91, 0.97]}
NONE = {"count": 0, "of": 200, "rate": 0.0, "interval": [0.0, 0.02]}


def result(name, seed, once=RATE):
    measured = {"env_steps": 80_000, "train_s": 40.0 + seed, "cpu_s": 120.0, "return": 12.3, "curve": []}
    measured["machine"] = {"load_before": 0.5}
    if name == "begun":
        measured["start"] = {"success_once": once, "success_at_end": once}
    about = {"recipe": name, "seed": seed, "eval_seed": tasks.EVAL_SEED, "task": "Push-v1"}
    return about | measured | {"success_once": once, "success_at_end": once}


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The benchmark without its runs: the list of what was measured fills up."""
    done = []
    monkeypatch.setattr(tasks, "PLACE", tmp_path)
    monkeypatch.setattr(tasks, "environment", dict)
    monkeypatch.setattr(tasks, "measure_seed", lambda name, seed, env: done.append((name, seed)) or result(name, seed))
    return done


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["tasks", *arguments])
    tasks.main()


def test_what_is_cheap_comes_first_and_every_task_before_a_second_seed(measured, monkeypatch):
    steps = [load([f"recipe={name}"]).config.run.env_steps for name in tasks.recipes()]
    assert steps == sorted(steps) and len(steps) == 1 + len(recipe_names(*BY_TASK)) >= 12
    run(monkeypatch, "--tasks", "pullcube_ppo", "pickcube_ppo", "--seeds", "0", "1")
    assert measured == [(name, seed) for seed in (0, 1) for name in ("pullcube_ppo", "pickcube_ppo")]


def test_resume_measures_what_is_missing_or_comes_from_another_recipe(measured, monkeypatch, tmp_path, capsys):
    asked = ("--tasks", "pullcube_ppo", "--resume")
    run(monkeypatch, *asked)
    (tmp_path / "pullcube_ppo-seed-1.json").unlink()
    other = tmp_path / "pullcube_ppo-seed-2.json"
    older = json.loads(other.read_text())
    older["settings"]["algo"]["lr"] = 1.0
    other.write_text(json.dumps(older))
    run(monkeypatch, *asked)
    assert [seed for _, seed in measured] == [0, 1, 2, 1, 2]
    assert json.loads((tmp_path / "pullcube_ppo-seed-1.json").read_text())["commit"]
    assert "pullcube_ppo seed 0: success_once 95%" in capsys.readouterr().out


def test_another_start_measures_again():
    first = tasks.start_of("stackcube_ppo")
    now = {"recipe": "stackcube_ppo", "settings": settings(resolved("stackcube_ppo"))}
    assert first == "stackcube_sft" and not tasks.of_today(now)
    assert tasks.of_today(now | {"start_settings": settings(resolved(first))})
    assert not tasks.of_today(now | {"start_settings": settings(resolved("placesphere_sft"))})


def test_an_option_that_came_since_changes_nothing_unless_a_recipe_chooses_it():
    kept = settings(resolved("pullcube_ppo"))
    assert still_says("pullcube_ppo", kept)
    del kept["env"]["fast_images"], kept["collect"]  # neither of which the recipe sets
    kept["eval"]["failure_videos"] = 99  # which changes no result
    assert still_says("pullcube_ppo", kept)
    assert not still_says("pullcube_ppo", kept, "eval.episodes=7")
    assert not still_says("pullcube_ppo", kept | {"gone": 1})
    del kept["env"]["stagger"]  # which it does
    assert not still_says("pullcube_ppo", kept)


def test_a_row_tells_every_seed_zeros_too():
    done = [result("a", 0), result("a", 1, NONE), result("b", 0, None), result("begun", 0)]
    rows = tasks.report(done).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in rows]
    assert cells[0][2:4] == ["", "95% [91%, 97%], 0% [0%, 2%]"] and cells[0][5:] == ["80,000", "40", "2", "0.5"]
    assert cells[1][3:5] == ["return 12", "-"] and cells[2][2] == "95%"


@pytest.mark.parametrize("name", recipe_names(*BY_TASK))
def test_a_recipe_of_a_task_keeps_its_step_limit_and_is_found_by_it(name):
    env = load([f"recipe={name}"]).config.env
    assert env.max_episode_steps is None
    assert recipe_of_task(env.task) == name
    assert name.removesuffix("_ppo") in env.task.replace("-", "").lower()
    assert env.solver_iterations == (4 if name == "pullcube_ppo" else None)  # which what is held does not bear


def test_the_solver_iterations_of_a_recipe_are_for_its_task_alone():
    assert load(["recipe=maniskill_ppo"]).config.env.solver_iterations == 4
    assert load(["recipe=maniskill_ppo", "env.task=PickCube-v1"]).config.env.solver_iterations is None
    assert (
        load(["recipe=maniskill_ppo", "env.task=PickCube-v1", "env.solver_iterations=8"]).config.env.solver_iterations
        == 8
    )
    with pytest.raises(ConfigError, match=r"solver_iterations=true: should be a number"):
        load(["recipe=maniskill_ppo", "env.solver_iterations=true"])


def test_the_first_screen_names_the_recipe_of_a_task(capsys):
    from embodied.train import main

    pytest.importorskip("mani_skill")
    assert main(["recipe=maniskill_ppo", "env.task=PullCube-v1", "cluster.machines=1xCPU", "--dry-run"]) == 0
    assert "recipe=pullcube_ppo has settings that were found for this task" in " ".join(capsys.readouterr().out.split())
    assert main(["recipe=pullcube_ppo", "run.name=mine", "cluster.machines=1xCPU", "--dry-run"]) == 0
    assert "has settings" not in capsys.readouterr().out
