"""Write the report of a run, or compare several: python -m embodied.report RUN [RUN ...]

Writes report.html of a run or an evaluation: curves, tables, videos, timings, provenance. report.data.json beside it
holds the same numbers and words. For several runs: one page that compares them, by name, date, commit and differences
between their recipes.

usage: python -m embodied.report RUN [RUN ...] [out=FILE] [--live] [--rerun=N] [--help]

  RUN                           a run's folder (runs/NAME-DATE) or an evaluation's (runs/NAME-DATE/eval/v000100), or
                                that of a group of seeds or settings, which counts as its average; or, alone, that of
                                runs that share devices (runs/share-DATE)
  out=FILE                      where the page goes; else report.html in the folder of the one RUN, or
                                comparison.html beside the first of several
  --live                        write the page again every few seconds until no RUN is running any more; an open page
                                reloads itself
  --rerun=N                     no page, but episode N of RUN's newest evaluation as a file of Rerun, in its folder:
                                the video, and every step that eval.dataset=true recorded

The page needs no network and no server: open it from disk in any browser. Its videos are the files of the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from embodied import let_call
from embodied.core.errors import ConfigError
from embodied.core.files import as_path, read_object
from embodied.core.options import RERUN_SDK
from embodied.reporting.comparison_page import read_all
from embodied.reporting.page import write_page
from embodied.reporting.run_page import REPORT, page_of
from embodied.reporting.runs import Evaluation, Run, read_run
from embodied.reporting.sections import outcome, videos_by_episode
from embodied.run import launch
from embodied.sharing.page import SHARE

COMPARISON = "comparison.html"
LIVE, RERUN = "--live", "--rerun="
WHICH_RUN = "which run? python -m embodied.report runs/NAME-DATE [runs/NAME-DATE ...] [out=FILE] [--live]"
EVERY_S = 5
STEP = "step"  # the timeline of Rerun


def main(argv: list[str] | None = None) -> int:
    return launch.run(start, argv, __doc__)


def start(argv: list[str]) -> int:
    options = [word.removeprefix("out=") for word in argv if word.startswith("out=")]
    numbers = [word.removeprefix(RERUN) for word in argv if word.startswith(RERUN)]
    runs = [as_path(word) for word in argv if not word.startswith(("out=", RERUN)) and word != LIVE]
    if not runs or len(options) > 1 or any(str(run).startswith("-") for run in runs):
        raise ConfigError(WHICH_RUN)
    out = as_path(options[0]) if options else None
    if numbers:
        if len(runs) > 1 or not numbers[-1].isdecimal():
            raise ConfigError(f"{RERUN}{numbers[-1]}: name one RUN, and the number of an episode")
        print(write_episode(runs[0], int(numbers[-1]), out))
        return 0
    if LIVE in argv:
        keep_writing(runs, out)
    print(write(runs, out))
    return 0


def call(*runs: Run | Path | str, out: Path | str | None = None) -> Path:
    """Write a page from Python, like the command, and return its path: `embodied.report(run, other, out="two.html")`. A
    run is what `embodied.train` returned, or a folder."""
    if not runs:
        raise ConfigError(WHICH_RUN)
    return write(
        [as_path(str(getattr(run, "folder", run))) for run in runs], None if out is None else as_path(str(out))
    )


def keep_writing(folders: list[Path], out: Path | None, wait: Callable[[float], None] = time.sleep) -> None:
    """Write the page every few seconds while one of the runs is running, until Ctrl-C."""
    running = any(map(is_running, folders))
    write(folders, out, live=running)  # errors come before the line that promises pages
    if running:
        print(f"written every {EVERY_S} s while the run is running; Ctrl-C ends this, not the run", flush=True)
    with suppress(KeyboardInterrupt):
        while running:
            wait(EVERY_S)
            running = any(map(is_running, folders))
            write(folders, out, live=running)


def is_running(folder: Path) -> bool:
    """True if the folder belongs to a running run, a group with a running run, or running runs that share devices."""
    if (folder / SHARE).is_file():  # the command that serves the runs removes its socket when it ends
        return Path(str(read_object(folder / SHARE).get("socket") or "no socket")).exists()
    runs = read_all([folder])
    return any(run.info.get("state") == "running" for shown in runs for run in getattr(shown, "runs", [shown]))


def write(folders: list[Path], out: Path | None, live: bool = False) -> Path:
    """Write the page of one run, or of several compared; returns its path. A `live` page reloads itself."""
    if out is None:
        out = folders[0] / REPORT if len(folders) == 1 else folders[0].resolve().parent / COMPARISON
    shown, unread = page_of(folders, out.parent)
    write_page(out, shown, EVERY_S if live else 0)
    if unread:
        files = "1 file" if unread == 1 else f"{unread} files"
        print(f"{files} could not be read; the top of the page says why", file=sys.stderr)
    return out


def write_episode(folder: Path, number: int, out: Path | None) -> Path:
    """Write the episode of this number, of the evaluation that the folder's report shows; returns its path."""
    RERUN_SDK.check("--rerun")
    import rerun

    evaluation = read_run(folder).last
    episode = next((played for played in evaluation.episodes if played.index == number), None) if evaluation else None
    if not evaluation or not episode:
        raise ConfigError(f"{folder} has no episode {number}; name one that is in the evaluation's episodes.csv")
    video, steps = videos_by_episode(evaluation).get(number), recorded_steps(evaluation, number)
    if not video and not steps:
        how = "evaluate with eval.videos=4 or eval.dataset=true"
        raise ConfigError(f"episode {number} of {evaluation.folder} has neither a video nor recorded steps; {how}")
    out = out or evaluation.folder / f"episode-{number:03d}.rrd"
    with rerun.RecordingStream("embodied", recording_id=f"{folder.resolve().name}-{evaluation.name}-{number}") as to:
        to.save(out)
        words = f"{episode.task}: {outcome(episode)}, return {episode.total_reward:g}, seed {episode.seed}"
        to.log("episode", rerun.TextDocument(words), static=True)
        if video:
            film = rerun.AssetVideo(path=video)
            to.log("video", film, static=True)
            times = film.read_frame_timestamps_nanos()
            frames = rerun.TimeColumn(STEP, sequence=range(len(times)))
            to.send_columns("video", [frames], rerun.VideoFrameReference.columns_nanos(times))
        for name, values in (steps or {}).items():
            log_steps(to, rerun, name, values)
        pictures = [
            *(["video"] if video else []),
            *(name for name, values in (steps or {}).items() if values.ndim == 4),
        ]
        to.send_blueprint(layout(rerun.blueprint, pictures, [name for name in steps or {} if name not in pictures]))
    return out


