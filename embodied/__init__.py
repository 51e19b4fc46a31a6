"""Embodied Loop: simulator-in-the-loop reinforcement learning for robot policies."""

import os
import signal
import sys

__version__ = "0.1.0"


def _stop_at_once(*_: object) -> None:
    os.write(2, b"stopped at once\n")
    os._exit(130)


def _is_starting() -> bool:
    """Whether Python is about to run one of our commands: `python -m embodied.train`."""
    words = sys.orig_argv
    named = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    return sys.argv[:1] == ["-m"] and any(name.startswith("embodied.") for name in named)


if _is_starting() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _stop_at_once)  # while a command is imported; `commands.run` has a plan of its own
