"""Conversations as the sim worker holds them, with a policy that is played by the test."""

import csv
import io
import threading
from collections import deque
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from embodied.core.conversations import Completion, CompletionBatch
from embodied.core.errors import DeadlineExceeded, EmbodiedError
from embodied.core.types import RESTART, Answerers, EpisodeSpec, Job, decisions_of, join
from embodied.envs.config import ExternalEnvConfig
from embodied.envs.player import Tally
from embodied.envs.text.text_env import TextEnv, Turn
from embodied.envs.text.text_worker import (
    ConversationClient,
    EnvsOfConfig,
    Part,
    SideBySide,
    play_conversations,
    trajectory_of,
)
from embodied.records.results import episode, episodes_csv
from embodied.records.success_stats import summarize
from embodied.runtime import Timers

CONFIG = ExternalEnvConfig(name="my_pkg.mod:Counting", max_episode_steps=3)


class Counting(TextEnv):
    """Asks for a number, then for the next one, until an answer is wrong."""

    def reset(self, spec):
        self.expected = spec.index
        return f"{spec.index}?"

    def step(self, answer):
        right = answer == str(self.expected)
        self.expected += 1
        return Turn(float(right), f"{self.expected}?" if right else (), success=right, done=not right)


class Queue(deque):
    """A channel whose other end is the test."""

    def put(self, item):
        self.append(item)

    def get(self):
        return self.popleft()


class Policy:
    """Answers what is in its queue, the newest first; tokens are the codes of characters."""

    def __init__(self):
        self.requests, self.replies = Queue(), Queue()
        self.route = (Answerers("sim-0/0#1", {"policy": self.requests}, replies=self.replies),)
        self.asked, self.say = [], lambda prompt: prompt.said.rstrip("?")

    def answer(self, **changes):
        batch = self.requests.pop()
        self.asked.append(batch)
        self.replies.put(CompletionBatch(batch.source, tuple(self.complete(p, **changes) for p in batch.prompts)))

    def complete(self, prompt, **changes):
        said, text = [ord(one) for one in prompt.said], self.say(prompt)
        tokens = np.array([*said, *map(ord, text)], np.int32)
        known = {"number": prompt.number, "tokens": tokens, "logprobs": np.full(len(text), -0.5, np.float32)}
        return replace(Completion(**known, version=4, text=text), **changes)


def held(policy, indices, rows=2, meanwhile=None, kind=None, most=1, config=CONFIG, **more):
    """All conversations, by episode, in the order in which they ended; at most so many env steps at the same time."""
    specs = [EpisodeSpec("counting", -1, 7, index) for index in indices]
    talk, get = ConversationClient(policy.route, Timers()), policy.replies.get

    def answered(timeout_s=None):
        while not policy.replies:
            if timeout_s is not None and not policy.requests:
                raise DeadlineExceeded("nothing is asked")
            (meanwhile or policy.answer)()
        return get()

    policy.replies.get = answered
    part = Part(EnvsOfConfig(kind or Counting, config, None), Tally(Job(specs, **more)), rows)
    playing = play_conversations([part], talk, Timers(), steps_of(most))
    return {one.spec.index: one for ended in playing for one in ended}


def steps_of(most):
    """At most so many at the same time, all of which are taken for long ones."""
    steps = SideBySide(most, quick_s=-1)
    steps.seconds.extend([0.0, 0.0])
    return steps


def test_a_conversation_is_one_stream_of_tokens_of_which_those_of_the_env_are_masked():
    (one,) = held(Policy(), [8]).values()
    played = trajectory_of([one])
    assert bytes(played.actions.ravel().tolist()).decode() == "8?89?910?10"
    assert played.mask.ravel().tolist() == [c == "T" for c in "FFTFFTFFFTT"]
    assert played.rewards.ravel().tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 1]
    assert (played.logprobs.ravel() == np.where(played.mask.ravel(), np.float32(-0.5), 0)).all()
    assert played.terminated.ravel().tolist() == [False] * 10 + [True] and not played.truncated.any()
    assert set(played.versions.tolist()) == {4} and set(played.episodes.tolist()) == {8}
    result = one.result()
    assert (result.length, result.total_reward, result.tokens) == (3, 3.0, 4)  # three turns: max_episode_steps
    assert (result.success_once, result.success_at_end, result.truncated) == (True, True, False)


def short(asked, answer):
    return float(len(asked) + len(answer))


def off(asked, answer, solution):
    return np.nan if answer == "6" else float(solution)


class Solved(Counting):
    def solution(self):
        return "2"


