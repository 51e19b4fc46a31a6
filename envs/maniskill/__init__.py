"""ManiSkill tasks on batched CPU scenes or on the GPU, with images, experts and the bridge tasks."""

__all__ = ["config", "cpu_batch", "env", "equality_proof", "experts", "tasks"]
