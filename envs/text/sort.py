"""Sorting digits, a toy: `sort4` shows "sort 98171:", four to six digits, and wants "11789"."""

from __future__ import annotations

from embodied.core.types import EpisodeSpec
from embodied.envs.text.text_env import TextEnv, Turn


class Sort(TextEnv):
    def reset(self, spec: EpisodeSpec) -> str:
        digits = self.draw(spec, lambda rng: "".join(map(str, rng.integers(0, 10, rng.integers(4, 7)))))
        self.right = "".join(sorted(digits))
        return f"sort {digits}:"

    def step(self, answer: str) -> Turn:
        success = answer.strip() == self.right
        return Turn(reward=float(success), success=success, facts={"expected": self.right})

    def solution(self) -> str:
        return self.right
