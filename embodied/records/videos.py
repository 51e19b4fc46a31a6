"""Videos of episodes: mp4 files that any browser plays, text below their frames, and a mosaic of several.

`VideoRecorder` works in the sim worker's process and streams frames to ffmpeg one by one, in constant memory. A file is
written under a hidden name and gets its final name, with the outcome, when it is complete. `workflows/evaluator.py`
chooses the episodes.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from embodied.core.arrays import Observation
from embodied.core.errors import DeadlineExceeded, EmbodiedError
from embodied.core.types import ChunkResult, EpisodeResult, EpisodeSpec, Recording
from embodied.envs.own_modules import file_name

if TYPE_CHECKING:
    from embodied.envs.vector_env import VectorEnv

CLOSE_S = 60.0  # for ffmpeg to write its last frames
JOIN_S = 600.0  # for ffmpeg to join files of some hundred megabytes
# Colours are converted and labelled as BT.709, else players guess by frame size.
BT709 = (
    "scale=in_range=full:out_range=limited:out_color_matrix=bt709,format={pixels},"
    "setparams=color_primaries=bt709:color_trc=bt709:colorspace=bt709"
)


DRAFT = ".recording-"  # begins the name of an unfinished video, which has no suffix: nobody takes it for a video
VIDEO_NAME = re.compile(r"episode-(?P<episode>\d+)_(?P<outcome>[a-z]+)_.*")  # as `video_name` makes it


def worth_seeing(videos: Iterable[Path]) -> list[Path]:
    """The videos of the newest evaluation first, and among these a success before failures."""
    return sorted(videos, key=lambda path: (str(path.parent), "_failure_" not in path.name, path.name), reverse=True)


def video_name(episode: int, success: bool | None, task: str, seed: int) -> str:
    """The file of an episode's video: episode-000_success_PushCube-v1_seed7.mp4. `task` fits into a file's name."""
    outcome = {True: "success", False: "failure", None: "played"}[success]
    return f"episode-{episode:03d}_{outcome}_{task}_seed{seed}.mp4"


def remove_drafts(evaluation: Path) -> None:
    """Delete the unfinished videos of killed workers."""
    for draft in evaluation.glob(f"videos/{DRAFT}*"):
        draft.unlink()


@dataclass(frozen=True)
class Coding:
    """The ffmpeg command that turns frames into a file."""

    options: str  # of ffmpeg, with the format: a draft's name does not say it
    suffix: str = ".mp4"
    pad: bool = True  # to even sizes: the most compatible pixel format requires them

    def arguments(self, height: int, width: int) -> list[str]:
        odd = bool(height % 2 or width % 2)
        colours = BT709.format(pixels="yuv444p" if odd and not self.pad else "yuv420p")
        padding = "pad=ceil(iw/2)*2:ceil(ih/2)*2," if odd and self.pad else ""
        coding = ["-c:v", "libx264", "-preset", "veryfast", "-threads", "1", *self.options.split()]
        return ["-vf", padding + colours, *coding]


FOR_BROWSERS = Coding("-crf 20 -movflags +faststart -f mp4")
# For datasets: a bare stream, so that streams can be concatenated. Every second frame is a key frame, so any frame is
# found quickly. Sizes stay.
FOR_DATASETS = Coding("-crf 18 -g 2 -bf 0 -f h264", ".h264", pad=False)


def encoder_problem() -> str:
    """The reason why this machine cannot write videos; empty if it can."""
    from imageio_ffmpeg import get_ffmpeg_exe

    try:
        program = get_ffmpeg_exe()
    except RuntimeError as err:
        return str(err).partition("\n")[0]
    return "" if shutil.which(program) else f"there is no ffmpeg at {program}; python -m embodied.doctor says more"


class VideoWriter:
    """Writes one video: `add` frames, then `finish` with the file's name or `discard`."""

    def __init__(self, folder: Path, fps: float, coding: Coding = FOR_BROWSERS) -> None:
        self.folder = Path(folder)
        self.fps = fps
        self.coding = coding
        self.num_frames = 0
        self._shape: tuple[int, ...] = ()
        self._draft = self.folder / f"{DRAFT}{uuid.uuid4().hex}"
        self._encoder: subprocess.Popen | None = None

    def add(self, frame: np.ndarray) -> None:
        """Append a frame, uint8 [H, W, 3]; all frames of a video have one size."""
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ValueError(f"a frame is {frame.dtype} {list(frame.shape)}, it must be uint8 [height, width, 3]")
        if self._encoder is None:
            self._start(frame.shape)
        if frame.shape != self._shape:
            raise ValueError(f"frame {self.num_frames} is {list(frame.shape)}, the ones before {list(self._shape)}")
        try:
            self._encoder.stdin.write(np.ascontiguousarray(frame).data)
        except OSError:  # ffmpeg has ended; its output says more than "broken pipe"
            self._fail(self._wait())
        self.num_frames += 1

    def finish(self, name: str) -> Path:
        """Complete the file and give it its name in the folder."""
        if self._encoder is None:
            raise ValueError(f"{name}: a video needs at least one frame")
        code = self._wait()
        if code != 0:
            self._fail(code)
        path = self.folder / name
        os.replace(self._draft, path)
        self._log.close()
        self._encoder = None
        return path

    def discard(self) -> None:
        """Stop and delete the draft."""
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
        self._log = tempfile.TemporaryFile()  # noqa: SIM115, closed when the video ends
        # Its own process group: Ctrl-C asks the run to finish its step, and must not end the video.
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
        with contextlib.suppress(OSError):  # unsent frames of an encoder that has ended
            self._encoder.stdin.close()

    def _fail(self, code: int) -> None:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        self.discard()
        raise EmbodiedError(f"ffmpeg ended with code {code} while writing into {self.folder}: {'; '.join(words[-3:])}")


