"""Sums: the toy that small language models learn to do within minutes.

`add2` shows "37+58=" and wants "95". `fewshot_sums` is for pretrained models: it shows three sums with their results
and one without, and scores the text before the end of the line. `calc2` is `add2` with factors, for a policy that may
use a calculator: an answer that ends in `<calc>12*7</calc>` gets the reply "84", and the conversation continues. `mul2`
asks the same products without a calculator. `Calculator` is a mixin for text envs and an example of a tool. Arithmetic
is read as a syntax tree; nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from abc import abstractmethod
from collections.abc import Callable
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from embodied.core.types import EpisodeSpec
from embodied.envs.text.text_env import TextEnv, Turn

SHOTS = "3 + 5 = 8\n12 + 7 = 19\n24 + 13 = 37\n"
RANGES = {
    "add2": (10, 100),
    "fewshot_sums": (1, 50),
    "calc2": (10, 100),
    "mul2": (10, 100),
}  # of both numbers, the end excluded
CALL = re.compile(r"<calc>([^<]*)</calc>\s*\Z")
LONGEST = 200  # characters of an expression
LARGEST = 10**30  # of its numbers and results
DIGITS = 10  # of a result that is not an integer


class Calculator:
    """A mixin, to be placed before `TextEnv` among the bases. A subclass implements `answered` instead of `step`."""

    result: str | None = None  # the calculator's last result in this conversation

    @abstractmethod
    def answered(self, answer: str) -> Turn:
        """Score an answer that calls no calculator."""

    def uses_calculator(self) -> bool:
        """True if there is a calculator in this conversation."""
        return True

    def step(self, answer: str) -> Turn:
        """Compute if the answer calls the calculator, else score."""
        if self.uses_calculator() and (call := CALL.search(answer)):
            self.result = calculate(call[1])
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
        self.numbers = a, b = self.draw(spec, lambda rng: two_numbers(rng, low, high), every_pair(low, high))
        self.right = str(a * b if products else a + b)
        if spec.task == "fewshot_sums":
            return f"{SHOTS}{a} + {b} ="
        return f"{a}*{b}=" if products else f"{a}+{b}="

    def uses_calculator(self) -> bool:
        return self.task == "calc2"

    def answered(self, answer: str) -> Turn:
        """Score the text up to the end of the line."""
        success = answer.split("\n", 1)[0].strip() == self.right
        return Turn(reward=float(success), success=success, facts={"expected": self.right})

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
            return small(number)
        case ast.UnaryOp(op=sign, operand=inner) if type(sign) in OPERATORS:
            return OPERATORS[type(sign)](value(inner))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, exponent = value(left), value(right)
            if abs(exponent) > 100:  # before it is computed: 9**9**9 has millions of digits
                raise ValueError("too large")
            return real(small(base**exponent))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return small(OPERATORS[type(op)](value(left), value(right)))
    raise ValueError("not arithmetic")


def small(number: int | float | complex) -> int | float:
    """The number, if it can be written down."""
    if abs(number) > LARGEST or number != number:
        raise ValueError("too large")
    return number


def real(number: int | float | complex) -> int | float:
    if isinstance(number, complex):
        raise ValueError("not a real number")
    return number
