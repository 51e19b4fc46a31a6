"""A calculator that a policy may use: an answer that ends in `<calc>12*7</calc>` is told "84", and goes on.

A mixin for text envs, and an example of a tool: the env hears the call, appends the result as a turn of its own, and
scores what is answered in the end. Arithmetic is read as a syntax tree and computed here; nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
from abc import abstractmethod
from collections.abc import Callable

from embodied.envs.text.base import Turn

CALL = re.compile(r"<calc>([^<]*)</calc>\s*\Z")
LONGEST = 200  # characters of an expression
LARGEST = 10**30  # of its numbers, whether given or computed
DIGITS = 10  # of a result that is no integer


class Calculator:
    """Placed before `TextEnv` among the bases; `answered` is what `step` is elsewhere."""

    result: str | None = None  # what the calculator said in this conversation last

    @abstractmethod
    def answered(self, answer: str) -> Turn:
        """Score an answer that calls no calculator."""

    def uses_calculator(self) -> bool:
        """Whether there is one in this conversation."""
        return True

    def step(self, answer: str) -> Turn:
        """Compute where that is asked for, else score."""
        if self.uses_calculator() and (call := CALL.search(answer)):
            self.result = calculate(call[1])
            return Turn(said=f"{self.result}\n", done=False, facts={"calculated": self.result})
        return self.answered(answer)


def calculate(expression: str) -> str:
    """The value of an expression of numbers, + - * / // % ** and brackets; or why there is none."""
    if len(expression) > LONGEST:
        return "error: too long"
    try:
        found = value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        return "error: division by zero"
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError) as err:
        return f"error: {err}" if type(err) is ValueError else "error: not arithmetic"
    return str(found) if isinstance(found, int) else f"{found:.{DIGITS}g}"


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
