"""ManiSkill's GPU physics: what it gives stays on the card, and episodes begin as they do on the CPU."""

from dataclasses import replace

import numpy as np
import pytest
from needed import requires

from embodied.config.recipe import load
from embodied.core.arrays import host
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.env_checker import check_vector_env
from embodied.envs.maniskill import env as maniskill
from embodied.envs.maniskill import gpu_memory
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.maniskill.env import ManiSkillEnv
from embodied.placement.topology import Gpu
from embodied.run import launch

pytestmark = pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
requires("mani_skill")

EPISODES = [EpisodeSpec("task", -1, seed, seed) for seed in range(4)]


@pytest.fixture(scope="module")
def simulated():
    env = make_env(ManiSkillConfig(task="PickCube-v1", backend="cuda", max_episode_steps=10), 4)
    yield env
    env.close()


def test_physics_on_a_gpu_that_does_not_draw_has_no_renderer_and_cameras_are_refused(monkeypatch):
    states = ManiSkillConfig(task="PushCube-v1", backend="cuda")
    images = states.model_copy(update={"cameras": ("base_camera",)})
    monkeypatch.setattr(maniskill, "gpu_draws", lambda: True)
    assert maniskill.render_backend(states) == maniskill.render_backend(images) == "gpu"
    monkeypatch.setattr(maniskill, "gpu_draws", lambda: False)
    assert maniskill.render_backend(states) == "none"
    with pytest.raises(EmbodiedError, match=r"this GPU does not draw.*NVIDIA_DRIVER_CAPABILITIES=all"):
        maniskill.render_backend(images)


def test_physx_has_room_for_the_rows_and_contacts_that_were_lost_end_the_run_with_the_numbers_to_set(tmp_path):
    usual = {"max_rigid_contact_count": 1 << 19, "max_rigid_patch_count": 1 << 20, "heap_capacity": 1 << 26}
    assert gpu_memory.capacities(usual, 4096, {}) == usual
    more = usual | {"max_rigid_contact_count": 1 << 21, "max_rigid_patch_count": 9}
    assert gpu_memory.capacities(usual, 10_000, {"max_rigid_patch_count": 9}) == more
    with (tmp_path / "log").open("w") as log:
        log.write(
            "Contact buffer overflow detected, please increase its size to at least 9 in the scene desc! (before)\n"
        )
        log.flush()
        overflows = gpu_memory.Overflows(log.fileno())
        overflows.check("PushCube-v1", 8)
        log.write(
            "[SAPIEN] [critical] the application need to increase the PxgDynamicsMemoryConfig::foundLostPairsCapacity "
            "parameter to 165721092, otherwise the simulation will miss interactions\n"
            "[SAPIEN] [critical] Patch buffer overflow detected, please increase its size to at least 2194799 in the "
            "scene desc!\n"
        )
        log.flush()
        numbers = "found_lost_pairs_capacity: 268435456, max_rigid_patch_count: 4194304"
        with pytest.raises(EmbodiedError, match=f"for 8 envs of PushCube-v1.*env.gpu_memory='{{{numbers}}}'"):
            overflows.check("PushCube-v1", 8)
        overflows.check("PushCube-v1", 8)


@pytest.mark.parametrize("backend", ["cpu", "cpu_batched"])
def test_states_are_the_same_without_a_renderer_and_there_are_no_videos_with_the_reason(backend, monkeypatch):
    found = []
    for draws in (True, False):
        if not draws:
            monkeypatch.setattr(maniskill, "render_backend", lambda config: "none")
        env = make_env(ManiSkillConfig(task="PushCube-v1", backend=backend), 2)
        state = env.reset(options={"episodes": EPISODES[:2]})[0]["state"].copy()
        result = env.step_chunk(np.full((2, 3, env.env_spec.action.dim), 0.3, np.float32))
        found.append((state, result.obs["state"].copy(), result.rewards.copy()))
        assert env.video_problem() == ("" if draws else maniskill.NO_DRAWING)
        env.close()
    assert all(np.array_equal(drawn, blind) for drawn, blind in zip(*found, strict=True))


@pytest.mark.gpu
def test_observations_are_tensors_on_the_card(simulated):
    import torch

    state = simulated.reset(options={"episodes": EPISODES})[0]["state"]
    assert state.device.type == "cuda" and state.shape == (4, simulated.env_spec.state_dim)
    result = simulated.step_chunk(torch.zeros((4, 2, 8), device="cuda"))
    assert result.obs["state"].device.type == result.rewards.device.type == "cuda"


@pytest.mark.gpu
def test_episodes_begin_as_on_the_cpu(simulated):
    on_cpu = make_env(ManiSkillConfig(task="PickCube-v1", backend="cpu_batched"), 4)
    ours, theirs = (env.reset(options={"episodes": EPISODES})[0]["state"] for env in (simulated, on_cpu))
    np.testing.assert_allclose(host(ours), theirs, atol=1e-4)


@pytest.mark.gpu
def test_the_contract_holds_on_the_card(simulated, monkeypatch):
    monkeypatch.setattr(ManiSkillEnv, "gives_tensors", False)  # the check compares arrays
    check_vector_env(simulated, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.slow
def test_the_gpu_recipe_trains(tmp_path):
    from embodied.train import main

    short = ["run.iterations=2", "run.env_steps=null", "run.eval_every=null", "eval.episodes=4", "eval.num_envs=4"]
    small = ["env.num_envs=64", "algo.minibatch_size=800", "eval.videos=1", f"run.dir={tmp_path}"]
    assert main(["recipe=maniskill_ppo_gpu", *short, *small]) == 0


def test_without_a_gpu_its_physics_is_refused_with_what_to_do(monkeypatch):
    monkeypatch.setattr("embodied.run.devices.gpus", lambda *sys: [])
    with pytest.raises(ConfigError, match=r"env\.backend=cuda needs an NVIDIA GPU.*try env\.backend=auto"):
        launch.planned(load(["recipe=maniskill_ppo_gpu"]).config)


def test_the_same_recipe_takes_the_same_path_beside_a_gpu_and_the_gpus_recipe_holds_the_gpu(monkeypatch):
    without = launch.planned(load(["recipe=maniskill_ppo"]).config)
    monkeypatch.setattr("embodied.run.devices.gpus", lambda *sys: [Gpu(0, "H100", card=0)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config, plan = launch.planned(load(["recipe=maniskill_ppo"]).config)
    assert (config, replace(plan, idle_gpus=())) == without and config.env.backend == "cpu_batched" and plan.idle_gpus
    config, plan = launch.planned(load(["recipe=maniskill_ppo_gpu"]).config)
    assert config.env.backend == "cuda"
    assert [(host.roles, host.device) for host in plan.hosts] == [(("sim", "policy"), "gpu:0"), (("learner",), "gpu:0")]
