"""Stages of a sim worker: when their episodes begin and end."""

import numpy as np

from embodied.envs import make_env
from embodied.envs.config import PointMassConfig
from embodied.envs.rollout import Stage
from embodied.episodes import EpisodeList
from embodied.runtime.timers import Timers


def lengths_of_episodes(stagger, episodes=2):
    """[episode of the env, env]: how long the episodes of envs 2 and 3 of 4 are when the limit is 8 env steps."""
    config = PointMassConfig(name="pointmass", max_episode_steps=8, on_success="continue", stagger=stagger)
    stage = Stage(make_env(config, 2), "sim-1/0", np.array([2, 3]), num_envs_total=4, timers=Timers())
    specs = EpisodeList(0, "train", "reach")
    stage.reset(np.arange(2), specs)
    lengths = [[], []]
    steps = np.zeros(2, int)
    while min(map(len, lengths)) < episodes:
        result = stage.env.step_chunk(np.zeros((2, 1, 2)))
        steps += 1
        done = np.flatnonzero(result.done)
        for row in done:
            lengths[row].append(int(steps[row]))
        steps[done] = 0
        if len(done):
            stage.reset(done, specs)
    return [list(row[:episodes]) for row in lengths]


def test_staggered_envs_cut_their_first_episode_at_different_steps_and_play_the_next_whole():
    # env 2 of 4 begins 2/4 through its 8 steps, env 3 begins 3/4 through
    assert lengths_of_episodes(stagger=True) == [[4, 8], [2, 8]]
    assert lengths_of_episodes(stagger=False) == [[8, 8], [8, 8]]
