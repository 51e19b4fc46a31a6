"""Pictures, a toy for small models that read images: count dots, name a colour, add two digits. Every picture is a
drawing, named by its random seed."""

from __future__ import annotations

from typing import Any

from embodied.core.conversations import Said
from embodied.core.pictures import draw, drawing
from embodied.core.types import EpisodeSpec
from embodied.envs.text.text_env import TextEnv, Turn

ASKED = {"count": "count: ", "colour": "disc: ", "add": "sum: "}  # after the picture


class PictureQuestions(TextEnv):
    @classmethod
    def shows_pictures(cls, config: Any) -> bool:
        return True

    def reset(self, spec: EpisodeSpec) -> Said:
        seed, pixels = self.draw(spec, lambda rng: int(rng.integers(2**31))), self.config.pixels
        _, self.right = draw(spec.task, seed, pixels)
        shown = {"type": "image", "image": drawing(spec.task, seed, pixels)}
        return ({"role": "user", "content": [shown, {"type": "text", "text": ASKED[spec.task]}]},)

    def step(self, answer: str) -> Turn:
        success = answer.strip() == self.right
        return Turn(reward=float(success), success=success, facts={"expected": self.right})

    def solution(self) -> str:
        return self.right
