"""Planting faults in a small checkout: one that a test catches, one that none does, and one that no longer fits."""

import json
import subprocess

import pytest

from benchmarks import planted_faults

FILES = {
    "pyproject.toml": '[tool.pytest.ini_options]\nmarkers = ["slow", "chaos"]\n',
    "adding.py": "def add(a, b):\n    return a + b\n\ndef half(a):\n    return a / 2\n",
    "tests/test_adding.py": "import adding\n\ndef test_sums():\n    assert adding.add(2, 3) == 5\n",
    "tests/test_broken.py": "import adding\n\ndef test_fails_anyway():\n    assert adding.add(1, 1) == 3\n",
    "tests/test_lists.py": "import pytest\n\n@pytest.mark.slow\ndef test_slow():\n    assert False\n",
}
FAULTS = """
subtracts: {file: adding.py, before: a + b, after: a - b, tests: test_broken test_lists test_adding}
thirds: {file: adding.py, before: a / 2, after: a / 3, tests: test_adding}
moved: {file: adding.py, before: a, after: b, tests: test_adding}
"""


@pytest.fixture
def planted(tmp_path):
    """Runs the program on the small checkout; returns its exit code and its results."""
    source, faults, results = tmp_path / "source", tmp_path / "faults.yaml", tmp_path / "results.json"
    for name, text in FILES.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    for arguments in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", "-C", str(source), *arguments], check=True, timeout=60)
    faults.write_text(FAULTS)

    def run(*words):
        code = planted_faults.main(words, faults, source, results)
        assert (source / "adding.py").read_text() == FILES["adding.py"]
        return code, json.loads(results.read_text())["faults"]

    return run


@pytest.mark.slow
def test_a_fault_is_caught_by_the_first_test_that_fails_with_it_alone(planted, capsys):
    code, found = planted()
    assert code == 1
    assert found["subtracts"]["caught_by"] == "tests/test_adding.py::test_sums"
    assert found["thirds"]["caught_by"] == ""
    assert "exactly once" in found["moved"]["problem"]
    assert "1 of 3 faults are caught" in capsys.readouterr().out
    assert planted("--faults", "subtracts")[0] == 0
    assert planted("--faults", "thirds", "--again", "--all-tests")[0] == 1


@pytest.mark.slow
def test_a_measured_fault_is_only_measured_again_on_request(planted, monkeypatch):
    planted("--faults", "subtracts")
    monkeypatch.setattr(planted_faults.Copy, "first_failure", lambda copy, tests: "tests/other.py::test_other")
    monkeypatch.setattr(planted_faults.Copy, "_fails_anyway", lambda copy, test: False)
    assert planted("--faults", "subtracts")[1]["subtracts"]["caught_by"] == "tests/test_adding.py::test_sums"
    assert planted("--faults", "subtracts", "--again")[1]["subtracts"]["caught_by"] == "tests/other.py::test_other"


def test_there_are_a_hundred_faults():
    """Whether each still fits the code the program says: a change of the code need not wait for a fault's words."""
    faults = planted_faults.read_faults()
    assert len(faults) >= 100
    assert all(fault.before != fault.after and fault.tests for fault in faults.values())
