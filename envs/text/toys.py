"""Toys that small language models learn within minutes: sums, sorting digits, text written backwards, pictures.

Sums: `add2` shows "37+58=" and wants "95". `fewshot_sums` is for pretrained models: it shows three sums with their
results and one without, and scores the text before the end of the line. `calc2` is `add2` with factors, for a policy
that may use a calculator: an answer that ends in `<calc>12*7</calc>` gets the reply "84", and the conversation
continues. `mul2` asks the same products without a calculator. `Calculator` is a mixin for text envs and an example of a
tool. Arithmetic is read as a syntax tree; nothing is executed.

Sorting: `sort4` shows "sort 98171:", four to six digits, and wants "11789". Backwards: `sentences` asks in messages for
the reversed text between tags, as PRIME-RL's example does, and is rewarded by similarity; `letters` shows
"reverse hello:" and wants "olleh", for models with fresh weights. Pictures: every picture is a drawing, named by its
random seed; the questions are how many dots it has, the name of a colour, or the sum of two digits.
"""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable
from difflib import SequenceMatcher
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from embodied.core.conversations import Said
from embodied.core.errors import ConfigError
from embodied.core.files import reading
from embodied.core.pictures import draw, drawing
from embodied.core.types import EpisodeSpec
from embodied.envs.text.text_env import TextEnv, Turn

SHOTS = "3 + 5 = 8\n12 + 7 = 19\n24 + 13 = 37\n"
RANGES = {
    "add2": (10, 100),
    "fewshot_sums": (1, 50),
    "calc2": (10, 100),
    "mul2": (10, 100),
}  # of both numbers, the end excluded
LONGEST = 200  # characters of an expression
LARGEST = 10**30  # of its numbers and results
DIGITS = 10  # of a result that is not an integer


class Calculator:
    """A mixin, to be placed before `TextEnv` among the bases. A subclass sets its `right` answer, or scores by an
    `answered` of its own. Another `tag` with another `compute` is another tool."""

    right: str
    tag: ClassVar[str] = "calc"
    result: str | None = None  # the calculator's last result in this conversation

    def compute(self, text: str) -> str:
        """The reply to a call with this text."""
        return calculate(text)

    def answered(self, answer: str) -> Turn:
        """Score an answer that calls no calculator: the text up to the end of the line."""
        success = answer.split("\n", 1)[0].strip() == self.right
        return Turn(reward=float(success), success=success, facts={"expected": self.right})

    def uses_calculator(self) -> bool:
        """True if there is a calculator in this conversation."""
        return True

    def step(self, answer: str) -> Turn:
        """Compute if the answer calls the calculator, else score."""
        if self.uses_calculator() and (call := re.search(rf"<{self.tag}>([^<]*)</{self.tag}>\s*\Z", answer)):
            self.result = self.compute(call[1])
            return Turn(said=f"{self.result}\n", done=False, facts={"calculated": self.result})
        return self.answered(answer)


class Sums(Calculator, TextEnv):
    @classmethod
    def longest_episode(cls, config: Any) -> int:
        return config.max_episode_steps or (2 if "calc2" in cls.tasks(config) else 1)

    @classmethod
    def num_questions(cls, config: Any, task: str) -> int:
        return len(every_pair(*RANGES[task])) - cls.held_out(config)

    def reset(self, spec: EpisodeSpec) -> str:
        self.task, self.result = spec.task, None
        low, high = RANGES[spec.task]
        products = spec.task in ("calc2", "mul2")
        spec = spec._replace(task="calc2") if products else spec  # held-out products are the same for both tasks
        self.numbers = a, b = self.draw(spec, PAIRS[spec.task], every_pair(low, high))
        self.right = str(a * b if products else a + b)
        if spec.task == "fewshot_sums":
            return f"{SHOTS}{a} + {b} ="
        return f"{a}*{b}=" if products else f"{a}+{b}="

    def uses_calculator(self) -> bool:
        return self.task == "calc2"

    def solution(self) -> str:
        """The result; with a calculator its call, then the calculator's result."""
        if self.task == "fewshot_sums":
            return f" {self.right}\n"
        if self.task == "calc2" and self.result is None:
            return "<calc>{}*{}</calc>".format(*self.numbers)
        return self.right


def two_numbers(rng: np.random.Generator, low: int, high: int) -> tuple[int, int]:
    a, b = rng.integers(low, high, 2)
    return int(a), int(b)


PAIRS = {task: partial(two_numbers, low=low, high=high) for task, (low, high) in RANGES.items()}


@lru_cache
def every_pair(low: int, high: int) -> tuple[tuple[int, int], ...]:
    """All pairs that `two_numbers` may draw."""
    return tuple(product(range(low, high), repeat=2))


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and brackets, or an error message."""
    if len(expression) > LONGEST:
        return "error: too long"
    try:
        result = value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as err:
        return f"error: {err}" if type(err) is ValueError else "error: not arithmetic"
    return str(result) if isinstance(result, int) else f"{result:.{DIGITS}g}"


OPERATORS: dict[type, Callable] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def value(node: ast.expr) -> int | float:
    """The value of a syntax tree of arithmetic."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return check_size(number)
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value(inner))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = value(left), value(right)
            if abs(exponent) > 100:  # before it is computed: 9**9**9 has millions of digits
                raise ValueError("too large")
            return check_size(base**exponent)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return check_size(OPERATORS[type(op)](value(left), value(right)))
    raise ValueError("not arithmetic")


def check_size(number: int | float | complex) -> int | float:
    """Returns the number; ValueError if it is not real, or too large to be written down."""
    if isinstance(number, complex):
        raise ValueError("not a real number")
    if abs(number) > LARGEST or number != number:
        raise ValueError("too large")
    return number


class ExactAnswer(TextEnv):
    """One text is right, whatever space is around it."""

    right: str

    def step(self, answer: str) -> Turn:
        success = answer.strip() == self.right
        return Turn(reward=float(success), success=success, facts={"expected": self.right})

    def solution(self) -> str:
        return self.right


class Sort(ExactAnswer):
    def reset(self, spec: EpisodeSpec) -> str:
        digits = self.draw(spec, lambda rng: "".join(map(str, rng.integers(0, 10, rng.integers(4, 7)))))
        self.right = "".join(sorted(digits))
        return f"sort {digits}:"


TAG = "reversed_text"
REVERSE_REQUEST = f"Write the text of the user backwards, character by character, between <{TAG}> and </{TAG}>."
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
        text = self.text_of(spec) if self.shared else self.draw(spec, some_words if self.tagged else some_letters)
        self.right = text[::-1]
        if not self.tagged:
            return f"reverse {text}:"
        return ({"role": "system", "content": REVERSE_REQUEST}, {"role": "user", "content": text})

    def text_of(self, spec: EpisodeSpec) -> str:
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


PICTURE_QUESTIONS = {"count": "count: ", "colour": "disc: ", "add": "sum: "}  # after the picture


class PictureQuestions(ExactAnswer):
    @classmethod
    def shows_pictures(cls, config: Any) -> bool:
        return True

    def reset(self, spec: EpisodeSpec) -> Said:
        seed, pixels = self.draw(spec, lambda rng: int(rng.integers(2**31))), self.config.pixels
        _, self.right = draw(spec.task, seed, pixels)
        shown = {"type": "image", "image": drawing(spec.task, seed, pixels)}
        return ({"role": "user", "content": [shown, {"type": "text", "text": PICTURE_QUESTIONS[spec.task]}]},)
