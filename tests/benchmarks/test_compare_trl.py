"""Both sides do the same work, and the table says what was measured."""

import copy

import pytest

from benchmarks import compare_trl, trl_grpo
from benchmarks.common import resolved
from benchmarks.compare_trl import OVER, RECIPE, Step


def steps(seconds, rewards, tokens=100.0):
    return [Step(seconds, reward, tokens) for reward in rewards]


def test_the_peer_answers_the_prompts_of_our_groups():
    from idle_collector import idle_collector

    from embodied.config.recipe import load

    found = compare_trl.prompts(3, 4)
    assert all(str(sum(map(int, one["prompt"][:-1].split("+")))) == one["answer"] for one in found)
    config = load([f"recipe={RECIPE}", "seed=3"]).config
    collector = idle_collector(config, ("add2",), text=True)
    size, env = config.algo.group_size, compare_trl.new_env(config.env)
    ours = [env.reset(collector.spec_of(number)) for number in range(4 * size)]
    assert ours == [one["prompt"] for one in found for _ in range(size)]


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("algo", "epochs", 2),
        ("algo", "kl_coef", 0.1),
        ("policy", "dtype", "bfloat16"),
        ("pipeline", "schedule", "async"),
    ],
)
def test_a_recipe_that_the_peer_cannot_follow_is_refused(section, key, value):
    config = copy.deepcopy(resolved(RECIPE))
    compare_trl.check_comparable(config)
    config[section][key] = value
    with pytest.raises(ValueError, match=f"{section}.{key}={value}"):
        compare_trl.check_comparable(config)


def test_our_steps_last_from_one_iteration_to_the_next():
    rows = [{"train_s": at, "success_once": 0.5, "engine/tokens": 9.0} for at in (3.0, 4.0, 4.5)]
    assert [step.seconds for step in compare_trl.steps_of(rows)] == [3.0, 1.0, 0.5]


def test_a_step_of_two_processes_takes_as_long_as_the_slower_one_and_has_the_tokens_of_both():
    one, other = ({"seconds": s, "reward": r, "tokens": t} for s, r, t in ((1.0, 0.2, 50), (2.0, 0.4, 60)))
    (step,) = compare_trl.joined([[one], [other]])
    assert (step.seconds, step.tokens) == (2.0, 110) and step.reward == pytest.approx(0.3)


def test_steps_that_warm_up_do_not_count_as_speed_but_as_time():
    run = [*steps(10.0, [0.0] * 3), *steps(0.5, [0.0] * 4), *steps(0.5, [1.0] * 5)]
    assert compare_trl.tokens_per_s(run) == 200.0
    # rewards of steps 3..12: two times 0, ... the mean of ten is 0.5 at the last
    assert compare_trl.seconds_to(run, 0.5) == pytest.approx(30.0 + 9 * 0.5)
    assert compare_trl.seconds_to(run[:-1], 0.5) is None and compare_trl.seconds_to(run[: OVER - 1], 0.0) is None


def test_ours_is_compared_with_the_peer_at_its_best_by_medians():
    flat = [0.6] * 12
    found = {
        "ours": [steps(0.1, flat), steps(0.1, flat), steps(9.0, flat)],
        "TRL, 1 thread": [steps(0.5, flat)] * 3,
        "TRL, 2 threads": [steps(0.4, flat), steps(0.4, flat), steps(0.1, flat)],
    }
    table, ratio = compare_trl.report(found, 0.5).split("\n\n")
    assert ratio == "ours / TRL, 2 threads: 4.00x tokens/s, 4.00x as fast to 50%"
    assert "1,000" in table and "never" not in table


def test_the_peer_rewards_what_ours_does():
    said = ["95", " 95 ", "95\n1", "9", "195", ""]
    assert trl_grpo.rewards(said, ["95"] * 6) == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    env = compare_trl.new_env(resolved_env())
    from embodied.core.types import EpisodeSpec

    env.reset(EpisodeSpec("add2", 0, 0, 0))
    assert [env.step(answer).reward for answer in (env.solution(), "nothing")] == [1.0, 0.0]


def resolved_env():
    from embodied.config.recipe import load

    return load([f"recipe={RECIPE}"]).config.env
