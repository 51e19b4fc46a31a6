"""What an env step is rewarded with: `env.reward` chooses, the same way for every simulator.

Built here once, in the base of all envs, so that success, the end of an episode and frozen rows mean the same whatever
the reward is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.errors import ConfigError

if TYPE_CHECKING:
    from embodied.envs.base import StepResult, VectorEnv

RewardFunction = Callable[["VectorEnv", np.ndarray, "StepResult"], np.ndarray]  # env, actions [N, A], step -> [N]


class Reward:
    """own: what the simulator says. success: 1 in the env step that solves the task for the first time, else 0.
    difference: what the simulator says minus what it said one step before (nothing, before the first step), so that an
    episode's return is its last reward however long it takes. Any other name is that of a function.

    Rewards 0.2, 0.5, 0.5, 1 with success in the last step: success gives 0, 0, 0, 1, difference 0.2, 0.3, 0, 0.5.
    """

    def __init__(self, name: str, num_envs: int, has_success: bool, load: Callable[[str, str], RewardFunction]) -> None:
        """`load(what, key)` imports a function; the key is for its complaints."""
        self.name = name
        self.memory = np.zeros(num_envs)  # per row: the last reward, or whether success was paid for
        self.function = load(name, "env.reward") if ":" in name else None
        if name == "success" and not has_success:
            raise ConfigError(
                "env.reward=success, but this env does not tell of success; "
                "try env.reward=own, or a function of yours: env.reward=my_pkg.my_module:my_reward"
            )

    def begin(self, rows: np.ndarray) -> None:
        """New episodes on these rows."""
        self.memory[rows] = 0.0

    def of(self, env: VectorEnv, actions: np.ndarray, step: StepResult, moved: np.ndarray) -> np.ndarray:
        """[N]; only rows that moved count."""
        if self.name == "own":
            return step.rewards
        if self.function is not None:
            return np.asarray(self.function(env, actions, step))
        if self.name == "success":
            given = step.success & (self.memory == 0)
            self.memory[moved & given] = 1.0
            return given.astype(env.dtype)
        given = step.rewards - self.memory
        np.copyto(self.memory, step.rewards, where=moved)
        return given.astype(env.dtype)
