"""A point mass with images, for tests of drawing. Its module does not import torch, which takes a process a second."""

from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv


class ImageEnv(PointMassEnv):
    """The point mass seen by both cameras; `env.kwargs` are further options of it."""

    def __init__(self, config, num_envs: int) -> None:
        common = {name: getattr(config, name) for name in ("num_envs", "max_episode_steps", "on_success")}
        seen = {"cameras": ("near", "top"), "image_size": 16, "state": "proprio"}
        own = {name: value for name, value in config.kwargs.items() if name != "notes"}
        super().__init__(PointMassConfig(name="pointmass", **{**common, **seen, **own}), num_envs)
