"""How much of the house does one iteration take to follow? python -m benchmarks.walk [recipe=maniskill_ppo]
Which modules does only one other import? python -m benchmarks.walk --importers
And how large is each folder? python -m benchmarks.walk --lines

The first trains two iterations in one process and counts the modules of ours, and their lines, in which anything runs
during the second; how many of these lines are in functions that ran; and how many would be left if the other functions
stood elsewhere: fewer are not to be had by moving code. Not counted, as a reader may take them on trust: the transport
under a call or a channel (`runtime/` but the worker, its group and its channel), physics and drawing of a simulator
(its folder but `env.py`), and the packages' `__init__.py`.

The second reads imports wherever they stand, those for types too, and names such as "embodied.envs.text.sums:Sums" in
tables. A name that a package's `__init__.py` hands on is imported from the file behind it, by the file that asks for
it; the `__init__.py` itself counts only where its table loads plug-ins. Programs (`python -m`) count like any other.

The third counts lines that hold code: none that is blank, a comment or part of a docstring.
"""

from __future__ import annotations

import ast
import io
import sys
import tempfile
import threading
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType

from benchmarks.common import ROOT

PRODUCT = ("embodied", "envs", "policies", "placement")
TRUSTED = ("embodied/runtime/", "envs/maniskill/", "envs/libero/", "envs/robosuite/", "envs/gym/")
READ = ("worker.py", "group.py", "channel.py", "env.py")
OVERRIDES = ("cluster.backend=inline", "run.iterations=2", "run.eval_every=null", "eval.episodes=1", "eval.videos=0")


def main(argv: list[str]) -> None:
    if argv == ["--importers"]:
        return print_lone_modules()
    if argv == ["--lines"]:
        return print_lines()
    walked = modules_of(argv or ["recipe=maniskill_ppo"])
    followed = {path: lines for path, lines in walked.items() if is_followed(path)}
    print("lines    ran   left  module")
    for path, numbers in sorted(followed.items()):
        print(*(f"{number:5d}" for number in numbers), path, sep="  ")
    lines, ran, left = (sum(column) for column in zip(*followed.values(), strict=True))
    print(f"{len(followed)} modules, {lines} lines, of which {ran} in functions that ran", end="; ")
    print(f"{left} without the functions that did not; with what is under them {len(walked)} modules")


def is_followed(path: str) -> bool:
    name = path.rpartition("/")[2]
    return name != "__init__.py" and (name in READ or not path.startswith(TRUSTED))


def modules_of(arguments: list[str]) -> dict[str, tuple[int, int, int]]:
    """The files in which something ran during the second iteration, with their lines, those of functions that ran, and
    those outside of functions that did not."""
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
        str(path.relative_to(ROOT)): (len(path.read_text().splitlines()), lines_of(ours[path]), left(path, ours[path]))
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


def left(path: Path, ran: set[CodeType]) -> int:
    """The lines of a file without those of its functions that did not run."""
    text, begun = path.read_text(), {code.co_firstlineno for code in ran}
    kept = set(range(len(text.splitlines())))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            inner = {one.lineno for one in ast.walk(node) if isinstance(one, ast.FunctionDef | ast.Lambda)}
            if not {first, *inner} & begun:
                kept -= set(range(first - 1, node.end_lineno))
    return len(kept)


def print_lone_modules() -> None:
    """Every module that exactly one other imports, with the lines of both."""
    files = product_files()
    lines = {name: len(path.read_text().splitlines()) for name, path in files.items()}
    lone = [(name, found) for name, found in importers(files).items() if len(found) == 1]
    print("lines  module, and the lines of what imports it")
    for name, found in lone:
        ((by, in_a_table),) = found.items()
        note = "  by name" if in_a_table else ""
        print(f"{lines[name]:5d}  {shown(files[name])}  <-  {lines[by]:3d}  {shown(files[by])}{note}")
    by_name = sum(any(found.values()) for _, found in lone)
    print(f"{len(lone)} of {len(files)} modules have one importer, {by_name} of them named in its table")


def print_lines() -> None:
    """Every folder with its files, all of their lines, and those that hold code."""
    sizes: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for path in product_files().values():
        folder = "/".join(path.relative_to(ROOT).parent.parts[:2])
        text = path.read_text()
        sizes[folder].append((len(text.splitlines()), len(code_lines(text))))
    print("files   lines    code  folder")
    for folder, of_files in sorted(sizes.items()):
        lines, code = (sum(column) for column in zip(*of_files, strict=True))
        print(f"{len(of_files):5d}  {lines:6d}  {code:6d}  {folder}")
    every = [size for of_files in sizes.values() for size in of_files]
    print(f"{len(every):5d}  {sum(lines for lines, _ in every):6d}  {sum(code for _, code in every):6d}  in all")


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold a token of the language which is no docstring."""
    empty = (tokenize.NL, tokenize.COMMENT, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in empty:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            held.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return held


def product_files() -> dict[str, Path]:
    """Module name -> its file. The links in embodied/ lead to folders that are listed themselves."""
    files = {}
    for path in (path for folder in PRODUCT for path in sorted((ROOT / folder).rglob("*.py"))):
        if not any(parent.is_symlink() for parent in path.parents):
            parts = path.relative_to(ROOT).with_suffix("").parts
            parts = parts if parts[0] == "embodied" else ("embodied", *parts)
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


def importers(files: dict[str, Path]) -> dict[str, dict[str, bool]]:
    """Module -> those that import it -> whether only by its name in a table. Packages are not listed."""
    trees = {name: ast.parse(path.read_text()) for name, path in files.items()}
    packages = {name for name, path in files.items() if path.name == "__init__.py"}
    handed_on = {name: dict(names_handed_on(name, trees[name], files)) for name in packages}
    found: dict[str, dict[str, bool]] = {name: {} for name in files if name not in packages}
    for name, tree in trees.items():
        for home, word in imported(tree, files):
            home = handed_on.get(home, {}).get(word, home)
            if home in found and name not in (home, *packages):
                found[home][name] = False
        for text in strings(tree):
            module, colon, _ = text.partition(":")
            if module in found and module != name and (colon or name not in packages):
                found[module].setdefault(name, True)
    return found


def imported(tree: ast.Module, files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """The modules of ours that are imported, each with the name that is taken from it, or ""."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield (inner, "") if inner in files else (node.module, alias.name)


def names_handed_on(package: str, tree: ast.Module, files: dict[str, Path]) -> Iterator[tuple[str, str]]:
    """What a package offers as its own, and the modules it is from: imports, and lines "wilson": "success_stats"."""
    yield from ((word, home) for home, word in imported(tree, files) if word)
    for table in (node for node in ast.walk(tree) if isinstance(node, ast.Dict)):
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                for home in (f"{package}.{value.value}", value.value):
                    if home in files:
                        yield key.value, home


def strings(tree: ast.Module) -> Iterator[str]:
    return (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))


def shown(path: Path) -> str:
    return str(path.relative_to(ROOT))


if __name__ == "__main__":
    main(sys.argv[1:])
