"""An evaluation that is not over: what it has so far, on disk, so that whoever goes on plays only what is missing.

Its folder holds `partial.json` (what was asked for, how much is over) and the finished episodes in `episodes.csv`, both
written anew as it goes on, and no `results.json`. A part of the list gets no rates: episodes that succeed soon are over
first, so they would be too many among those that are over.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from embodied.core.errors import CheckpointError
from embodied.core.types import EpisodeResult
from embodied.reporting.results import RESULTS, read_episodes, write_episodes
from embodied.run.checkpoints import read_json, replace_text
from embodied.run.folder import provenance

PARTIAL = "partial.json"
EVERY_S = 1.0  # between two writings, while episodes end
SHARE = 1 / 50  # of the time that writing may take


class PartialEvaluation:
    """`finished` has the episodes that are over, by index, of earlier sittings too."""

    def __init__(
        self,
        folder: Path,
        asked: dict[str, Any],
        policy: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`asked` is all that the outcome of an episode follows from: earlier sittings count if theirs was the same.
        `policy` is what results.json says of it."""
        self.folder, self.asked, self.policy, self.clock = folder, asked, policy, clock
        self.num_episodes = asked["eval"]["episodes"]
        self.finished: dict[int, EpisodeResult] = {}
        self.earlier: list[dict[str, Any]] = []
        if told := is_part_of(folder, asked):
            with suppress(OSError, ValueError, KeyError, TypeError):  # else it is played from the start
                self.finished = {one.index: one for one in read_episodes(folder)}
                self.earlier = told["provenance"]
        self.sitting = provenance()
        for rest in folder.glob("videos/.recording-*"):  # by workers that were killed
            rest.unlink()
        (folder / RESULTS).unlink(missing_ok=True)  # of the same version, evaluated before the run was resumed
        self.write()

    def __str__(self) -> str:
        return f"{len(self.finished)} of {self.num_episodes} episodes"

    def add(self, episodes: Iterable[EpisodeResult]) -> None:
        """These are over, too."""
        before = len(self.finished)
        self.finished |= {one.index: one for one in episodes}
        self.changed |= len(self.finished) > before
        if self.changed and self.clock() >= self.next_s:
            self.write()

    def write(self) -> None:
        began = self.clock()
        write_episodes(self.folder, self.finished.values())
        told = {"over": len(self.finished), "episodes": self.num_episodes}
        mark(self.folder, {**told, "asked": self.asked, "provenance": [*self.earlier, self.sitting]})
        self.changed = False
        self.next_s = self.clock() + max(EVERY_S, (self.clock() - began) / SHARE)

    def end(self) -> None:
        """It is whole: `results.json` is there."""
        unmark(self.folder)

    def provenance(self) -> dict[str, Any]:
        """What produced the results; `earlier` are the sittings before this one."""
        return {**self.sitting, **({"earlier": self.earlier} if self.earlier else {})}


def mark(folder: Path, told: dict[str, Any]) -> None:
    """What is in the folder is a part of what is asked for."""
    replace_text(folder / PARTIAL, json.dumps({"state": "partial", **told}, indent=2) + "\n")


def unmark(folder: Path) -> None:
    (folder / PARTIAL).unlink()


def is_part_of(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """What `partial.json` says if the folder holds a part of what is asked for."""
    told = partial_in(folder)
    return told if told and told.get("asked") == json.loads(json.dumps(asked)) else None


def partial_in(folder: Path) -> dict[str, Any] | None:
    """What is known of an evaluation that was interrupted; None where there is none."""
    with suppress(CheckpointError):
        if not (folder / RESULTS).is_file():
            return read_json(folder / PARTIAL)
    return None
