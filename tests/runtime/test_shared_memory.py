import os
import subprocess
import sys

import numpy as np
import pytest

from embodied.runtime.payload import Segments, decode, encode

SIZE = 100_000


@pytest.fixture
def segments():
    segments = Segments()
    yield segments
    segments.drop()


def memory_of(fd: int) -> int:
    return os.fstat(fd).st_ino


def test_memory_is_used_again_when_its_message_is_gone(segments):
    first, _ = segments.take(SIZE)
    used = memory_of(first)
    os.close(first)
    again, _ = segments.take(SIZE + 1000)
    assert memory_of(again) == used
    os.close(again)


def test_memory_is_not_used_again_while_a_copy_of_its_descriptor_waits_somewhere(segments):
    first, _ = segments.take(SIZE)
    waiting = os.dup(first)
    os.close(first)
    other, _ = segments.take(SIZE)
    assert memory_of(other) != memory_of(waiting)
    os.close(waiting)
    os.close(other)


def test_memory_of_an_array_in_use_is_never_overwritten():
    seen = [decode(encode(np.full(SIZE, i))) for i in range(5)]  # the payloads and their descriptors are gone
    parts = [array[7:] for array in seen]
    del seen
    for i in range(5, 10):
        encode(np.full(SIZE, i))
    assert [set(part.tolist()) for part in parts] == [{i} for i in range(5)]


def test_memory_of_a_reader_that_was_killed_is_used_again(segments):
    fd, _ = segments.take(SIZE)
    held = memory_of(fd)
    wait = [sys.executable, "-S", "-c", "import sys; sys.stdin.read()"]
    with subprocess.Popen(wait, stdin=subprocess.PIPE, pass_fds=[fd]) as reader:
        os.close(fd)
        other, _ = segments.take(SIZE)
        assert memory_of(other) != held
        reader.kill()
        reader.wait()
        again, _ = segments.take(SIZE)
        assert memory_of(again) == held
    os.close(other)
    os.close(again)


def test_the_memory_kept_for_reuse_is_bounded():
    segments = Segments(kept_bytes=1 << 20)
    before = len(os.listdir("/proc/self/fd"))
    taken = [segments.take(300_000) for _ in range(8)]  # each takes half of what may be kept
    for number, (_, memory) in enumerate(taken):
        memory[:] = bytes([number]) * len(memory)
    assert [memory[-1] for _, memory in taken] == list(range(8))  # nothing that is in use went
    for fd, _ in taken:
        os.close(fd)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    segments.drop()
    assert len(os.listdir("/proc/self/fd")) == before
