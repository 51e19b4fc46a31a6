"""The reward of an env step by `env.reward`, the same for every simulator; also a function or class of the user's."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.core.errors import ConfigError, WrongShape
from embodied.core.types import Array
from embodied.envs.own_modules import explain_errors, import_class

if TYPE_CHECKING:
    from embodied.envs.vector_env import StepResult, VectorEnv


class Reward:
    """The reward of an env step by `env.reward`, the same for every simulator.

    own: the simulator's reward. success: 1 in the env step that solves the task for the first time, else 0. difference:
    the simulator's reward minus its previous reward (0 before the first step), so that an episode's return is its last
    reward, whatever its length. Any other name is a function, or a class with a method `__call__`, that takes the env,
    its actions [N, A] and the `StepResult` and returns [N].

    Rewards 0.2, 0.5, 0.5, 1 with success in the last step: success gives 0, 0, 0, 1, difference 0.2, 0.3, 0, 0.5.
    """

    def __init__(self, config: Any, num_envs: int, has_success: bool) -> None:
        self.name = name = config.reward
        self.memory = np.zeros(num_envs)  # per row: the last reward, or whether success was rewarded
        self.function = own_reward(config) if ":" in name else None
        self.on_device = name == "own"  # whether it reads no data of a simulator on a GPU
        if name == "success" and not has_success:
            raise ConfigError(
                "env.reward=success, but this env does not report success; "
                "try env.reward=own, or a function of yours: env.reward=my_pkg.my_module:my_reward"
            )

    def begin(self, rows: np.ndarray) -> None:
        """New episodes on these rows."""
        self.memory[rows] = 0.0

    def of(self, env: VectorEnv, actions: Array, step: StepResult, moved: np.ndarray) -> Array:
        """[N]; only rows that moved count."""
        if self.name == "own":
            return step.rewards
        if self.function is not None:
            return self._user_rewards(env, actions, step)
        if self.name == "success":
            given = step.success & (self.memory == 0)
            self.memory[moved & given] = 1.0
            return given.astype(env.dtype)
        given = step.rewards - self.memory
        np.copyto(self.memory, step.rewards, where=moved)
        return given.astype(env.dtype)

    def _user_rewards(self, env: VectorEnv, actions: Array, step: StepResult) -> np.ndarray:
        """The user's reward."""
        with explain_errors(f"env.reward={self.name}", "be called"):
            given = np.asarray(self.function(env, actions, step))
        if given.shape != (env.num_envs,) or given.dtype.kind not in "biuf":
            raise WrongShape(
                f"env.reward={self.name} returns {given.dtype} {list(given.shape)}, it must return a number for each "
                f"env row, [{env.num_envs}]"
            )
        return given


def reward_class(config: Any) -> Any:
    """The function or class that `env.reward` names. Refuses `env.reward_kwargs` that it does not take, before an
    object is made."""
    kind, kwargs, what = import_class(config.reward, "env.reward"), config.reward_kwargs, f"env.reward={config.reward}"
    if not inspect.isclass(kind):
        if kwargs:
            raise ConfigError(f"{what} is no class, and env.reward_kwargs={kwargs} are arguments of one; leave it out")
        return kind
    if not any("__call__" in vars(base) for base in kind.__mro__):
        raise ConfigError(
            f"{what} is a class without a method __call__(self, env, actions, step), which returns the reward of "
            "every row (docs/own_task.md)"
        )
    try:
        inspect.signature(kind).bind(**kwargs)
    except TypeError as err:
        raise ConfigError(f"{what} does not take env.reward_kwargs={kwargs}: {err}") from None
    except ValueError:  # a class of another language has no signature
        pass
    return kind


def own_reward(config: Any) -> Any:
    """The function of `env.reward`, or an object of its class, made with `env.reward_kwargs`."""
    kind = reward_class(config)
    with explain_errors(f"env.reward={config.reward}", "be made"):
        return kind(**config.reward_kwargs) if inspect.isclass(kind) else kind
