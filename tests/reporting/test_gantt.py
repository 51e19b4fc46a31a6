"""Charts of rows: the iteration that a plan predicts, and rows of many pieces."""

import pytest

from embodied.placement.timeline import Span, Timeline
from embodied.plan import draw
from embodied.reporting.page import merge_pieces


def timeline(seconds, *spans):
    """Of spans (first device, end of the devices, component, start, end)."""
    return Timeline(seconds, [Span("gpu", range(first, end), *rest) for first, end, *rest in spans])


def test_devices_that_do_the_same_share_a_row_and_all_timelines_a_time_axis():
    hybrid = timeline(5.0, (0, 2, "sim", 0, 1), (0, 1, "policy", 1, 2), (2, 300, "learner", 2, 4))
    drawing = draw({"hybrid": hybrid, "collocated": timeline(10.0, (0, 1, "sim", 0, 10))})
    hybrid, collocated = drawing["charts"]
    assert (hybrid["title"], hybrid["high"], hybrid["end"]) == ("hybrid; 5 s", 10.0, 5.0)
    assert (collocated["high"], collocated["end"], drawing["x"]) == (10.0, 10.0, "seconds of an iteration")
    assert {row["name"]: row["bars"] for row in hybrid["rows"]} == {
        "gpu:0": {"sim": [(0, 1)], "policy": [(1, 2)]},
        "gpu:1": {"sim": [(0, 1)]},
        "gpu:2-299": {"learner": [(2, 4)]},
    }


def test_a_bin_of_many_pieces_shows_what_filled_most_of_it_and_rare_pieces_stay_whole():
    half = [(i, i + 0.6) for i in range(5000)]  # 60% step and 30% act in the first half, 30% step alone in the second
    bars = {
        "step": half + [(i, i + 0.3) for i in range(5000, 10_000)],
        "act": [(i + 0.6, i + 0.9) for i in range(5000)],
    }
    merged = merge_pieces(bars | {"offload policy": [(7000.2, 7000.3)]}, 10_000.0)
    assert merged["step"] == [(0.0, pytest.approx(5000.0))] and not merged["act"], "idle where most of a bin is idle"
    assert list(merged)[-1] == "offload policy" and merged["offload policy"] == [(7000.2, 7000.3)]
