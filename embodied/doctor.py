"""Say what works on this machine and how to mend the rest: python -m embodied.doctor [--json]"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from embodied.core.errors import ConfigError
from embodied.run import launch
from embodied.system.health import CHECKS, FAILED, WARNING, Finding
from embodied.system.machine import Machine

USAGE = """Say what works on this machine and how to mend the rest.

usage: python -m embodied.doctor [--json] [--help]

  --json                        one JSON object: {"ok": ..., "findings": [{"check", "state", "told", "fix"}, ...]}

Tries out what a run uses: packages against the lock, torch, GPUs, a frame of every simulator, an mp4, Ray, memory and
disk. States: ok; warning (works, but not well); absent (optional, not here); failed. Exit code 1 if anything failed."""


def main(argv: list[str] | None = None) -> int:
    return launch.run(lambda: start(sys.argv[1:] if argv is None else argv))


def start(argv: list[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        return 0
    if unknown := [word for word in argv if word != "--json"]:
        raise ConfigError(f"{unknown[0]}: there is only --json; see python -m embodied.doctor --help")
    return examine(Machine(), "--json" in argv)


def examine(machine: Machine, as_json: bool, checks: Sequence[Callable[[Machine], list[Finding]]] = CHECKS) -> int:
    """Run the checks one after the other and tell each finding as it comes."""
    findings: list[Finding] = []
    for check in checks:
        for finding in check(machine):
            findings.append(finding)
            if not as_json:
                print(describe(finding), flush=True)
    failed, warned = (sum(finding.state == state for finding in findings) for state in (FAILED, WARNING))
    if as_json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        print(f"\n{summary(failed, warned)}")
    return 1 if failed else 0


def describe(finding: Finding) -> str:
    line = f"{finding.state:<8} {finding.check:<26} {finding.told}"
    return f"{line}\n{'':<8} {'':<26} fix: {finding.fix}" if finding.fix else line


def summary(failed: int, warned: int) -> str:
    warnings = f"{warned} warning{'s' * (warned != 1)}"
    return f"{failed} failed, {warnings}" if failed else f"everything that is installed works, {warnings}"


if __name__ == "__main__":
    raise SystemExit(main())
