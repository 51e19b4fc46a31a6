"""Videos with known frames."""

import subprocess

from imageio_ffmpeg import get_ffmpeg_exe


def write_video(path, frames, fps):
    """A video with exactly these frames, uint8 [T, H, W, 3]."""
    _, height, width, _ = frames.shape
    raw = ["-f", "rawvideo", "-pix_fmt", "rgb24", "-s", f"{width}x{height}", "-r", str(fps), "-i", "-"]
    exact = ["-c:v", "libx264rgb", "-crf", "0", str(path)]
    subprocess.run([get_ffmpeg_exe(), "-y", "-v", "error", *raw, *exact], input=frames.tobytes(), check=True)
    return path
