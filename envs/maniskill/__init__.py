"""ManiSkill tasks on batched CPU scenes or on the GPU, with images, experts and the bridge tasks."""

__all__ = ["config", "env", "episode_draws", "equality_proof", "expert", "motion_planner", "tasks"]
