"""Asking a policy worker that may be replaced between question and answer."""

from collections import deque

import numpy as np

from embodied.core.types import ActReply, AskAgain, EpisodeSpec
from embodied.envs.episode_player import PolicyClient
from embodied.envs.evaluation import num_startable


class Fifo(deque):
    """As much of a channel as a line uses."""

    put = deque.append
    get = deque.popleft


def reply(source, number):
    return ActReply(source, number, None, np.zeros(1), None, version=0)


def test_an_answer_belongs_to_the_last_question_of_this_round():
    requests, replies = Fifo(), Fifo()
    line = PolicyClient("sim-0/0#2", requests, replies)
    line.ask(value_only=True)
    line.ask()
    replies.extend([reply("sim-0/0#1", 2), AskAgain("sim-0/0#1"), reply("sim-0/0#2", 1), reply("sim-0/0#2", 2)])
    answer = line.answer()
    assert (answer.source, answer.number) == ("sim-0/0#2", 2)
    assert [request.number for request in requests] == [1, 2]


def test_the_question_is_asked_again_and_a_second_answer_ignored():
    requests, replies = Fifo(), Fifo()
    line = PolicyClient("sim-0/0#2", requests, replies)
    line.ask(value_only=True)
    replies.extend([AskAgain("sim-0/0#2"), reply("sim-0/0#2", 1), reply("sim-0/0#2", 1)])
    assert line.answer().number == 1
    assert requests[0] is requests[1]
    line.ask()
    replies.append(reply("sim-0/0#2", 2))
    assert line.answer().number == 2


def test_another_worker_is_asked_the_last_question_and_all_that_follow():
    requests, others, replies = Fifo(), Fifo(), Fifo()
    line = PolicyClient("sim-0/0#2", requests, replies)
    line.ask()
    replies.extend([AskAgain("sim-0/0#2", others), reply("sim-0/0#2", 1), reply("sim-0/0#2", 1)])
    assert line.answer().number == 1  # of whichever worker comes first
    line.ask()
    replies.extend([AskAgain("sim-0/0#2"), reply("sim-0/0#2", 2)])
    assert line.answer().number == 2
    assert [request.number for request in requests] == [1]
    assert [request.number for request in others] == [1, 2, 2]


def test_what_was_seen_before_goes_along_only_when_asked_again():
    requests, replies = Fifo(), Fifo()
    line, seen = PolicyClient("sim-0/0#3", requests, replies), {"state": np.zeros(1)}
    line.ask(same_as=("sim-0/0#2", 9), obs=seen)
    replies.extend([AskAgain("sim-0/0#3"), reply("sim-0/0#3", 1)])
    line.answer()
    assert [(request.obs, request.same_as) for request in requests] == [(None, ("sim-0/0#2", 9)), (seen, None)]


def test_suspects_wait_until_nothing_else_is_played():
    episodes = deque(EpisodeSpec("reach", -1, 0, index) for index in range(4))
    alone = frozenset({2, 3})
    playing = np.array([True, False, False])
    assert num_startable(episodes, ~playing & playing, alone) == 2
    while episodes[0].index not in alone:
        episodes.popleft()
    assert num_startable(episodes, playing, alone) == 0
    assert num_startable(episodes, ~playing & playing, alone) == 1
    assert num_startable(deque(), playing, alone) == 0
