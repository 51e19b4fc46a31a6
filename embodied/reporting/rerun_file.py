"""One episode of an evaluation as a file of Rerun (rerun.io), to step through: the video, and what eval.dataset=true
recorded of every step. Needs the package rerun-sdk.

write_episode(Path("runs/pointmass_ppo-DATE"), 3, None)  ->  runs/pointmass_ppo-DATE/eval/v000039/episode-003.rrd
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from embodied.core.errors import ConfigError
from embodied.reporting.runs import Evaluation, read_run
from embodied.reporting.sections import outcome, videos_by_episode

MISSING = "--rerun needs the package rerun-sdk: python -m pip install 'embodied-loop[rerun]'"
STEP = "step"  # the timeline


def write_episode(folder: Path, number: int, out: Path | None) -> Path:
    """Write the episode of this number, of the evaluation that the folder's report shows; returns its path."""
    try:
        import rerun
    except ModuleNotFoundError:
        raise ConfigError(MISSING) from None
    evaluation = read_run(folder).last
    episode = next((one for one in evaluation.episodes if one.index == number), None) if evaluation else None
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
    return out


def recorded_steps(evaluation: Evaluation, number: int) -> dict[str, np.ndarray] | None:
    """The arrays [T, ...] of an episode in the evaluation's dataset, by name; None without a dataset."""
    written = [one.index for one in evaluation.episodes if not one.error]  # in the order of the dataset
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
