"""The tables of what GRPO learned say what the measured results say."""

import pytest

from benchmarks.learning import page


def test_the_page_shows_the_results_that_lie_there():
    shown = page.PAGE.read_text()
    assert page.told(shown, page.tables()) == shown, "python -m benchmarks.learning.page"


def test_a_course_is_the_mean_of_equal_parts():
    curve = [[100 * n, 0.1 * (n // 2), 4] for n in range(12)]
    assert page.course(curve) == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
