"""How large is the house, and how much of it does an iteration walk through? python -m benchmarks.house [RECIPE ...]

Counts code lines (no blank, comment or docstring lines), modules, functions and import circles. Then trains each recipe
with a line tracer in all of its processes, for one iteration, and counts:

    executed   modules, functions and lines that ran between the rows of two iterations in metrics.jsonl. Imports, and
               the modules' own bodies, are left out.
    named      also the modules that an executed function names, where they are defined (types in signatures too)
    imported   modules of ours in each process after that iteration, and in all processes together
    carriers   dataclasses and named tuples with arrays, or with carriers, that executed lines construct: the forms in
               which data go from a player to the loss

Writes results/house.json. Times under a tracer mean nothing and are not recorded.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

from benchmarks.common import (
    RESULTS,
    ROOT,
    code_commit,
    environment,
    machine,
    markdown,
    packages,
    train_command,
    tree_pids,
    write_json,
)

FILE = RESULTS / "house.json"
AFTER = 2  # iterations that end before lines are recorded
WAIT_S = 900.0
NOT_PRODUCT = ("tests", "benchmarks", "examples")
DEEP = ("embodied", "envs", "policies", "placement")  # folders that are counted by their folders
LONG_MODULE, LONG_FUNCTION = 450, 60
SHORT = ("run.start_from=null", "run.eval_every=null", "run.save_minutes=null", "eval.episodes=2", "eval.videos=0")
TWO_OF_EACH = 'placement={"sim,policy": "fake:0-1", "learner": "fake:0-1"}'  # however many cores there are
RECIPES = {
    "maniskill_ppo": (TWO_OF_EACH,),
    "sums_grpo": (TWO_OF_EACH, "run.iterations=30", "algo.filter=none"),  # an untrained policy's groups are all equal
}
Def = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Module:
    """A source file, by its path in the checkout."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return [*ast.walk(self.tree)]

    @cached_property
    def code_lines(self) -> frozenset[int]:
        docs: set[int] = set()
        for node in self.nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, *Def)) and ast.get_docstring(node, False) is not None:
                docs.update(lines_of(node.body[0]))
        lines = enumerate(map(str.strip, self.text.splitlines()), 1)
        return frozenset(number for number, line in lines if line and line[0] != "#" and number not in docs)

    @cached_property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        return [node for node in self.nodes if isinstance(node, Def)]

    @cached_property
    def lines_for_types(self) -> set[int]:
        """Lines that run for type checkers alone."""
        checks = [node for node in self.nodes if isinstance(node, ast.If)]
        return {line for node in checks if getattr(node.test, "id", "") == "TYPE_CHECKING" for line in lines_of(node)}

    @property
    def name(self) -> str:
        """The name under which it is imported."""
        parts = Path(self.path).with_suffix("").parts
        return ".".join(part for part in (*["embodied"][parts[0] == "embodied" :], *parts) if part != "__init__")

    def function_at(self, line: int) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
        """The innermost function whose body has this line."""
        within = [node for node in self.functions if node.body[0].lineno <= line <= (node.end_lineno or 0)]
        return max(within, key=lambda node: node.lineno, default=None)


def lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def is_record(node: ast.AST) -> bool:
    """True for a dataclass or a named tuple."""
    if not isinstance(node, ast.ClassDef):
        return False
    words = [ast.unparse(part) for part in (*node.decorator_list, *node.bases)]
    return any(re.search(r"\b(dataclass|NamedTuple)\b", word) for word in words)


