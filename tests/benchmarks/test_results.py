"""What measurements leave in the repository says nothing of the machine's folders."""

import re
from pathlib import Path

from benchmarks.common import RESULTS
from benchmarks.fault_table import relative

FOLDER = re.compile(r"(?<![\w.>/])/(tmp|work|home|root|var|mnt|opt|usr|Users)/[\w.-]+")


def test_no_result_names_a_folder_of_the_machine_that_measured_it():
    found = {path.name: FOLDER.search(path.read_text()) for path in RESULTS.rglob("*") if path.is_file()}
    assert found and not [f"{name}: {hit[0]}" for name, hit in found.items() if hit]


def test_a_fault_is_told_with_its_log_inside_the_run():
    folder = Path("/tmp/tmpabc")
    said = relative("error: sim-0: it broke [log: /tmp/tmpabc/runs/toy/logs/sim-0.log]", folder)
    assert FOLDER.search("log: /tmp/tmpabc/runs") and not FOLDER.search(said)
    assert said.endswith("[log: runs/toy/logs/sim-0.log]")
