"""The loggers `wandb` and `trackio` of `run.log`. Both packages are optional."""

from __future__ import annotations

import importlib.util
import io
import os
import secrets
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from embodied.config.read import read_yaml
from embodied.core.errors import ConfigError, EmbodiedError
from embodied.core.files import replace_text

PROJECT = "embodied-loop"


def check_log(names: Sequence[str]) -> None:
    """Refuse a package of `run.log` that is not installed. A folder wandb/ in the working directory does not count."""
    for name in ("wandb", "trackio"):
        spec = importlib.util.find_spec(name) if name in names else None
        if name in names and (spec is None or spec.origin is None):
            raise ConfigError(
                f"run.log={list(names)} needs the package {name}, which is not installed: python -m pip install "
                f"{name}, or 'embodied-loop[{name}]'"
            )


class TrackioLogger:
    """trackio's curves, over env steps, in its own folder on this machine (TRACKIO_DIR). TRACKIO_PROJECT names another
    project. Nothing leaves this machine unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL ask for it."""

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
        """A line that says where the curves are."""
        return f"to see the curves: trackio show --project {self.project}"

    def add(self, step: int, numbers: dict[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self, failed: bool = False) -> None:
        import trackio

        with redirect_stdout(io.StringIO()):
            trackio.finish()  # not self._run.finish(), after which trackio finishes and prints once more at exit


class WandbLogger:
    """Weights & Biases' curves, over env steps. Its files lie in the run's folder; WANDB_PROJECT names another project.

    Nothing leaves this machine unless WANDB_MODE or WANDB_API_KEY ask for it, and no machine's or git's details do.
    """

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
        """A line that says where the curves are."""
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
