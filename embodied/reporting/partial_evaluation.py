"""An interrupted evaluation on disk, so that continuing it plays only the missing episodes.

Its folder holds `partial.json` (the evaluation's options and its number of finished episodes), the finished episodes in
`episodes.csv`, buffers for a dataset, and no `results.json`. Both files are rewritten as episodes end. A partial
evaluation gets no rates: successful episodes end early, so they are over-represented among the finished ones.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from embodied.core.errors import CheckpointError
from embodied.core.files import replace_text
from embodied.core.types import EpisodeResult
from embodied.reporting.results import RESULTS, read_episodes, write_episodes
from embodied.reporting.success_stats import figures
from embodied.reporting.transcripts import remove_transcripts
from embodied.run.checkpoints import read_json
from embodied.run.run_folder import provenance

PARTIAL = "partial.json"
BUFFERS = "episode_buffers"  # the folder of the dataset's episodes
TELL_EVERY_S = 15.0
EVERY_S = 1.0  # minimum time between two writes
SHARE = 1 / 50  # largest share of the time spent on writing


class PartialEvaluation:
    """The state of an evaluation. `finished` holds its finished episodes by index, of earlier sessions too."""

    def __init__(
        self,
        folder: Path,
        asked: dict[str, Any],
        policy: dict[str, Any],
        clock: Callable[[], float] = time.monotonic,
        notify: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`asked`: everything that decides an episode's outcome. Episodes of earlier sessions with the same `asked` are
        kept. `policy` is the entry in results.json. `notify` gets lines on its progress."""
        self.folder, self.asked, self.policy, self.clock = folder, asked, policy, clock
        self.num_episodes = asked["eval"]["episodes"]
        self.finished: dict[int, EpisodeResult] = {}
        self.earlier: list[dict[str, Any]] = []
        if partial := is_part_of(folder, asked):
            with suppress(OSError, ValueError, KeyError, TypeError):  # else it is played from the start
                self.finished = {episode.index: episode for episode in read_episodes(folder)}
                self.earlier = partial["provenance"]
        if not self.finished:
            remove_transcripts(folder)
        self.session = provenance()
        self.notify, self.began = notify, len(self.finished)
        self.began_s = self.ended_s = clock()  # `ended_s`: the time of the last end of an episode
        self.told, self.told_s = self.began, self.began_s  # episodes that were over at the last line, and when it came
        self.wait_s = TELL_EVERY_S  # seconds until the next line, if no episode ends
        for rest in folder.glob("videos/.recording-*"):  # drafts of killed workers
            rest.unlink()
        (folder / RESULTS).unlink(missing_ok=True)  # of the same version, evaluated before the run was resumed
        self.write()

    def __str__(self) -> str:
        return f"{len(self.finished)} of {self.num_episodes} episodes"

    def add(self, episodes: Iterable[EpisodeResult]) -> None:
        """Add finished episodes; they are written if the last write is long enough ago."""
        before = len(self.finished)
        self.finished |= {episode.index: episode for episode in episodes}
        if len(self.finished) > before:
            self.changed, self.ended_s = True, self.clock()
        if self.changed and self.clock() >= self.next_s:
            self.write()
        new = len(self.finished) > self.told
        quiet_s = self.clock() - self.told_s
        if quiet_s >= (TELL_EVERY_S if new else self.wait_s) and len(self.finished) < self.num_episodes:
            # Without news the time between two lines doubles.
            self.wait_s = TELL_EVERY_S if new else 2 * self.wait_s
            self.told, self.told_s = len(self.finished), self.clock()
            self.notify(self.progress())

    def progress(self) -> str:
        """The number of finished episodes, their outcomes, the speed, and the remaining time at this speed."""
        over, results = len(self.finished), figures(list(self.finished.values()))
        parts = [f"{over:,} of {self.num_episodes:,} episodes are over"]
        if results["success_once"]:
            parts.append(f"success_once {results['success_once']['rate']:.0%} of these")
        elif results["return"] is not None:
            parts.append(f"return {results['return']:.2f}")
        if played := over - self.began:
            speed = played / (self.clock() - self.began_s)
            left_s = (self.num_episodes - over) / speed
            parts += [f"{speed:.3g} a second", f"about {left_s:,.0f} s left"]
        if (quiet_s := self.clock() - self.ended_s) >= 2 * TELL_EVERY_S:
            parts.append(f"none has ended for {quiet_s:,.0f} s")
        return "evaluation  " + ", ".join(parts)

    def write(self) -> None:
        """Write the finished episodes and partial.json."""
        began = self.clock()
        write_episodes(self.folder, self.finished.values())
        progress = {"over": len(self.finished), "episodes": self.num_episodes}
        mark(self.folder, {**progress, "asked": self.asked, "provenance": [*self.earlier, self.session]})
        self.changed = False
        self.next_s = self.clock() + max(EVERY_S, (self.clock() - began) / SHARE)

    def end(self) -> None:
        """Remove partial.json and the buffers, once results.json is written."""
        shutil.rmtree(self.folder / BUFFERS, ignore_errors=True)
        unmark(self.folder)

    def provenance(self) -> dict[str, Any]:
        """The provenance of the results; `earlier` holds that of earlier sessions."""
        return {**self.session, **({"earlier": self.earlier} if self.earlier else {})}


def mark(folder: Path, content: dict[str, Any]) -> None:
    """Write partial.json, which marks the folder as an interrupted evaluation."""
    replace_text(folder / PARTIAL, json.dumps({"state": "partial", **content}, indent=2) + "\n")


def unmark(folder: Path) -> None:
    """Remove partial.json."""
    (folder / PARTIAL).unlink()


def is_part_of(folder: Path, asked: dict[str, Any]) -> dict[str, Any] | None:
    """The content of partial.json, if it belongs to the evaluation `asked`."""
    partial = partial_in(folder)
    return partial if partial and partial.get("asked") == json.loads(json.dumps(asked)) else None


def partial_in(folder: Path) -> dict[str, Any] | None:
    """The content of an interrupted evaluation's partial.json; None without one."""
    with suppress(CheckpointError):
        if not (folder / RESULTS).is_file():
            return read_json(folder / PARTIAL)
    return None
