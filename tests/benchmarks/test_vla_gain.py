"""The recipes of the VLA benchmark belong together; the runs themselves take too long for a test."""

import pytest

from benchmarks.learning.vla_gain import MODELS
from embodied.config.recipe import load


@pytest.mark.parametrize("name", MODELS)
def test_grpo_begins_with_what_imitation_leaves(name):
    model = MODELS[name]
    imitating = load([f"recipe={model.sft}", "sft.data=demos"], entry="sft").config
    going_on = load([f"recipe={model.grpo}"]).config
    assert imitating.policy.model_copy(update={"keyframes": ()}) == going_on.policy  # RL never asks the head for them
    assert imitating.eval.protocol == going_on.eval.protocol
    assert going_on.env.reward == ("success" if name == "carrot_oft" else "difference") and going_on.algo.name == "grpo"
    same = "task max_episode_steps action_units cameras image_size image_region fast_images state on_success".split()
    assert all(getattr(imitating.env, key) == getattr(going_on.env, key) for key in same)
