"""Profiles and workflows are data: they survive JSON, and what cannot be is refused in a sentence."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.placement import PlacementError
from embodied.placement.dataflow import Component, Dataflow, Edge, embodied_dataflow, traced_edges
from embodied.placement.profile import (
    Cost,
    Curve,
    Link,
    Profile,
    Sync,
    constant,
    curve_from_json,
    fit,
    profile_from_json,
    profile_to_json,
    read_profile,
    write_profile,
)
from embodied.placement.topology import read_topology

WORKFLOW = embodied_dataflow(num_envs=64, decisions=25, learner_calls=64, learner_items=200, env_steps=1600)
PROFILE = Profile(
    WORKFLOW,
    {
        "sim": {"cpu": Cost(Curve((1, 32), (0.1, 0.4)), fixed_s=0.2)},
        "policy": {"cpu": Cost(constant(0.01), last_s=constant(0.002)), "gpu-H100": Cost(constant(0.001))},
        "learner": {"cpu": Cost(Curve((10, 200), (0.1, 1)), exchange_s=Curve((1, 8), (0, 0.1)), offload_s=0.5)},
    },
    Sync(0.001, Curve((1, 4), (0.01, 0.02))),
    Link(1e-4, 1e9),
    made={"recipe": "maniskill_ppo"},
    sources={"costs.sim": "measured"},
)


def test_a_profile_survives_a_file(tmp_path):
    write_profile(PROFILE, tmp_path / "deep" / "profile.json")
    assert read_profile(tmp_path / "deep" / "profile.json") == PROFILE
    assert profile_from_json(json.loads(json.dumps(profile_to_json(PROFILE)))) == PROFILE


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ({"format": "something/9"}, "not a profile of this version"),
        ({"workflow": {}}, "damaged: KeyError"),
        ({"costs": {"sim": {"cpu": {"second": 1}}}}, "second among the costs; known: seconds"),
        ({"costs": {"sim": {"cpu": {"seconds": {"sizes": [2, 1], "values": [1, 2]}}}}}, "must rise"),
        ({"costs": {"sim": {"cpu": {"seconds": 1}}}}, "no costs for policy, learner"),
    ],
)
def test_an_invalid_profile_is_refused_with_a_sentence(change, answer):
    with pytest.raises(PlacementError, match=answer):
        profile_from_json(profile_to_json(PROFILE) | change)


def test_cycles_collapse_and_sources_come_first():
    assert WORKFLOW.order == (("sim", "policy"), ("learner",))
    assert WORKFLOW.sources == (frozenset(), frozenset({0}))
    longer = Dataflow(
        (
            Component("learner", 1, 8),
            Component("sim", 1, 8, splits=True),
            Component("policy", 1, 8),
            Component("reward", 1, 8),
            Component("reference", 1, 8),
        ),
        (
            Edge("sim", "policy"),
            Edge("policy", "sim"),
            Edge("sim", "reward"),
            Edge("policy", "reference"),
            Edge("reward", "learner"),
            Edge("reference", "learner"),
            Edge("learner", "policy", next_iteration=True),
        ),
    )
    assert longer.order == (("sim", "policy"), ("reward",), ("reference",), ("learner",))
    assert longer.sources == (frozenset(), frozenset({0}), frozenset({0}), frozenset({1, 2}))


def test_the_graph_is_traced_from_who_gave_what_to_whom_when():
    flows = {("learner", "policy"): (15.0, 15.1), ("sim", "learner"): (9.5, 10.0)}
    flows |= {("policy", "sim"): (0.1, 9.2), ("sim", "policy"): (0.0, 9.1)}
    assert traced_edges(flows) == (
        Edge("sim", "policy"),
        Edge("policy", "sim"),
        Edge("sim", "learner"),
        Edge("learner", "policy", next_iteration=True),
    )


def test_costs_on_a_model_of_gpu_hold_for_it_alone_and_those_on_gpus_for_all():
    one, other = (read_topology(f"8x{model}").classes()[0] for model in ("H200", "H100"))
    cost = {name: {"gpu-H200": Cost(constant(1))} for name in ("sim", "policy", "learner")}
    profile = Profile(WORKFLOW, cost)
    assert (one.name, other.name) == ("gpu", "gpu")
    assert profile.knows(one) and not profile.knows(other)
    assert replace(profile, costs={**cost, "sim": {"gpu": Cost(constant(1))}}).knows(other)


# The profiles of published workloads: every number has a source


PROFILES = Path(__file__).parents[2] / "assets/profiles"
FILES = sorted(PROFILES.glob("published_*.json"))


def numbers(content, path=()):
    """Dotted paths of everything that is a number; components by their name."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from numbers(value, (*path, key))
    elif isinstance(content, list):
        for i, value in enumerate(content):
            yield from numbers(value, (*path, value["name"] if isinstance(value, dict) and "name" in value else str(i)))
    elif not isinstance(content, str):
        yield ".".join(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_number_has_a_source(path):
    content = json.loads(path.read_text())
    sources = content.pop("sources")
    content["made"] = {name: value for name, value in content["made"].items() if name.endswith("_s")}
    found = list(numbers(content))
    assert len(found) > 30
    bare = [number for number in found if not any(number == s or number.startswith(s + ".") for s in sources)]
    assert not bare
    idle = [s for s in sources if not any(number == s or number.startswith(s + ".") for number in found)]
    assert not idle


# Curves predict between, beyond and below what was measured, and never fall


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
