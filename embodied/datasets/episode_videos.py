"""Videos of many episodes in few files, from which the frames of a single episode can be read.

Bare streams are concatenated; ffmpeg then only writes the time of every frame, n / fps, which is exact for any number
of frames.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from embodied.core.errors import EmbodiedError
from embodied.datasets.validation import AGAIN
from embodied.reporting.videos import ffmpeg


class JoinedVideo:
    """The frames of one camera, in one mp4 file after the other."""

    def __init__(self, path: Callable[[int], Path], fps: int, file_bytes: int) -> None:
        """`path(n)` names the n-th file; a new one begins after `file_bytes`."""
        self.path, self.fps, self.file_bytes = path, fps, file_bytes
        self.file = 0
        self.num_frames = 0  # in the open file

    @property
    def _stream(self) -> Path:
        return self.path(self.file).with_suffix(".h264")

    def add(self, stream: Path, num_frames: int) -> tuple[int, float]:
        """Append an episode; returns the number of its file and its begin time there."""
        if self.num_frames and self._stream.stat().st_size + stream.stat().st_size > self.file_bytes:
            self.close()
            self.file += 1
        begins_s = self.num_frames / self.fps
        self._stream.parent.mkdir(parents=True, exist_ok=True)
        with self._stream.open("ab") as out, stream.open("rb") as source:
            shutil.copyfileobj(source, out)
        self.num_frames += num_frames
        return self.file, begins_s

    def close(self) -> None:
        """Complete the open file."""
        if self.num_frames:
            source = ["-f", "h264", "-framerate", str(self.fps), "-i", str(self._stream)]
            frame = f"1/({self.fps}*TB)"  # in units of the file's clock; without it times are rounded to microseconds
            times = f"setts=ts=round(N*{frame}):duration=round({frame})"
            wrap = ["-c", "copy", "-bsf:v", times, "-movflags", "+faststart"]
            ffmpeg(["-y", *source, *wrap, str(self.path(self.file))])
            self._stream.unlink()
            self.num_frames = 0


def read_frames(path: Path, begins_s: float, num_frames: int, fps: float, size: tuple[int, ...]) -> np.ndarray:
    """The frames of a video from this time on, uint8 [num_frames, H, W, 3]."""
    before = max(begins_s - 0.5 / fps, 0.0)  # frames have the times n / fps, rounded: half a frame before is safe
    seek = ["-ss", f"{before:.6f}"] if before else []
    height, width, colours = size
    header = f"P6\n{width} {height}\n255\n".encode()  # each frame contains its size
    frame = len(header) + height * width * colours
    wanted = num_frames * frame
    most = ["-frames:v", str(num_frames), "-fs", str(wanted + 1)]  # even if the file claims more frames
    raw = ["-fps_mode", "passthrough", "-f", "image2pipe", "-c:v", "ppm", "-pix_fmt", "rgb24", "-"]
    try:
        data = ffmpeg([*seek, "-f", "mp4", "-i", str(path), "-map", "0:v:0", *most, *raw])
    except EmbodiedError as err:
        raise EmbodiedError(f"{path} cannot be read: {err}; {AGAIN}") from None
    whole = sum(data.startswith(header, at) for at in range(0, len(data), frame))
    if whole != num_frames or len(data) != wanted:
        raise EmbodiedError(
            f"{path} has {whole} of the {num_frames} frames of {list(size)} from {begins_s:g} s on; {AGAIN}"
        )
    return np.frombuffer(data, np.uint8).reshape(num_frames, frame)[:, len(header) :].reshape(num_frames, *size)
