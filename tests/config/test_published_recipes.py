"""Recipes of published sizes hold the numbers of the programs that they follow, read in their own files."""

import pytest

from embodied.config.recipe import load

# key there -> the same number from our configuration
HERE = {
    "optim.lr": lambda c: c.algo.lr,
    "optim.value_lr": lambda c: c.algo.value_lr,
    "optim.adam_beta2": lambda c: c.algo.adam_betas[1],
    "optim.adam_eps": lambda c: c.algo.adam_eps,
    "optim.weight_decay": lambda c: c.algo.weight_decay,
    "optim.clip_grad": lambda c: c.algo.max_grad_norm,
    "global_batch_size": lambda c: c.algo.minibatch_size,
    "update_epoch": lambda c: c.algo.epochs,
    "group_size": lambda c: c.algo.group_size,
    "episodes": lambda c: c.algo.groups * c.algo.group_size,  # total_num_envs * rollout_epoch
    "env_steps": lambda c: c.env.num_envs * c.algo.rollout_decisions * c.policy.chunk,  # of a rollout, all envs
    "clip_ratio_high": lambda c: c.algo.clip_high,
    "clip_ratio_low": lambda c: c.algo.clip_low,
    "clip_ratio_c": lambda c: c.algo.dual_clip,
    "value_clip": lambda c: c.algo.value_clip,
    "huber_delta": lambda c: c.algo.huber_delta,
    "gamma": lambda c: c.algo.gamma,
    "value loss": lambda c: c.algo.value_coef,
    "entropy_bonus": lambda c: c.algo.entropy_coef,
    "mask by episode": lambda c: c.algo.weighting == "episode",
    "bootstrap_type": lambda c: {"truncate": "always", "terminate": "standard"}[c.env.on_success],
    "rewards_bounds": lambda c: (c.algo.filter_low, c.algo.filter_high),  # divided by reward_coef
    "total_num_envs": lambda c: c.env.num_envs,
    "max_episode_steps": lambda c: c.env.max_episode_steps,
    "steps before": lambda c: c.env.settling_steps,
    "reset_gripper_open": lambda c: c.env.settling_gripper == "open",
    "camera_heights": lambda c: c.env.image_size,
    "num_action_chunks": lambda c: c.policy.chunk,
    "action_horizon": lambda c: c.policy.horizon,
    "num_steps": lambda c: c.policy.steps,
    "extra_delta_transform": lambda c: c.policy.relative_actions == 6,  # make_bool_mask(6, -1)
    "temperature_train": lambda c: c.policy.temperature,
    "crop": lambda c: c.policy.crop_area,
    "stop token": lambda c: c.policy.stop_token,
    "lora_rank": lambda c: c.policy.lora_rank,
    "lora_path": lambda c: c.policy.lora_path,
}
ADAM = {"optim.adam_eps": 1e-8, "optim.weight_decay": 0.01}
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_c": 3.0}
PPO = {**ADAM, **CLIP, "clip_ratio_high": 0.2, "value_clip": 0.2, "huber_delta": 10, "gamma": 0.99, "value loss": 1.0}
OFT = {**ADAM, "clip_ratio_high": 0.28, "num_action_chunks": 8, "group_size": 8, "mask by episode": True}
PI0 = {**PPO, "optim.lr": 5e-6, "optim.value_lr": 1e-4, "optim.adam_beta2": 0.95, "optim.clip_grad": 1.0,
       "global_batch_size": 2048, "env_steps": 64 * 8 * 240, "max_episode_steps": 240, "steps before": 15,
       "reset_gripper_open": True, "camera_heights": 256, "num_action_chunks": 5, "mask by episode": True}  # fmt: skip
ORIGINALS = {
    "libero_grpo_openvla_oft": {
        **OFT, **CLIP, "optim.lr": 2e-5, "optim.clip_grad": 1.0, "global_batch_size": 16384, "episodes": 64 * 16,
        "rewards_bounds": (0.5 / 5, 4.5 / 5), "max_episode_steps": 512, "steps before": 15, "reset_gripper_open": False,
        "temperature_train": 1.6, "crop": 1.0, "stop token": False, "camera_heights": 256, "total_num_envs": 64,
    },
    "libero_grpo_openvla_oft_simplevla": {
        **OFT, "clip_ratio_low": 0.2, "clip_ratio_c": None, "optim.lr": 5e-6, "optim.clip_grad": 1.0,
        "episodes": 64 * 8, "rewards_bounds": (0.1, 0.9), "max_episode_steps": 512, "steps before": 10,
        "reset_gripper_open": True, "temperature_train": 1.6, "crop": 0.9, "stop token": True,
        "global_batch_size": 128 * 512 // 8,
    },
    "libero_ppo_pi0": {**PI0, "update_epoch": 4, "action_horizon": 50, "num_steps": 4, "extra_delta_transform": True},
    "libero_ppo_pi05": {**PI0, "update_epoch": 1, "action_horizon": 10, "num_steps": 3, "extra_delta_transform": False},
    "maniskill_ppo_openvla": {
        **PPO, "optim.lr": 1e-4, "optim.value_lr": 3e-3, "optim.clip_grad": 10, "global_batch_size": 640,
        "env_steps": 128 * 160, "bootstrap_type": "always", "mask by episode": False, "lora_rank": 32,
        "total_num_envs": 128, "max_episode_steps": 80,
    },
    "maniskill_grpo_openvla_oft": {
        **OFT, **CLIP, "optim.lr": 1e-4, "optim.clip_grad": 10, "global_batch_size": 640, "episodes": 256,
        "lora_rank": 32, "lora_path": "RLinf/RLinf-OpenVLAOFT-ManiSkill-Base-Lora", "total_num_envs": 256,
    },
    "maniskill_ppo_pi0": {
        **PPO, "optim.lr": 7.91e-6, "optim.value_lr": 1.55e-4, "optim.adam_beta2": 0.95, "optim.clip_grad": 1.0,
        "global_batch_size": 5120, "env_steps": 320 * 80, "bootstrap_type": "always", "mask by episode": False,
        "action_horizon": 8, "entropy_bonus": 0.005, "update_epoch": 4,
    },
}  # fmt: skip


@pytest.mark.parametrize("recipe", ORIGINALS)
def test_a_recipe_has_the_numbers_of_the_program_that_it_follows(recipe):
    config = load([f"recipe={recipe}"]).config
    assert {key: HERE[key](config) for key in ORIGINALS[recipe]} == ORIGINALS[recipe]
