"""Which episodes were begun, ended and given up: arithmetic on their numbers."""

import sys

import numpy as np
import pytest

import embodied
from embodied.core.types import EpisodeResult, deal_by_task, rows_of_sims
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv
from embodied.policies.policy_folder import read_weights
from embodied.workflows.collector import EpisodeCounter


def result(index):
    return EpisodeResult(index, "reach", -1, 0, 5, 1.0, True, True)


def test_every_episode_is_open_ended_or_abandoned():
    episode_counter = EpisodeCounter(4)
    episode_counter.begin([0, 1, 2, 3])
    episode_counter.begin([6, 7])  # envs 2 and 3 begin their second
    episode_counter.finish([result(2), result(3)])
    assert episode_counter.begun.tolist() == [1, 1, 2, 2]
    assert episode_counter.abandon(range(2, 4)) == 2
    episode_counter.begin([10, 11])
    assert episode_counter.begun.tolist() == [1, 1, 3, 3]
    assert episode_counter.abandon(range(2, 4)) == 2 and episode_counter.abandon(range(0, 2)) == 2
    assert episode_counter.abandon(range(0, 4)) == 0


def test_episodes_that_ended_in_a_lost_slice_are_abandoned_too():
    episode_counter = EpisodeCounter(2)
    episode_counter.begin([0, 1, 2, 4])  # env 0 ended two of its three, and nobody heard of it
    assert episode_counter.abandon(range(0, 1)) == 3


def test_episodes_that_ended_before_their_sim_died_in_the_same_round_are_settled_once():
    episode_counter = EpisodeCounter(2)
    episode_counter.begin([0, 1, 2, 4])  # env 0 ends two episodes, and its sim dies while another sim still plays
    assert episode_counter.abandon(range(0, 1)) == 3
    assert episode_counter.finish([result(0), result(2)]) == 2
    assert episode_counter.state_of_ended()["rows.started"].tolist() == [3, 1]
    episode_counter.begin([6])
    assert episode_counter.abandon(range(0, 1)) == 1


def test_a_note_that_comes_twice_counts_once():
    episode_counter = EpisodeCounter(2)
    episode_counter.begin([0, 1, 3])
    episode_counter.begin([1])
    assert episode_counter.begun.tolist() == [1, 2]


def state(**more):
    return {"env_ids": np.array([0, 1]), "rows.started": np.array([3, 2]), "rows.length": np.array([4, 0]), **more}


def test_envs_whose_state_was_saved_go_on_with_their_open_episode():
    episode_counter = EpisodeCounter(2)
    episode_counter.restore(state(**{"env.position": np.zeros(2)}))
    assert episode_counter.begun.tolist() == [3, 2] and episode_counter.abandon(range(0, 2)) == 2


def test_envs_without_a_saved_state_begin_the_next_or_the_same_again():
    """Env 0 was 4 steps into its third episode, env 1 had not taken a step of its second."""
    episode_counter = EpisodeCounter(2)
    episode_counter.restore(state())
    assert episode_counter.begun.tolist() == [4, 2] and episode_counter.abandon(range(0, 2)) == 2


@pytest.mark.parametrize(("envs", "sims", "tasks", "most"), [(640, 64, 10, 2), (320, 64, 10, 2), (40, 2, 10, 5)])
def test_every_row_has_one_sim_and_a_sim_has_rows_of_few_tasks(envs, sims, tasks, most):
    owned = rows_of_sims(envs, sims, tasks)
    assert sorted(np.concatenate(owned).tolist()) == list(range(envs))
    assert {len(rows) for rows in owned} == {envs // sims}
    assert max(len(set(rows % tasks)) for rows in owned) == most
    dealt = deal_by_task([f"task {at % tasks}" for at in range(3 * tasks)], sims)  # an evaluation, of the same tasks
    names = [{f"task {row % tasks}" for row in rows} for rows in owned]
    assert all({f"task {at % tasks}" for at in share} <= known for share, known in zip(dealt, names, strict=True))


# Sim workers that own the rows of a few tasks, as LIBERO does: their number does not change what is learned


PLAYED: dict[int, set[str]] = {}  # by env, the tasks that its rows have played


class SomeTasks(PointMassEnv):
    mixes_tasks = True

    def __init__(self, config, num_envs: int) -> None:
        super().__init__(PointMassConfig(name="pointmass", dtype="float64", num_envs=config.num_envs), num_envs)
        PLAYED[len(PLAYED)] = self.played = set()

    def _reset_rows(self, rows, episodes):
        self.played.update(episode.task for episode in episodes)
        return super()._reset_rows(rows, episodes)


@pytest.mark.parametrize("recipe", ["pointmass_ppo", "pointmass_grpo"])
def test_sims_of_few_tasks_each_learn_what_one_sim_of_all_tasks_learns(recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "some_tasks", sys.modules[__name__])
    batch = {"pointmass_ppo": ["algo.rollout_decisions=8", "algo.minibatch_size=16"]}
    batch |= {"pointmass_grpo": ["algo.groups=4", "algo.group_size=2", "algo.minibatch_size=null", "algo.filter=none"]}
    weights = []
    for sims in (1, 2):
        PLAYED.clear()
        placement = f"""placement={{sim: "cpu:0{"-1*2" if sims == 2 else ""}", "policy,learner": "cpu:0"}}"""
        chosen = [*batch[recipe], "policy.dtype=float64", "policy.hidden=[8]", "env.num_envs=8", "run.iterations=2"]
        tasks = (
            "env.name=some_tasks:SomeTasks env.task=[a,b,c,d] cluster.backend=inline eval.episodes=8 eval.videos=0"
        ).split()
        run = embodied.train(recipe, *chosen, *tasks, placement, f"run.dir={tmp_path / str(sims)}")
        weights.append(read_weights(max(run.folder.glob("checkpoints/v*")) / "policy"))
        assert {len(played) for played in PLAYED.values() if played} == {4 // sims}
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weight, weights[1][name], atol=1e-9, rtol=0)
