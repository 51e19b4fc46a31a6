"""A Gymnasium env of your own that shows images; a small convolutional network learns from them. About twenty seconds.

    python gym_images.py

The env need not be registered. docs/own_task.md lists the spaces that are understood.
"""

import gymnasium
import numpy as np
from gymnasium import spaces

import embodied

PLACES, CELL = 5, 8  # places in a row, and pixels of each


class Catch(gymnasium.Env):
    """A ball falls; a paddle in the bottom row steps left, stays or steps right, and should be below it."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 8}  # noqa: RUF012
    observation_space = spaces.Box(0, 255, (PLACES * CELL, PLACES * CELL, 3), np.uint8)
    action_space = spaces.Discrete(3)

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.ball, self.paddle = self.np_random.integers(PLACES, size=2)
        self.row = 0
        return self.observe(), {"success": False}

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + action - 1, 0, PLACES - 1))
        self.row += 1
        landed = self.row == PLACES - 1
        caught = landed and self.paddle == self.ball
        reward = caught - abs(self.paddle - self.ball) / PLACES
        return self.observe(), reward, landed, False, {"success": caught}

    def observe(self):
        image = np.zeros(self.observation_space.shape, np.uint8)
        for row, column, colour in ((self.row, self.ball, (255, 160, 0)), (PLACES - 1, self.paddle, (0, 160, 255))):
            image[CELL * row :, CELL * column :][:CELL, :CELL] = colour
        return image

    def render(self):
        return self.observe().repeat(4, 0).repeat(4, 1)


if __name__ == "__main__":
    options = ["env.max_episode_steps=4", "policy.name=cnn", "run.name=catch"]
    embodied.check("env.name=gym_images:Catch", options[0])
    run = embodied.train("gym_ppo", "env.name=gym_images:Catch", *options, "run.env_steps=10000", "eval.episodes=40")
    print(f"caught at first and at last: {run.metrics[0]['success_once']:.0%}, {run.metrics[-1]['success_once']:.0%}")
