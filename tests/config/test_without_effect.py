"""Keys that would change nothing are refused in a line that says why, values of a wrong shape in one that helps."""

import pytest

from embodied.config.recipe import load
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.run import launch


def refused(*arguments, entry="train"):
    with pytest.raises(ConfigError) as caught:
        launch.planned(load([*arguments], entry).config, dry=True)
    (line,) = str(caught.value).splitlines()
    return line


def test_a_key_of_another_command_is_answered_with_that_command():
    line = refused("recipe=sums_grpo", "sft.data=examples.jsonl")
    assert line == "sft.data has no effect in train; leave it out, or run python -m embodied.sft"
    assert "or run python -m embodied.collect" in refused("recipe=pointmass_ppo", "collect.noise=1")
    assert refused("recipe=sums_sft", "algo.lr=1", entry="sft").endswith("has no effect in sft; leave it out")


GRAPHS = {
    "conversations have any size; try learner.graphs=auto": ["recipe=sums_grpo"],
    "groups of pipeline.schedule=periodic have any size": [
        *("recipe=pointmass_grpo", "pipeline.schedule=periodic", "algo.minibatch_size=null", "algo.epochs=1"),
    ],
    "records steps that one learner computes as a whole, but learner.shard is set": [
        *("recipe=pointmass_ppo", "learner.shard=true"),
    ],
}


@pytest.mark.parametrize("told", GRAPHS)
def test_steps_of_unknown_sizes_are_not_recorded(told):
    assert told in refused(*GRAPHS[told], "learner.graphs=on")


def test_gradients_of_whole_learners_are_summed_once_a_step():
    line = refused("recipe=pointmass_ppo", "learner.reduce_each_pass=true")
    assert "leave it out, or set learner.shard=true" in line


@pytest.mark.parametrize(
    ("recipe", "name"), [("sums_grpo", "language"), ("pointmass_ppo_pi0_tiny", "pi0")], ids=["language", "pi0"]
)
def test_a_dry_run_refuses_a_folder_without_a_model_or_its_weights(recipe, name, tmp_path):
    asked = [f"recipe={recipe}", f"policy.pretrained={tmp_path}"]
    asked += ["run.start_from=null"] if name == "language" else []
    assert f"policy.pretrained={tmp_path}: config.json is missing" in found(asked)
    (tmp_path / "config.json").write_text("{}")
    assert f"policy.pretrained={tmp_path}: the model has no weights there" in found(asked)


def found(asked):
    with pytest.raises(EmbodiedError) as caught:
        launch.planned(load(asked).config, dry=True)
    return str(caught.value)
