"""Do the tests notice faults? Plants those of planted_faults.yaml, one at a time, and says which tests catch which.

    python -m benchmarks.planted_faults [--faults NAME ...] [--again] [--all-tests]

Each fault is planted in a copy of the checkout. Its tests run file by file until one fails; a test that also fails
without the fault does not count. Results are added to results/planted_faults.json after every fault, and known results
are not measured again, so the program may be stopped at any time. `--again` measures them again, and `--all-tests`
tries the whole suite on a fault that its own tests miss. Ends with 1 if a fault is not caught or no longer fits.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import yaml

from benchmarks.common import RESULTS, ROOT, code_commit, environment, machine, markdown, write_json

FAULTS = Path(__file__).with_suffix(".yaml")
FILE = RESULTS / "planted_faults.json"
WAIT_S = 1800  # limit for the tests of a file; a fault that makes them hang is caught
HANGING = "(hangs)"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?::.+?|\S+?)(?: - .*)?$", re.M)
NOTHING_RAN = 5  # pytest's exit code


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]  # test files, the likeliest first

    def fits(self, root: Path) -> bool:
        """True if the text to be replaced stands exactly once in the file."""
        path = root / self.file
        return path.is_file() and path.read_text().count(self.before) == 1 and self.before != self.after

    @contextmanager
    def planted(self, root: Path) -> Iterator[None]:
        path = root / self.file
        text = path.read_text()
        rewrite(path, text.replace(self.before, self.after))
        try:
            yield
        finally:
            rewrite(path, text)


def rewrite(path: Path, text: str) -> None:
    """Write a module, and forget its bytecode: Python compares whole seconds only."""
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()
    path.write_text(text)


def read_faults(path: Path = FAULTS) -> dict[str, Fault]:
    entries = yaml.safe_load(path.read_text())
    return {
        name: Fault(
            name, one["file"], one["before"], one["after"], tuple(f"tests/{t}.py" for t in one["tests"].split())
        )
        for name, one in entries.items()
    }


class Copy:
    """A copy of the checkout's files, for planting."""

    def __init__(self, source: Path, root: Path) -> None:
        self.root = root
        self.fails: dict[str, bool] = {}  # by test: whether it also fails without a fault
        command = ["git", "-C", str(source), "ls-files", "-z"]
        for name in filter(
            None, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
        ):
            if (source / name).is_symlink() or (source / name).is_file():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source / name, root / name, follow_symlinks=False)

    def first_failure(self, tests: Sequence[str]) -> str:
        """The first of these files' tests that fails; "" if all pass. Slow and chaos tests are left out."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider"]
        command += ["-m", "not slow and not chaos", *tests]
        env = environment() | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": ""}
        env.pop("PYTHONWARNINGS")  # tests turn warnings into errors
        with tempfile.TemporaryFile("w+") as output:
            run = subprocess.Popen(
                command, cwd=self.root, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                code = run.wait(WAIT_S)
            except subprocess.TimeoutExpired:
                return f"{tests[0]} {HANGING}"
            finally:
                run.kill()
                run.wait()
            output.seek(0)
            text = output.read()
        if code in (0, NOTHING_RAN):
            return ""
        found = FAILED.search(text)
        return found[1] if found else f"{tests[0]} (ends with {code})"

    def caught_by(self, fault: Fault, files: Sequence[str]) -> str:
        """The test that fails with the fault, and passes without it; "" if there is none."""
        for file in files:
            with fault.planted(self.root):
                failure = self.first_failure([file])
            if failure and not self._fails_anyway(failure):
                return failure
        return ""

    def _fails_anyway(self, test: str) -> bool:
        name = test.split(" (")[0]
        if name not in self.fails:
            self.fails[name] = bool(self.first_failure([name]))
        return self.fails[name]


def measured(copy: Copy, fault: Fault, all_tests: bool) -> dict:
    if not fault.fits(copy.root):
        return {"caught_by": None, "problem": f"its text does not stand exactly once in {fault.file}"}
    started = perf_counter()
    files = [file for file in fault.tests if (copy.root / file).is_file()]
    if lacking := sorted({*fault.tests} - {*files}):
        print(f"{fault.name}: there is no {', '.join(lacking)}", flush=True)
    caught = copy.caught_by(fault, files)
    if not caught and all_tests:
        others = sorted(str(path.relative_to(copy.root)) for path in (copy.root / "tests").rglob("test_*.py"))
        caught = copy.caught_by(fault, [file for file in others if file not in files])
    return {"caught_by": caught, "seconds": round(perf_counter() - started, 1)}


def table(found: dict[str, dict]) -> str:
    rows = [[name, one.get("problem") or one["caught_by"] or "NOT CAUGHT"] for name, one in found.items()]
    return markdown(["fault", "caught by"], rows)


def main(words: Sequence[str] | None = None, path: Path = FAULTS, source: Path = ROOT, file: Path = FILE) -> int:
    faults = read_faults(path)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="*", choices=faults, default=[*faults], metavar="NAME")
    parser.add_argument("--again", action="store_true", help="also those with a result")
    parser.add_argument("--all-tests", action="store_true", help="try the whole suite if the fault's tests miss it")
    asked = parser.parse_args(words)
    commit = code_commit()
    known: dict[str, dict] = json.loads(file.read_text())["faults"] if file.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(source, Path(folder))
        for name in asked.faults:
            if name not in known or asked.again or known[name].get("problem"):
                known[name] = measured(copy, faults[name], asked.all_tests) | {"commit": commit}
                ordered = {name: known[name] for name in faults if name in known}
                write_json(file, {"machine": machine(), "faults": ordered})
                print(f"{name}: {known[name].get('problem') or known[name]['caught_by'] or 'NOT CAUGHT'}", flush=True)
    found = {name: known[name] for name in asked.faults}
    caught = sum(bool(one["caught_by"]) for one in found.values())
    print(f"{table(found)}\n{caught} of {len(found)} faults are caught")
    return int(caught < len(found))


if __name__ == "__main__":
    raise SystemExit(main())
