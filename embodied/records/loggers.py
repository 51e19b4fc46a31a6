"""The loggers of `run.log`, whose packages are imported when they are opened, and the metrics of a Ray cluster."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import FileIO
from pathlib import Path
from typing import Any

from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import replace_text
from embodied.core.plugins import LOGGER_CLASSES
from embodied.core.yaml_text import read_yaml

PROJECT = "embodied-loop"


class Logger:
    """Where a run's curves go. `run.log` names it, and a run makes one in the driver."""

    package = ""
    """The optional package that it imports."""

    def __init__(self, run: Path) -> None:
        """`run` is the run's folder; a resumed run has the same."""

    def describe(self) -> str:
        """A line that says where the curves are; "" if nobody needs to be told."""
        return ""

    def add(self, step: int, numbers: dict[str, float]) -> None:
        """A point of every curve, after so many env steps."""
        raise NotImplementedError

    def close(self, failed: bool = False) -> None:
        """The run is over."""


def check_log(names: Sequence[str]) -> None:
    """Refuse a package of `run.log` that is not installed. A folder wandb/ in the working directory does not count."""
    for package in filter(None, (LOGGER_CLASSES[name].package for name in names)):
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise ConfigError(
                f"run.log={list(names)} needs the package {package}, which is not installed: python -m pip install "
                f"{package}, or 'embodied-loop[{package}]'"
            )


class TensorBoardLogger(Logger):
    """TensorBoard's curves, written with its own record writer: no thread behind, and no torch in the driver.

    One event file. A resumed run opens another beside it; TensorBoard joins them.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / "tensorboard"
        self._file: FileIO | None = None  # opened with the first point

    def _open(self) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.folder.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() // 10**9}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self.folder / name).open("ab", buffering=0)
        self._records = RecordWriter(self._file)
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, step: int, numbers: dict[str, float]) -> None:
        if self._file is None:
            self._open()
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self, failed: bool = False) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


class TrackioLogger(Logger):
    """trackio's curves, over env steps, in its own folder on this machine (TRACKIO_DIR). TRACKIO_PROJECT names another
    project. Nothing leaves this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL ask for it."""

    package = "trackio"

    def __init__(self, run: Path) -> None:
        import trackio

        self.project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        try:
            with redirect_stdout(io.StringIO()):  # the run prints its own line
                self._run = trackio.init(
                    project=self.project,
                    name=run.name,
                    resume="allow",
                    config=read_yaml((run / "config.yaml").read_text(encoding="utf-8")),
                    embed=False,
                    auto_log_gpu=False,
                    auto_log_cpu=False,
                )
        except (OSError, ValueError) as err:
            raise EmbodiedError(f"run.log: trackio does not start: {err}; leave it out of run.log") from err

    def describe(self) -> str:
        return f"to see the curves: trackio show --project {self.project}"

    def add(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool = False) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # not self._run.finish(), after which trackio finishes and prints once more at exit


class WandbLogger(Logger):
    """Weights & Biases' curves, over env steps. Its files lie in the run's folder; WANDB_PROJECT names another project.

    Nothing leaves this machine unless WANDB_MODE or WANDB_API_KEY ask for it, and no machine's or git's details do.
    """

    package = "wandb"

    def __init__(self, run: Path) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.mode = mode(os.environ)
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_git=True,
            x_disable_stats=True,
            x_disable_meta=True,
            x_save_requirements=False,
        )
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", PROJECT),
                name=run.name,
                id=run_id(run / "wandb" / "id"),
                dir=str(run),
                mode=self.mode,
                resume="allow",
                config=read_yaml((run / "config.yaml").read_text(encoding="utf-8")),
                settings=settings,
            )
        except wandb.errors.Error as err:
            raise EmbodiedError(f"run.log: W&B does not start: {err}; WANDB_MODE=offline needs no account") from err
        self.folder = Path(self._run.settings.sync_dir)
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def describe(self) -> str:
        if self.mode == "offline":
            return f"offline; to send it: wandb sync {self.folder}"
        return f"{self.mode}, {self._run.url or self.folder}"

    def add(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log({**numbers, "env_steps": step})

    def close(self, failed: bool = False) -> None:
        import wandb

        try:
            self._run.finish(exit_code=int(failed))
        except wandb.errors.Error as err:  # the run has finished, and metrics.jsonl is complete
            print(f"W&B did not get all: {err}; to send the rest: wandb sync {self.folder}", flush=True)


def mode(environ: Any) -> str:
    """online, offline or disabled: WANDB_MODE if it is set, else online with a key in WANDB_API_KEY, else offline."""
    return environ.get("WANDB_MODE") or ("online" if environ.get("WANDB_API_KEY") else "offline")


def run_id(path: Path) -> str:
    """The run's id in W&B; a resumed run keeps it."""
    path.parent.mkdir(exist_ok=True)
    if not path.is_file():
        replace_text(path, secrets.token_hex(8))
    return path.read_text().strip()


class RayGauges(Logger):
    """The newest numbers as metrics of the Ray cluster (embodied_train_loss for train/loss), labelled by run, for its
    dashboard and for Prometheus."""

    def __init__(self, run: Path) -> None:
        self.run = run.name
        self.gauges: dict[str, Any] = {}

    def add(self, step: int, numbers: dict[str, float]) -> None:
        from ray.util.metrics import Gauge

        for name, number in {"env_steps": step, **numbers}.items():
            if name not in self.gauges:
                words = re.sub(r"\W", "_", name.removeprefix("run/"))
                self.gauges[name] = Gauge(f"embodied_{words}", f"{name} of a run's newest iteration", ("run",))
            self.gauges[name].set(number, {"run": self.run})

    def close(self, failed: bool = False) -> None:
        self.gauges.clear()
