"""Recipes with settings that were found for one task."""

import pytest

from embodied.config.merge import recipe_of_task
from embodied.config.recipe import load
from embodied.config.recipe_files import BY_TASK, recipe_names
from embodied.core.errors import ConfigError


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
