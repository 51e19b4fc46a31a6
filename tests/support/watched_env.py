"""Point masses for tests of what images go through: `env.name=watched_env:CountedEnv`, and one that gives tensors.

`CountedEnv` writes down every picture that leaves its process; `TensorEnv` looks to the loop like a simulator on a GPU.
"""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from image_env import ImageEnv

from embodied.core.types import ActRequest, Trajectory
from embodied.envs.pointmass.env import REACH
from embodied.runtime.channel import Remote


class CountedEnv(ImageEnv):
    def __init__(self, config, num_envs: int) -> None:
        super().__init__(config, num_envs)
        note_pictures(Path(config.kwargs["notes"]))


def note_pictures(notes: Path) -> None:
    """From now on `notes` gets a line for every message with pictures that leaves this process: what and how many."""
    put = Remote.put

    def noted(self, item, *rest):
        if isinstance(item, ActRequest | Trajectory):
            with notes.open("a") as file:
                file.write(json.dumps([type(item).__name__, os.getpid(), *pictures(item)]) + "\n")
        return put(self, item, *rest)

    Remote.put = noted


def pictures(item) -> tuple[int, int]:
    """Pictures of one camera in an item's observations, and the bytes of all."""
    found = [obs["images"] for obs in (item.obs, getattr(item, "final_obs", None)) if obs]
    count = sum(len(images["near"]) for images in found)
    return count, sum(image.nbytes for images in found for image in images.values())


class TensorEnv(ImageEnv):
    """Everything comes and goes as tensors, but that no episode terminates."""

    def _reset_rows(self, rows, episodes):
        super()._reset_rows(rows, episodes)
        return torch.from_numpy(self._distance() < REACH * self.config.size)

    def _step(self, actions, active):
        assert isinstance(actions, torch.Tensor)
        step = super()._step(actions.numpy(), active)
        return replace(step, rewards=torch.from_numpy(step.rewards), success=torch.from_numpy(step.success))

    def _observe(self):
        images = self._paint(np.arange(self.num_envs))
        return {
            "state": torch.from_numpy(super()._observe()["state"]),
            "images": {camera: torch.from_numpy(frames) for camera, frames in images.items()},
        }
