"""What a run's folder keeps of its progress: metrics.jsonl, logs/driver.log, and the curves of `run.log`: TensorBoard's
files, or W&B (`wandb_logger.py`).
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from embodied.core.files import replace_text
from embodied.reporting.results import evaluation_numbers
from embodied.reporting.wandb_logger import WandbLogger


class RunLogger(Protocol):
    def add(self, step: int, numbers: dict[str, float]) -> None:
        """A point of every curve, after so many env steps."""

    def close(self, failed: bool = False) -> None:
        """Write what is left to write."""


class RunLog:
    """Writes the console's lines and the iterations' numbers into a run's folder."""

    def __init__(self, run: Path) -> None:
        self.path = run
        self.metrics = run / "metrics.jsonl"
        self._file: FileIO | None = None
        self._loggers: list[RunLogger] = []
        self._tensorboard = True  # to be opened with the first row

    def begin(self, names: Sequence[str]) -> list[str]:
        """Write the curves of `run.log`; returns lines that say where those of others go."""
        self._tensorboard = "tensorboard" in names
        if "wandb" not in names:
            return []
        found = WandbLogger(self.path)
        self._loggers.append(found)
        return [f"wandb       {found.describe()}"]

    def note(self, text: str) -> None:
        """Write a line of the console into logs/driver.log."""
        with (self.path / "logs" / "driver.log").open("ab", buffering=0) as file:
            file.write(f"{now()} {text}\n".encode())

    def row(self, row: dict) -> None:
        """Write one iteration's numbers."""
        if self._file is None:
            self._file = self.metrics.open("ab", buffering=0)  # nothing is left to flush later
        self._file.write((json.dumps(row) + "\n").encode())
        self._point(row["env_steps"], row)

    def evaluated(self, version: int, results: dict) -> None:
        """Add an evaluation's figures to the row of the iteration that made this version, and to the curves."""
        rows = self._rows()
        row = next((row for row in reversed(rows) if row["policy_version"] == version), None)
        if row is None:  # of the policy that training began with
            return
        figures = evaluation_numbers(results)
        row.update(figures)
        self._rewrite(rows)
        self._point(row["env_steps"], figures)

    def keep_rows(self, iteration: int) -> None:
        """Drop the rows of iterations after `iteration`: a resumed run makes them again."""
        if self.metrics.is_file():
            self._rewrite([row for row in self._rows() if row["iteration"] <= iteration])

    def close(self, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()
        for logger in self._loggers:
            logger.close(failed)
        self._file, self._loggers = None, []

    def _point(self, step: int, numbers: dict) -> None:
        if self._tensorboard:
            self._loggers.append(TensorBoardLogger(self.path / "tensorboard"))
            self._tensorboard = False
        for logger in self._loggers:
            logger.add(step, in_folders(numbers))

    def _rows(self) -> list[dict]:
        if not self.metrics.is_file():
            return []
        rows = map(row_of, self.metrics.read_text(errors="replace").splitlines())
        return [row for row in rows if row]

    def _rewrite(self, rows: list[dict]) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        replace_text(self.metrics, "".join(json.dumps(row) + "\n" for row in rows))


class TensorBoardLogger:
    """TensorBoard's curves, written with its own record writer: no thread behind, and no torch in the driver.

    One event file. A resumed run opens another beside it; TensorBoard joins them.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, numbers: dict[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self, failed: bool = False) -> None:
        self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def in_folders(numbers: dict) -> dict[str, float]:
    """The numbers by the curves' names: those without a folder get `run/`."""
    return {
        name if "/" in name else f"run/{name}": float(number)
        for name, number in numbers.items()
        if isinstance(number, int | float)
    }


def row_of(line: str) -> dict | None:
    """A line of metrics.jsonl; None for what a crash or a full disk has left of one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("iteration"), int) else None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
