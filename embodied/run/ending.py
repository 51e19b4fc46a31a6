"""How a run ends: asked to stop, by a mistake, by a worker's death, or at its end; run.json says which."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from math import inf
from pathlib import Path
from shlex import quote
from typing import Any

from embodied.core.errors import DeadlineExceeded, EmbodiedError, NothingToLearn, StepGivenUp, WorkerFailed
from embodied.run.run_folder import STOPPED_AT_ONCE, RunFolder

AGAIN_S = 1.0  # launchers often send the same signal twice within milliseconds: that is one request


class Interrupted(KeyboardInterrupt):
    """A signal that stops at once."""

    def __init__(self, number: int) -> None:
        super().__init__(name_of(number))
        self.exit_code = 128 + number


class Interruption:
    """SIGTERM, Ctrl-C and a closed terminal ask the run to finish its step, save and stop. `check` gives up a step that
    is not over after `stop_s` seconds. A second Ctrl-C stops at once, and so does any signal that comes a second after
    the first. With `at_once` the first signal does, too."""

    def __init__(self, at_once: bool = False, stop_s: float = inf) -> None:
        self.at_once, self.stop_s = at_once, stop_s
        self.signal: int | None = None
        self.since = 0.0  # time of the first signal
        self._is_deferred, self._late = False, 0

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

    def check(self, what: str = "the step in progress", grace: bool = True) -> None:
        """Raise StepGivenUp if a requested stop has waited long enough, or without `grace` at all."""
        if self.signal is not None and time.monotonic() - self.since >= (self.stop_s if grace else 0.0):
            after = f" {self.stop_s:g} s after {name_of(self.signal)} (run.stop_s)" if grace else ""
            raise StepGivenUp(f"{what} was given up{after}")

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside, no signal stops at once; it does so at the end."""
        self._is_deferred = True
        try:
            yield
        finally:
            self._is_deferred = False
        if self._late:
            raise Interrupted(self._late)

    def __enter__(self) -> Interruption:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is not threading.main_thread():
            return self  # in another thread (a notebook, a server) Python allows no signal handlers
        ends = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # a run under nohup outlives the terminal
            ends.append(signal.SIGHUP)
        self._before = {sig: signal.signal(sig, self._handle) for sig in ends}
        return self

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._before.items():
            signal.signal(sig, handler)

    def _handle(self, sig: int, _frame: object) -> None:
        if self.signal is None:
            self.signal, self.since = sig, time.monotonic()
            if self.at_once:
                self._stop_at_once(sig)
                return
            latest = f", or after {self.stop_s:g} s" if self.stop_s < inf else ""
            with suppress(OSError):  # the terminal may be closed
                os.write(2, f"\nstopping after this step{latest}; a second Ctrl-C or SIGTERM stops at once\n".encode())
        elif sig == signal.SIGINT or time.monotonic() - self.since >= AGAIN_S:
            self._stop_at_once(sig)

    def _stop_at_once(self, sig: int) -> None:
        if not self._is_deferred:
            raise Interrupted(sig)
        self._late = sig


def name_of(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


@contextmanager
def closing(folder: RunFolder, interruption: Interruption, report: Callable[[Path], object]) -> Iterator[None]:
    """Write into run.json how the run ended, and then a `report`. The error of a failed worker then also says how to
    resume."""
    try:
        yield
    except KeyboardInterrupt as err:
        record_end(folder, "stopped", f"{STOPPED_AT_ONCE}{str(err) or name_of(signal.SIGINT)}")
        raise
    except NothingToLearn as err:
        record_end(folder, "stopped", str(err))
        raise
    except BaseException as err:
        record_end(folder, "failed", f"{type(err).__name__}: {err}")
        if isinstance(err, OSError) and err.errno == errno.ENOSPC and not err.filename:
            err.filename = str(folder.path)  # an open file does not say where it is
        if isinstance(err, (WorkerFailed, DeadlineExceeded)):
            advised = EmbodiedError("\n".join([str(err), *what_next(folder, err)]))
            advised.exit_code = err.exit_code
            raise advised from err
        raise
    else:
        record_end(folder, "stopped" if interruption.requested else "finished", "")
    finally:
        if folder.path.is_dir():
            report(folder.path)


def what_next(folder: RunFolder, error: Exception) -> list[str]:
    """Lines of advice after a worker's final failure, or after a step was given up."""
    saved = any(folder.checkpoints.glob("v[0-9]*"))
    crashed = "its process" in str(error) or "hung" in str(error)
    goes_on = "continue from the last checkpoint" if saved else "nothing was saved yet; begin it again"
    command = folder.info().get("command", "train")
    resume = f"  {goes_on}: python -m embodied.{command} {quote(f'resume={folder.path}')}"
    doctor = "  if this repeats: python -m embodied.doctor"
    return [resume] * (saved or crashed or isinstance(error, StepGivenUp)) + [doctor] * crashed


def record_end(folder: RunFolder, state: str, cause: str) -> None:
    if not folder.path.is_dir():
        print(f"{folder.path} was removed while the run went on", file=sys.stderr)
        return
    try:
        folder.finish(state, cause)
        folder.log.note(f"{state}: {cause}" if cause else state)
    except OSError as err:  # a full disk must not hide the original error
        print(f"run.json could not be written: {err}", file=sys.stderr)
