"""Charts of rows: the iteration that a plan predicts, and rows of many pieces."""

import pytest

from embodied.placement.event_replay import Schedule
from embodied.plan import MOST_ROWS, draw
from embodied.reporting.page import merge_pieces


def schedule(seconds, **spans):
    """Of devices gpu_0 and so on, each with its (component, start, end)."""
    made = Schedule(seconds, devices=list(spans))
    for device, bars in spans.items():
        for bar in bars:
            made.add(device, *bar)
    return made


def test_a_device_has_a_row_and_every_schedule_the_same_time_axis():
    work = {"gpu_0": [("sim", 0, 1), ("policy", 1, 2), ("sim", 2, 3)], "gpu_1": [("learner", 2, 4), ("mine", 4, 4.5)]}
    drawing = draw({"hybrid": schedule(5.0, **work), "collocated": schedule(10.0, gpu_0=[("sim", 0, 10)])})
    hybrid, collocated = drawing["charts"]
    assert (hybrid["title"], hybrid["high"], hybrid["end"]) == ("hybrid; 5 s", 10.0, 5.0)
    assert (collocated["high"], collocated["end"], drawing["x"]) == (10.0, 10.0, "seconds of an iteration")
    assert {row["name"]: row["bars"] for row in hybrid["rows"]} == {
        "gpu_0": {"sim": [(0, 1), (2, 3)], "policy": [(1, 2)]},
        "gpu_1": {"learner": [(2, 4)], "mine": [(4, 4.5)]},
    }


def test_a_cluster_shows_its_kinds_of_devices():
    cluster = draw({"one": schedule(1.0, **{f"n:{i}": [("sim" if i < 150 else "policy", 0, 1)] for i in range(300)})})
    rows = [row["name"] for row in cluster["charts"][0]["rows"]]
    assert len(rows) == MOST_ROWS and {"n:0", "n:149", "n:150", "n:299"} <= {*rows}


def test_a_bin_of_many_pieces_shows_what_filled_most_of_it_and_rare_pieces_stay_whole():
    half = [(i, i + 0.6) for i in range(5000)]  # 60% step and 30% act in the first half, 30% step alone in the second
    bars = {
        "step": half + [(i, i + 0.3) for i in range(5000, 10_000)],
        "act": [(i + 0.6, i + 0.9) for i in range(5000)],
    }
    merged = merge_pieces(bars | {"offload policy": [(7000.2, 7000.3)]}, 10_000.0)
    assert merged["step"] == [(0.0, pytest.approx(5000.0))] and not merged["act"], "idle where most of a bin is idle"
    assert list(merged)[-1] == "offload policy" and merged["offload policy"] == [(7000.2, 7000.3)]
