"""Episodes as mp4 files that any browser plays, streamed frame by frame to ffmpeg so that memory stays flat.

A file gets its name only when it is whole: it is written under a hidden name in the same folder and renamed at the end,
when the outcome that belongs into the name is known.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from embodied.core.errors import DeadlineExceeded, EmbodiedError

CLOSE_S = 60.0  # ffmpeg has this long to write what it still holds
# Colours are converted and labelled as BT.709, else players guess by frame size.
BT709 = (
    "scale=in_range=full:out_range=limited:out_color_matrix=bt709,format={pixels},"
    "setparams=color_primaries=bt709:color_trc=bt709:colorspace=bt709"
)


@dataclass(frozen=True)
class Coding:
    """How frames become a file."""

    options: str  # of ffmpeg
    suffix: str = ".mp4"
    pad: bool = True  # to even sizes, as the pixel format that all players know needs

    def arguments(self, height: int, width: int) -> list[str]:
        odd = bool(height % 2 or width % 2)
        picture = BT709.format(pixels="yuv444p" if odd and not self.pad else "yuv420p")
        padding = "pad=ceil(iw/2)*2:ceil(ih/2)*2," if odd and self.pad else ""
        coding = ["-c:v", "libx264", "-preset", "veryfast", "-threads", "1", *self.options.split()]
        return ["-vf", padding + picture, *coding]


FOR_BROWSERS = Coding("-crf 20 -movflags +faststart")
# For datasets: a bare stream, so that many are joined by putting them one after the other; every second frame stands
# alone, so that any is found quickly; sizes stay.
FOR_DATASETS = Coding("-crf 18 -g 2 -bf 0 -f h264", ".h264", pad=False)


def encoder_problem() -> str:
    """Why nothing can be recorded here; empty: it can."""
    from imageio_ffmpeg import get_ffmpeg_exe

    try:
        program = get_ffmpeg_exe()
    except RuntimeError as err:
        return str(err).partition("\n")[0]
    return "" if shutil.which(program) else f"there is no ffmpeg at {program}; python -m embodied.doctor says more"


class VideoWriter:
    """One recording: `add` frames, then `finish` with the file's name or `discard`."""

    def __init__(self, folder: Path, fps: float, coding: Coding = FOR_BROWSERS) -> None:
        self.folder = Path(folder)
        self.fps = fps
        self.coding = coding
        self.num_frames = 0
        self._shape: tuple[int, ...] = ()
        self._draft = self.folder / f".recording-{uuid.uuid4().hex}{coding.suffix}"
        self._encoder: subprocess.Popen | None = None

    def add(self, frame: np.ndarray) -> None:
        """uint8 [H, W, 3]; all frames of a recording have one size."""
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"a frame is {frame.dtype} {list(frame.shape)}, it must be uint8 [height, width, 3]")
        if self._encoder is None:
            self._start(frame.shape)
        if frame.shape != self._shape:
            raise ValueError(f"frame {self.num_frames} is {list(frame.shape)}, the ones before {list(self._shape)}")
        try:
            self._encoder.stdin.write(np.ascontiguousarray(frame).data)
        except OSError:  # ffmpeg is gone; its own words say more than "broken pipe"
            self._fail(self._wait())
        self.num_frames += 1

    def finish(self, name: str) -> Path:
        """Complete the file and give it its name in the folder."""
        if self._encoder is None:
            raise ValueError(f"{name}: a recording needs at least one frame")
        code = self._wait()
        if code != 0:
            self._fail(code)
        path = self.folder / name
        os.replace(self._draft, path)
        self._log.close()
        self._encoder = None
        return path

    def discard(self) -> None:
        """Stop and leave nothing behind."""
        if self._encoder is not None:
            self._encoder.kill()
            self._encoder.wait(CLOSE_S)
            self._close_input()
            self._log.close()
            self._encoder = None
        self._draft.unlink(missing_ok=True)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def _start(self, shape: tuple[int, ...]) -> None:
        from imageio_ffmpeg import get_ffmpeg_exe

        self.folder.mkdir(parents=True, exist_ok=True)
        self._shape = shape
        size = f"{shape[1]}x{shape[0]}"
        source = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", size, "-r", f"{self.fps:g}", "-i", "-", "-an"]
        coding = self.coding.arguments(*shape[:2])
        command = [get_ffmpeg_exe(), "-y", "-v", "error", *source, *coding, str(self._draft)]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed when the recording ends
        # Its own process group: Ctrl-C asks the run to finish its step, and must not end the recording.
        self._encoder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._log, process_group=0
        )

    def _wait(self) -> int:
        self._close_input()
        try:
            return self._encoder.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.discard()
            raise DeadlineExceeded(f"ffmpeg did not finish {self._draft} within {CLOSE_S:.0f} s") from None

    def _close_input(self) -> None:
        with contextlib.suppress(OSError):  # frames that were still on their way to an encoder that is gone
            self._encoder.stdin.close()

    def _fail(self, code: int) -> None:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        self.discard()
        raise EmbodiedError(f"ffmpeg ended with code {code} while writing into {self.folder}: {'; '.join(words[-3:])}")
