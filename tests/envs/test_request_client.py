"""Asking policy workers that may die, leave or join between question and answer."""

from collections import deque
from dataclasses import replace

import numpy as np

from embodied.core.request_queue import PolicyClient
from embodied.core.types import ActReply, Answerers, EpisodeSpec, PolicyOutput
from embodied.envs.player import num_startable

SOURCE = "sim-0/0#2"


class Fifo(deque):
    """As much of a channel as a client uses."""

    put = deque.append

    def get(self, timeout_s=None):
        return self.popleft()


class Asking:
    """A stage of four rows and its client; `tell` which workers answer from now on, each through its own channel."""

    def __init__(self, *names):
        self.ends = {}
        self.replies = Fifo()
        self.client = PolicyClient(replace(self.answerers(*names), replies=self.replies))

    def answerers(self, *names, others=()):
        self.ends |= {name: Fifo() for name in names if name not in self.ends}
        return Answerers(SOURCE, {name: self.ends[name] for name in names}, frozenset(others))

    def tell(self, *names, others=()):
        self.replies.put(self.answerers(*names, others=others))

    def ask(self, **what):
        rows = np.arange(4)
        self.client.ask({"state": rows[:, None] * 1.0}, rows, rows, **what)

    def reply(self, name):
        """This worker answers the next request that it has: as actions the states that it was shown."""
        request = self.ends[name].popleft()
        final = None if request.final_obs is None else request.final_obs["state"][:, 0]
        output = PolicyOutput(*[request.obs["state"][:, None]] * 2, request.obs["state"][:, 0])
        self.replies.put(ActReply(SOURCE, request.key, output, output.values, final, 3))

    def has(self, name):
        return [request.key for request in self.ends[name]]


def test_an_answer_belongs_to_the_last_question_of_this_round_and_a_second_one_is_ignored():
    asking = Asking("a")
    asking.ask()
    (first,) = asking.ends["a"]
    asking.reply("a")
    asking.client.answer()
    asking.ask()
    late = ActReply(SOURCE, first.key, None, np.zeros(4), None, 3)
    asking.replies.extend([ActReply("sim-0/0#1", (2, 0, 4), None, np.zeros(4), None, 3), late])
    asking.reply("a")
    answer = asking.client.answer()
    assert answer.key == (2, 0, 4) and answer.output is not None


def test_the_request_to_a_dead_worker_is_sent_again_to_its_successor():
    asking = Asking("a")
    asking.ask()
    asking.tell("a again")
    asking.replies.put(Answerers(SOURCE, {}))  # until then nobody answers
    while asking.replies:
        asking.client.get()
    asking.tell("a again")
    asking.client.get()
    assert asking.has("a") == [(1, 0, 4)] and asking.has("a again") == [(1, 0, 4)] * 2
    asking.reply("a again")
    assert asking.client.answer().key == (1, 0, 4)


def test_workers_answer_parts_of_a_request_in_any_order_each_with_its_final_observations():
    asking = Asking("a", "b")
    asking.ask(final_obs={"state": np.array([[10.0], [30.0]])}, final_rows=np.array([1, 3]))
    assert (asking.has("a"), asking.has("b")) == ([(1, 0, 2)], [(1, 2, 2)])
    assert [asking.ends[name][0].final_rows.tolist() for name in "ab"] == [[1], [1]]
    asking.reply("b")
    asking.reply("a")
    answer = asking.client.answer()
    assert answer.values.tolist() == [0, 1, 2, 3] and answer.final_values.tolist() == [10, 30]
    assert answer.output.actions[:, 0, 0].tolist() == [0, 1, 2, 3]


def test_a_part_of_a_worker_that_died_is_cut_anew_and_one_that_leaves_still_answers():
    asking = Asking("a", "b")
    asking.ask()
    asking.tell("c", "d", others=["b"])
    asking.client.get()
    assert (asking.has("c"), asking.has("d")) == ([(1, 0, 1)], [(1, 1, 1)])
    for name in ("d", "a", "b", "c"):  # the late answer of a is to a part that nobody has now
        asking.reply(name)
    assert asking.client.answer().values.tolist() == [0, 1, 2, 3]


def test_episodes_marked_as_alone_start_only_when_no_row_plays():
    episodes = deque(EpisodeSpec("reach", -1, 0, index) for index in range(4))
    alone = frozenset({2, 3})
    playing = np.array([True, False, False])
    assert num_startable(episodes, ~playing & playing, alone) == 2
    while episodes[0].index not in alone:
        episodes.popleft()
    assert num_startable(episodes, playing, alone) == 0
    assert num_startable(episodes, ~playing & playing, alone) == 1
    assert num_startable(deque(), playing, alone) == 0
