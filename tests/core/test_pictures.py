"""Names of pictures, videos and drawings: which files they load, and which files are refused."""

import struct
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from written_videos import write_video

from embodied.core import pictures

WIDE = np.asarray(pictures.draw("count", 3, 64)[0])[:40]


def test_a_picture_is_the_same_as_a_file_in_its_name_and_for_servers(tmp_path):
    file = tmp_path / "one.png"
    Image.fromarray(WIDE).save(file)
    for name in (str(file), pictures.data_url(WIDE), pictures.as_data_url(str(file))):
        assert np.array_equal(pictures.load_picture(name), WIDE) and pictures.picture_size(name) == (40, 64)
    drawn = pictures.drawing("add", 7, 48)
    assert np.array_equal(pictures.load_picture(pictures.as_data_url(drawn)), pictures.load_picture(drawn))
    assert pictures.picture_size(drawn) == (48, 48)
    assert np.array_equal(pictures.load_picture(file.read_bytes()), WIDE)


def test_the_rule_in_a_videos_name_chooses_its_frames(tmp_path):
    frames = np.arange(10, dtype=np.uint8)[:, None, None, None] * np.full((1, 16, 32, 3), 20, np.uint8)
    path = write_video(tmp_path / "a?b.mp4", frames, 5)
    rules = {(4, None): [0, 2, 5, 7], (4, 0.2): [0, 2, 5, 7], (9, 1): [0, 5], (99, None): [*range(10)], (3, 9.0): [0]}
    for rule, chosen in rules.items():
        assert np.array_equal(pictures.load_video(pictures.video(path, *rule)).frames, frames[chosen]), rule
    assert pictures.load_picture(pictures.video(path, 4)).shape == (16, 4 * 32, 3)


@given(st.integers(0, 10**6), st.integers(16, 64))
def test_a_drawing_shows_the_colours_that_its_answer_names(seed, pixels):
    image, answer = pictures.draw("colour", seed, pixels)
    colours = {*map(tuple, np.asarray(image).reshape(-1, 3).tolist())}
    shown = {name for name, colour in pictures.COLOURS.items() if colour in colours}
    assert answer in shown and len(shown) == 2
    dots, count = pictures.draw("count", seed, pixels)
    assert 1 <= int(count) <= 6 and np.asarray(dots).shape == (pixels, pixels, 3)
    assert dots == pictures.draw("count", seed, pixels)[0]


def in_name(kind, content):
    return f"data:image/{kind};base64,{b64encode(content).decode()}"


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
RLE = struct.pack("<IIIIiiHHIIIIII", 1082, 0, 1078, 40, 4, 4, 1, 8, 1, 4, 0, 0, 256, 0)
REFUSED = {
    "damaged": (in_name("png", b"hello"), "is no PNG.*or damaged"),
    "cut": (pictures.data_url(WIDE)[:122], "cannot be read: .*truncated"),
    "a program": (in_name("x-eps", EPS), "is no PNG"),
    "compressed": (in_name("bmp", b"BM" + RLE + bytes(1024) + b"\4\1\0\1"), "is a compressed BMP"),
    "too large": (pictures.data_url(np.zeros((40, 65, 3), np.uint8)), "has 65 x 40 pixels; at most 2,560 are read"),
    "not base64": ("data:image/png;base64,!", "not base64"),
    "no video": ("video:nowhere.mp4", "there is no video nowhere.mp4"),
    "no frames": (pictures.video(__file__), "test_pictures.py has no frames that ffmpeg reads"),
    "drawing": ("drawn:house?seed=1&pixels=48", "no drawing 'house'"),
    "drawing's size": ("drawn:add?seed=1&pixels=5000", "16 to 4096 pixels"),
    "neither": ("nowhere.png", "there is no picture nowhere.png"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_that_is_no_picture_is_refused_with_a_sentence(kind, monkeypatch):
    monkeypatch.setattr(pictures, "MOST_PIXELS", WIDE.size // 3)
    name, words = REFUSED[kind]
    with pytest.raises(pictures.PictureError, match=words):
        pictures.load_picture(name)


def test_servers_are_sent_no_videos():
    with pytest.raises(pictures.PictureError, match="servers read no videos"):
        pictures.as_data_url(pictures.video("a.mp4"))
