"""Tasks of reasoning_gym: drawn by number or seed, held out, and scored without pay for containing the answer."""

import pytest
from needed import requires
from pydantic import TypeAdapter

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class
from embodied.envs.config import EnvConfig
from embodied.envs.reasoning_gym import env as reasoning_gym
from embodied.envs.text.scoring_process import Scorer
from embodied.envs.text.text_env_checker import check_text_env

requires("reasoning_gym")


def config(task="chain_sum", **options):
    name = f"reasoning_gym:{task}"
    return TypeAdapter(EnvConfig).validate_python({"name": name, "score_s": 60, **options})


@pytest.fixture(scope="module")
def scorer():
    scorer = Scorer(reasoning_gym.SCORES)
    yield scorer
    scorer.close()


@pytest.fixture
def opened(scorer, monkeypatch):
    """Envs that share one process, which takes seconds to start."""
    monkeypatch.setattr(reasoning_gym, "Scorers", lambda kind: scorer)

    def open_env(chosen):
        kind = env_class(chosen)
        kind.check(chosen)
        return kind(chosen, kind.load(chosen))

    return open_env


def spec(number=-1, seed=0):
    return EpisodeSpec("task", number, seed, 0)


def test_questions_come_with_instructions_and_are_right_only_in_tags(opened):
    env = opened(config())
    system, user = env.reset(spec(0))
    assert "<answer>" in system["content"] and user["role"] == "user"
    right = env.entry["answer"]
    assert env.step(f"<answer>7</answer> no: <answer> {right} </answer>").success
    assert env.step(env.solution()).reward == 1.0
    assert env.step(right).facts["problem"] == "no <answer> tag"
    assert env.step(f"<answer>{right}</answer> and <answer>1.5</answer>").reward == 0.0


@pytest.mark.parametrize("partial", [False, True])
def test_an_answer_that_contains_the_right_one_is_paid_nothing(opened, partial):
    env = opened(config("letter_counting", partial_scores=partial))
    env.reset(spec(0))
    turn = env.step(f"<answer>12 {env.entry['answer']} 13 14</answer>")
    assert turn.reward == 0.0 and not turn.success


def test_scores_of_the_task_itself_are_paid_where_that_is_asked_for(opened):
    env = opened(config("spell_backward", kwargs={"min_word_len": 6}, partial_scores=True))
    env.reset(spec(0))
    nearly = env.entry["answer"][:-1] + "?"
    turn = env.step(f"<answer>{nearly}</answer>")
    assert 0.0 < turn.reward < 1.0 and not turn.success
    strict = opened(config("spell_backward", kwargs={"min_word_len": 6}))
    strict.reset(spec(0))
    assert strict.step(f"<answer>{nearly}</answer>").reward == 0.0


def test_held_out_questions_are_never_trained_on_though_the_task_has_few(opened):
    env = opened(config(kwargs={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}))
    held_out = {env.reset(spec(number))[1]["content"] for number in range(200)}
    training = [env.reset(spec(seed=seed))[1]["content"] for seed in range(1000)]
    assert 50 < len(held_out) < 180, "questions repeat, so that disjoint seeds alone would not do"
    assert not held_out & {*training} and len({*training}) > 20


def test_an_unknown_reasoning_gym_task_is_refused_with_the_nearest_name():
    chosen = config("chain_sun")
    with pytest.raises(ConfigError, match="no task 'chain_sun'; did you mean 'chain_sum'"):
        env_class(chosen).check(chosen)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"min_term": 2}, "min_term"),
        ({"min_terms": 0}, "AssertionError"),
        ({"seed": 3}, "seed is chosen by env.name=reasoning_gym"),
    ],
)
def test_options_that_the_task_does_not_take_are_refused(kwargs, message):
    chosen = config(kwargs=kwargs)
    with pytest.raises(ConfigError, match=message):
        env_class(chosen).check(chosen)


def test_a_composite_plays_several_tasks(opened):
    parts = [{"name": "chain_sum", "weight": 1, "config": {}}, {"name": "spell_backward", "weight": 1}]
    env = opened(config("composite", kwargs={"datasets": parts}))
    kinds = set()
    for number in range(10):
        env.reset(spec(number))
        kinds.add(env.entry["metadata"]["source_dataset"])
        assert env.step(env.solution()).success
    assert kinds == {"chain_sum", "spell_backward"}


@pytest.mark.parametrize("task", ["chain_sum", "simple_equations"])
def test_reasoning_gym_tasks_keep_the_contract(task):
    chosen = config(task)
    check_text_env(env_class(chosen), chosen)