def test_rewards_of_several_functions_are_summed_by_weight_and_logged_separately():
    wanted = ["correct", {"name": f"{__name__}:short", "weight": 0.5}, {"name": f"{__name__}:off", "weight": -1}]
    config = ExternalEnvConfig(name="my_pkg.mod:Solved", max_episode_steps=3, rewards=wanted)
    (one,) = held(Policy(), [8], kind=Solved, config=config).values()
    before, answer = "8?89?910?", "10"
    scores = {"correct": 3.0, "short": float(len(before + answer)), "off": 2.0}
    last = 1 + 0.5 * scores["short"] - 2
    assert trajectory_of([one]).rewards.ravel().tolist() == [0, 0, 1, 0, 0, 1, 0, 0, 0, 0, last]
    assert one.result().rewards == scores and one.result().total_reward == 2 + last
    assert one.turns[0]["facts"] == {"correct": 1} and one.turns[2]["facts"] == {**scores, "correct": 1}
    assert summarize([one.result()])["overall"]["text"]["rewards"] == scores
    (read,) = csv.DictReader(io.StringIO(episodes_csv([one.result()])))
    assert episode(read).rewards == scores
    with pytest.raises(EmbodiedError, match=r"env.rewards: .*:off gave the reward nan for '6'"):
        held(Policy(), [4], kind=Solved, config=config)


def test_earlier_turns_go_to_the_policy_as_tokens_and_only_what_is_new_as_text():
    policy = Policy()
    held(policy, [5])
    prompts = [batch.prompts[0] for batch in policy.asked]
    assert [prompt.said for prompt in prompts] == ["5?", "6?", "7?"]
    assert [bytes(prompt.tokens.tolist()).decode() for prompt in prompts] == ["", "5?5", "5?56?6"]


class Rewriting(Counting):
    """Its next question replaces the conversation."""

    @classmethod
    def rewrites(cls, config):
        return True

    def step(self, answer):
        return replace(super().step(answer), restarts=True)


def test_a_rewritten_conversation_continues_without_its_earlier_tokens_which_are_learned_from():
    policy = Policy()
    (one,) = held(policy, [8], kind=Rewriting).values()
    prompts = [prompt for batch in policy.asked for prompt in batch.prompts]
    assert [(prompt.said, len(prompt.tokens), prompt.forgotten) for prompt in prompts] == [
        ("8?", 0, 0),
        ("9?", 0, 1),
        ("10?", 0, 2),
    ]
    played = trajectory_of([one])
    assert bytes(played.actions.ravel().tolist()).decode() == "8?89?910?10"
    assert np.flatnonzero(played.obs[RESTART]).tolist() == [3, 6]


class Ranked(Counting):
    """Asks three times in an episode, and rewards the longest answer."""

    sizes: ClassVar = []

    @classmethod
    def plays_groups(cls, config):
        return True

    def reset(self, spec):
        self.answers = []
        self.sizes.append(self.group_size)
        return "1?"

    def step(self, answer):
        self.answers.append(answer)
        if len(self.answers) < 3:
            return Turn(said="and?", ends_sample=True)
        best = max(map(len, self.answers))
        return Turn(scores=[Turn(float(len(one) == best), success=len(one) == best) for one in self.answers])


def test_an_env_plays_the_conversations_of_a_group_and_scores_them_together():
    """Three at a time: of the second episode's, one is more than the group has."""
    policy = Policy()
    policy.say = lambda prompt: "x" * prompt.episode
    played = held(policy, [1, 2, 3, 4, 5], rows=1, kind=Ranked)
    assert Ranked.sizes == [5, 2]
    rewards = {index: one.result().total_reward for index, one in played.items()}
    assert rewards == {1: 0.0, 2: 0.0, 3: 1.0, 4: 0.0, 5: 1.0}
    assert [one.result().success_once for one in played.values()] == [False, False, True, False, True]
    prompts = [prompt for batch in policy.asked for prompt in batch.prompts]
    assert [prompt.episode for prompt in prompts] == [1, 2, 3, 4, 5, 5]
    assert [prompt.forgotten > 0 for prompt in prompts] == [False] * 5 + [True], "other noise"


@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_conversations_do_not_depend_on_how_many_are_played_at_a_time(rows):
    alone = {index: trajectory_of(held(Policy(), [index]).values()) for index in range(7)}
    together = held(Policy(), range(7), rows)
    for index, one in together.items():
        assert np.array_equal(trajectory_of([one]).actions, alone[index].actions)
        assert one.result() == one.result()._replace(index=index)
    assert sorted(together) == [*range(7)]
    np.testing.assert_equal(decisions_of(trajectory_of(together.values())), decisions_of(join([*alone.values()])))


class Meeting(Counting):
    """A step of four at the same time, or none."""

    meet = threading.Barrier(4, timeout=20)

    def step(self, answer):
        self.meet.wait()
        return super().step(answer)


def test_env_steps_of_different_conversations_run_at_the_same_time_and_change_none_of_them():
    alone, together = held(Policy(), range(8)), held(Policy(), range(8), rows=4, kind=Meeting, most=4)
    assert sorted(together) == sorted(alone)
    for index, one in together.items():
        assert one.result() == alone[index].result()
        for column in ("actions", "rewards", "mask", "terminated"):
            assert np.array_equal(getattr(trajectory_of([one]), column), getattr(trajectory_of([alone[index]]), column))


def test_quick_env_steps_stay_in_the_thread_and_the_order_of_one_at_a_time():
    steps, here = SideBySide(16), []
    for number in range(100):
        steps.begin(number, lambda: not here.append(threading.current_thread()))
    assert steps.take_ended(wait_for_one=True) == [(number, True) for number in range(100)]
    assert set(here) == {threading.current_thread()}


