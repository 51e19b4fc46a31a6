"""What a run writes as it goes: the console's lines into logs/driver.log, the numbers of its iterations into
metrics.jsonl and TensorBoard's curves by env steps."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import UTC, datetime
from pathlib import Path

from embodied.core.files import replace_text


class RunLog:
    def __init__(self, run: Path) -> None:
        self.path = run
        self.metrics = run / "metrics.jsonl"
        self._file = None
        self._curves = None

    def note(self, text: str) -> None:
        """Write a line of the console into logs/driver.log."""
        with (self.path / "logs" / "driver.log").open("ab", buffering=0) as file:
            file.write(f"{now()} {text}\n".encode())

    def row(self, row: dict) -> None:
        """Write one iteration's numbers."""
        if self._curves is None:
            self._file = self.metrics.open("ab", buffering=0)  # nothing is left to flush later
            self._curves = Curves(self.path / "tensorboard")
        self._file.write((json.dumps(row) + "\n").encode())
        self._curves.add(row["env_steps"], row)

    def keep_rows(self, iteration: int) -> None:
        """Drop the rows of iterations after `iteration`: a resumed run makes them again."""
        if self.metrics.is_file():
            rows = map(row_of, self.metrics.read_text(errors="replace").splitlines())
            kept = [row for row in rows if row and row["iteration"] <= iteration]
            replace_text(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))

    def close(self) -> None:
        for file in (self._file, self._curves):
            if file is not None:
                file.close()
        self._file = self._curves = None


def row_of(line: str) -> dict | None:
    """A line of metrics.jsonl; None for what a crash or a full disk has left of one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("iteration"), int) else None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class Curves:
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

    def add(self, step: int, numbers: dict) -> None:
        """One point of every curve; names without a folder get `run/`."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [
            Summary.Value(tag=name if "/" in name else f"run/{name}", simple_value=float(number))
            for name, number in numbers.items()
            if isinstance(number, int | float)
        ]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self._file.close()

    def _write(self, event) -> None:
        self._records.write(event.SerializeToString())
