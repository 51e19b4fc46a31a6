"""How a run ends: asked to stop, by a mistake, by a worker's death, or at its end; run.json says which."""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from shlex import quote
from typing import Any

from embodied.core.errors import DeadlineExceeded, EmbodiedError, NothingToLearn, WorkerFailed
from embodied.run.run_folder import RunFolder


class Interrupted(KeyboardInterrupt):
    def __init__(self, signal: int) -> None:
        self.exit_code = 128 + signal


class Interruption:
    """SIGTERM, Ctrl-C and a closed terminal ask the run to finish its step, save and stop; a second Ctrl-C stops at
    once. With `at_once` the first one does, too."""

    def __init__(self, at_once: bool = False) -> None:
        self.at_once = at_once
        self.signal: int | None = None

    @property
    def requested(self) -> bool:
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        return 0 if self.signal is None else 128 + self.signal

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
        if self.requested and sig == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.requested:
            self.signal = sig
            if self.at_once:
                raise Interrupted(sig)
            with suppress(OSError):  # the terminal may be closed
                os.write(2, b"\nstopping after this step; Ctrl-C again stops at once\n")


@contextmanager
def closing(folder: RunFolder, interruption: Interruption) -> Iterator[None]:
    """Write into run.json how the run ended. The error of a failed worker then also says how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        record_end(folder, "stopped", "second Ctrl-C")
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


def what_next(folder: RunFolder, error: Exception) -> list[str]:
    """Lines of advice after a worker's final failure."""
    saved = any(folder.checkpoints.glob("v[0-9]*"))
    crashed = "its process" in str(error) or "hung" in str(error)
    goes_on = "continue from the last checkpoint" if saved else "nothing was saved yet; begin it again"
    command = folder.info().get("command", "train")
    resume = f"  {goes_on}: python -m embodied.{command} {quote(f'resume={folder.path}')}"
    doctor = "  if this repeats: python -m embodied.doctor"
    return [resume] * (saved or crashed) + [doctor] * crashed


def record_end(folder: RunFolder, state: str, cause: str) -> None:
    from embodied.reporting.run_page import report_or_say_why

    if not folder.path.is_dir():
        print(f"{folder.path} was removed while the run went on", file=sys.stderr)
        return
    try:
        folder.finish(state, cause)
        folder.log.note(f"{state}: {cause}" if cause else state)
    except OSError as err:  # a full disk must not hide the original error
        print(f"run.json could not be written: {err}", file=sys.stderr)
    report_or_say_why(folder.path)
