"""What is kept of an evaluation besides its outcomes: films of the first episodes and of failures, and a dataset.

Which episodes fail is known only afterwards, so those are played once more for the camera: filming costs no more than
the episodes that are filmed.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from embodied.core.types import EnvSpec, EpisodeResult, EpisodeSpec, Recording

if TYPE_CHECKING:
    from embodied.config.recipe import EvalSection

DRAFTS = "drafts"  # in the folder of an evaluation while it is played


def first_recording(options: EvalSection, out: Path) -> Recording:
    return Recording(
        film=frozenset(range(options.videos)),
        videos=out / "videos",
        overlay=options.overlay,
        cameras=options.cameras,
        drafts=out / DRAFTS if options.dataset else None,
    )


def to_film_again(options: EvalSection, episodes: list[EpisodeSpec], results: list[EpisodeResult]) -> list[EpisodeSpec]:
    """The failures that are not on film yet, as many as are wanted."""
    failed = {result.index for result in results if result.success_once is False}
    on_film = sum(index < options.videos for index in failed)
    missing = [spec for spec in episodes if spec.index in failed and spec.index >= options.videos]
    return missing[: max(0, options.failure_videos - on_film)] if options.videos else []


def write_dataset(out: Path, path: Path, spec: EnvSpec, results: list[EpisodeResult]) -> None:
    """The drafts of these episodes, in their order, as a dataset in LeRobot's layout; errors are left out."""
    from embodied.datasets import DatasetWriter, buffer_name, features_of, fps_of

    shutil.rmtree(path, ignore_errors=True)  # of the same version, evaluated before the run was resumed
    played = [result for result in results if not result.error]
    if played:
        with DatasetWriter(path, fps_of(spec), features_of(spec)) as writer:
            for result in played:
                writer.add_draft(out / DRAFTS / buffer_name(result.index))
    shutil.rmtree(out / DRAFTS, ignore_errors=True)
