"""Whole episodes: who plays them, and in which company, changes nothing of what is recorded."""

from contextlib import AbstractContextManager
from functools import partial
from itertools import zip_longest

import numpy as np
import pytest
from pydantic import TypeAdapter

from embodied.core.rng import uniform
from embodied.core.types import ActReply, EpisodeList, Job, PolicyOutput, Recording, choose, join
from embodied.envs import make_env
from embodied.envs.config import EnvConfig
from embodied.envs.player import EpisodePlayer, Record, Tally, play_episodes
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.store import arrays_of, trajectory_from
from embodied.runtime import Timers

CHUNK = 3
EPISODES = EpisodeList(0, "train", ("reach",), group_size=4).first(12)


class Policy:
    """A line to a policy that goes to the target, more or less as episode and decision say, and counts who asks."""

    def __init__(self):
        self.asked = []

    def begin(self, rows):
        pass

    def ask(self, obs, episodes, decisions, **_):
        assert len(obs["state"]) == len(obs["instruction"]) == len(episodes)
        self.asked += zip(episodes.tolist(), decisions.tolist(), strict=True)
        noise = uniform(0, "test", episodes, decisions, 2 * CHUNK)
        self.output = PolicyOutput(
            actions=(2 * noise - 1).reshape(-1, CHUNK, 2) + 2 * obs["state"][:, None, 4:],
            logprobs=noise.reshape(-1, CHUNK, 2),
            values=noise[:, 0],
            replay={"noise": noise},
        )

    def answer(self):
        return ActReply("", (0, 0, 1), self.output, self.output.values, None, 7)


def play(rows, stages=1, episodes=EPISODES):
    config = PointMassConfig(name="pointmass", dtype="float64", max_episode_steps=20, instruction=True)
    lines, records, tally = [Policy() for _ in range(stages)], [Record("") for _ in range(stages)], Tally(Job(episodes))
    playing = [
        play_episodes(EpisodePlayer(make_env(config, rows), Timers()), tally, episodes[i::stages], lines[i], records[i])
        for i in range(stages)
    ]
    assert sum(1 for decisions in zip_longest(*playing) for _ in decisions)
    whole = join([record.trajectory() for record in records if record.decisions])
    return whole, tally.finished, [question for line in lines for question in line.asked]


@pytest.fixture(scope="module")
def alone():
    return play(1)


@pytest.mark.parametrize(("rows", "stages"), [(5, 1), (12, 1), (20, 1), (2, 3)])
def test_recorded_episodes_do_not_depend_on_the_number_of_rows_or_stages(alone, rows, stages):
    ours, theirs = arrays_of(play(rows, stages)[0]), arrays_of(alone[0])
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


def test_rows_that_have_finished_ask_nothing(alone):
    played, results, asked = play(5)
    expected = [(int(e), d) for e, length in zip(played.ids, played.lengths, strict=True) for d in range(length)]
    assert sorted(asked) == expected
    lengths = {result.index: result.length for result in results}
    ends = np.cumsum(played.lengths)
    for episode, end, length in zip(played.ids.tolist(), ends, played.lengths, strict=True):
        mask = played.mask[end - length : end]
        assert mask.sum() == lengths[episode] and mask[:-1].all() and mask[-1].any()
    assert len(set(lengths.values())) > 1, "episodes of different lengths"


def test_all_episodes_of_a_group_begin_in_one_state(alone):
    played = alone[0]
    begins = played.obs["state"][np.concatenate([[0], np.cumsum(played.lengths)[:-1]])]
    assert all((begins[start : start + 4] == begins[start]).all() for start in (0, 4, 8))
    assert len(np.unique(begins, axis=0)) == 3


def test_episodes_are_chosen_joined_and_stored_without_loss(alone):
    whole = alone[0]
    even, odd = (choose(whole, range(first, 12, 2), "sim-0#1") for first in (0, 1))
    assert even.source == "sim-0#1" and even.ids.tolist() == [0, 2, 4, 6, 8, 10]
    again = trajectory_from(arrays_of(join([odd, even])))
    assert again.obs["instruction"].tolist() == whole.obs["instruction"].tolist()
    ours, theirs = arrays_of(again), arrays_of(whole)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)


# Recorders that a caller names look on while episodes are played


class Still:
    """Chunks of two env steps in which nothing moves, worth a half each."""

    def begin(self, rows):
        pass

    def ask(self, obs, episodes, decisions, **_):
        still, worth = np.zeros((len(episodes), 2, 2), np.float32), np.full(len(episodes), 0.5)
        self.reply = ActReply("", (0, 0, len(episodes)), PolicyOutput(still, still, worth), worth, None, 0)

    def answer(self):
        return self.reply


class Notebook(AbstractContextManager):
    """Counts what it is shown."""

    def __init__(self, lines, env, recording, warn):
        self.lines, self.env = lines, env
        self.frames = self.steps = 0

    def begin(self, rows, specs, instructions):
        self.lines += [f"episode {spec.index} begins" for spec in specs]

    def record_decision(self, obs, actions, at, values):
        assert len(obs["state"]) == len(actions) == self.env.num_envs and (values == 0.5).all()

    def on_frame(self, active):
        self.frames += int(active.sum())

    def record_result(self, result):
        self.steps += int(result.mask.sum())

    def finish(self, rows, outcomes):
        self.lines += [f"episode {outcome.index} took {outcome.length} steps" for outcome in outcomes]

    def __exit__(self, *raised):
        self.lines.append(f"{self.frames} frames of {self.steps} steps")


def test_a_recorder_sees_every_episode_and_every_step_of_it():
    config = TypeAdapter(EnvConfig).validate_python({"name": "pointmass", "max_episode_steps": 5})
    env, lines = make_env(config, 2), []
    recording = Recording(recorders=(partial(Notebook, lines),))
    episodes = EpisodeList(0, "eval", ("reach",)).first(3)
    [*play_episodes(EpisodePlayer(env, Timers()), Tally(Job(episodes, recording=recording)), episodes, Still())]
    assert lines == [
        "episode 0 begins",
        "episode 1 begins",
        "episode 0 took 5 steps",
        "episode 1 took 5 steps",
        "episode 2 begins",
        "episode 2 took 5 steps",
        "15 frames of 15 steps",
    ]
