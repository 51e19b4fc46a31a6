"""Where the hosts of a lost node go. Free of Ray's processes."""

from collections import Counter

import pytest

from embodied.core.errors import EmbodiedError
from embodied.runtime import HostPlan

pytest.importorskip("ray")
from embodied.runtime.ray_nodes import RayNode, move

ONE, TWO = (RayNode(name, name, tuple(range(4))) for name in ("one", "two"))
PLAN = HostPlan("sim-0", ("sim",), cores=(8, 9), node="gone")


def test_a_host_moves_to_the_least_busy_node_and_its_least_busy_cores():
    busy = Counter({("one", 0): 2, ("two", 0): 1})
    moved = move(PLAN, [ONE, TWO], busy)
    assert (moved.node, moved.cores) == ("two", (1, 2))
    assert (moved.name, moved.roles) == (PLAN.name, PLAN.roles)


def test_a_node_with_fewer_cores_gives_what_it_has():
    assert move(PLAN, [RayNode("small", "id", (3,))], Counter()).cores == (3,)


def test_a_host_that_needs_a_gpu_stays_lost():
    plan = HostPlan("sim-0", ("sim",), node="gone", devices=("gone/gpu:0",))
    with pytest.raises(EmbodiedError, match="node gone is lost, and sim-0 needs a GPU of it"):
        move(plan, [ONE], Counter())


def test_a_host_that_only_drew_on_a_gpu_goes_on_drawing_on_cores():
    cards = {"CUDA_VISIBLE_DEVICES": "3", "MUJOCO_EGL_DEVICE_ID": "3", "EMBODIED_RENDER": "gpu:3"}
    plan = HostPlan("sim-0", ("sim",), (0,), node="gone", env={**cards, "MINE": "1"}, devices=("gone/cpu:0",))
    assert move(plan, [ONE], Counter()).env == {"MINE": "1"}
