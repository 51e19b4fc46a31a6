"""mp4 files: playable, right colours, whole or absent."""

import os
import subprocess
from pathlib import Path

import imageio_ffmpeg
import numpy as np
import pytest

from embodied.core.errors import EmbodiedError
from embodied.records.videos import VideoWriter, encoder_problem, worth_seeing

RED, GREEN, BLUE = (220, 40, 40), (60, 180, 75), (30, 60, 200)


def quarters(height, width):
    """Red and green above, blue and white below."""
    frame = np.full((height, width, 3), 255, np.uint8)
    frame[: height // 2, : width // 2] = RED
    frame[: height // 2, width // 2 :] = GREEN
    frame[height // 2 :, : width // 2] = BLUE
    return frame


def write(folder, frames, name="clip.mp4", fps=20.0):
    with VideoWriter(folder, fps) as writer:
        for frame in frames:
            writer.add(frame)
        return writer.finish(name)


def read(path, size):
    """The frames of a video and what ffmpeg says of it."""
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=True)
    return np.frombuffer(done.stdout, np.uint8).reshape(-1, *size, 3), done.stderr.decode()


def test_a_video_is_h264_yuv420p_with_the_fps_of_the_env(tmp_path):
    path = write(tmp_path, [quarters(96, 128)] * 30, fps=20.0)
    frames, said = read(path, (96, 128))
    assert len(frames) == 30
    stream = next(line for line in said.splitlines() if "Video: h264" in line)
    for part in ("yuv420p(tv, bt709", "128x96", "20 fps"):
        assert part in stream
    assert "Duration: 00:00:01.50" in said


def test_the_index_comes_before_the_pictures_so_that_a_browser_starts_at_once(tmp_path):
    data = write(tmp_path, [quarters(64, 64)] * 5).read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_colours_and_places_survive(tmp_path):
    path = write(tmp_path, [quarters(96, 128)] * 12)
    frame = read(path, (96, 128))[0][6]
    for (y, x), colour in {(24, 32): RED, (24, 96): GREEN, (72, 32): BLUE, (72, 96): (255, 255, 255)}.items():
        assert np.abs(frame[y, x].astype(int) - colour).max() <= 6


def test_frames_keep_their_order(tmp_path):
    greys = [np.full((32, 32, 3), 8 * i, np.uint8) for i in range(25)]
    frames, _ = read(write(tmp_path, greys), (32, 32))
    assert frames.mean(axis=(1, 2, 3)) == pytest.approx([8 * i for i in range(25)], abs=4)


def test_odd_sizes_are_padded_to_even_ones(tmp_path):
    path = write(tmp_path, [quarters(33, 47)] * 2)
    assert len(read(path, (34, 48))[0]) == 2


def test_an_unfinished_recording_is_hidden_and_nothing_is_left_of_an_interrupted_one(tmp_path):
    with VideoWriter(tmp_path, 20.0) as writer:
        for _ in range(20):  # more than fits into the pipe, so the encoder has made its file
            writer.add(quarters(128, 128))
        assert list(tmp_path.iterdir()) and not list(tmp_path.glob("*.mp4"))
    assert not list(tmp_path.iterdir())


def test_a_dead_encoder_is_an_error_with_its_words_and_leaves_nothing(tmp_path):
    writer = VideoWriter(tmp_path, 20.0)
    writer.add(quarters(32, 32))
    writer._encoder.kill()
    writer._encoder.wait(10)
    with pytest.raises(EmbodiedError, match="ffmpeg ended with code -9"):
        writer.finish("never.mp4")
    assert list(tmp_path.iterdir()) == []


def test_wrong_frames_are_refused_with_their_shape(tmp_path):
    with VideoWriter(tmp_path, 20.0) as writer:
        with pytest.raises(ValueError, match=r"float64 \[8, 8, 3\]"):
            writer.add(np.zeros((8, 8, 3)))
        writer.add(quarters(32, 32))
        with pytest.raises(ValueError, match=r"frame 1 is \[32, 34, 3\]"):
            writer.add(quarters(32, 34))
    with pytest.raises(ValueError, match="at least one frame"):
        VideoWriter(tmp_path, 20.0).finish("empty.mp4")


def test_ctrl_c_in_the_terminal_does_not_reach_the_encoder(tmp_path):
    with VideoWriter(tmp_path, 20.0) as writer:
        writer.add(quarters(32, 32))
        assert os.getpgid(writer._encoder.pid) == writer._encoder.pid


def test_a_missing_encoder_is_a_reason_and_no_error(monkeypatch):
    assert encoder_problem() == ""
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    assert "no ffmpeg at /nowhere/ffmpeg" in encoder_problem()


def test_the_video_that_a_run_names_is_a_success_of_its_newest_evaluation():
    names = ["v1/videos/episode-003_success_x", "v2/videos/episode-000_success_x", "v2/videos/episode-001_failure_x"]
    assert worth_seeing(Path(f"{name}.mp4") for name in names)[0] == Path(f"{names[1]}.mp4")
    assert worth_seeing([Path("v2/videos/episode-1_failure_x.mp4"), Path("v2/videos/mosaic.mp4")])[0].stem == "mosaic"
