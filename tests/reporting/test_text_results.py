"""avg@k, pass@k and their intervals, the files of language policies' results, and comparisons by prompt."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied.core.types import EpisodeResult
from embodied.records.results import COLUMNS, TEXT_COLUMNS, read_results, write_results
from embodied.records.success_stats import compare, pass_at, rate_over_prompts, summarize, wilson


def answered(right, tokens=4, truncated=False, seed=0):
    """The episodes of answers to some prompts: `right` holds a list of outcomes for each."""
    outcomes = [(number, bool(one)) for number, found in enumerate(right) for one in found]
    return [
        EpisodeResult(index, "add2", number, seed, 1, float(one), one, one, None, "", truncated and not one, tokens)
        for index, (number, one) in enumerate(outcomes)
    ]


def text(episodes):
    return summarize(episodes)["overall"]["text"]


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_answer(numbers):
    answers, right, k = numbers
    draws = list(combinations([True] * right + [False] * (answers - right), k))
    assert pass_at(k, right, answers) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_avg_and_pass_are_means_over_prompts():
    # shares 1, 1/4, 0; pass@2: 1, 1 - C(3,2)/C(4,2) = 1/2, 0; pass@4: 1, 1, 0
    found = text(answered([[1, 1, 1, 1], [0, 0, 1, 0], [0, 0, 0, 0]]))
    assert (found["prompts"], found["samples"]) == (3, 4)
    assert found["avg"]["rate"] == found["pass"]["1"]["rate"] == pytest.approx(1.25 / 3)
    assert found["pass"]["2"]["rate"] == pytest.approx(0.5)
    assert found["pass"]["4"]["rate"] == pytest.approx(2 / 3)
    assert list(found["pass"]) == ["1", "2", "4"] and found["pass"]["4"]["of"] == 3


def test_the_interval_of_a_best_answer_is_as_wide_as_there_are_prompts_few():
    found = text(answered([[1] * 19 + [0]] * 20))["pass"]
    assert (
        found["16"]["interval"][0] >= found["8"]["interval"][0] == pytest.approx(wilson(20 * found["8"]["rate"], 20)[0])
    )


def test_a_prompt_with_too_few_answers_counts_for_fewer():
    lost = answered([[1, 0], [0, 1], [0]])
    found = text(lost)
    assert found["pass"]["2"] == rate_over_prompts([1.0, 1.0], 2) and found["pass"]["1"]["of"] == 3


def test_with_one_answer_to_each_prompt_the_interval_is_wilsons():
    overall = summarize(answered([[1]] * 7 + [[0]] * 3))["overall"]
    assert overall["text"]["avg"]["interval"] == overall["success_once"]["interval"] == list(wilson(7, 10))


@pytest.mark.parametrize("right", [[[0] * 4] * 10, [[1] * 4] * 10])
def test_answers_that_are_all_alike_count_as_one_to_each_prompt(right):
    found = text(answered(right))
    assert found["avg"]["interval"] == list(wilson(10 * right[0][0], 10))


def test_several_answers_to_a_prompt_are_less_than_as_many_prompts():
    alike = summarize(answered([[1] * 8] * 5 + [[0] * 8] * 5))["overall"]["success_once"]["interval"]
    mixed = summarize(answered([[1, 0] * 4] * 10))["overall"]["success_once"]["interval"]
    assert alike == pytest.approx(wilson(5, 10)) and mixed == pytest.approx(wilson(40, 80))


@pytest.mark.parametrize(("low", "high"), [(0.4, 0.4), (0.2, 0.2), (4.0, 0.4)])
def test_the_intervals_hold_the_truth_about_as_often_as_they_say(low, high):
    """Prompts as hard as a beta distribution has it, 8 answers each; avg@8 and pass@4."""
    random = np.random.Generator(np.random.Philox(key=[1, 2]))
    truth = low / (low + high)
    missed = 1 - math.prod((high + i) / (low + high + i) for i in range(4))  # 1 - E[(1 - p)^4]
    held = np.zeros(2)
    for _ in range(400):
        right = random.binomial(8, random.beta(low, high, size=60))
        for place, (k, wanted) in enumerate(((1, truth), (4, missed))):
            below, above = rate_over_prompts([pass_at(k, int(c), 8) for c in right], 480)["interval"]
            held[place] += below <= wanted <= above
    assert (held / 400 > 0.91).all() and (held / 400 < 0.995).all(), held


def test_truncation_tokens_and_errors_are_counted():
    found = text(answered([[1, 0], [0, 0]], truncated=True, tokens=6))
    assert (found["truncated"]["count"], found["truncated"]["of"], found["tokens"]) == (3, 4, 6.0)
    long = [EpisodeResult(i, "t", i, 0, 3, 0.0, False, False, truncated=False, tokens=12) for i in range(2)]
    assert text(long)["tokens"] == 4.0  # of an answer
    lost = EpisodeResult(9, "add2", 9, 0, 0, 0.0, None, None, error="sim-0 died")
    assert text([*answered([[1], [0]]), lost]) == text(answered([[1], [0]]))


def test_results_of_text_come_back_as_they_were_written(tmp_path):
    episodes = answered([[1, 0], [0, 1]], truncated=True)
    results = {"policy_version": 7, "protocol": {"eval": {"temperature": 1.0}}, **summarize(episodes)}
    write_results(tmp_path, results, episodes)
    assert read_results(tmp_path) == (results, episodes)
    header, line, *_ = (tmp_path / "episodes.csv").read_text().splitlines()
    assert header.split(",") == [*COLUMNS, *TEXT_COLUMNS] and line == "0,add2,0,0,1,1.0,true,true,,,false,4,"


def test_single_answers_are_compared_as_pairs_whatever_the_seed_of_the_evaluation():
    told = compare(answered([[1], [0], [0]], seed=1), answered([[1], [1], [0]], seed=2)[::-1])
    assert (told["prompts"], told["success_once"]["only_second"], told["success_once"]["both"]) == (3, 1, 1)
    assert "p_value" in told["success_once"]


def test_several_answers_are_compared_by_prompt():
    # shares 1/2, 0 against 1, 1/2, 1: differences 1/2, 1/2 on the two prompts that both have
    told = compare(answered([[1, 0], [0, 0]]), answered([[1, 1], [0, 1], [1, 1]], tokens=6))
    assert (told["prompts"], told["episodes"]) == (2, 4)
    assert told["success_once"] == {"difference": 0.5, "interval": [0.5, 0.5]}
    assert told["return"]["difference"] == 0.5 and told["tokens"]["difference"] == 2.0
    assert told["truncated"]["difference"] == 0.0


def test_prompts_drawn_by_seed_are_those_with_the_same_seed():
    first, other = ([EpisodeResult(0, "t", -1, seed, 1, 1.0, True, True, truncated=False, tokens=1)] for seed in (5, 6))
    assert compare(first, other)["prompts"] == 0 and compare(first, first)["prompts"] == 1
