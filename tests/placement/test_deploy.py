"""The planner's layouts become placements that this machine can run."""

import pytest

from embodied.placement import make_plan
from embodied.placement.dataflow import embodied_dataflow
from embodied.placement.forecast import as_placement, granularity
from embodied.placement.iteration_cost import Pricer
from embodied.placement.layout import Layout, Zone
from embodied.placement.profile import Cost, Curve, Profile
from embodied.placement.profile_planner import Planner
from embodied.placement.topology import DeviceClass, read_topology

WORKFLOW = embodied_dataflow(num_envs=8, decisions=4, learner_calls=4, learner_items=8, env_steps=32)
COST = Cost(Curve((1, 8), (1.0, 8.0)))
PROFILE = Profile(WORKFLOW, {name: {"cpu": COST, "gpu": COST} for name in ("sim", "policy", "learner")})
CLASSES = [DeviceClass("cpu", "cpu", 4, 1e12), DeviceClass("gpu", "gpu", 4, 1e12)]


def placed(*layers):
    return as_placement(Pricer(WORKFLOW, PROFILE, CLASSES), Layout(layers))


@pytest.mark.parametrize(("chunks", "decisions"), [(1, None), (2, 2), (4, 1), (3, 2)])
def test_parts_of_a_rollout_are_counted_in_decisions(chunks, decisions):
    assert granularity(Layout((), chunks=chunks), WORKFLOW) == decisions


def zone(devices, *names, on="cpu"):
    return Zone(names, on, devices)


@pytest.mark.parametrize(
    ("layers", "placement"),
    [
        (((zone(2, "sim", "policy", "learner"),),), {"sim,policy": "cpu:0-1*2", "learner": "cpu:0-1*2"}),
        (((zone(4, "sim", "policy"),), (zone(2, "learner"),)), {"sim,policy": "cpu:0-3*4", "learner": "cpu:0-1*2"}),
        (((zone(1, "sim"), zone(1, "policy", "learner")),), {"sim": "cpu:0", "policy,learner": "cpu:1"}),
        (
            ((zone(1, "sim"), zone(3, "policy", "learner")),),  # one sim asks, so one policy worker answers
            {"sim": "cpu:0", "policy": "cpu:1", "learner": "cpu:1-3*3"},
        ),
        (
            ((zone(2, "sim"), zone(1, "policy"), zone(1, "learner")),),
            {"sim": "cpu:0-1*2", "policy": "cpu:2", "learner": "cpu:3"},
        ),
    ],
)
def test_a_layout_of_cores_becomes_a_map(layers, placement):
    assert placed(*layers) == placement
    make_plan(placement, (0, 1, 2, 3), 8)


def test_every_plan_of_the_planner_can_be_run():
    for cores in (1, 2, 3, 4, 7):
        planner = Planner(WORKFLOW, PROFILE, [DeviceClass("cpu", "cpu", cores, 1e12)])
        for choice in filter(None, planner.modes().values()):
            plan = make_plan(as_placement(planner.pricer, choice.layout), tuple(range(cores)), 8, choice.layout.stages)
            assert plan.count("sim") == planner.pricer.count("sim", at_of(choice.layout), choice.layout.stages)


def at_of(layout):
    return {name: (zone, zone.devices) for zone in layout.zones for name in zone.components}


def test_on_several_nodes_devices_carry_their_names():
    topology = read_topology("2x8xGPU")
    pricer = Pricer(WORKFLOW, PROFILE, topology.classes())
    layer = (zone(2, "sim", on="gpu"), zone(12, "policy", "learner", on="gpu"))
    placement = as_placement(pricer, Layout((layer,)), topology)
    assert placement == {
        "policy": "node0/gpu:0-1",
        "learner": "node0/gpu:0-7",  # eight items for eight learners, on the machine that we are on if it has room
        "sim": "node1/gpu:4-5",
    }
    assert make_plan(placement, topology, 8).count("learner") == 8


@pytest.mark.parametrize(
    ("layers", "placement"),
    [
        (
            ((zone(2, "sim"), zone(5, "learner", on="gpu"), zone(10, "policy", on="gpu")),),
            {"learner": "node0/gpu:0-3", "policy": "node0/gpu:6-7,node1/gpu:0-7"},
        ),
        (
            ((zone(2, "sim"), zone(16, "policy", "learner", on="gpu")),),
            {"learner": "node0/gpu:0-7", "policy": "node0/gpu:0-7,node1/gpu:0-7"},
        ),
    ],
)
def test_policy_workers_of_two_gpus_have_gpus_of_one_machine_each(layers, placement):
    workflow = embodied_dataflow(8, 4, 4, 8, env_steps=32, merges=64, policy_devices=2)
    topology = read_topology("2x8xGPU")
    pricer, layout = Pricer(workflow, PROFILE, topology.classes()), Layout(layers)
    made = as_placement(pricer, layout, topology)
    assert {role: made[role] for role in placement} == placement
    plan = make_plan(made, topology, 8, shared=True, policy_gpus=2)
    assert plan.count("policy") == pricer.count("policy", pricer.places(layers[0]), 1)


def test_simulators_on_cores_draw_on_the_gpus_beside_them_where_their_env_does():
    topology = read_topology("2xH100")
    pricer = Pricer(WORKFLOW, PROFILE, topology.classes())
    layout = Layout(((zone(8, "sim"), zone(2, "policy", "learner", on="gpu")),))
    placement = as_placement(pricer, layout, topology, draws=True)
    assert placement["sim"] == {"devices": "cpu:0-7*8", "render": "gpu:0-1"}
    assert {host.render for host in make_plan(placement, topology, 8).hosts if host.roles == ("sim",)} == {
        "gpu:0",
        "gpu:1",
    }
    on_gpus = Layout(((zone(2, "sim", "policy", "learner", on="gpu"),),))
    assert as_placement(pricer, on_gpus, topology, draws=True)["sim,policy"] == "gpu:0-1"
