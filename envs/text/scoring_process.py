"""Scores answers in a separate process, since comparing mathematics may hang, crash or use up the memory.

`Scorer` starts `python -m embodied.envs.text.scoring_process KIND`, asks it over a socket, one JSON object a line, and
replaces it if it does not answer in time; that answer then counts as wrong. The process ends with its worker.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from embodied.core.errors import EmbodiedError

START_S = 180.0  # imports take seconds, or minutes on a loaded machine
END_S = 10.0  # until a killed process is gone
ORPHAN_S = 10.0  # this long after its deadline, a process whose worker has died ends itself
MATHEMATICS = "embodied.envs.text.scoring_process:mathematics"
MEMORY = 4 << 30  # bytes of address space
LONGEST = 20_000  # characters of compared answers
TIMED_OUT, DIED = "scoring timed out", "scoring died"


class Scorer:
    """A process that scores answers. `kind` is my_pkg.my_module:my_scores, a function that imports what it needs and
    returns the function that scores."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._asking = threading.Lock()  # held by the thread whose question is answered
        self._begin()

    @property
    def pid(self) -> int:
        """The id of the process that scores now."""
        return self._process.pid

    def score(self, seconds: float, **question: Any) -> tuple[float, str]:
        """The score of an answer, and the problem if there was one; after `seconds` the score is 0."""
        if len(question["answer"]) > LONGEST:
            return 0.0, f"longer than {LONGEST} characters"
        with self._asking:
            return self._score(seconds, question)

    def _score(self, seconds: float, question: dict[str, Any]) -> tuple[float, str]:
        self._wait_until_ready()
        deadline = time.monotonic() + seconds
        try:
            self._socket.settimeout(seconds)
            self._socket.sendall(json.dumps({"seconds": seconds, **question}).encode() + b"\n")
            reply = json.loads(self._read(deadline - time.monotonic()))
        except (OSError, EOFError) as err:
            self.close()
            self._begin()
            return 0.0, TIMED_OUT if isinstance(err, TimeoutError) else DIED
        return float(reply["score"]), reply["problem"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(END_S)
        self._lines.close()
        self._socket.close()

    def _begin(self) -> None:
        self._socket, its_socket = socket.socketpair()
        environment = {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}
        with its_socket:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "embodied.envs.text.scoring_process", self.kind],
                stdin=its_socket,
                stdout=its_socket,
                start_new_session=True,  # Ctrl-C is the worker's
                env=os.environ | environment,
            )
        self._lines, self._ready = self._socket.makefile("rb"), False

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._read(START_S)
        except (OSError, EOFError) as err:
            self.close()
            why = "did not start in time" if isinstance(err, TimeoutError) else "died while starting"
            raise EmbodiedError(f"the process that scores {self.kind} {why}: python -m embodied.doctor") from None
        self._ready = True

    def _read(self, seconds: float) -> bytes:
        """The next line of the process."""
        self._socket.settimeout(max(seconds, 1e-3))  # 0 would be no limit
        if not (line := self._lines.readline()):
            raise EOFError
        return line


class Scorers:
    """Scorers of one kind, for conversations that are scored at the same time: another process whenever all are busy,
    at most one for each core."""

    def __init__(self, kind: str) -> None:
        self.kind, self.most = kind, len(os.sched_getaffinity(0))
        self.changed = threading.Condition()
        self.idle = [Scorer(kind)]
        self.all = [*self.idle]

    def score(self, seconds: float, **question: Any) -> tuple[float, str]:
        """As `Scorer.score`; the time until a scorer is free does not count."""
        scorer = self._take()
        try:
            return scorer.score(seconds, **question)
        finally:
            with self.changed:
                self.idle.append(scorer)
                self.changed.notify()

    def close(self) -> None:
        for scorer in self.all:
            scorer.close()

    def _take(self) -> Scorer:
        with self.changed:
            while not self.idle and len(self.all) == self.most:
                self.changed.wait()
            if not self.idle:
                self.all.append(Scorer(self.kind))
                return self.all[-1]
            return self.idle.pop()


# In the process


def mathematics() -> Callable[..., float]:
    """Scores 1 if the answer equals one of the solutions, in any notation."""
    from math_verify import parse, verify

    def score(answer: str, solutions: list[str]) -> float:
        given = parse(f"${answer}$", parsing_timeout=None)
        golds = (parse(f"${solution}$", parsing_timeout=None) for solution in solutions)
        return float(any(verify(gold, given, timeout_seconds=None) for gold in golds))

    return score


def main(kind: str) -> None:
    """Answer questions until the input ends."""
    module, _, name = kind.partition(":")
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of libraries must not mix with replies
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.ERROR)  # math_verify warns that its own time limits are off: the deadline is ours
    score = getattr(importlib.import_module(module), name)()
    print(json.dumps({"ready": kind}), file=replies)
    for line in sys.stdin:
        question = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, question.pop("seconds") + ORPHAN_S)  # its default is to end the process
        reply = {"score": 0.0, "problem": ""}
        try:
            reply["score"] = score(**question)
        except Exception as err:  # scorers of libraries raise all kinds of things on odd answers
            reply["problem"] = f"scoring failed: {type(err).__name__}: {err}"[:300]
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies)


if __name__ == "__main__":
    main(sys.argv[1])
