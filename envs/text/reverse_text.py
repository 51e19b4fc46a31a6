"""Text to be written backwards: the smallest task for a chat model, rewarded by the similarity of its answer.

`sentences` asks in messages for the reversed text between tags, as PRIME-RL's example does; `letters` shows
"reverse hello:" and wants "olleh", for models with fresh weights. `env.file` gives texts of your own to `sentences`.
"""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.conversations import Said
from embodied.core.errors import ConfigError
from embodied.core.files import reading
from embodied.core.types import EpisodeSpec
from embodied.envs.text.text_env import TextEnv, Turn

TAG = "reversed_text"
ASKED = f"Write the text of the user backwards, character by character, between <{TAG}> and </{TAG}>."
BETWEEN = re.compile(f"<{TAG}>(.*?)</{TAG}>", re.DOTALL)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
WORDS = (
    "a after again all always and animal answer apple at autumn away back bank bell big bird blue boat book bread "
    "bridge brother but by call cat child city clear cloud cold come country dark day deep door down dream dry "
    "early earth east empty evening every eye fall family far field find fire first fish flower for friend from "
    "garden give glass go good grass green ground hand happy hear heart high hill home horse house how ice in "
    "island it journey just keep kind lake large last late laugh leaf learn letter light like line little long look "
    "love make man many map milk moon morning mother mountain music name near never new night north now ocean of "
    "often old on one open or other out over paper path people picture place plain plant play quiet rain read red "
    "river road rock room round run sea season see seven shadow ship silver sing sister sky slow small snow some "
    "song south speak spring star stone story street summer sun table tall teacher the then thing three time to "
    "today train tree under valley very village voice walk warm water way we west white wind window winter with "
    "word world write year yellow young"
).split()


class ReverseText(TextEnv):
    @classmethod
    def load(cls, config: Any) -> list[str] | None:
        """The texts of env.file; None if they are generated."""
        return texts_of(config.file) if config.file else None

    @classmethod
    def check(cls, config: Any) -> None:
        super().check(config)
        if config.file and len(texts_of(config.file)) <= cls.num_held_out:
            raise ConfigError(f"env.file={config.file} needs more than {cls.num_held_out} texts, which are held out")

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int | None:
        return len(texts_of(config.file)) - cls.num_held_out if config.file else None

    def reset(self, spec: EpisodeSpec) -> Said:
        self.tagged = spec.task == "sentences"
        text = self.given(spec) if self.shared else self.draw(spec, some_words if self.tagged else some_letters)
        self.right = text[::-1]
        if not self.tagged:
            return f"reverse {text}:"
        return ({"role": "system", "content": ASKED}, {"role": "user", "content": text})

    def given(self, spec: EpisodeSpec) -> str:
        """A text of the file, whose first ones are held out."""
        if spec.init_state_id >= 0:
            return self.shared[spec.init_state_id % self.num_held_out]
        return self.shared[self.num_held_out + self.choose(spec, len(self.shared) - self.num_held_out)]

    def step(self, answer: str) -> Turn:
        answers = BETWEEN.findall(answer) if self.tagged else [answer]
        given = answers[-1].strip() if answers else ""
        reward = SequenceMatcher(None, given, self.right).ratio() if given else 0.0
        return Turn(reward=reward, success=given == self.right, facts={"expected": self.right})

    def solution(self) -> str:
        return f"<{TAG}>{self.right}</{TAG}>" if self.tagged else self.right


def some_words(rng: np.random.Generator) -> str:
    """A sentence of six to twelve random words."""
    return " ".join(rng.choice(WORDS, int(rng.integers(6, 13)))).capitalize() + "."


def some_letters(rng: np.random.Generator) -> str:
    """Three to six letters."""
    return "".join(rng.choice(list(LETTERS), int(rng.integers(3, 7))))


def texts_of(path: Path) -> list[str]:
    """The different texts of a JSONL file with lines {"prompt": "..."}."""
    with reading(path, ConfigError, 'env.file is JSONL, a line {"prompt": "..."} each'):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return list(dict.fromkeys(line["prompt"].strip() for line in lines))
