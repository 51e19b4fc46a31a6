"""The tables of what experts and GRPO reach say what the measured results say."""

import pytest

from benchmarks.learning import page


@pytest.mark.parametrize("block", page.BLOCKS)
def test_the_pages_show_the_results_that_lie_there(block):
    name, write = page.BLOCKS[block]
    shown = (page.ROOT / "docs" / name).read_text()
    assert f"<!-- {block}: begin -->" in shown
    assert page.told(shown, block, write()) == shown, "python -m benchmarks.learning.page"


def test_a_course_is_the_mean_of_equal_parts():
    curve = [[100 * n, 0.1 * (n // 2), 4] for n in range(12)]
    assert page.course(curve) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
