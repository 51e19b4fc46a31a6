"""Sums: the toy that small language models learn to do within minutes.

`add2` shows "37+58=" and wants "95". `fewshot_sums` is for models that have read of such things: three sums with their
results, one without, and what counts is the text before the end of the line. `calc2` is `add2` with factors, for a
policy that may let a calculator work: see `calculator.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from embodied.core.types import EpisodeSpec
from embodied.envs.text.base import TextEnv, Turn
from embodied.envs.text.calculator import Calculator

SHOTS = "3 + 5 = 8\n12 + 7 = 19\n24 + 13 = 37\n"
RANGES = {"add2": (10, 100), "fewshot_sums": (1, 50), "calc2": (10, 100)}  # of both numbers, the end excluded


class Sums(Calculator, TextEnv):
    @classmethod
    def longest_episode(cls, config: Any) -> int:
        return config.max_episode_steps or (2 if "calc2" in cls.tasks(config) else 1)

    def reset(self, spec: EpisodeSpec) -> str:
        self.task, self.result = spec.task, None
        self.numbers = a, b = self.draw(spec, lambda rng: two_numbers(rng, *RANGES[spec.task]))
        self.right = str(a * b if spec.task == "calc2" else a + b)
        if spec.task == "fewshot_sums":
            return f"{SHOTS}{a} + {b} ="
        return f"{a}*{b}=" if spec.task == "calc2" else f"{a}+{b}="

    def uses_calculator(self) -> bool:
        return self.task == "calc2"

    def answered(self, answer: str) -> Turn:
        """Score what is there up to the end of the line."""
        success = answer.split("\n", 1)[0].strip() == self.right
        return Turn(reward=float(success), success=success, facts={"expected": self.right})

    def solution(self) -> str:
        """The result; with a calculator its call, then what it said."""
        if self.task == "fewshot_sums":
            return f" {self.right}\n"
        if self.task == "calc2" and self.result is None:
            return "<calc>{}*{}</calc>".format(*self.numbers)
        return self.right


def two_numbers(rng: np.random.Generator, low: int, high: int) -> tuple[int, int]:
    a, b = rng.integers(low, high, 2)
    return int(a), int(b)
