"""The benchmark of frozen towers says what was kept and how long both took."""

from benchmarks.frozen_towers import FAMILIES, compare, table


def test_both_ways_are_timed_and_what_is_kept_is_counted():
    found = compare(FAMILIES["openvla"], items=2, epochs=1, rounds=1)
    assert found["again"] > 0 and found["once"] > 0
    assert found["kept_bytes"] == 16 * 192 * 4  # patches, both towers' numbers, float32
    assert table({"openvla": found})[0][-1] == "12 kB"
