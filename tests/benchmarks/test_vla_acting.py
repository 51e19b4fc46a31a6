"""The comparison of acting with generate(): both sides write the same best tokens, and medians are compared."""

import pytest

pytest.importorskip("transformers")

from benchmarks.vla_acting import compare, line


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_both_sides_write_the_same_tokens():
    found = compare(rows=2, rounds=1)
    assert 0 < found["products"] < found["writing"]["ours"] and found["deciding"]["generate"] > 0 and found["rows"] == 2


def test_a_line_has_both_times_and_their_ratio():
    assert line("writing", {"ours": 0.01, "generate": 0.02, "ratio": 2.0}) == ["writing", "10.0 ms", "20.0 ms", "2.00x"]
