"""The name that `ps` and `top` show of a host's process.

The system shows the bytes of the command line where the process got them, so they are written over. A last byte that is
not zero tells Linux that they are a title now, which ends at the first zero.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

ARGUMENTS = slice(45, 47)  # where they begin and end, among the words of /proc/self/stat after the name
SHORT = 15  # letters of the name that top shows


def title_of(host: str) -> str:
    return f"embodied {host}"


def show_title(host: str) -> None:
    """`embodied sim+policy-0` for this process, and `sim+policy-0` where only a short name is shown."""
    with suppress(OSError, ValueError):  # a system that has no such files shows what it likes
        Path("/proc/self/comm").write_text(host[:SHORT])
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin, end = map(int, words[ARGUMENTS])
        if 0 < begin < end:
            title = title_of(host).encode()[: end - begin - 2]
            ctypes.memmove(begin, title.ljust(end - begin - 1, b"\0") + b".", end - begin)
