"""The geometry of the bridge expert, without a simulator."""

import numpy as np
import pytest
from needed import requires

from embodied.envs.maniskill.bridge.bridge_expert import (
    ABOVE,
    CLEAR,
    CLOSE,
    OPEN,
    PRESS,
    BridgeWorld,
    angle_to,
    hand_target,
    matrices,
    narrow,
)

requires("mani_skill")

ALONG_X = np.array([[1.0, 0.0, 0.0, 0.0]])
QUARTER = np.array([[np.sqrt(0.5), 0.0, 0.0, np.sqrt(0.5)]])


def test_the_smallest_turn_takes_either_end_of_an_axis():
    axis = np.array([[1.0, 0.0]])
    for degrees, wanted in ((30, 30), (150, -30), (-100, 80), (180, 0)):
        turn = angle_to(axis, np.array([[np.cos(np.radians(degrees)), np.sin(np.radians(degrees))]]))
        assert np.degrees(turn[0]) == pytest.approx(wanted, abs=1e-6)


def test_fingers_close_where_a_thing_is_narrow():
    size = np.array([[0.12, 0.03, 0.04]])
    assert np.abs(narrow(matrices(ALONG_X), size)) == pytest.approx(np.array([[0, 1]]), abs=1e-9)
    assert np.abs(narrow(matrices(QUARTER), size)) == pytest.approx(np.array([[1, 0]]), abs=1e-9)


def scene(**changes):
    usual = {
        "hand": [0.0, 0.0, 0.895],
        "asked": [0.0, 0.0, 0.9],
        "closing": [0.0, 1.0],
        "thing": [0.0, 0.0, 0.888],
        "across": [0.0, 1.0],
        "height": 0.04,
        "place": [0.1, 0.0, 0.876],
        "held": False,
    }
    return BridgeWorld(**{name: np.array([value]) for name, value in (usual | changes).items()})


def test_the_expert_approaches_grasps_lifts_carries_and_releases_in_order():
    goal, grip = hand_target(scene(hand=[0.05, 0.0, 1.0]))
    assert goal[0] == pytest.approx([0, 0, 0.888 + ABOVE]) and grip[0] == OPEN  # over the thing
    goal, grip = hand_target(scene(hand=[0.0, 0.0, 0.95]))
    assert goal[0, 2] < 0.888 and grip[0] == OPEN  # down
    assert hand_target(scene())[1][0] == CLOSE
    assert hand_target(scene(across=[1.0, 0.0]))[1][0] == OPEN  # turned the wrong way
    goal, grip = hand_target(scene(held=True))
    assert goal[0, 0] == 0 and goal[0, 2] > 0.92 and grip[0] == CLOSE  # up before sideways
    high = 0.876 + 0.02 + CLEAR
    goal, _ = hand_target(scene(held=True, hand=[0, 0, high], thing=[0, 0, high]))
    assert goal[0, 0] == pytest.approx(0.1)
    goal, grip = hand_target(scene(held=True, hand=[0.1, 0, high], thing=[0.1, 0, high]))
    assert goal[0, 2] == pytest.approx(0.896 - PRESS) and grip[0] == CLOSE  # down, until it touches
    assert hand_target(scene(held=True, hand=[0.1, 0, 0.9], thing=[0.1, 0, 0.9]))[1][0] == OPEN
    goal, grip = hand_target(scene(hand=[0.1, 0, 0.9], thing=[0.1, 0, 0.9]))
    assert goal[0, 2] > 0.94 and grip[0] == OPEN  # away from what lies where it should
