"""Stages of a sim worker: when their episodes begin and end."""

from dataclasses import replace

import numpy as np
import pytest

from embodied.core.errors import ConfigError
from embodied.core.types import ActReply, Answerers, EpisodeList, Job, PolicyOutput, head_start
from embodied.envs import make_env
from embodied.envs.gym.config import GymConfig
from embodied.envs.player import Record, Stage, Tally, play_horizon
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.sim_worker import SimWorker, restore_stage, stage_state
from embodied.runtime.worker import Timers

SPECS = EpisodeList(0, "train", ("reach",))


def staged(config):
    return Stage(make_env(config, 2), np.array([2, 3]), num_envs_total=4, timers=Timers())


def lengths_of_episodes(stagger, episodes=2, state=None):
    """[episode of the env, env]: how long the episodes of envs 2 and 3 of 4 are when the limit is 8 env steps."""
    config = PointMassConfig(name="pointmass", max_episode_steps=8, on_success="continue", stagger=stagger)
    stage = staged(config)
    if state is None:
        stage.reset_all(SPECS)
    else:
        restore_stage(stage, state, SPECS)
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
            stage.reset(done, SPECS)
    return [list(row[:episodes]) for row in lengths]


def test_staggered_envs_cut_their_first_episode_at_different_steps_and_play_the_next_whole():
    # 2 * 0.618 = 1.236: env 2 begins 0.236 * 8 = 1.9 steps on, so 1; 3 * 0.618 = 1.854: env 3 begins 6.8, so 6 steps on
    assert lengths_of_episodes(stagger=True) == [[7, 8], [2, 8]]
    assert lengths_of_episodes(stagger=False) == [[8, 8], [8, 8]]


def test_a_resumed_run_whose_simulator_is_not_saved_spreads_its_episodes_as_it_did_when_it_began():
    config = PointMassConfig(name="pointmass", max_episode_steps=8, on_success="continue", stagger=True)
    stage = staged(config)
    stage.reset_all(SPECS)
    stage.play(np.zeros((2, 1, 2)))
    rows = {name: array for name, array in stage_state(stage).items() if not name.startswith("env.")}
    assert lengths_of_episodes(stagger=True, state=rows) == lengths_of_episodes(stagger=True) == [[7, 8], [2, 8]]


def test_an_episode_that_the_simulator_gives_up_ends_with_its_reason(monkeypatch):
    stage = staged(PointMassConfig(name="pointmass", max_episode_steps=3, on_success="continue"))
    stage.reset_all(SPECS)
    step = stage.env._step

    def giving_up(*given):
        stage.env.given_up[1] = "no room"
        return replace(step(*given), truncated=np.array([False, True]))

    with monkeypatch.context() as patch:
        patch.setattr(stage.env, "_step", giving_up)
        (given_up,) = stage.end(stage.play(np.zeros((2, 1, 2))))[1]
    (whole,) = stage.end(stage.play(np.zeros((2, 2, 2))))[1]
    assert [(each.index, each.length, each.error) for each in (given_up, whole)] == [(3, 1, "no room"), (2, 3, "")]


def test_head_starts_spread_evenly_over_any_block_of_envs():
    starts = head_start(np.arange(64), 50)
    for block in np.split(starts, 4):
        gaps = np.diff(np.sort(block), prepend=0, append=50)
        assert gaps.max() <= 2 * 50 / 16  # sixteen envs, at most twice the even distance apart


def begun(stage, episodes):
    """[env, episode]: the listed episodes whose initial states are played, while env 2 heads for its target and env 3
    rests."""
    found = [[], []]
    while min(map(len, found)) < episodes:
        _, obs = stage.observe_playing()
        for row, known in enumerate(found):
            seed = stage.rows.specs[row].seed
            if stage.rows.length[row] == 0:
                known.append(next(index for index in range(999) if SPECS[index].seed == seed))
        heading = 10 * obs["state"][:, 4:] - 5 * obs["state"][:, 2:4]
        result = stage.play(np.stack([heading[0], np.zeros(2)])[:, None])
        done, _ = stage.end(result)
        stage.go_on(done, result, SPECS)
    return [known[:episodes] for known in found]


def test_failed_episodes_are_retried_from_their_initial_state_also_after_a_resume():
    config = PointMassConfig(name="pointmass", retries=2)
    stage = staged(config)
    stage.reset_all(SPECS)
    assert begun(stage, 4) == [[2, 6, 10, 14], [3, 3, 3, 15]]
    resumed = staged(config)
    restore_stage(resumed, stage_state(stage), SPECS)
    assert begun(resumed, 4)[1] == begun(stage, 4)[1] and resumed.rows.specs[1] == stage.rows.specs[1]


def test_retries_are_refused_where_nothing_is_a_success():
    with pytest.raises(ConfigError, match="CartPole-v1 reports no success"):
        staged(GymConfig(name="gym:CartPole-v1", retries=1))


class Resting:
    """Lets the points rest. An observation is worth the sum of its numbers."""

    def __init__(self):
        self.keys = []  # [request, row]: episode and decision

    def ask(self, obs, episodes, decisions, final_obs=None, value_only=False, **about):
        self.keys.append(list(zip(episodes.tolist(), decisions.tolist(), strict=True)))
        worth, still = obs["state"].sum(axis=1), np.zeros((len(episodes), 1, 2))
        final = None if final_obs is None else final_obs["state"].sum(axis=1)
        output = None if value_only else PolicyOutput(still, still, worth)
        self.reply = ActReply("", (0, 0, len(episodes)), output, worth, final, version=0)

    def answer(self):
        return self.reply


def test_a_cut_off_episode_ends_with_its_final_value_and_the_next_ones_noise_begins_anew():
    """Of a point that rests the final observation is worth what the last one was; the next episode is elsewhere."""
    stage, record, policy = (
        staged(PointMassConfig(name="pointmass", max_episode_steps=3, on_success="continue")),
        Record("", horizon=8),
        Resting(),
    )
    list(play_horizon(stage, Tally(Job(SPECS, horizon=8)), policy, record, lambda end: None))
    assert [keys[0] for keys in policy.keys] == [
        (2, 0),
        (2, 1),
        (2, 2),
        (6, 0),
        (6, 1),
        (6, 2),
        (10, 0),
        (10, 1),
        (10, 2),
    ]
    played = record.trajectory()
    values, following, cut = (
        array.reshape(2, 8) for array in (played.values, played.next_values, played.truncated[:, 0])
    )
    assert cut.tolist() == [[False, False, True, False, False, True, False, False]] * 2
    assert (following[cut] == values[cut]).all()
    assert (following[:, :-1] == values[:, 1:])[~cut[:, :-1]].all() and (values[:, 2] != values[:, 3]).all()


def test_an_expert_that_plays_slowly_is_not_taken_for_hung():
    """Its decisions wait for no answer, and its episodes may last longer than faults.hang_s."""
    signs, config = [], PointMassConfig(name="pointmass", max_episode_steps=8)
    worker = SimWorker(config, 0, None, eval_config=config, eval_rows=2)
    worker.timers, worker.tick = Timers(), lambda: signs.append(1)
    (played,) = worker.play(
        [Job(SPECS.first(2), evaluation="demonstrations", expert="scripted")], (Answerers("sim-0", {}),)
    )
    assert len(played.finished) == 2 and len(signs) >= max(result.length for result in played.finished)
