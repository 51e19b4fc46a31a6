"""What `benchmarks.house` counts."""

import subprocess
from importlib.util import find_spec

import pytest

from benchmarks import house
from benchmarks.common import ROOT
from benchmarks.house import House

MOST_IMPORTED = 90

FILES = {
    "embodied/__init__.py": "",
    "embodied/loop.py": '''"""Two lines
of words."""
from embodied.tools import Carried, saw
from embodied.types import Only

def walk(wood: Only):
    """Words."""
    # a comment
    if wood:

        return saw(wood)
    return Carried

def rest():
    def inner():
        return 1

    return inner
''',
    "embodied/tools/__init__.py": "from embodied.tools.saw import saw\nfrom embodied.tools.carried import Carried\n",
    "embodied/tools/saw.py": """from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from embodied.loop import walk

def saw(wood):
    raise ValueError
""",
    "embodied/tools/carried.py": "class Carried:\n    pass\n",
    "embodied/types.py": "def later():\n    import embodied.loop as loop\n    return loop\nOnly = int\n",
    "tests/test_loop.py": "assert True\n",
}


@pytest.fixture
def wood(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True, timeout=60)
    return House(tmp_path)


def test_code_lines_are_neither_blank_nor_comments_nor_docstrings(wood):
    counted = house.counts(wood)
    assert counted["folders"]["embodied"] == [10 + 4, 3] and counted["folders"]["embodied/tools"] == [9, 3]
    assert counted["lines"] == 23 and counted["modules"] == 6 and counted["test_lines"] == 1
    assert counted["functions"] == 5 and counted["raises"] == counted["refusals"] == 1
    assert counted["longest_function"] == ["embodied/loop.py:walk", 7]


def test_circles_are_counted_with_lazy_imports_and_once_more_with_those_for_types(wood):
    assert house.counts(wood)["circles"] == {
        "modules": [["embodied/loop.py", "embodied/types.py"]],
        "modules_with_types": [["embodied/loop.py", "embodied/tools/saw.py", "embodied/types.py"]],
        "folders": [],
    }


def test_a_walk_counts_whole_functions_and_the_modules_that_they_name(wood):
    lines = {"embodied/loop.py": {3, 6, 9, 11}, "embodied/tools/saw.py": {1}}  # not the bodies of modules
    executed, named = house.walk(wood, lines)
    assert executed == {
        **{"modules": 1, "module_lines": 10, "functions": 1, "function_lines": 4, "lines": 2},
        "paths": ["embodied/loop.py"],
    }
    assert named == {"embodied/loop.py", "embodied/tools/saw.py", "embodied/tools/carried.py", "embodied/types.py"}


def test_carriers_are_records_with_arrays_that_executed_lines_construct(wood):
    texts = {
        "embodied/held.py": "@dataclass\nclass Held:\n    rows: np.ndarray\n@dataclass\nclass Count:\n    rows: int\n",
        "embodied/used.py": "from embodied.held import Count, Held\nclass Pair(NamedTuple):\n    both: list[Held]\n"
        "def use():\n    Count(Held)\n    Pair([])\n    return Held\n",
    }
    wood.modules = {path: house.Module(path, text) for path, text in texts.items()}
    assert wood.carriers == {"embodied.held.Held", "embodied.used.Pair"}
    assert house.constructed(wood, {"embodied/used.py": {5, 6, 7}}) & wood.carriers == {"embodied.used.Pair"}


@pytest.mark.slow
def test_a_run_is_traced_in_all_of_its_processes():
    small = ("env.num_envs=2", "algo.rollout_decisions=4", "algo.minibatch_size=8", "cluster.backend=local")
    found = house.traced(House(ROOT), "pointmass_ppo", *small, 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}')
    imported = found["imported"]
    assert {*imported["by_process"]} == {"driver", "sim+policy-0", "learner-0"}
    assert max(imported["by_process"].values()) < imported["modules"] < sum(imported["by_process"].values())
    executed = found["executed"]
    assert {"embodied/train.py", "envs/pointmass/env.py", "embodied/learners/update.py"} <= {*executed["paths"]}
    assert executed["lines"] < executed["function_lines"] < executed["module_lines"]
    assert executed["modules"] < found["executed_or_named"]["modules"] < imported["modules"]


@pytest.mark.skipif(find_spec("mani_skill") is None, reason="needs ManiSkill")
def test_a_run_imports_few_modules_that_it_does_not_use():
    small = ("env.num_envs=2", "algo.rollout_decisions=4", "algo.minibatch_size=8", "cluster.backend=local")
    places = 'placement={"sim,policy": "cpu:0", learner: "cpu:0"}'
    by_process = house.imported_modules(House(ROOT), "maniskill_ppo", *small, places)
    together = set[str]().union(*by_process.values())
    assert len(together) <= MOST_IMPORTED
    unused = {"reporting", "sharing", "serving", "profiling"}
    assert not [path for path in together if unused & {*path.split("/")}]
