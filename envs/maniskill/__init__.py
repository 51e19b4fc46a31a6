"""ManiSkill tasks on batched CPU scenes or on the GPU, with images, experts and the bridge tasks."""
