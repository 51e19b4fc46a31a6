"""Write the report of a run, or compare several: python -m embodied.report RUN [RUN ...]"""

from __future__ import annotations

import sys
from pathlib import Path

from embodied import commands
from embodied.errors import ConfigError
from embodied.reporting.report import write_report

USAGE = """Write report.html of a run or an evaluation: curves, tables, clips, where the time went, what produced it.

usage: python -m embodied.report RUN [RUN ...] [--help]

  RUN                           a run's folder (runs/NAME-DATE) or an evaluation's (runs/NAME-DATE/eval/v000100)

One page per folder, written into it. It needs no network and no server: open it from disk in any browser."""


def main(argv: list[str] | None = None) -> int:
    return commands.run(lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    if not argv or any(word.startswith("-") for word in argv):
        raise ConfigError("which run? python -m embodied.report runs/NAME-DATE")
    for name in argv:
        print(write_report(Path(name).expanduser()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
