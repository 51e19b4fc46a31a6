"""What several runs gain by sharing devices: predicted by the rules that decide, and played by processes."""

import json

import pytest

from benchmarks import sharing
from benchmarks.common import RESULTS, ROOT
from benchmarks.sharing import CASES, FakeRun, errors, play, row, simulated, table


@pytest.mark.parametrize(("case", "serial", "split"), [(0, 1.46, 1.0), (1, 1.59, 1.3), (2, 1.02, 1.3)])
def test_lending_is_as_fast_as_the_sketch_said_and_no_run_ends_later_than_on_its_own_devices(case, serial, split):
    found = row(CASES[case], simulated(CASES[case]))
    assert found["lend_over_serial"] == pytest.approx(serial, rel=0.05)
    assert found["lend_over_split"] >= split and found["latest_beside_split"] <= 0.02
    assert CASES[case].what in table([found])


def test_the_error_of_a_prediction_is_that_of_the_run_that_is_off_most():
    assert errors({"lend": {"a": 9.0, "b": 12.0}}, {"lend": {"a": 10.0, "b": 10.0}}) == {"lend": pytest.approx(0.2)}


def test_processes_lend_a_device_while_their_last_conversation_is_written_elsewhere(monkeypatch):
    monkeypatch.setattr(sharing, "BEGIN_S", 3.0)
    monkeypatch.setattr(sharing, "SCALE", 0.5)
    monkeypatch.setattr(FakeRun, "lengths", lambda self, seed: [[6.0] if seed == 0 else [0.3] * self.conversations])
    runs = {"tail": FakeRun(1, 0.0, 1.0, 1), "wide": FakeRun(400, 0.0, 1.0, 1)}
    devices = [f"fake:{i}" for i in range(3)]
    together = {"tail": (runs["tail"], 0, devices[:2]), "wide": (runs["wide"], 1, devices[2:])}
    lines = []
    ends = play(together, devices, "lend", lines)
    held = [line for line in lines if (line.get("phase") or "").startswith("rollout")]
    borrowed = [line["at"] for line in held if line["run"] == "wide" and line["device"] in devices[:2]]
    updated = min(line["at"] for line in lines if line.get("phase") == "update" and line["run"] == "tail")
    assert min(borrowed) < updated
    assert ends["wide"] < 400 / 8 * 0.3 + 1  # on its own device alone


def test_the_table_of_the_page_is_that_of_the_last_measurement():
    found = json.loads((RESULTS / "sharing.json").read_text())["real"]
    page = (ROOT / "docs" / "sharing.md").read_text()
    shown = page.partition("<!-- sharing: begin -->\n")[2].partition("\n<!-- sharing: end -->")[0]
    assert shown == table([found[case.what] for case in CASES])
    assert max(abs(error) for one in found.values() for error in one["error"].values()) < 0.05  # as the page says
