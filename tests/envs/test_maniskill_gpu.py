"""ManiSkill's GPU physics: what it gives stays on the card, and episodes begin as they do on the CPU."""

import numpy as np
import pytest

from embodied.arrays import host, map_obs
from embodied.config import load
from embodied.data import EpisodeSpec
from embodied.envs import env_class, make_env
from embodied.envs.check import check_vector_env
from embodied.envs.config import ManiSkillConfig
from embodied.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
pytest.importorskip("mani_skill")

EPISODES = [EpisodeSpec("task", -1, seed, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def simulated():
    env = make_env(ManiSkillConfig(task="PickCube-v1", backend="cuda", max_episode_steps=10), 4)
    yield env
    env.close()


@pytest.mark.gpu
def test_observations_are_tensors_on_the_card(simulated):
    import torch

    state = simulated.reset(options={"episodes": EPISODES})[0]["state"]
    assert state.device.type == "cuda" and state.shape == (4, simulated.env_spec.state_dim)
    result = simulated.step_chunk(torch.zeros((4, 2, 8), device="cuda"))
    assert result.obs["state"].device.type == "cuda" and isinstance(result.rewards, np.ndarray)


@pytest.mark.gpu
def test_episodes_begin_as_on_the_cpu(simulated):
    on_cpu = make_env(ManiSkillConfig(task="PickCube-v1", backend="cpu_batched"), 4)
    ours, theirs = (env.reset(options={"episodes": EPISODES})[0]["state"] for env in (simulated, on_cpu))
    np.testing.assert_allclose(host(ours), theirs, atol=1e-4)


@pytest.mark.gpu
def test_the_contract_holds_on_the_card(simulated, monkeypatch):
    observe = simulated._observe
    monkeypatch.setattr(simulated, "_observe", lambda: map_obs(observe(), host, list))  # the check compares arrays
    check_vector_env(simulated, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.slow
def test_the_gpu_recipe_trains(tmp_path):
    from embodied.train import main

    short = ["run.iterations=2", "run.env_steps=null", "run.eval_every=null", "eval.episodes=4", "eval.num_envs=4"]
    small = ["env.num_envs=64", "algo.minibatch_size=800", "eval.videos=1", f"run.dir={tmp_path}"]
    assert main(["recipe=maniskill_ppo_gpu", *short, *small]) == 0


def test_without_a_gpu_its_physics_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("embodied.envs.maniskill.has_gpu", lambda: False)
    config = load(["recipe=maniskill_ppo_gpu"]).config
    assert config.learner.device_beside(config.env.backend) == "cuda"
    with pytest.raises(ConfigError, match=r"env\.backend=cuda needs an NVIDIA GPU.*try env\.backend=auto"):
        env_class(config.env).check(config.env)
