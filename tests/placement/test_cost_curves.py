"""Curves predict between, beyond and below what was measured, and never fall."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.placement.cost_curves import Curve, constant, curve_from_json, fit


def test_a_curve_is_straight_between_points_and_goes_on_as_steeply():
    curve = Curve((4, 8, 16), (1.0, 2.0, 3.0))
    assert [curve.at(size) for size in (4, 6, 8, 12, 16, 24)] == [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]


def test_below_the_first_point_a_curve_falls_no_faster_than_in_proportion():
    assert Curve((4, 8), (1.0, 2.0)).at(2) == 0.5  # the line meets proportion
    assert Curve((4, 8), (2.0, 3.0)).at(2) == 1.5  # the line: 2 - 2 * 0.25
    assert Curve((4, 8), (1.0, 9.0)).at(2) == 0.5  # the line would be negative; half the size, half the time
    assert constant(3).at(0.1) == 3


def test_a_floor_and_a_line_are_recognised():
    curve = fit({size: [max(0.2, 0.01 * size)] for size in (1, 4, 8, 24, 32, 48, 64)})
    assert curve.at(2) == pytest.approx(0.2)
    assert curve.at(40) == pytest.approx(0.4)
    assert curve.at(128) == pytest.approx(1.28)
    assert curve.error < 0.05


def test_medians_that_fall_become_their_mean():
    curve = fit({1: [1.0], 2: [3.0], 4: [2.0]})
    assert curve.values == (1.0, 2.5, 2.5)


def test_the_error_is_what_leaving_a_point_out_would_have_cost():
    curve = fit({1: [1.0], 2: [4.0], 3: [5.0]})  # without the middle: 3.0 instead of 4.0
    assert curve.error == pytest.approx(0.25)
    assert fit({1: [1.0, 2.0, 3.0], 2: [4.0]}).spread == pytest.approx(0.5)  # quartiles 1.5 and 2.5 around 2


@settings(deadline=None)  # a loaded machine is slow
@given(
    st.dictionaries(
        st.integers(1, 10_000), st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=4), min_size=1, max_size=8
    )
)
def test_a_fitted_curve_never_falls_and_survives_json(samples):
    curve = fit(samples)
    at = curve.at(np.geomspace(0.5, 50_000, 200))
    assert np.all(np.diff(at) >= -1e-9 * at.max())
    assert at.min() >= 0
    assert curve_from_json(json.loads(json.dumps(curve.to_json()))) == curve


@pytest.mark.parametrize(("sizes", "values"), [((), ()), ((1, 1), (1, 2)), ((1, 2), (2, 1)), ((1,), (-1,)), ((1,), ())])
def test_points_that_are_no_curve_are_refused(sizes, values):
    with pytest.raises(ValueError, match="curve"):
        Curve(sizes, values)
