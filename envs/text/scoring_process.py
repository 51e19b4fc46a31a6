"""Scores answers in a process of its own, since comparing mathematics may hang, crash or eat all memory.

`Scorer` starts `python -m embodied.envs.text.scoring_process KIND`, asks it over a pipe, a JSON object a line, and
replaces it where it does not answer in time: that costs one answer, which counts as wrong. The process ends when its
worker does.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

from embodied.core.errors import EmbodiedError

START_S = 180.0  # imports take seconds, on a loaded machine minutes
END_S = 10.0  # until a killed process is gone
ORPHAN_S = 10.0  # beyond its deadline, a process whose worker has died without stopping it ends itself
MEMORY = 4 << 30  # bytes of address space
LONGEST = 20_000  # characters of what is compared
TIMED_OUT, DIED = "scoring timed out", "scoring died"


class Scorer:
    """A process that scores answers of one kind: math, or reasoning_gym."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._asking = threading.Lock()  # held by the thread whose question is answered
        self._begin()

    @property
    def pid(self) -> int:
        """The id of the process that scores now."""
        return self._process.pid

    def score(self, seconds: float, **question: Any) -> tuple[float, str]:
        """The score of an answer, and what went wrong with it; after so many seconds it is 0."""
        if len(question["answer"]) > LONGEST:
            return 0.0, f"longer than {LONGEST} characters"
        with self._asking:
            return self._score(seconds, question)

    def _score(self, seconds: float, question: dict[str, Any]) -> tuple[float, str]:
        self._wait_until_ready()
        deadline = time.monotonic() + seconds
        try:
            self._write(json.dumps({"seconds": seconds, **question}) + "\n", deadline)
            found = json.loads(self._read(deadline))
        except (TimeoutError, BrokenPipeError, EOFError) as err:
            self.close()
            self._begin()
            return 0.0, TIMED_OUT if isinstance(err, TimeoutError) else DIED
        return float(found["score"]), found["problem"]

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait(END_S)
        self._process.stdin.close()
        self._process.stdout.close()

    def _begin(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "embodied.envs.text.scoring_process", self.kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # Ctrl-C is the worker's
            env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"},
        )
        os.set_blocking(self._process.stdin.fileno(), False)
        self._ready, self._rest = False, b""

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        try:
            self._read(time.monotonic() + START_S)
        except (EOFError, TimeoutError) as err:
            self.close()
            why = "did not start in time" if isinstance(err, TimeoutError) else "died while starting"
            raise EmbodiedError(f"the process that scores {self.kind} {why}: python -m embodied.doctor") from None
        self._ready = True

    def _write(self, line: str, deadline: float) -> None:
        rest = line.encode()
        while rest:
            self._wait(self._process.stdin, select.POLLOUT, deadline)
            rest = rest[os.write(self._process.stdin.fileno(), rest) :]

    def _read(self, deadline: float) -> bytes:
        while b"\n" not in self._rest:
            self._wait(self._process.stdout, select.POLLIN, deadline)
            if not (more := os.read(self._process.stdout.fileno(), 1 << 16)):
                raise EOFError
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    @staticmethod
    def _wait(pipe: Any, event: int, deadline: float) -> None:
        ready = select.poll()
        ready.register(pipe, event)
        if not ready.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError


class Scorers:
    """Scorers of one kind, for conversations that are scored at the same time: a process more whenever all are busy, at
    most one for each core."""

    def __init__(self, kind: str) -> None:
        self.kind, self.most = kind, len(os.sched_getaffinity(0))
        self.changed = threading.Condition()
        self.idle = [Scorer(kind)]
        self.all = [*self.idle]

    def score(self, seconds: float, **question: Any) -> tuple[float, str]:
        """As that of a `Scorer`; the time that it waits for one does not count."""
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


def equal_mathematics(answer: str, solutions: list[str]) -> float:
    """1 where the answer is equal to one of the solutions, however it is written."""
    from math_verify import parse, verify

    given = parse(f"${answer}$", parsing_timeout=None)
    golds = (parse(f"${solution}$", parsing_timeout=None) for solution in solutions)
    return float(any(verify(gold, given, timeout_seconds=None) for gold in golds))


@cache
def dataset_of(name: str, options: str) -> Any:
    """A data set of reasoning_gym; its options are JSON."""
    import reasoning_gym

    options = json.loads(options)
    if name == "composite" and isinstance(options.get("datasets"), list):
        from reasoning_gym.composite import DatasetSpec

        options["datasets"] = [DatasetSpec(**{"weight": 1, "config": {}, **one}) for one in options["datasets"]]
    return reasoning_gym.create_dataset(name, **options)


@lru_cache(1024)
def entry_of(name: str, options: str, index: int) -> dict[str, Any]:
    """A question of a data set. Making one may take long, and a group asks the same."""
    return dataset_of(name, options)[index]


def reasoning_gym_score(answer: str, name: str, options: str, index: int, partial: bool) -> float:
    """The data set's own score. Less than 1 counts where `partial` asks for it, and never for containing the answer."""
    from reasoning_gym.dataset import ProceduralDataset

    dataset = dataset_of(name, options)
    entry = entry_of(name, options, index)
    score = float(dataset.score_answer(answer, entry))
    scorer = dataset
    if name == "composite":
        scorer = dataset.datasets[entry["metadata"]["source_dataset"]]
    pays_for_length = type(scorer).score_answer is ProceduralDataset.score_answer
    return score if score == 1.0 or (partial and not pays_for_length) else 0.0


SCORES: dict[str, tuple[str, Callable[..., float]]] = {  # kind -> what is imported at the start, what scores
    "math": ("math_verify", equal_mathematics),
    "reasoning_gym": ("reasoning_gym", reasoning_gym_score),
}


def main(kind: str) -> None:
    """Answer questions until there are no more."""
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is not a reply
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    logging.disable(logging.ERROR)  # math_verify warns that its own time limits are off: the deadline is ours
    module, score = SCORES[kind]
    __import__(module)
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
