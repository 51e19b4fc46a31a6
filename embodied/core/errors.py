"""Errors, in the words of the person who has to fix them.

`EmbodiedError` and its subclasses are for the user's side: a command prints their text without a traceback and exits
with `exit_code`. A broken invariant of our own is an `assert` instead.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

# Control characters except tab and newline, and half surrogate pairs, which stand for bytes that are no UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

# The address of an object in memory, in its repr; and torch's C++ stack, behind its message.
_INTERNAL = re.compile(r" at 0x[0-9a-f]+(?=[>,])|\s*Exception raised from \S+ at .*", re.DOTALL)


def printable(text: str) -> str:
    """Foreign text in a form for any file, terminal and page: unprintable characters become escapes."""
    return _UNPRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_error(text: str) -> str:
    """The text of an error in printable form, without the addresses of objects and code."""
    return printable(_INTERNAL.sub("", text))


def stop_at_once(*_: object) -> None:
    """The answer to Ctrl-C while a command is imported."""
    os.write(2, b"stopped at once\n")
    os._exit(130)


class EmbodiedError(Exception):
    """An error that the user can fix: the text says what happened, where, and what to try."""

    exit_code = 1

    def __str__(self) -> str:
        return printable_error(super().__str__())


class ConfigError(EmbodiedError):
    """The recipe or the command line is wrong. Found before anything starts."""

    exit_code = 2


class MissingAsset(EmbodiedError):
    """A simulator needs files that are not on this machine."""

    exit_code = 2


class CheckpointError(EmbodiedError):
    """A checkpoint is missing, incomplete or damaged."""

    exit_code = 2


@contextmanager
def naming(key: str) -> Iterator[None]:
    """Put the option before errors about its value: `/tmp: no policy in it` becomes `checkpoint=/tmp: no policy in
    it`."""
    try:
        yield
    except (ConfigError, CheckpointError) as err:
        if f"{key}=" in str(err) or re.match(r"\w+(\.\w+)*=", str(err)):
            raise
        raise type(err)(f"{key}={err}") from None


class Diverged(EmbodiedError):
    """Training produced numbers that are not finite; no step was taken with them."""


class NothingToLearn(EmbodiedError):
    """Training ended early: several batches in a row had no gradient."""


class StepGivenUp(EmbodiedError):
    """The run was asked to stop, and its step did not end in time."""


class EvaluationStopped(EmbodiedError):
    """An evaluation was stopped before all its episodes had ended."""


class Unusable(EmbodiedError):
    """A worker produced unusable results: non-finite numbers, or a wrong shape. A new worker may not fail."""


class NotFinite(Unusable):
    """A simulator returned NaN or infinity."""


class WrongShape(Unusable):
    """A simulator returned an array of another shape or kind than it promised."""


class StaleWeights(EmbodiedError):
    """A worker's weights are not the current version."""


class WorkerFailed(EmbodiedError):
    """A worker raised an exception or its process died. Carries the worker's name and the first cause."""

    lost_state = False  # True: a learner's process ended, and only checkpoints still have its state

    def __init__(self, worker: str, cause: str) -> None:
        super().__init__(f"{worker}: {cause}")
        self.worker = worker
        self.cause = cause


class ChannelClosed(EmbodiedError):
    """The other side of a channel has ended: no more items will come or be taken."""

    def __init__(self, channel: str, peer: str, cause: str) -> None:
        super().__init__(f"channel {channel!r} was closed by {peer}: {cause}")
        self.channel = channel
        self.peer = peer
        self.cause = cause


class DeadlineExceeded(EmbodiedError):
    """A wait lasted longer than its deadline (`faults.timeout_s` unless named otherwise)."""


def nearest(name: str, names: Iterable[str], cutoff: float = 0.5, before: str = "; ", count: int = 1) -> str:
    """ "; did you mean ...?" with at most `count` similar names, or nothing. Names of the same words come first."""
    names = list(names)
    words = sorted(re.split("[_-]", name))
    same = [other for other in names if sorted(re.split("[_-]", other)) == words]
    near = same[:count] or difflib.get_close_matches(name, names, count, cutoff)
    return f"{before}did you mean {' or '.join(map(repr, near))}?" if near else ""


def in_a_line(err: BaseException) -> str:
    """An exception with its type, in one line."""
    return printable_error(" ".join(f"{type(err).__name__}: {err}".split()))
