"""Rules of the layout: who may import whom, and no option without a reader."""

import ast
import re
import subprocess
from functools import cache
from keyword import kwlist
from pathlib import Path

import pytest

from embodied.config.read import leaves, root
from embodied.config.recipe import RunConfig
from embodied.core.plugins import OURS
from embodied.envs.config import ENV_CONFIGS
from embodied.policies.config import POLICY_CONFIGS

ROOT = Path(__file__).parents[2]
FOLDERS = ("embodied", "envs", "policies", "placement")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in (*["embodied"][parts[0] == "embodied" :], *parts) if part != "__init__")


MODULES = {module_of(path): path for path in SOURCES}


@pytest.fixture(scope="module", autouse=True)
def no_file_is_kept():
    """What is parsed takes 130 MB."""
    yield
    nodes_of.cache_clear()
    imports.cache_clear()


@cache
def nodes_of(path):
    return [*ast.walk(ast.parse(path.read_text()))]


def import_statements(node, runs=True, for_types=False):
    """(statement, whether it runs when the module is imported, whether it is for types alone) of all imports in a node.
    Expressions contain none."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield node, runs, for_types
    runs = runs and not isinstance(node, ast.FunctionDef)
    for_types = for_types or (isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING")
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, ast.expr):
            yield from import_statements(inner, runs, for_types)


@cache
def imports(path, with_types=False):
    """The modules a file imports, and whether each import runs when the module is imported."""
    found = []
    for node, runs, for_types in import_statements(nodes_of(path)[0]):
        if for_types and not with_types:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, runs) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in MODULES or node.module == "embodied" else node.module for name in names]
            found += [(name, runs) for name in names]
    return found


def ours(folder):
    return [
        (path, name)
        for path in SOURCES
        if path.is_relative_to(ROOT / folder)
        for name, _ in imports(path)
        if name.split(".")[0] == "embodied"
    ]


def allowed(name, prefixes):
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


SHARED = ("embodied.core", "embodied.runtime")


@pytest.mark.parametrize(
    ("folder", "may_import"),
    [
        ("placement", ("embodied.placement",)),
        ("envs", ("embodied.envs", *SHARED)),
        ("policies", ("embodied.policies", *SHARED)),
        ("embodied/core", ("embodied.core",)),
        ("embodied/algorithms", ("embodied.algorithms", "embodied.core")),
        ("embodied/runtime", ("embodied.runtime", "embodied.core")),
    ],
)
def test_a_folder_imports_only_what_the_layout_allows(folder, may_import):
    wrong = [f"{path.relative_to(ROOT)} imports {name}" for path, name in ours(folder) if not allowed(name, may_import)]
    assert not wrong


def test_components_never_import_a_workflow_or_a_command():
    conductors = ("embodied.workflows", "embodied.train", "embodied.evaluate", "embodied.run", "embodied.config")
    for folder in ("envs", "policies", "placement", "embodied/algorithms", "embodied/learners", "embodied/runtime"):
        assert not [(path, name) for path, name in ours(folder) if allowed(name, conductors)]


def circles(edges):
    """Groups of modules that import each other, however indirectly (Tarjan's strongly connected components)."""
    order, low, stack, found = {}, {}, [], []

    def visit(module):
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in edges[module]:
            if other not in order:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            group = [stack.pop() for _ in stack[stack.index(module) :]]
            if len(group) > 1:
                found.append(sorted(group))

    for module in edges:
        if module not in order:
            visit(module)
    return found


def test_no_modules_import_each_other_in_a_circle():
    """Imports inside functions, and for types alone, count too."""
    edges = {
        module: {name for name, _ in imports(path, with_types=True)} & {*MODULES} - {module}
        for module, path in MODULES.items()
    }
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert not circles(edges)


def test_the_runtime_knows_no_role_by_name():
    for path in SOURCES:
        if path.is_relative_to(ROOT / "embodied/runtime"):
            named = re.findall(r"(?<![a-z])(?:sims?|policy|learners?)(?![a-z0-9])", path.read_text(), re.IGNORECASE)
            assert not named, f"{path}: {named}"


def test_options_are_free_of_heavy_imports():
    for path in SOURCES:
        if path.name.endswith("config.py") or path.name == "options.py":
            assert not [
                name
                for name, now in imports(path)
                if now and name.split(".")[0] in ("torch", "numpy", "ray", "gymnasium")
            ]


MESSAGES = [
    ROOT / "embodied/runtime" / name for name in ("payload.py", "ray_backend.py")
]  # between our own processes only


CLASSES = {name: ENV_CONFIGS[name].env for name in OURS["embodied.envs"]}
CLASSES |= {name: POLICY_CONFIGS[name].policy for name in OURS["embodied.families"]}


def test_the_options_of_a_simulator_or_family_stand_beside_its_class():
    for name, where in CLASSES.items():
        folder = where.partition(":")[0].rpartition(".")[0]
        options = (OURS["embodied.envs"] | OURS["embodied.families"])[name]
        assert options.partition(":")[0] == f"{folder}.config"


def test_the_toolkit_knows_no_simulator_and_no_robot_policy_by_name():
    """It asks the classes and options behind the names. That envs may ask in words and that language models are served
    is the toolkit's own."""
    names, shared = {*CLASSES}, ("embodied.envs.text", "embodied.policies.language")
    folders = {where.partition(":")[0].rpartition(".")[0] for where in CLASSES.values()}
    folders = {folder for folder in folders if folder.count(".") > 1} - {*shared} | {"embodied.policies.vla"}
    assert {"embodied.envs.maniskill", "embodied.policies.pi0"} <= folders
    for path in SOURCES:
        if path.is_relative_to(ROOT / "embodied"):
            assert not [name for name, _ in imports(path) if allowed(name, folders)], path
            compared = [node for node in nodes_of(path) if isinstance(node, ast.Compare)]
            words = {getattr(inner, "value", None) for node in compared for inner in ast.walk(node)}
            assert not names & {word for word in words if isinstance(word, str)}, path


ASIDE = (
    *(
        f"embodied.envs.{name}"
        for name in ("verifiers", "reasoning_gym", "robosuite", "envpool", "metaworld", "maniskill.motion_planner")
    ),
    "embodied.policies.language.servers",
)


def test_modules_for_few_runs_are_only_imported_when_used():
    for module, path in MODULES.items():
        outside = [folder for folder in ASIDE if not allowed(module, [folder])]
        assert not [name for name, now in imports(path) if now and allowed(name, outside)], path


def test_nothing_else_is_pickled_and_no_global_seed_is_set():
    for path in SOURCES:
        serialisers = {name for name, _ in imports(path)} & {"pickle", "dill", "cloudpickle", "marshal", "shelve"}
        assert not serialisers or path in MESSAGES
        found = re.search(r"np\.random\.seed\(|(?<!\.)random\.seed\(|allow_pickle=True", path.read_text())
        assert not found, f"{path}: {found}"


def test_every_option_is_read_outside_its_model():
    """A key without effect is a bug: each field name is an attribute that some code reads."""
    read = set()
    for path in SOURCES:
        if not path.name.endswith("config.py"):
            read |= {node.attr for node in nodes_of(path) if isinstance(node, ast.Attribute)}
    unread = sorted({key for key, _, _ in leaves(root(RunConfig)) if key.rpartition(".")[2] not in read})
    assert not unread


def code_lines(path):
    """Lines without blank, comment and docstring lines."""
    documented = set()
    for node in nodes_of(path):
        has_docstring = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_docstring and ast.get_docstring(node, False) is not None:
            documented |= {*range(node.body[0].lineno, node.body[0].end_lineno + 1)}
    lines = [line.strip() for line in path.read_text().splitlines()]
    return sum(1 for at, line in enumerate(lines, 1) if line and line[0] != "#" and at not in documented)


def test_files_stay_readable():
    assert not {str(path.relative_to(ROOT)): count for path in SOURCES if (count := code_lines(path)) > 450}


UPSTAIRS = (  # what reads files, plans, and calls `train`
    *(f"embodied.{name}" for name in ("reporting", "profiling", "sharing", "serving")),
    *(f"embodied.run.{name}" for name in ("launch", "ending", "rehearsal")),
    *(f"embodied.placement.{name}" for name in "forecast iteration_cost profile_planner schedule_overlap".split()),
)


def is_upstairs(name):
    is_command = name.count(".") == 1 and name in MODULES and MODULES[name].name != "__init__.py"
    return is_command or allowed(name, UPSTAIRS)


def test_imports_go_down_the_floors_as_the_architecture_page_draws_them():
    drawing = re.search(r"^## Floors$.*?^```text$(.*?)^```$", (ROOT / "docs/architecture.md").read_text(), re.M | re.S)
    floors = [line.partition(":")[0].split() for line in drawing[1].splitlines() if line.strip(" |")]
    assert {*UPSTAIRS} <= {*MODULES} and is_upstairs("embodied.train") and not is_upstairs("embodied.envs")
    height = {room: -number for number, floor in enumerate(floors) for room in floor[1:]}

    def floor_of(module):
        return 0 if is_upstairs(module) else height[module.split(".")[1]]

    for module, path in MODULES.items():
        if module != "embodied":
            used = [name for name, _ in imports(path, with_types=True) if name in MODULES and name != "embodied"]
            assert not [name for name in used if floor_of(name) > floor_of(module)], module


def test_names_in_docstrings_exist_in_the_code():
    """`name` in a docstring: a name or word of the sources; in a function's one of its own file, or a function, class,
    module or field of another."""
    named, words = [], {}
    defined = {*kwlist, *(module.rpartition(".")[2] for module in MODULES)}
    for path in SOURCES:
        documented = ast.Module | ast.ClassDef | ast.FunctionDef
        holders = [node for node in nodes_of(path) if isinstance(node, documented) and ast.get_docstring(node, False)]
        named += [
            (path, isinstance(holder, ast.FunctionDef), name)
            for holder in holders
            for name in re.findall(r"`(\w+)`", ast.get_docstring(holder, False))
        ]
        docstrings = {id(holder.body[0].value) for holder in holders}
        code = words[path] = set()
        for node in nodes_of(path):
            code |= {getattr(node, field) for field in ("id", "attr", "arg", "name") if hasattr(node, field)}
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                code |= {*re.findall(r"\w+", node.value)}
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.AnnAssign | ast.Assign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                defined |= {getattr(target, "attr", getattr(target, "id", "")) for target in targets}
    assert len(named) > 500
    anywhere = defined.union(*words.values())
    near = {path: of_file | defined for path, of_file in words.items()}
    odd = [(path, name) for path, strict, name in named if name not in (near[path] if strict else anywhere)]
    assert not [(str(path.relative_to(ROOT)), name) for path, name in odd if not name.isdigit()]


def test_no_link_of_the_repository_leads_out_of_it():
    """Least of all a worktree's .venv: a merge would put the link in the place of the folder with this name."""
    told = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    links = [ROOT / name for name in told.stdout.split("\0") if name and (ROOT / name).is_symlink()]
    assert links and all(link.resolve().is_relative_to(ROOT) for link in links)


def test_files_and_tests_that_conftest_names_exist():
    named = re.findall(r"(?<![\w/:])((?:\w+/)*test_\w+)(?:\.py)?(?:::(\w+))?", (ROOT / "tests/conftest.py").read_text())
    assert len(named) > 40
    for path, name in named:
        files = [*(ROOT / "tests").glob(f"{path.removeprefix('tests/')}{'' if name else '*'}.py")]
        assert files and (not name or f"\ndef {name}" in files[0].read_text()), f"{path}::{name}"
