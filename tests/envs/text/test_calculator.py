"""A calculator in a conversation: what it computes, what it refuses, and that the env scores what comes after it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from embodied.core.types import EpisodeSpec
from embodied.envs import env_class
from embodied.envs.config import EnvConfig
from embodied.envs.text.toys import calculate


@pytest.mark.parametrize(
    ("expression", "result"), [("12*7", "84"), (" 2 + 3 * (4 - 1) ", "11"), ("7 / 2", "3.5"), ("2**10", "1024")]
)
def test_arithmetic_is_computed(expression, result):
    assert calculate(expression) == result


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "elephant",
        "__import__('os').system('ls')",
        "().__class__",
        "9**9**9**9",
        "1/0",
        "1e308*10",
        "(" * 150 + "1" + ")" * 150,
        "1" * 500,
        "\ud800",
    ],
)
def test_anything_else_is_an_error_in_words(expression):
    assert calculate(expression).startswith("error: ")


@given(st.text(alphabet="0123456789+-*/%(). e", max_size=40))
def test_no_expression_raises(expression):
    assert calculate(expression)


@pytest.fixture
def env():
    chosen = TypeAdapter(EnvConfig).validate_python({"name": "sums", "task": "calc2"})
    env = env_class(chosen)(chosen)
    env.reset(EpisodeSpec("calc2", 0, 0, 0))
    return env


def test_a_call_is_answered_by_a_turn_and_what_follows_is_scored(env):
    a, b = env.numbers
    assert env.solution() == f"<calc>{a}*{b}</calc>"
    turn = env.step(f"well, <calc>{a}*{b}</calc>\n")
    assert (turn.said, turn.done, turn.reward, turn.success) == (f"{a * b}\n", False, 0.0, False)
    assert env.solution() == str(a * b)
    turn = env.step(str(a * b))
    assert (turn.done, turn.reward, turn.success) == (True, 1.0, True)


def test_a_wrong_call_is_answered_with_an_error_and_the_conversation_continues(env):
    turn = env.step("<calc>quit()</calc>")
    assert not turn.done and turn.said == "error: not arithmetic\n"


def test_a_call_that_is_not_at_the_end_is_part_of_an_answer(env):
    assert env.step("<calc>1+1</calc> is 2").done and env.step("<calc>1+1</calc").done


def test_a_new_conversation_has_computed_nothing(env):
    env.step("<calc>1+1</calc>")
    env.reset(EpisodeSpec("calc2", 1, 0, 0))
    assert env.solution().startswith("<calc>")


def test_tasks_without_a_calculator_score_a_call_as_an_answer():
    chosen = TypeAdapter(EnvConfig).validate_python({"name": "sums"})
    env = env_class(chosen)(chosen)
    env.reset(EpisodeSpec("add2", 0, 0, 0))
    assert env.step("<calc>1+1</calc>").done
