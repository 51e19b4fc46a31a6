"""The words of other toolkits are answered with our keys, and misspelt keys with the nearest by their last part."""

import pytest

from embodied.config.key_tree import leaves, root
from embodied.config.recipe import RunConfig, load
from embodied.config.suggestions import OURS, USUAL
from embodied.core.errors import ConfigError

KEYS = {key for key, _, _ in leaves(root(RunConfig))}


def answer(*arguments, entry="train"):
    with pytest.raises(ConfigError) as told:
        load(list(arguments), entry)
    return str(told.value)


def test_the_table_names_keys_there_are_and_no_word_is_a_whole_key():
    assert {key for keys in OURS for key in keys.split()} <= KEYS
    assert not USUAL.keys() & KEYS
    words = " ".join(OURS.values()).split()
    assert len(words) == len(set(words))


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("learning_rate", "'algo.lr'"),
        ("algo.learning_rat", "'algo.lr'"),
        ("n_envs", "'env.num_envs'"),
        ("num_envs", "'env.num_envs'"),
        ("eval.num_env", "'eval.num_envs'"),
        ("gamma", "'algo.gamma'"),
        ("batch_size", "'algo.minibatch_size'"),
        ("total_timesteps", "'run.env_steps'"),
        ("env_id", "'env.task'"),
        ("SEED", "'seed'"),
        ("random_seed", "'seed'"),
        ("clip_range", "'algo.clip_low' or 'algo.clip_high'"),
        ("policy.hiden", "'policy.hidden'"),
        ("recipee", "'recipe'"),
    ],
)
def test_a_key_of_another_toolkit_or_misspelt_is_answered_with_ours(key, ours):
    assert answer("recipe=pointmass_ppo", f"{key}=3") == f"{key}: unknown key, did you mean {ours}? (from command line)"


def test_only_keys_that_have_an_effect_are_named():
    assert "'sft.lr'?" in answer("recipe=sums_sft", "learning_rate=3", entry="sft")
    assert "did you mean" not in answer("recipe=pointmass_ppo", "max_new_tokens=3")
    assert "'policy.max_tokens'?" in answer("recipe=sums_grpo", "max_new_tokens=3")
    assert "'checkpoint'?" in answer("chekpoint=random", "env.name=pointmass", entry="evaluate")
