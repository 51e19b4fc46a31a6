"""Simulators give their memory back between rollouts, and go on as if they had stayed."""

import numpy as np
import pytest
from needed import requires
from stepped import GRPO, PPO, Run

from embodied.envs import sim_worker
from embodied.envs.pointmass.env import PointMassEnv
from embodied.envs.vector_env import VectorEnv
from embodied.runtime.device_memory import AllocatedMemory


class OnGPU(AllocatedMemory):
    """As on a GPU, where a simulator's memory is counted."""

    def __init__(self):
        self.num_bytes = 1000


@pytest.fixture
def built(monkeypatch):
    """The envs that sim workers build, whose memory counts."""
    envs, make = [], sim_worker.make_env
    monkeypatch.setattr(sim_worker, "AllocatedMemory", OnGPU)
    monkeypatch.setattr(sim_worker, "make_env", lambda *args: envs.append(make(*args)) or envs[-1])
    return envs


def played(folder, recipe, leaves, iterations=2):
    folder.mkdir()
    with Run(folder, *recipe, "pipeline.stages=2") as run:
        sims, numbers = run.loop.workers.sims, []
        for number in range(iterations):
            numbers.append(run.loop.iterate(number, iterations)[1]["train/grad_norm"])
            if leaves:
                sims.offload().wait()
                run.loop.collector.save()  # a checkpoint needs no simulator
                sims.onload().wait()
        return numbers, run.weights()


@pytest.mark.parametrize("recipe", [PPO, GRPO], ids=["open_episodes", "whole_episodes"])
def test_a_simulator_that_left_goes_on_as_if_it_had_stayed(recipe, built, tmp_path):
    numbers, weights = played(tmp_path / "stays", recipe, leaves=False)
    stayed = len(built)
    found, others = played(tmp_path / "leaves", recipe, leaves=True)
    assert len(built) == stayed * (2 + 2)
    assert found == numbers and all(np.array_equal(weights[name], others[name]) for name in weights)


ROBOT = (
    "recipe=maniskill_ppo env.num_envs=4 env.stagger=true policy.hidden=[16] algo.rollout_decisions=20 "
    "algo.minibatch_size=40 algo.epochs=1 run.iterations=2 run.env_steps=null"
).split()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
@pytest.mark.parametrize("task", ["PushCube-v1", "StackCube-v1"])
def test_robots_that_left_go_on_bit_for_bit(task, built, tmp_path):
    """Their open episodes are played again, with all that contacts and solvers remember."""
    requires("mani_skill")
    recipe = [*ROBOT, f"env.task={task}"]
    numbers, weights = played(tmp_path / "stays", recipe, leaves=False)
    found, others = played(tmp_path / "leaves", recipe, leaves=True)
    assert len(built) == 4 * (2 + 2)
    assert found == numbers and all(np.array_equal(weights[name], others[name]) for name in weights)


def test_simulators_whose_open_episodes_cannot_be_saved_stay(built, tmp_path, monkeypatch):
    monkeypatch.setattr(PointMassEnv, "_get_state", VectorEnv._get_state)
    with Run(tmp_path, *PPO) as run:
        before = len(built)
        needs = run.loop.workers.sims.needs().wait()
        assert all(need.num_bytes == need.kept_bytes == 1000 for need in needs)
        run.loop.workers.sims.offload().wait()
        run.loop.workers.sims.onload().wait()
        assert len(built) == before
