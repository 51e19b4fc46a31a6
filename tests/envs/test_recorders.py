"""Recorders that a caller names look on while episodes are played."""

from contextlib import AbstractContextManager
from functools import partial
from queue import SimpleQueue

import numpy as np
from pydantic import TypeAdapter

from embodied.core.types import EpisodeList, Recording
from embodied.envs import make_env
from embodied.envs.config import EnvConfig
from embodied.envs.evaluation import play_episodes
from embodied.runtime import Timers


class Still:
    """Chunks of two env steps in which nothing moves, worth a half each."""

    source = "still"

    def begin(self, rows):
        pass

    def ask(self, obs, rows, at):
        self.num = len(at)

    def answer(self):
        return np.zeros((self.num, 2, 2), np.float32), np.full(self.num, 0.5)


class Notebook(AbstractContextManager):
    """Counts what it is shown."""

    def __init__(self, lines, env, recording, warn):
        self.lines, self.env = lines, env
        self.frames = self.steps = 0

    def begin(self, rows, specs, instructions):
        self.lines += [f"episode {spec.index} begins" for spec in specs]

    def decided(self, obs, actions, at, values):
        assert len(obs["state"]) == len(actions) == self.env.num_envs and (values == 0.5).all()

    def on_frame(self, active):
        self.frames += int(active.sum())

    def played(self, result):
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
    [*play_episodes(env, episodes, Still(), recording, SimpleQueue(), frozenset(), Timers())]
    assert lines == [
        "episode 0 begins",
        "episode 1 begins",
        "episode 0 took 5 steps",
        "episode 1 took 5 steps",
        "episode 2 begins",
        "episode 2 took 5 steps",
        "15 frames of 15 steps",
    ]