def test_no_more_conversations_go_on_than_there_are_rows():
    policy, most = Policy(), []

    def answer():
        most.append(sum(len(batch.prompts) for batch in policy.requests))
        policy.answer()

    held(policy, range(9), 4, meanwhile=answer)
    assert max(most) == 4


def test_where_a_policy_worker_is_replaced_only_what_is_open_is_asked_again_and_second_answers_are_ignored():
    policy, other, lost = Policy(), Queue(), []

    def lose_the_first():
        if lost:
            if other:
                policy.requests.put(other.pop())
            return policy.answer()
        lost.append(policy.requests.pop())
        one, *_ = lost[0].prompts
        first = CompletionBatch(lost[0].source, (policy.complete(one),))
        for reply in (first, Answerers(lost[0].source, {"its successor": other}), first):
            policy.replies.put(reply)

    found = held(policy, range(3), 3, meanwhile=lose_the_first)
    again = policy.asked[0].prompts
    assert [prompt.number for prompt in again] == [prompt.number for prompt in lost[0].prompts[1:]] + [4]
    alone = trajectory_of([held(Policy(), [0])[0]]).actions
    assert np.array_equal(trajectory_of([found[0]]).actions, alone)


def test_an_answer_that_cannot_be_used_ends_its_conversation_which_counts_for_nothing():
    policy = Policy()
    (one,) = held(policy, [3], meanwhile=lambda: policy.answer(dropped="a log-prob is NaN")).values()
    result = one.result()
    assert (result.error, result.success_once, result.truncated) == ("a log-prob is NaN", None, None)


def test_a_truncated_answer_is_scored_and_ends_the_conversation():
    policy = Policy()
    (one,) = held(policy, [3], meanwhile=lambda: policy.answer(truncated=True)).values()
    assert one.result().truncated and one.result().total_reward == 1.0 and len(one.turns) == 1
    assert trajectory_of([one]).truncated.ravel().tolist() == [False, False, True]


def test_episodes_marked_as_alone_are_played_by_themselves():
    policy, sizes = Policy(), []

    def answer():
        sizes.append([prompt.episode for batch in policy.requests for prompt in batch.prompts])
        policy.answer()

    held(policy, range(5), 3, meanwhile=answer, alone=frozenset({3, 4}))
    assert [episodes for episodes in sizes if {3, 4} & {*episodes}] == [[3]] * 3 + [[4]] * 3


def test_a_turn_that_says_something_goes_on_unless_it_says_that_it_is_done():
    assert Turn().done and not Turn(said="more").done and Turn(said="more", done=True).done


def test_a_text_env_that_returns_no_turn_or_no_text_is_refused_by_name():
    class Silent(Counting):
        def reset(self, spec):
            return 5

    class Numb(Counting):
        def step(self, answer):
            return 1.0

    class Halved(Counting):
        def step(self, answer):
            return Turn(said="\ud800")

    class HalvedMessage(Counting):
        def reset(self, spec):
            return ({"role": "user", "content": "a\udfff"},)

    refusals = {
        Silent: "Silent says 5; it must be text",
        Numb: "Numb.step returned float",
        Halved: "Halved says .*holds half a character",
        HalvedMessage: "HalvedMessage says .*holds half a character",
    }
    for kind, message in refusals.items():
        for most in (1, 16):
            with pytest.raises(EmbodiedError, match=message):
                held(Policy(), [0], kind=kind, most=most)


class Undecided(Counting):
    """Goes on after a wrong answer too, cannot score "?", and pays a little for what is cut short."""

    def step(self, answer):
        if answer == "?":
            return Turn(dropped="it cannot\nbe scored" + 200_000 * " ")
        return replace(super().step(answer), done=False, said="on?")

    def cut_short(self, turn):
        return replace(turn, reward=turn.reward + 0.25, done=True)


def held_by(kind, policy, monkeypatch):
    monkeypatch.setitem(held.__globals__, "Counting", kind)
    (one,) = held(policy, [0]).values()
    return one


def test_an_env_says_what_a_conversation_is_worth_that_had_enough_turns(monkeypatch):
    policy = Policy()
    policy.say = lambda prompt: "no"
    one = held_by(Undecided, policy, monkeypatch)
    assert [turn["reward"] for turn in one.turns] == [0.0, 0.0, 0.25]


def test_an_env_says_what_a_conversation_is_worth_whose_answer_was_cut_off(monkeypatch):
    policy = Policy()
    policy.answer, answer = lambda: answer(truncated=True), policy.answer
    one = held_by(Undecided, policy, monkeypatch)
    assert [turn["reward"] for turn in one.turns] == [1.25]


def test_a_conversation_that_cannot_be_scored_counts_for_nothing(monkeypatch):
    policy = Policy()
    policy.say = lambda prompt: "?"
    one = held_by(Undecided, policy, monkeypatch)
    result = one.result()
    assert (result.error, result.success_once, result.total_reward) == ("it cannot be scored", None, 0.0)
