"""How answers are drawn: what is refused in training, where losses would learn from other log-probs, and what does
nothing."""

import pytest

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.run import launch

SUMS = ["recipe=sums_grpo", "run.start_from=null"]
SERVER = ["policy.engine=http", "policy.url=http://127.0.0.1:1", "policy.weights=/dev/shm"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([*SUMS, "policy.top_p=0.9"], "unknown key: rollouts draw from all tokens.*eval.top_p truncates"),
        ([*SUMS, "algo.top_k=5"], "unknown key: rollouts draw from all tokens.*eval.top_k truncates"),
        ([*SUMS, "policy.temperature=0"], "policy.temperature"),
        ([*SUMS, *SERVER, "policy.temperature=0.8"], "policy.engine=http gives those of temperature 1"),
        ([*SUMS, "eval.top_p=0.9", "eval.temperature=0"], "eval.top_p=0.9 has no effect.*the likeliest"),
        ([*SUMS, "eval.top_k=1", "eval.temperature=0"], "eval.top_k=1 has no effect"),
        (
            ["recipe=pointmass_ppo", "eval.top_k=5"],
            "eval.top_k=5 has no effect, since env.name=pointmass has no tokens",
        ),
    ],
)
def test_sampling_that_cannot_be_learned_from_or_does_nothing_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        launch.planned(load(words).config, dry=True)


def test_evaluations_may_be_truncated_and_rollouts_sharper():
    loaded = load([*SUMS, "eval.top_p=0.9", "eval.top_k=5", "eval.temperature=0.6", "policy.temperature=0.8"])
    launch.planned(loaded.config, dry=True)
