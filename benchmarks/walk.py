"""How much of the house does one iteration take to follow? python -m benchmarks.walk [recipe=maniskill_ppo]

Trains two iterations in one process and counts the modules of ours, and their lines, in which anything runs during the
second, and how many of these lines are in functions that ran. Not counted, as a reader may take them on trust: the
transport under a call or a channel (`runtime/` but the worker, its group and its channel), physics and drawing of a
simulator (its folder but `env.py`), and the packages' `__init__.py`.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import defaultdict
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType

from benchmarks.common import ROOT

TRUSTED = ("embodied/runtime/", "envs/maniskill/", "envs/libero/", "envs/robosuite/", "envs/gym/")
READ = ("worker.py", "group.py", "channel.py", "env.py")
OVERRIDES = ("cluster.backend=inline", "run.iterations=2", "run.eval_every=null", "eval.episodes=1", "eval.videos=0")


def main(argv: list[str]) -> None:
    walked = modules_of(argv or ["recipe=maniskill_ppo"])
    followed = {path: lines for path, lines in walked.items() if is_followed(path)}
    print("lines    ran  module")
    for path, (lines, ran) in sorted(followed.items()):
        print(f"{lines:5d}  {ran:5d}  {path}")
    lines, ran = (sum(column) for column in zip(*followed.values(), strict=True))
    print(f"{len(followed)} modules, {lines} lines, of which {ran} in functions that ran", end="; ")
    print(f"with what is under them {len(walked)} modules")


def is_followed(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name != "__init__.py" and (name in READ or not path.startswith(TRUSTED))


def modules_of(arguments: list[str]) -> dict[str, tuple[int, int]]:
    """The files in which something ran during the second iteration, with their lines and those of functions that
    ran."""
    from embodied import train

    seen: dict[str, set[CodeType]] = defaultdict(set)
    iterations = []

    def note(frame, event, argument) -> None:
        if event == "call" and len(iterations) == 2:
            seen[frame.f_code.co_filename].add(frame.f_code)

    iterate = train.iterate

    def watched(*arguments, **options):
        iterations.append("begun")
        try:
            return iterate(*arguments, **options)
        finally:
            iterations.append("over") if len(iterations) == 2 else None

    train.iterate = watched
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with tempfile.TemporaryDirectory() as folder:
            train.start([*arguments, *OVERRIDES, f"run.dir={folder}"])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    ours = {Path(name).resolve(): codes for name, codes in seen.items() if name.endswith(".py")}
    kept = [path for path in ours if path.is_relative_to(ROOT) and not path.is_relative_to(ROOT / "benchmarks")]
    return {
        str(path.relative_to(ROOT)): (len(path.read_text().splitlines()), lines_of(ours[path]))
        for path in kept
        if ".venv" not in path.parts
    }


def lines_of(codes: set[CodeType]) -> int:
    """The lines from the first to the last of each function, without those of modules and classes as a whole."""
    found: set[int] = set()
    for code in codes:
        numbers = [line for _, _, line in code.co_lines() if line]
        if code.co_flags & CO_OPTIMIZED:
            found.update(range(code.co_firstlineno, max(numbers) + 1))
    return len(found)


if __name__ == "__main__":
    main(sys.argv[1:])
