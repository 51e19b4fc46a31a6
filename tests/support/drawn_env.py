"""A point mass whose images go wrong on a "GPU": `env.name=drawn_env:DrawnEnv env.kwargs={fault: hang, at: 3}`.

A process draws on a GPU if the plan says so (EMBODIED_RENDER); software's pictures, drawn elsewhere, are right. The
fault comes with the picture number `at`, of which the first is drawn at the reset. With `lone`, a file, it comes
only while another process draws.
"""

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
from image_env import ImageEnv


class DrawnEnv(ImageEnv):
    def __init__(self, config, num_envs: int) -> None:
        kwargs = dict(config.kwargs)
        on_gpu = "EMBODIED_RENDER" in os.environ
        self.fault, self.at, lone = (kwargs.pop(name, None) for name in ("fault", "at", "lone"))
        self.fault = self.fault if on_gpu else None
        self.name = kwargs.pop("drawn_by", "a card")
        self.pids = kwargs.pop("pids", None)
        self.count, self.last = 0, []
        if self.fault == "driver":
            raise ImportError("Cannot initialize a EGL device display")
        if lone and on_gpu:
            self.lock = os.open(lone, os.O_CREAT | os.O_RDWR)  # until the process ends
            with suppress(BlockingIOError):
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.fault = None
        super().__init__(config.model_copy(update={"kwargs": kwargs}), num_envs)

    def drawn_by(self) -> str:
        return self.name

    def _paint(self, rows: np.ndarray) -> dict:
        images = super()._paint(rows)
        self.count += 1
        self.last.append(images)
        if self.fault is None or self.count < self.at:
            return images
        if self.fault == "hang":
            Path(self.pids).write_text(str(os.getpid()))
            time.sleep(3600)
        if self.fault == "abort":
            os.abort()
        if self.fault == "slow":
            time.sleep(0.05)
        wrong = {"again": -2, "late": -3}.get(self.fault)
        if wrong is not None:
            return self.last[wrong]
        if self.fault == "blank":
            return {name: np.zeros_like(image) for name, image in images.items()}
        if self.fault == "wrong":
            return {name: 255 - image for name, image in images.items()}
        return images
