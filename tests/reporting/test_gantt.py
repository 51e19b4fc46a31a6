"""Charts of rows: the iteration that a plan predicts, and rows of many pieces."""

import pytest

from embodied.reporting.page import merge_pieces


def test_a_bin_of_many_pieces_shows_what_filled_most_of_it_and_rare_pieces_stay_whole():
    half = [(i, i + 0.6) for i in range(5000)]  # 60% step and 30% act in the first half, 30% step alone in the second
    bars = {
        "step": half + [(i, i + 0.3) for i in range(5000, 10_000)],
        "act": [(i + 0.6, i + 0.9) for i in range(5000)],
    }
    merged = merge_pieces(bars | {"offload policy": [(7000.2, 7000.3)]}, 10_000.0)
    assert merged["step"] == [(0.0, pytest.approx(5000.0))] and not merged["act"], "idle where most of a bin is idle"
    assert list(merged)[-1] == "offload policy" and merged["offload policy"] == [(7000.2, 7000.3)]
