"""Training curves for TensorBoard, written with its own record writer: no thread behind, and no torch in the driver."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path


class Curves:
    """One event file. A resumed run opens another beside it; TensorBoard joins them."""

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
