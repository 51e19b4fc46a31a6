"""Messages of robots: numbers arrive as they were sent, and no message costs much before it is refused."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

msgpack = pytest.importorskip("msgpack")

from embodied.core.robot_messages import BadMessage, is_typed, pack, pack_typed, unpack  # noqa: E402

DTYPES = st.sampled_from("bool uint8 int64 float32 >f4 float64".split())


@given(DTYPES, st.lists(st.integers(0, 3), max_size=3), st.sampled_from([str, bytes]))
def test_arrays_and_numbers_arrive_as_they_were_sent(kind, shape, keys):
    sent = {"a": np.arange(np.prod(shape)).astype(kind).reshape(shape), "n": np.ones(1, kind)[0], "prompt": ["go", 1]}
    got = unpack(pack(sent, keys))
    assert got["prompt"] == ["go", 1] and got["n"] == 1 and np.asarray(got["n"]).dtype == sent["n"].dtype
    assert got["a"].dtype == sent["a"].dtype and np.array_equal(got["a"], sent["a"])


def test_the_content_of_a_message_about_episodes_is_skipped_and_may_have_any_size():
    places = {"places": [0] * 1000}
    start = unpack(pack_typed("episode_start", places, 7))
    assert is_typed(start) and (start["type"], start["seq"], start["payload"]) == ("episode_start", 7, None)
    with pytest.raises(BadMessage, match="1000 exceeds max_array_len"):
        unpack(pack_typed("observation", places, 7))


def an_array(kind, shape, data=b""):
    return msgpack.packb({"a": {b"__ndarray__": True, b"dtype": kind, b"shape": shape, b"data": data}})


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"\xc1", "the message cannot be read as msgpack"),
        (msgpack.packb([1]), "the message cannot be read as msgpack"),
        (msgpack.packb({"prompt": "go"}) + b"\x00", "something follows its end"),
        (msgpack.packb({"x": [0] * 65}), r"'x' in the message.*65 exceeds max_array_len\(64\)"),
        (msgpack.packb({str(key): 0 for key in range(65)}), "65 keys; at most 64"),
        (msgpack.packb({"x": [[[]] * 60] * 9}), "'x' in the message: more than 512 maps and lists"),
        (msgpack.packb({"x": "a" * 8193}), "'x' in the message.*max_str_len"),
        (b"\x81\xa1x" + b"\x91" * 3000, "'x' in the message.*StackError"),
        (pack({"x": np.zeros(101, np.uint8)}), r"101 exceeds max_bin_len\(100\)"),
        (an_array("|O", [1], b"x" * 8), r"type '\|O'"),
        (an_array("<f8", [2**40]), "'a' in the message cannot be read.*reshape"),
    ],
)
def test_a_message_that_is_odd_or_too_large_is_refused_with_its_place(sent, reason):
    with pytest.raises(BadMessage, match=reason):
        unpack(sent, largest=100)


@pytest.mark.parametrize("value", [np.array(["a"]), np.array([None]), {1}])
def test_only_numbers_and_texts_are_sent(value):
    with pytest.raises(TypeError, match="is not sent"):
        pack({"a": value})


def nested(thing, depth):
    """64 lists of 64 lists ... of 64 of these."""
    for _ in range(depth):
        thing = b"\xdc\x00\x40" + 64 * thing
    return thing


MAPS = b"\xdd" + (30_000_000).to_bytes(4, "big")
BOMBS = {
    "maps": lambda: MAPS + b"\x80" * 30_000_000,
    "maps in a key": lambda: b"\x81\xa1x" + MAPS + b"\x80" * 30_000_000,
    "maps in lists": lambda: b"\x81\xa1x" + nested(b"\x80", 4),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_message_of_many_things_is_refused_before_they_are_made(bomb):
    pack({})  # imports
    message = BOMBS[bomb]()
    began = time.thread_time()
    with pytest.raises(BadMessage, match=r"in the message: more than|exceeds max_array_len|as msgpack"):
        unpack(message)
    assert time.thread_time() - began < 1  # seconds of this thread; it was ten