@dataclass
class House:
    """The files of a checkout that git knows."""

    root: Path
    modules: dict[str, Module] = field(default_factory=dict)  # by path

    def __post_init__(self) -> None:
        command = ["git", "-C", str(self.root), "ls-files", "*.py"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
        files = [name for name in listed if (self.root / name).is_file()]
        self.modules = {name: Module(name, (self.root / name).read_text()) for name in files}

    @cached_property
    def product(self) -> dict[str, Module]:
        return {path: one for path, one in self.modules.items() if Path(path).parts[0] not in NOT_PRODUCT}

    @cached_property
    def by_name(self) -> dict[str, Module]:
        return {one.name: one for one in self.product.values()}

    @cached_property
    def carriers(self) -> set[str]:
        """The names of the dataclasses and named tuples with a field that is an array, a tensor, or a carrier."""
        records = [(module, node) for module in self.product.values() for node in module.nodes if is_record(node)]
        fields: dict[str, set[str]] = {}
        for module, node in records:
            types = [ast.unparse(one.annotation) for one in node.body if isinstance(one, ast.AnnAssign)]
            here = self.names_in(module)
            fields[f"{module.name}.{node.name}"] = {
                here.get(word, word) for word in re.findall(r"\w+", " ".join(types))
            }
        found, words = set[str](), {"ndarray", "Array", "Observation", "Tensor"}
        words |= {name for types in fields.values() for name in types if name.rpartition(".")[2] in words}
        while new := {name for name, types in fields.items() if words & types} - found:
            found, words = found | new, new
        return found

    def names_in(self, module: Module) -> dict[str, str]:
        """The full names of the classes of ours that a file defines or imports."""
        classes = [node.name for node in module.nodes if isinstance(node, ast.ClassDef)]
        imported = {name: f"{home.name}.{name}" for name, home in self.imports(module)}
        return imported | {name: f"{module.name}.{name}" for name in classes}

    def ours(self, files: Iterable[str]) -> set[str]:
        """The files of the product among these, by their paths in the checkout."""
        paths = {os.path.relpath(os.path.realpath(file), os.path.realpath(self.root)) for file in files}
        return paths & self.product.keys()

    def imports(self, module: Module, with_types: bool = True) -> Iterator[tuple[str, Module]]:
        """Every name that a file imports from us, anywhere in it, and the module that it comes from."""
        for node in module.nodes:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                continue
            if node.lineno in module.lines_for_types and not with_types:
                continue
            for alias in node.names:
                if isinstance(node, ast.Import) and alias.name in self.by_name:
                    yield alias.asname or alias.name.partition(".")[0], self.by_name[alias.name]
                elif isinstance(node, ast.ImportFrom) and (home := self.home_of(node.module or "", alias.name)):
                    yield alias.asname or alias.name, home

    def home_of(self, module: str, name: str) -> Module | None:
        """The module that `from module import name` leads to: also through a folder's `__init__`."""
        if f"{module}.{name}" in self.by_name:
            return self.by_name[f"{module}.{name}"]
        found = self.by_name.get(module)
        if found and found.path.endswith("__init__.py"):
            for node in found.tree.body:
                if isinstance(node, ast.ImportFrom) and name in {alias.asname or alias.name for alias in node.names}:
                    return self.home_of(node.module or "", name) or found
        return found


# Counting


def counts(house: House) -> dict:
    lines, modules = Counter[str](), Counter[str]()
    for path, module in house.modules.items():
        parts = Path(path).parts
        folder = "/".join(parts[:2]) if parts[0] in DEEP and len(parts) > 2 else parts[0]
        lines[folder] += len(module.code_lines)
        modules[folder] += 1
    sizes = {path: len(module.code_lines) for path, module in house.product.items()}
    functions = [
        (len(lines_of(node)), f"{path}:{node.name}") for path, one in house.product.items() for node in one.functions
    ]
    raises = [node for one in house.product.values() for node in one.nodes if isinstance(node, ast.Raise)]
    largest = max(sizes, key=sizes.__getitem__)
    return {
        "lines": sum(sizes.values()),
        "modules": len(sizes),
        "test_lines": lines["tests"],
        "functions": len(functions),
        "raises": len(raises),
        "refusals": sum(is_refusal(node) for node in raises),
        "largest_module": [largest, sizes[largest]],
        "long_modules": sum(size > LONG_MODULE for size in sizes.values()),
        "longest_function": [*max(functions)][::-1],
        "long_functions": sum(size > LONG_FUNCTION for size, _ in functions),
        "folders": {name: [count, modules[name]] for name, count in lines.most_common()},
        "circles": {kind: circles(edges) for kind, edges in import_edges(house).items()},
    }


def is_refusal(node: ast.Raise) -> bool:
    """False for an error that is raised again, a method to be written by subclasses, and a command's exit code."""
    raised = ast.unparse(node.exc).partition("(")[0] if node.exc else ""
    return raised not in ("", "NotImplementedError", "SystemExit")


def import_edges(house: House) -> dict[str, dict[str, set[str]]]:
    """Who imports whom: modules when they run, modules also for types alone, and folders."""
    running: dict[str, set[str]] = {}
    any_time: dict[str, set[str]] = {}
    folders: dict[str, set[str]] = {}
    for path, module in house.product.items():
        running[path] = {home.path for _, home in house.imports(module, with_types=False)} - {path}
        any_time[path] = {home.path for _, home in house.imports(module)} - {path}
        here = str(Path(path).parent)
        folders[here] = folders.get(here, set()) | {str(Path(other).parent) for other in running[path]} - {here}
    return {"modules": running, "modules_with_types": any_time, "folders": folders}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """Groups whose members reach each other."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = edges.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        return seen

    reach = {one: reached(one) for one in edges}
    groups = {tuple(sorted(other for other in reach[one] if one in reach[other])) for one in edges if one in reach[one]}
    return sorted([*group] for group in groups)


# One iteration


def traced(house: House, recipe: str, *overrides: str) -> dict:
    """What an iteration of this recipe executes, and what its processes have imported after it."""
    return summary(house, recorded(house, recipe, *overrides))


def imported_modules(house: House, recipe: str, *overrides: str) -> dict[str, set[str]]:
    """The modules of ours that each process has imported after an iteration, by the process's name."""
    processes = recorded(house, recipe, *overrides, lines=False)
    return {name: house.ours(one["modules"]) for name, one in processes.items()}


def recorded(house: House, recipe: str, *overrides: str, lines: bool = True) -> dict[str, dict]:
    """What the processes of a run write after an iteration, by name. Without `lines` no line is traced."""
    with tempfile.TemporaryDirectory() as folder:
        moment = Path(folder, "moment")
        moment.write_bytes(b"\0")
        paths = [str(ROOT / "benchmarks" / "line_trace"), str(house.root)]
        env = environment() | {
            "PYTHONPATH": os.pathsep.join(paths),
            "TRACED_CODE": f"{house.root}{os.sep}embodied{os.sep}",
            "TRACE_FOLDER": folder,
            "TRACE_LINES": str(lines),
        }
        command = train_command(recipe, *SHORT, *overrides, f"run.dir={folder}/runs")
        with open(Path(folder, "output"), "w+") as output:
            run = subprocess.Popen(command, cwd=house.root, env=env, stdout=output, stderr=subprocess.STDOUT)
            try:
                for rows, value in ((AFTER, 1), (AFTER + 1, 2)):
                    wait(lambda rows=rows: rows_of(Path(folder)) >= rows, run, Path(output.name))
                    with open(moment, "r+b") as file:  # never shorter: processes have it in their memory
                        file.write(bytes([value]))
                written = {pid: Path(folder, f"{pid}.json") for pid in tree_pids(run.pid) if is_traced(pid, moment)}
                wait(lambda: all(path.is_file() for path in written.values()), run, Path(output.name))
            finally:
                run.kill()  # the kernel ends its hosts
                run.wait()
        found = {pid: json.loads(path.read_text()) for pid, path in written.items()}
        found[run.pid]["name"] = "driver"
    return {one["name"]: one for one in found.values() if one["modules"]}


def rows_of(folder: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in folder.glob("runs/*/metrics.jsonl"))


def is_traced(pid: int, moment: Path) -> bool:
    """True for a process that has imported the tracer, which maps this file."""
    try:
        return str(moment) in Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return False


def wait(done: Callable[[], bool], run: subprocess.Popen, output: Path) -> None:
    until = time.monotonic() + WAIT_S
    while not done():
        if run.poll() is not None or time.monotonic() > until:
            raise SystemExit(f"the traced run ended early or is too slow:\n{output.read_text()[-3000:]}")
        time.sleep(0.002)


def summary(house: House, processes: dict[str, dict]) -> dict:
    imported = {name: house.ours(one["modules"]) for name, one in processes.items()}
    together = set[str]().union(*imported.values())
    lines: dict[str, set[int]] = {}
    for one in processes.values():
        for file, line in one["lines"]:
            for path in house.ours([file]):
                lines.setdefault(path, set()).add(line)
    executed, named = walk(house, lines)
    return {
        "executed": executed,
        "carriers": sorted(name.rpartition(".")[2] for name in constructed(house, lines) & house.carriers),
        "executed_or_named": {"modules": len(named), "module_lines": code_lines(house, named), "paths": sorted(named)},
        "imported": {"modules": len(together), "module_lines": code_lines(house, together)}
        | {"by_process": {name: len(paths) for name, paths in imported.items()}},
    }


def walk(house: House, lines: dict[str, set[int]]) -> tuple[dict, set[str]]:
    """Counts of what was executed, and the modules that are executed or that executed functions name."""
    functions, of_functions, ran = 0, 0, 0
    executed: set[str] = set()
    named: set[str] = set()
    for path, numbers in lines.items():
        module = house.product[path]
        at = {line: module.function_at(line) for line in numbers}
        nodes = {id(node): node for node in at.values() if node}
        if not nodes:
            continue
        executed.add(path)
        functions += len(nodes)
        ran += sum(at[line] is not None for line in numbers & module.code_lines)
        covered = {line for node in nodes.values() for line in lines_of(node)}
        of_functions += len(covered & module.code_lines)
        words = {inner.id for node in nodes.values() for inner in ast.walk(node) if isinstance(inner, ast.Name)}
        named |= {home.path for name, home in house.imports(module) if name in words}
    counted = {"modules": len(executed), "module_lines": code_lines(house, executed), "functions": functions}
    return counted | {"function_lines": of_functions, "lines": ran, "paths": sorted(executed)}, named | executed


def constructed(house: House, lines: dict[str, set[int]]) -> set[str]:
    """The full names of what executed lines call."""
    found = set()
    for path, numbers in lines.items():
        names = house.names_in(house.product[path])
        calls = [node.func for node in house.product[path].nodes if is_call(node, numbers)]
        found |= {names.get(getattr(call, "id", getattr(call, "attr", "")), "") for call in calls}
    return found


def is_call(node: ast.AST, lines: set[int]) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and node.lineno in lines


def code_lines(house: House, paths: Iterable[str]) -> int:
    return sum(len(house.product[path].code_lines) for path in paths)


# What is shown


def table(found: dict) -> str:
    counted = found["counts"]
    rows = [["code lines; modules", f"{counted['lines']:,}; {counted['modules']}"]]
    rows += [["code lines of tests", f"{counted['test_lines']:,}"]]
    rows += [["largest module; over 450 lines", f"{counted['largest_module'][1]}; {counted['long_modules']}"]]
    rows += [["functions; longest; over 60", f"{counted['functions']:,}; {counted['longest_function'][1]}"]]
    rows[-1][1] += f"; {counted['long_functions']}"
    rows += [["raise; refusals among them", f"{counted['raises']:,}; {counted['refusals']:,}"]]
    for kind, groups in counted["circles"].items():
        rows += [
            [f"circles: {kind.replace('_', ' ')}", ", ".join(f"one of {len(group)}" for group in groups) or "none"]
        ]
    for recipe, one in found["recipes"].items():
        ran, named, imported = one["executed"], one["executed_or_named"], one["imported"]
        rows += [[f"{recipe}: executed modules; their lines", f"{ran['modules']}; {ran['module_lines']:,}"]]
        rows += [[f"{recipe}: executed functions; their lines", f"{ran['functions']}; {ran['function_lines']:,}"]]
        rows += [[f"{recipe}: carriers", f"{len(one['carriers'])}: {', '.join(one['carriers'])}"]]
        rows += [[f"{recipe}: executed lines", f"{ran['lines']:,}"]]
        rows += [[f"{recipe}: executed or named modules; their lines"]]
        rows[-1] += [f"{named['modules']}; {named['module_lines']:,}"]
        rows += [[f"{recipe}: imported modules; their lines", f"{imported['modules']}; {imported['module_lines']:,}"]]
        each = ", ".join(f"{name} {count}" for name, count in imported["by_process"].items())
        rows += [[f"{recipe}: imported by process", each]]
    return markdown(["what", "count"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="*", default=[*RECIPES], metavar="RECIPE")
    asked = parser.parse_args()
    house = House(ROOT)
    found = {"commit": code_commit(), "machine": machine(), "packages": packages(), "python": sys.version.split()[0]}
    found |= {"counts": counts(house)}
    found |= {"recipes": {recipe: traced(house, recipe, *RECIPES.get(recipe, ())) for recipe in asked.recipes}}
    write_json(FILE, found)
    print(table(found))


if __name__ == "__main__":
    main()
