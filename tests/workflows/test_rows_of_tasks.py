"""Sim workers that own the rows of a few tasks, as LIBERO does: their number does not change what is learned."""

import sys

import numpy as np
import pytest

import embodied
from embodied.envs.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv
from embodied.policies.policy_folder import read_weights

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
        tasks = [
            "env.name=some_tasks:SomeTasks",
            "env.task=[a,b,c,d]",
            "cluster.backend=inline",
            "eval.episodes=8",
            "eval.videos=0",
        ]
        run = embodied.train(recipe, *chosen, *tasks, placement, f"run.dir={tmp_path / str(sims)}")
        weights.append(read_weights(max(run.folder.glob("checkpoints/v*")) / "policy"))
        assert {len(played) for played in PLAYED.values() if played} == {4 // sims}
    for name, weight in weights[0].items():
        np.testing.assert_allclose(weight, weights[1][name], atol=1e-9, rtol=0)
