"""Chunks that overlap in time: what rows play with a delay, and a robot that does not wait for its server."""

from threading import Event

import numpy as np
import pytest
from served_robot import served

from embodied.core.chunks import ChunkRule, LateActions
from embodied.core.errors import ConfigError
from embodied.core.types import ActionSpec, EnvSpec
from embodied.policies import make_policy
from embodied.policies.config import MLPConfig
from embodied.policies.remote.asynchronous import ChunkClient


def answer(step, length=8, rows=1):
    """A chunk observed at a step: its actions are 100 times this step, plus the step that each is for."""
    actions = 100.0 * step + np.arange(step, step + length)
    return np.broadcast_to(actions.astype(np.float32)[:, None], (rows, length, 1))


def test_a_decision_plays_the_old_chunk_until_the_answer_comes_mixes_and_goes_on_with_the_new_one():
    late = LateActions(ChunkRule(delay=2, overlap=1), 2, 1)
    late.begin(np.arange(2))
    assert late.play(answer(0, rows=2))[0, :, 0].tolist() == [0, 1, 2, 3, 4]  # the first answer is awaited
    late.begin(np.array([1]))  # another episode on row 1
    played = late.play(answer(5, rows=2))[:, :, 0]
    assert played[0].tolist() == [5, 6, (7 + 507) / 2, 508, 509]
    assert played[1].tolist() == [505, 506, 507, 508, 509]
    assert late.play(answer(10, rows=2))[0, :2, 0].tolist() == [510, 511]


def test_single_actions_are_played_late_one_after_the_other():
    late = LateActions(ChunkRule(delay=2), 1, 1)
    late.begin(np.arange(1))
    assert [late.play(answer(step, 1)).item() for step in range(5)] == [0, 0, 0, 101, 202]


def test_a_policy_that_continues_chunks_sees_what_will_be_played_meanwhile():
    late = LateActions(ChunkRule(delay=2, overlap=1, real_time=True), 2, 1)
    late.begin(np.arange(2))
    late.play(answer(0, rows=2))
    late.begin(np.array([1]))
    previous = late.shown({}, np.arange(2))["previous"]
    assert previous["actions"][0, :, 0].tolist() == [5, 6, 7]
    # c = 1 / 2 for the only action of the overlap: c (e^c - 1) / (e - 1) = 0.5 * 0.6487 / 1.7183
    assert previous["weights"] == pytest.approx(np.array([[1, 1, 0.18877], [0, 0, 0]]), abs=1e-5)
    assert late.play(answer(5, rows=2))[0, :, 0].tolist() == [5, 6, 507, 508, 509]  # it is not mixed as well


def test_actions_that_are_choices_are_delayed_and_not_mixed():
    choices = np.array([[[3], [1], [2], [0]]])
    assert ChunkRule(1).join(np.array([[[2.0]]]), choices)[0, :, 0].tolist() == [2, 1, 2, 0]
    with pytest.raises(ConfigError, match="are choices"):
        ChunkRule(0, 1).join(np.array([[[2.0]]]), choices)


class Server:
    """Answers at once, or when it is let go."""

    name, hello = "a server", {"action_chunk": 8}

    def __init__(self):
        self.free, self.asked = Event(), []
        self.free.set()

    def ask(self, kind, sent, wanted):
        self.asked.append(sent)
        assert self.free.wait(60)
        return {"actions": answer(int(sent["state"]))[0]}

    def close(self):
        pass


def test_a_robot_goes_on_with_its_chunk_while_the_server_computes_and_then_skips_what_is_over():
    server = Server()
    robot = ChunkClient("ws://", overlap=1, blend="real_time", delay=2, connection=server)
    played = [robot.act({"state": step}).item() for step in range(5)]
    server.free.clear()
    played += [robot.act({"state": step}).item() for step in (5, 6)]  # three actions are left: it asks at step 5
    server.free.set()
    robot.answer.result(60)
    assert [sent["state"] for sent in server.asked] == [0, 5]
    assert server.asked[1]["previous"]["actions"][:, 0].tolist() == [5, 6, 7]
    played += [robot.act({"state": step}).item() for step in (7, 8)]
    assert played == [0, 1, 2, 3, 4, 5, 6, 507, 508]
    assert robot.delay == 2
    robot.close()


def test_a_robot_plays_the_chunks_of_a_real_server():
    policy = make_policy(MLPConfig(hidden=(8,), chunk=6), EnvSpec(ActionSpec(2), state_dim=1), seed=0)
    with served(policy) as (address, _):
        robot, played = ChunkClient(address, overlap=1, delay=1), []
        for step in range(14):
            if robot.answer:
                robot.answer.result(60)  # it comes one step after it was asked for
            played.append(robot.act({"state": np.array([step], np.float32)}))
        robot.close()
    chunks = policy.act_on({"state": np.arange(14, dtype=np.float32)[:, None]})
    expected = [chunks[at, step - at] for at, step in zip([0] * 5 + [4] * 4 + [8] * 4 + [12], range(14))]
    for step in (5, 9, 13):  # the last action of a chunk is mixed with the next chunk's
        expected[step] = (chunks[max(step - 5, 0), 5] + expected[step]) / 2
    np.testing.assert_allclose(played, expected, atol=1e-6)