# Text and images added to frames

TEXT, PAPER, MARGIN = (235, 235, 235), (24, 24, 28), 3
WIDEST = 640  # a wider frame gets no larger letters
MOST_LINES = 3  # of an instruction
WIDEST_NUMBER = "return -00.00"
OUTCOMES = {"SUCCESS": (104, 211, 145), "FAILURE": (252, 129, 129)}


def side_by_side(frame: np.ndarray, others: list[np.ndarray]) -> np.ndarray:
    """The frames in a row, all as high as the first."""
    return np.concatenate([frame, *[of_height(other, len(frame)) for other in others]], axis=1)


def of_height(frame: np.ndarray, height: int) -> np.ndarray:
    """The frame, enlarged or reduced without smoothing."""
    width = max(1, round(frame.shape[1] * height / frame.shape[0]))
    rows = np.arange(height) * frame.shape[0] // height
    columns = np.arange(width) * frame.shape[1] // width
    return frame[rows][:, columns]


@dataclass(frozen=True)
class Caption:
    """The text below a frame: outcome so far, numbers, and the instruction."""

    outcome: str  # empty where an env has no success
    numbers: tuple[str, ...]
    words: str


def captioned(frame: np.ndarray, caption: Caption) -> np.ndarray:
    """The frame with the caption below it: the outcome, the numbers in as many columns as fit, and the instruction on
    at most MOST_LINES. All captions of an episode have the same height."""
    from PIL import Image, ImageDraw

    width = frame.shape[1]
    size = max(9, min(width, WIDEST) // 22)
    room = width - 2 * MARGIN
    columns = min(len(caption.numbers), max(1, int(room // font(size).getlength(WIDEST_NUMBER))))
    columns = math.ceil(len(caption.numbers) / math.ceil(len(caption.numbers) / columns))  # no lonely last one
    lines = [[(0.0, caption.outcome)]] if caption.outcome else []
    for at in range(0, len(caption.numbers), columns):
        row = caption.numbers[at : at + columns]
        lines.append([(place * room / columns, text) for place, text in enumerate(row)])
    lines += [[(0.0, text)] for text in in_lines(caption.words, room, size)]
    page = Image.new("RGB", (width, len(lines) * (size + MARGIN) + 2 * MARGIN), PAPER)
    pen = ImageDraw.Draw(page)
    own_colour = next((colour for word, colour in OUTCOMES.items() if caption.outcome.startswith(word)), TEXT)
    for number, line in enumerate(lines):
        colour = own_colour if caption.outcome and not number else TEXT
        for left, text in line:
            at = (MARGIN + left, MARGIN + number * (size + MARGIN))
            pen.text(at, fitting(text, room - left, size), colour, font(size))
    return np.concatenate([frame, np.asarray(page)])


def in_lines(words: str, width: float, size: int) -> list[str]:
    """The text on at most MOST_LINES lines of this width in pixels; the last line is cut if the text is too long."""
    lines = [""]
    for word in words.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and len(lines) < MOST_LINES and font(size).getlength(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines if lines[0] else []


@cache
def font(size: int):
    from PIL import ImageFont

    return ImageFont.load_default(size)


def fitting(line: str, width: float, size: int) -> str:
    """The beginning of the line that fits into this width."""
    if font(size).getlength(line) <= width:
        return line
    while line and font(size).getlength(line + "...") > width:
        line = line[:-1]
    return line + "..."


# The mosaic: all videos of an evaluation in one, framed by outcome. ffmpeg joins the files; no frame is held here.

MOSAIC = "mosaic.mp4"
SIDE, FRAME = 160, 4  # pixels of a tile, and of the line around it
COLOURS = {"success": "0x2e9e5b", "failure": "0xc8443c"}


def write_mosaic(folder: Path) -> Path | None:
    """Join a folder's videos into mosaic.mp4; a video stands still at its end until the longest one ends.

    Returns None without videos.
    """
    from imageio_ffmpeg import count_frames_and_secs

    names = {path: match for path in sorted(folder.glob("*.mp4")) if (match := VIDEO_NAME.fullmatch(path.name))}
    if not (videos := list(names)):
        return None
    draft = folder / f"{DRAFT}mosaic"
    sources = [word for video in videos for word in ("-i", str(video))]
    coding = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-threads", "1", "-movflags", "+faststart"]
    longest_s = max(count_frames_and_secs(str(video))[1] for video in videos)
    filters = tiles([name["outcome"] for name in names.values()], longest_s)
    graph = ["-filter_complex", filters, "-map", "[all]"]
    try:
        ffmpeg(["-y", *sources, *graph, *coding, "-f", "mp4", str(draft)])
    except EmbodiedError as err:
        draft.unlink(missing_ok=True)
        raise EmbodiedError(f"the videos in {folder} could not be joined: {err}") from None
    draft.replace(folder / MOSAIC)
    return folder / MOSAIC


def tiles(outcomes: list[str], lasts_s: float) -> str:
    """ffmpeg's filters that put one video per outcome into a square."""
    inner, columns = SIDE - 2 * FRAME, math.ceil(math.sqrt(len(outcomes)))
    parts = []
    for number, outcome in enumerate(outcomes):
        colour = COLOURS.get(outcome, "0x808080")
        parts.append(
            f"[{number}:v]scale={inner}:{inner}:force_original_aspect_ratio=decrease,"
            f"pad={inner}:{inner}:-1:-1,pad={SIDE}:{SIDE}:{FRAME}:{FRAME}:{colour},"
            f"tpad=stop_mode=clone:stop_duration={lasts_s:.3f}[v{number}]"
        )
    if len(outcomes) == 1:
        return f"{parts[0]};[v0]trim=duration={lasts_s:.3f},format=yuv420p[all]"
    places = "|".join(f"{at % columns * SIDE}_{at // columns * SIDE}" for at in range(len(outcomes)))
    joined = "".join(f"[v{number}]" for number in range(len(outcomes)))
    stack = f"{joined}xstack=inputs={len(outcomes)}:layout={places}:fill=black"
    return ";".join([*parts, f"{stack},trim=duration={lasts_s:.3f},format=yuv420p[all]"])


def ffmpeg(arguments: list[str]) -> bytes:
    """Run ffmpeg and return its standard output; raises EmbodiedError with its last lines."""
    from imageio_ffmpeg import get_ffmpeg_exe

    command = [get_ffmpeg_exe(), "-v", "error", "-nostdin", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=JOIN_S)
    except subprocess.TimeoutExpired:
        raise EmbodiedError(f"ffmpeg did not end within {JOIN_S:.0f} s: {' '.join(command)}") from None
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        raise EmbodiedError(f"ffmpeg ended with code {done.returncode}: {'; '.join(words[-3:])}")
    return done.stdout


class VideoRecorder:
    """Open videos by env row: episodes whose index is in `recording.video_episodes`, from reset to end."""

    def __init__(self, env: VectorEnv, recording: Recording, warn: Callable[[str], object]) -> None:
        self.env, self.recording, self.warn = env, recording, warn
        problem = env.video_problem() or encoder_problem() if recording.video_episodes else ""
        self.episodes = frozenset() if problem else recording.video_episodes
        if problem:
            warn(f"no videos: {problem}")
        self.open: dict[int, VideoWriter] = {}
        self.statuses: dict[int, EpisodeStatus] = {}
        self.newest: dict[int, np.ndarray] = {}  # the last frame, until the outcome below it is known

    def __enter__(self) -> VideoRecorder:
        return self

    def __exit__(self, *_: object) -> None:
        for writer in self.open.values():
            writer.discard()

    def begin(self, rows: np.ndarray, specs: list[EpisodeSpec], instructions: np.ndarray | None) -> None:
        wanted = [(int(row), spec) for row, spec in zip(rows, specs, strict=True) if spec.index in self.episodes]
        for row, spec in wanted:
            self.open[row] = VideoWriter(self.recording.videos, fps=self.env.env_spec.control_hz)
            words = spec.task if instructions is None else instructions[row]
            self.statuses[row] = EpisodeStatus(words, self.env.env_spec.has_success)
        self._add_frames([row for row, _ in wanted])

    def record_decision(self, obs: Observation, actions: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
        for row, value in zip(at, values, strict=False):  # an expert has no value estimates
            if int(row) in self.statuses:
                self.statuses[int(row)].value = float(value)

    def on_frame(self, active: np.ndarray) -> None:
        rewards, success = self.env.last_step()
        rows = [row for row in self.open if active[row]]
        with self._writing():
            for row in rows:
                self.open[row].add(self._captioned(row, self.newest[row]))  # another frame follows
                self.statuses[row].stepped(float(rewards[row]), bool(success[row]))
            self._add_frames(rows)

    def record_result(self, result: ChunkResult) -> None:
        """Nothing to do: the frames were drawn step by step."""

    def finish(self, rows: np.ndarray, outcomes: list[EpisodeResult]) -> None:
        for row, outcome in zip(rows, outcomes, strict=True):
            writer = self.open.pop(int(row), None)
            if not writer:
                continue
            frame = self.newest.pop(int(row))
            if self.recording.failures_only and outcome.success_once is not False:
                writer.discard()
                continue
            self.statuses[int(row)].over = True
            task = Path(outcome.task).stem if outcome.task.endswith(".bddl") else outcome.task
            with self._writing():
                writer.add(self._captioned(int(row), frame))
                writer.finish(video_name(outcome.index, outcome.success_once, file_name(task), outcome.seed))

    def _captioned(self, row: int, frame: np.ndarray) -> np.ndarray:
        return captioned(frame, self.statuses[row].caption()) if self.recording.overlay else frame

    def _add_frames(self, rows: list[int]) -> None:
        """Draw a frame of each of these rows, with the cameras that were asked for."""
        if not rows:
            return
        try:
            frames = self.env.render_rows(np.array(rows))
        except Exception as err:
            return self._give_up(f"render_rows raised {type(err).__name__}: {err}")
        images = self.env.observe(np.array(rows)).get("images", {}) if self.recording.cameras else {}
        for row, frame in zip(rows, frames, strict=True):
            self.newest[row] = (
                side_by_side(frame, [camera[row] for camera in images.values()]) if images else frame.copy()
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Inside, an encoder that fails (killed for its memory, the disk is full) ends the videos, not the episodes."""
        try:
            yield
        except (EmbodiedError, OSError) as err:
            self._give_up(str(err))

    def _give_up(self, problem: str) -> None:
        """Record no more videos; the episodes continue and count."""
        self.warn(f"no videos: {problem}")
        self.episodes = frozenset()
        for writer in self.open.values():
            writer.discard()
        self.open.clear()


class EpisodeStatus:
    """The progress of an episode, for the text under its frames."""

    def __init__(self, words: str, has_success: bool) -> None:
        self.words, self.has_success = words, has_success
        self.step, self.reward, self.total = 0, 0.0, 0.0
        self.value: float | None = None
        self.first_success: int | None = None  # the env step
        self.success = False
        self.over = False

    def stepped(self, reward: float, success: bool) -> None:
        self.step += 1
        self.reward, self.success = reward, success
        self.total += reward
        if success and self.first_success is None:
            self.first_success = self.step

    def caption(self) -> Caption:
        shown = {"step": self.step, "reward": self.reward, "return": self.total, "value": self.value}
        numbers = ["" if number is None else f"{name} {short(number)}" for name, number in shown.items()]
        return Caption(self.outcome() if self.has_success else "", tuple(numbers), self.words)

    def outcome(self) -> str:
        if self.first_success is None:
            return "FAILURE" if self.over else "no success yet"
        lost = "" if self.success else ", lost"
        return f"SUCCESS at step {self.first_success}{lost}"


def short(number: float) -> str:
    """12, 0.25, -3.10, 1234"""
    return f"{number:.2f}" if isinstance(number, float) and abs(number) < 100 else f"{number:.0f}"
