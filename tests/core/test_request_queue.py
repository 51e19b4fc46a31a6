"""Requests wait until a worker takes them: whoever dies, joins or leaves, every row is answered once."""

import random
from dataclasses import dataclass
from math import inf

import pytest

from embodied.core.request_queue import RequestQueue, Waiting, level


@dataclass(frozen=True)
class Rows:
    """Rows of a request."""

    number: int
    which: range

    @property
    def key(self):
        return self.number, self.which

    @property
    def rows(self):
        return len(self.which)

    def for_rows(self, rows):
        return Rows(self.number, self.which[rows.start : rows.stop])


def waiting(number, rows):
    request = Rows(number, range(rows))
    return Waiting(request.key, request, rows)


def prompts(*numbers, goes_on=False):
    return [Waiting(number, number, 1, conversation=number % 100, goes_on=goes_on) for number in numbers]


def taken(queue):
    return {worker: [one.request for one in mine] for worker, mine in queue.take().items()}


@pytest.fixture
def queue():
    """Two workers with room for three each, which have nothing to do."""
    found = RequestQueue()
    found.workers({"a": 3, "b": 3})
    return found


def test_one_request_feeds_all_workers_and_neighbours_stay_together():
    queue = RequestQueue()
    queue.workers({"a": inf, "b": inf, "c": inf})
    queue.put(waiting(1, 8))
    found = {worker: [list(part.which) for part in parts] for worker, parts in taken(queue).items()}
    assert found == {"a": [[0, 1, 2]], "b": [[3, 4, 5]], "c": [[6, 7]]}


def test_workers_have_about_as_many_each_and_no_more_than_they_have_room_for(queue):
    queue.put(*prompts(*range(8)))
    assert taken(queue) == {"a": [0, 1, 2], "b": [3, 4, 5]}
    assert not taken(queue)
    assert queue.take_answer(0) and queue.take_answer(4) and queue.take_answer(5)
    assert taken(queue) == {"a": [6], "b": [7]}
    assert (queue.load("a"), queue.load("b")) == (3, 2)


@pytest.mark.parametrize(
    ("loads", "rows", "given"),
    [((0, 3, 3), 5, (4, 1, 0)), ((0, 0), 3, (2, 1)), ((4, 4), 3, (0, 0)), ((1, 0, 2), 1, (0, 1, 0)), ((0,), 9, (4,))],
)
def test_workers_with_less_load_are_given_more_rows(loads, rows, given):
    named = dict(zip("abc", loads, strict=False))
    assert tuple(level(named, dict.fromkeys(named, 4), rows).values()) == given


def test_requests_of_a_dead_worker_come_first_and_a_leaving_worker_still_answers(queue):
    queue.put(*prompts(*range(8)))
    taken(queue)
    queue.workers({"c": 9}, others={"b"})
    assert taken(queue) == {"c": [0, 1, 2, 6, 7]}
    assert queue.take_answer(3)
    queue.workers({"c": 9})  # b has left without an answer to two
    assert taken(queue) == {"c": [4, 5]}
    assert queue.take_answer(4) and not queue.take_answer(4) and not queue.take_answer(3)


def test_requests_that_nobody_waits_for_any_more_are_dropped(queue):
    queue.put(*prompts(1, 2, 3))
    queue.drop(lambda one: one.key == 2)
    assert taken(queue) == {"a": [1], "b": [3]}


def test_requests_wait_while_no_worker_takes_part():
    queue = RequestQueue()
    queue.put(*prompts(1, 2))
    assert not taken(queue)
    queue.workers({"a": 1})
    assert taken(queue) == {"a": [1]}


def test_a_conversation_goes_on_where_its_last_turn_was_written_if_there_is_room(queue):
    queue.put(*prompts(0, 1, 2, 3, goes_on=True))
    assert taken(queue) == {"a": [0, 1], "b": [2, 3]}
    assert queue.take_answer(2) and queue.take_answer(3)
    queue.put(*prompts(103, 102))
    assert taken(queue) == {"b": [103, 102]}
    queue.workers({"a": 9}, others={"b"})
    assert queue.take_answer(102)
    queue.put(*prompts(202))
    assert taken(queue) == {"a": [202]}


@pytest.mark.parametrize("seed", range(20))
def test_every_row_is_answered_once_whoever_dies_joins_or_leaves(seed):
    draw, queue = random.Random(seed), RequestQueue()
    lives, here, leaving, inbox, answered = 0, [], [], {}, []

    def tell():
        queue.workers(dict.fromkeys(here, inf), leaving)
        for worker, parts in queue.take().items():
            inbox.setdefault(worker, []).extend(parts)

    for number in range(30):
        queue.put(waiting(number, draw.randint(1, 9)))
        whole = {(number, row) for row in queue.waiting[-1].request.which}
        tell()
        while not whole <= set(answered):
            event = draw.choice(["join", "die", "leave", "left", "answer", "answer", "answer"])
            if event == "join" and len(here) < 3:
                lives += 1
                here.append(f"worker-{lives}")
            elif event == "die" and here + leaving:
                gone = draw.choice(here + leaving)
                here, leaving = ([w for w in group if w != gone] for group in (here, leaving))
            elif event == "leave" and here:
                leaving.append(here.pop())
            elif event == "left" and leaving:
                leaving.pop(0)
            elif event == "answer" and (able := [worker for worker, mine in inbox.items() if mine]):
                part = inbox[draw.choice(able)].pop(0)  # of one that has died, too: it comes late
                if queue.take_answer(part.key):
                    answered += [(part.request.number, row) for row in part.request.which]
            tell()
        assert len(answered) == len({*answered})
