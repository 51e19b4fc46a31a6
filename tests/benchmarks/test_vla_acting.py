"""The comparison of acting with generate(): both sides write the same best tokens, and medians are compared."""

import pytest

pytest.importorskip("transformers")

from benchmarks.vla_acting import CONTESTS, WORDS, compare, line
from embodied.policies.openvla.settings import PRESETS


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_both_sides_write_the_same_tokens():
    before = PRESETS["tiny"]
    for words in WORDS:
        found = compare(rows=2, rounds=1, words=words, threads=1)
        assert 0 < found["products"] < found["writing"]["ours"] and all(
            found[name]["generate"] > 0 for name in CONTESTS
        )
    assert PRESETS["tiny"] is before


def test_a_line_has_all_times_and_their_ratios():
    found = {"ours": 0.01, "compiled": 0.005, "generate": 0.02, "ratio": 2.0, "compiled_ratio": 4.0}
    assert line("writing", found) == ["writing", "10.0 ms", "5.0 ms", "20.0 ms", "2.00x", "4.00x"]
