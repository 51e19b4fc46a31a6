"""The benchmark of merged questions compares ways that end alike, and says how many rows a call had."""

import pytest

from benchmarks.merged_questions import STEPS, WAYS, compare, table


@pytest.mark.slow
def test_all_ways_play_the_same_and_merging_takes_fewer_calls():
    found = compare("openvla", sims=2, rounds=1)
    assert found.keys() == WAYS.keys()
    assert all(one["decisions"] == 4 * STEPS and one["wall_s"] > 0 for one in found.values())
    assert found["alone"]["calls"] == 4 * STEPS > found["within 20 ms"]["calls"]
    assert table({"openvla": found})[0][:2] == ["openvla", "alone"]
