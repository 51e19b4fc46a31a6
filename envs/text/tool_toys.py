"""Toys with tools that small language models learn to call: search in documents, and programs in Python.

`find` shows "age of Bado: " and wants "47", which only a document tells: an answer that ends in `<find>Bado</find>`
gets the document found, "Bado is 47". `python` shows "37^12 mod 97=" and wants the number: the program in
`<py>37**12%97</py>` is run. `recall` and `powers` ask the same without a tool. Ages follow from a rule, so they are the
same everywhere; there are too many to be learned by heart.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from embodied.core.rng import generator
from embodied.core.types import EpisodeSpec
from embodied.envs.text.text_env import TextEnv
from embodied.envs.text.tools import Search, check_box, run_python
from embodied.envs.text.toys import Calculator

SYLLABLES = [a + b for a, b in product("bdfgklmnprstvz", "aeiou")]
WITH_TOOL = {"find": "find", "recall": "find", "python": "python", "powers": "python"}
PROGRAM_S = 1  # of work


@lru_cache
def people() -> dict[str, int]:
    """The age of everyone whose name has two syllables."""
    names = [f"{a}{b}".capitalize() for a, b in product(SYLLABLES, SYLLABLES)]
    return dict(zip(names, generator(0, "ages").integers(10, 100, len(names)).tolist(), strict=True))


@lru_cache
def documents() -> Search:
    """A document about each of them."""
    return Search({name: f"is {age}" for name, age in people().items()})


class Tools(Calculator, TextEnv):
    tag = ""  # that of the task

    @classmethod
    def longest_episode(cls, config: Any) -> int:
        return config.max_episode_steps or (2 if {"find", "python"} & {*cls.tasks(config)} else 1)

    @classmethod
    def load(cls, config: Any) -> Any:
        if "python" in cls.tasks(config):
            check_box()
        return None

    def reset(self, spec: EpisodeSpec) -> str:
        self.task, self.result, self.tool = spec.task, None, WITH_TOOL[spec.task]
        spec = spec._replace(task=self.tool)  # held-out questions are the same with and without the tool
        if self.tool == "find":
            self.tag, names = "find", [*people()]
            self.call = self.draw(spec, lambda rng: names[rng.integers(len(names))])
            self.right = str(people()[self.call])
            return f"age of {self.call}: "
        self.tag, (a, b, m) = "py", self.draw(spec, three_numbers)
        self.call, self.right = f"{a}**{b}%{m}", str(pow(a, b, m))
        return f"{a}^{b} mod {m}="

    def uses_calculator(self) -> bool:
        return self.task == self.tool

    def compute(self, text: str) -> str:
        if self.tag == "py":
            return run_python(text, PROGRAM_S)
        found = documents().find(text, 1)
        return f"{found[0]} {documents().documents[found[0]]}" if found else "nothing was found"

    def solution(self) -> str:
        """The right answer; with a tool its call first."""
        return f"<{self.tag}>{self.call}</{self.tag}>" if self.uses_calculator() and self.result is None else self.right


def three_numbers(rng: np.random.Generator) -> tuple[int, int, int]:
    """Base, exponent and modulus."""
    a, b, m = rng.integers(10, 100, 3)
    return int(a), int(b), int(m)
