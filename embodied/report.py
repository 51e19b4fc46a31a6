"""Write the report of a run, or compare several: python -m embodied.report RUN [RUN ...]"""

from __future__ import annotations

import sys
from pathlib import Path

from embodied.errors import ConfigError, EmbodiedError

USAGE = """Write report.html of a run or an evaluation: curves, tables, clips, where the time went, what produced it.

usage: python -m embodied.report RUN [RUN ...] [--help]

  RUN                           a run's folder (runs/NAME-DATE) or an evaluation's (runs/NAME-DATE/eval/v000100)

One page per folder, written into it. It needs no network and no server: open it from disk in any browser."""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    try:
        write(argv)
    except EmbodiedError as err:
        print(f"error: {err}", file=sys.stderr)
        return err.exit_code
    return 0


def write(argv: list[str]) -> None:
    from embodied.reporting.report import write_report

    if not argv or any(word.startswith("-") for word in argv):
        raise ConfigError("which run? python -m embodied.report runs/NAME-DATE")
    for name in argv:
        print(write_report(Path(name).expanduser()))


if __name__ == "__main__":
    raise SystemExit(main())
