"""The rewards of conversations that `env.rewards` lists: the env's own, and functions of the user."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.envs.config import OWN_SCORE, WeightedReward
from embodied.envs.own_modules import explain_errors, import_class

OPTIONAL = "solution"  # a function with a parameter of this name gets a right answer, or None


class RewardSum:
    """Scores conversations by `env.rewards`. A function is called once for each, with the conversation before the last
    answer and with this answer."""

    def __init__(self, rewards: Sequence[WeightedReward]) -> None:
        self.weights = {reward.label: reward.weight for reward in rewards}
        self.functions = {
            reward.label: (reward.name, reward_function(reward.name)) for reward in rewards if reward.name != OWN_SCORE
        }
        self.read_solution = {
            label
            for label, (_, function) in self.functions.items()
            if OPTIONAL in inspect.signature(function).parameters
        }

    def of_env(self, reward: float) -> dict[str, float]:
        """The env's own reward of a turn, if it counts."""
        return {OWN_SCORE: reward} if OWN_SCORE in self.weights else {}

    def of_conversation(self, asked: str, answer: str, solution: Callable[[], str | None]) -> dict[str, float]:
        """The rewards of the functions, by their names."""
        scores = {}
        for label, (name, function) in self.functions.items():
            with explain_errors(f"env.rewards: {name}", "score an answer"):
                optional = {OPTIONAL: solution()} if label in self.read_solution else {}
                scores[label] = float(function(asked, answer, **optional))
            if not np.isfinite(scores[label]):
                raise ConfigError(f"env.rewards: {name} gave the reward {scores[label]} for {answer[:80]!r}")
        return scores

    def total(self, scores: dict[str, float]) -> float:
        """The weighted sum."""
        return sum(self.weights[label] * score for label, score in scores.items())


def reward_function(name: str) -> Callable[..., Any]:
    """The function of this name."""
    function = import_class(name, "env.rewards")
    if not callable(function):
        raise ConfigError(f"env.rewards: {name} is of type {type(function).__name__}, not a function")
    return function
