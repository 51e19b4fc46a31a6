"""Several engines write the answers to one queue of prompts: each has as many as it has room for, none is lost and none
is asked twice without need."""

import numpy as np
import pytest

from embodied.core.conversations import Prompt, PromptBatch, Vacancy
from embodied.workflows.prompt_routing import PromptQueue


def asked(source, *numbers):
    return PromptBatch(source, tuple(Prompt(number, number, "?") for number in numbers))


def handed(desk, *engines):
    """What engines are given now: (source, number of the prompt)."""
    found = desk.hand_out([*engines])
    return {
        name: [(batch.source, prompt.number) for batch in batches for prompt in batch.prompts]
        for name, batches in found.items()
    }


@pytest.fixture
def desk():
    """Two engines with room for three each, which have nothing to do."""
    found = PromptQueue()
    for name in "ab":
        found.make_room(Vacancy(name, 3))
    return found


def test_engines_have_about_as_many_each_and_neighbours_stay_together(desk):
    desk.add(asked("s", 1, 2, 3))
    desk.add(asked("t", 1))
    assert handed(desk, "a", "b") == {"a": [("s", 1), ("s", 2)], "b": [("s", 3), ("t", 1)]}


def test_an_engine_has_no_more_than_it_has_room_for_and_the_next_when_it_has_answered(desk):
    desk.add(asked("s", *range(8)))
    assert {name: len(mine) for name, mine in handed(desk, "a", "b").items()} == {"a": 3, "b": 3}
    assert not handed(desk, "a", "b")
    desk.make_room(Vacancy("b", 2))
    assert handed(desk, "a", "b") == {"b": [("s", 6), ("s", 7)]}


def test_who_has_less_in_hand_is_given_more(desk):
    desk.add(asked("s", *range(6)))
    handed(desk, "a", "b")
    desk.make_room(Vacancy("a", 1))
    desk.make_room(Vacancy("b", 3))
    desk.add(asked("s", 6, 7, 8))
    assert handed(desk, "a", "b") == {"a": [("s", 6)], "b": [("s", 7), ("s", 8)]}
    assert desk.open == {"a": 3, "b": 2}


def test_nothing_is_handed_out_before_all_that_the_round_begins_with_have_spoken():
    desk = PromptQueue()
    desk.first = {"a", "b"}
    desk.make_room(Vacancy("a", 9))
    desk.add(asked("s", 1, 2))
    assert not handed(desk, "a", "b")
    assert handed(desk, "a") == {"a": [("s", 1), ("s", 2)]}  # b has left


def test_who_comes_later_keeps_nobody_waiting(desk):
    desk.add(asked("s", 1))
    assert handed(desk, "a", "b", "late") == {"a": [("s", 1)]}


def test_what_an_engine_that_died_had_is_asked_again_once_and_nothing_else(desk):
    desk.add(asked("s", *range(8)))
    had = handed(desk, "a", "b")
    desk.make_room(Vacancy("b", 1))  # it has answered one
    desk.make_room(Vacancy("c", 3))
    assert desk.forget({"b", "c"}) and not desk.forget({"b", "c"})
    for _ in range(2):
        desk.add(asked("s", *range(8)))
    again = [one for mine in handed(desk, "b", "c").values() for one in mine]
    desk.make_room(Vacancy("c", 3))
    again += [one for mine in handed(desk, "b", "c").values() for one in mine]
    assert sorted(again) == sorted([*had["a"], ("s", 6), ("s", 7)])


def test_what_an_engine_says_that_has_left_is_of_no_use(desk):
    desk.forget({"b"})
    desk.make_room(Vacancy("a", 3))
    desk.add(asked("s", 1, 2))
    assert handed(desk, "b") == {"b": [("s", 1), ("s", 2)]}


def test_prompts_of_sims_that_ask_no_more_are_dropped(desk):
    desk.add(asked("s", 1))
    desk.add(asked("t", 1))
    desk.keep(lambda source: source == "t")
    assert handed(desk, "a", "b") == {"a": [("t", 1)]}


def test_a_conversation_goes_on_where_its_last_turn_was_written(desk):
    desk.add(PromptBatch("sim-0", tuple(Prompt(i, i, "", has_more_turns=True) for i in range(4))))
    before = desk.hand_out(["a", "b"])
    desk.make_room(Vacancy("b", 2))  # its two have ended, and go on with another turn
    wrote = [prompt.episode for batch in before["b"] for prompt in batch.prompts]
    tokens = np.array([1, 2])
    desk.add(PromptBatch("sim-0", tuple(Prompt(10 + i, i, "", tokens) for i in reversed(wrote))))
    found = desk.hand_out(["a", "b"])
    assert {name: [p.episode for batch in batches for p in batch.prompts] for name, batches in found.items()} == {
        "b": wrote[::-1]
    }
