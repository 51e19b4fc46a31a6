"""Prompts that wait in the driver for several language engines."""

from queue import SimpleQueue

import pytest

from embodied.core.conversations import Prompt, PromptBatch, Vacancy
from embodied.workflows.prompt_queue import PromptQueue

PLAYERS, ENGINES = ("sim-0/0#1", "sim-1/0#1"), ("policy-0", "policy-1")


@pytest.fixture
def engines():
    return {name: SimpleQueue() for name in ENGINES}


@pytest.fixture
def asked():
    """Two players have put three prompts each, and two engines have room for three each."""
    channel = SimpleQueue()
    for player in PLAYERS:
        channel.put(PromptBatch(player, tuple(Prompt(number, number, "1+1=") for number in range(3))))
    for name in ENGINES:
        channel.put(Vacancy(name, 3))
    return PromptQueue(channel, ENGINES)


def received(engine):
    batches = [engine.get() for _ in range(engine.qsize())]
    return [(batch.source, prompt.number) for batch in batches for prompt in batch.prompts]


def test_no_prompt_is_sent_before_all_first_engines_have_reported_room(asked, engines):
    asked.channel.put(asked.channel.get())
    late = PromptQueue(asked.channel, (*ENGINES, "policy-2"))
    late.hand_out(engines | {"policy-2": SimpleQueue()}, (*ENGINES, "policy-2"), PLAYERS)
    assert not any(map(received, engines.values()))


def test_prompts_of_an_engine_that_has_died_go_to_the_other_first(asked, engines):
    asked.hand_out(engines, ENGINES, PLAYERS)
    lost, kept = (received(engines[name]) for name in ENGINES)
    assert len(lost) == len(kept) == 3 and {*lost, *kept} == {(p, n) for p in PLAYERS for n in range(3)}
    asked.channel.put(Vacancy(ENGINES[1], 3, tuple(kept)))
    asked.hand_out({ENGINES[1]: engines[ENGINES[1]]}, ENGINES[1:], PLAYERS)
    assert received(engines[ENGINES[1]]) == lost


def test_prompts_of_a_player_that_died_with_its_engine_are_answered_by_nobody(asked, engines):
    asked.hand_out(engines, ENGINES, PLAYERS)
    lost, kept = (received(engines[name]) for name in ENGINES)
    asked.channel.put(Vacancy(ENGINES[1], 3, tuple(kept)))
    asked.hand_out({ENGINES[1]: engines[ENGINES[1]]}, ENGINES[1:], PLAYERS[1:])
    assert received(engines[ENGINES[1]]) == [prompt for prompt in lost if prompt[0] == PLAYERS[1]]
    assert not asked.queue.unanswered - len([prompt for prompt in lost if prompt[0] == PLAYERS[1]])
