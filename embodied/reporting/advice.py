"""What to try where nothing succeeds."""

from __future__ import annotations

from embodied.config.merge import recipe_of_task
from embodied.config.recipe import RunConfig
from embodied.envs import env_class

LONGER = 4


def without_success(config: RunConfig) -> str:
    """A line for a run in which no episode of the first third was a success; empty for language models, whose runs
    stop by themselves where there is nothing to learn from."""
    if config.policy.name == "language":
        return ""
    env, run = config.env, config.run
    task = env_class(env).tasks(env)[0]
    recipe = recipe_of_task(task)
    steps = f"run.env_steps={LONGER * run.env_steps}" if run.env_steps else f"run.iterations={LONGER * run.iterations}"
    sparse = getattr(env, "reward_mode", None) == "sparse"
    options = [
        f"the settings found for this task, recipe={recipe}" if recipe and run.name != recipe else "",
        "a shaped reward, env.reward_mode=normalized_dense" if sparse else "",
        "the simulator's own reward, env.reward=own" if env.reward == "success" else "",
        f"a longer run, {steps}",
        "demonstrations to begin with (docs/demonstrations.md)" if run.start_from is None else "",
    ]
    return f"nothing has succeeded in a third of the run; what may help: {'; '.join(filter(None, options))}"
