"""All films of an evaluation in one, framed by outcome. ffmpeg joins the files; no frame is held here."""

from __future__ import annotations

import math
import subprocess
from pathlib import Path

from embodied.core.errors import EmbodiedError

MOSAIC = "mosaic.mp4"
SIDE, FRAME = 160, 4  # pixels of a tile, and of the line around it
COLOURS = {"success": "0x2e9e5b", "failure": "0xc8443c"}
JOIN_S = 300.0


def write_mosaic(folder: Path) -> Path | None:
    """Beside the films; each stands still when it is over, until the longest is. None: there is nothing to show."""
    films = sorted(folder.glob("episode-*.mp4"))
    if not films:
        return None
    from imageio_ffmpeg import get_ffmpeg_exe

    draft = folder / f".{MOSAIC}"
    sources = [word for film in films for word in ("-i", str(film))]
    coding = ["-c:v", "libx264", "-preset", "veryfast", "-crf", "23", "-threads", "1", "-movflags", "+faststart"]
    graph = ["-filter_complex", tiles([film.name.split("_")[1] for film in films], longest_s(films)), "-map", "[all]"]
    command = [get_ffmpeg_exe(), "-y", "-v", "error", "-nostdin", *sources, *graph, *coding, "-f", "mp4", str(draft)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=JOIN_S)
    if done.returncode:
        draft.unlink(missing_ok=True)
        raise EmbodiedError(f"ffmpeg could not join the films in {folder}: {done.stderr.strip()[-300:]}")
    draft.replace(folder / MOSAIC)
    return folder / MOSAIC


def tiles(outcomes: list[str], lasts_s: float) -> str:
    """The filters that put as many films as there are outcomes into a square."""
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


def longest_s(films: list[Path]) -> float:
    from imageio_ffmpeg import count_frames_and_secs

    return max(count_frames_and_secs(str(film))[1] for film in films)
