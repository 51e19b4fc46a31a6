"""Examples run: each file in a folder of its own, each notebook by a kernel of its own."""

import re
from importlib.util import find_spec

import pytest
from pages import ROOT, apart, runner

EXAMPLES = ROOT / "examples"
PRINTS = {
    "own_reward": r"effort costs 0.02: return -?\d",
    "own_policy": r"returns \[",
    "from_python": r"four episodes of my own: \[",
    "two_runs": r"gym_ppo +return \d",
    "gym_images": r"caught at first and at last: \d+%",
    "text_tool": r"right answers in .*: \d+%, \d+%",
    "vla_folder": r"success [\d.]+ videos",
    "maniskill_task": r"success \[",
}
QUICK = ("own_reward", "own_policy", "from_python")
LINES = 60


@pytest.fixture
def examples_folder(tmp_path):
    """A folder with the examples, as a user copies them."""
    for path in EXAMPLES.glob("*.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in PRINTS]
)
def test_an_example_runs_and_prints_what_it_is_about(name, examples_folder, monkeypatch, capsys):
    """The quick ones in this process, which has imported already what takes them seconds to import, and for two
    iterations."""
    if name in QUICK:
        text = re.sub(r'"run.iterations=\d+"', '"run.iterations=2"', (examples_folder / f"{name}.py").read_text())
        printed = runner(examples_folder, monkeypatch, capsys).program(text)
    else:
        printed = apart(f"python {name}.py", examples_folder)
    assert re.search(PRINTS[name], printed), printed


def test_every_example_is_short_and_in_the_list_of_examples():
    files = sorted(path for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
    listed = re.findall(r"^\| \[(\S+)\]", (EXAMPLES / "README.md").read_text(), re.M)
    assert sorted(listed) == [path.name for path in files]
    assert {path.stem for path in files if path.suffix == ".py"} == {*PRINTS}
    for path in files:
        assert path.suffix == ".ipynb" or len(path.read_text().splitlines()) <= LINES, path.name


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nbclient") is None, reason="nbclient is not installed")
@pytest.mark.filterwarnings("ignore")  # the kernel's own
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel(path, examples_folder):
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=800, resources={"metadata": {"path": str(examples_folder)}}).execute()
    assert all(cell.outputs for cell in book.cells if cell.cell_type == "code")
    assert path.stat().st_size < 60_000, "its outputs are large"