def layout(views: Any, pictures: list[str], curves: list[str]) -> Any:
    """The viewer's first view: pictures on the left; the outcome, and curves with one plot a name on the right."""
    left = [views.Spatial2DView(origin=name, name=name) for name in pictures]
    right = [views.TimeSeriesView(origin=name, name=name) for name in curves]
    outcome = views.TextDocumentView(origin="episode", name="episode")
    columns = [*([views.Vertical(*left)] if left else []), views.Vertical(*right, outcome)]
    return views.Blueprint(views.Horizontal(*columns))


def recorded_steps(evaluation: Evaluation, number: int) -> dict[str, np.ndarray] | None:
    """The arrays [T, ...] of an episode in the evaluation's dataset, by name; None without a dataset."""
    written = [played.index for played in evaluation.episodes if not played.error]  # in the order of the dataset
    if number not in written or not (evaluation.folder / "dataset").is_dir():
        return None
    from embodied.datasets import read_dataset

    episode = read_dataset(evaluation.folder / "dataset")[written.index(number)]
    arrays = {f"cameras/{name}": images for name, images in episode.obs.get("images", {}).items()}
    arrays |= {"state": episode.obs["state"]} if "state" in episode.obs else {}
    return arrays | {"action": episode.actions} | ({"reward": episode.rewards} if episode.rewards is not None else {})


def log_steps(to: Any, rerun: Any, name: str, values: np.ndarray) -> None:
    """Log images one by one, and numbers as curves."""
    if values.ndim == 4:
        for step, image in enumerate(values):
            to.set_time(STEP, sequence=step)
            to.log(name, rerun.Image(image).compress())
        return
    rows = values.reshape(len(values), -1)
    columns = rerun.Scalars.columns(scalars=rows.ravel()).partition([rows.shape[1]] * len(rows))
    to.send_columns(name, [rerun.TimeColumn(STEP, sequence=range(len(rows)))], columns)


let_call(__name__)
if __name__ == "__main__":
    raise SystemExit(main())
