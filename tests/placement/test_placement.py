"""Placements become plans, or are refused with the arithmetic and one that works."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from embodied.placement import PlacementError, PlannedHost, make_plan
from embodied.placement.grammar import Slot, parse_devices
from embodied.placement.topology import Gpu, Node, Topology

TWO = (0, 1)


def machine(cores, gpus=0, *devices, name=""):
    return Node(name, len(cores), tuple(Gpu(i) for i in range(gpus)), devices=devices, core_ids=cores)


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("gpu:0-3", [Slot("gpu", (i,)) for i in range(4)]),
        ("gpu:0*2", [Slot("gpu", (0,)), Slot("gpu", (0,))]),
        ("cpu:0-15", [Slot("cpu", tuple(range(16)))]),
        ("cpu:0-3*2", [Slot("cpu", (0, 1)), Slot("cpu", (2, 3))]),
        ("cpu:0, cpu:0", [Slot("cpu", (0,)), Slot("cpu", (0,))]),
        ("node1/gpu:2", [Slot("gpu", (2,), "node1")]),
    ],
)
def test_devices_are_read_one_slot_per_worker(text, slots):
    assert parse_devices(text) == slots


def test_collocated_puts_sims_with_policies_on_every_core_and_learners_on_the_same():
    plan = make_plan("collocated", TWO, num_envs=64)
    assert plan.hosts == (
        PlannedHost("sim+policy-0", ("sim", "policy"), (0,), 1),
        PlannedHost("sim+policy-1", ("sim", "policy"), (1,), 1),
        PlannedHost("learner-0", ("learner",), (0,), 1),
        PlannedHost("learner-1", ("learner",), (1,), 1),
    )


def test_disaggregated_gives_every_role_cores_of_its_own():
    plan = make_plan("disaggregated", tuple(range(8)), 60)
    cores = {role: {c for h in plan.hosts if role in h.roles for c in h.cores} for role in ("sim", "policy", "learner")}
    assert cores == {"sim": {0, 1, 2, 3, 4}, "policy": {5}, "learner": {6, 7}}


APART = {"sim": "cpu:0", "policy": "cpu:0", "learner": "cpu:0"}


@pytest.mark.parametrize(
    ("placement", "num_envs", "stages", "answer"),
    [
        (APART | {"sim": "cpus:0"}, 8, 1, "cpus:0 is not there: devices are arm, cpu, fake, gpu,"),
        (APART | {"learner": "gpu:0,cpu:0"}, 8, 1, "'learner' is on cpu and on gpu; its workers"),
        (APART | {"sim": "arm:0*2"}, 8, 1, "two sim workers are on arm:0"),
        (APART | {"sim": "cpu:0-1*2"}, 6, 2, "2 sim workers x pipeline.stages=2 = 4 parts"),
        (APART | {"learner": "cpu:0-1*2"}, 1, 1, "2 learners share env.num_envs=1, so 1 would have none"),
    ],
)
def test_explicit_plans_that_cannot_hold_show_the_arithmetic(placement, num_envs, stages, answer):
    """Others: tests/placement/test_bad_placements.py."""
    with pytest.raises(PlacementError) as caught:
        make_plan(placement, Topology((machine(TWO, 1, "arm:0"),)), num_envs, stages)
    assert answer in str(caught.value)


def test_engines_that_share_the_prompts_may_be_more_than_the_sims_that_ask():
    placement = {"sim": "cpu:0", "policy": "cpu:0-1*2", "learner": "cpu:0"}
    assert make_plan(placement, TWO, 8, shared=True).count("policy") == 2
    with pytest.raises(PlacementError, match="2 policy workers share"):
        make_plan(placement, TWO, 1, shared=True)


def test_any_role_can_be_on_any_device_of_any_node():
    placement = {
        "sim": {"devices": "cpu:0-3*2", "render": "gpu:0-1"},
        "policy": "big/gpu:1*2",
        "learner": "fake:0, fake:7, big/fake:0",
    }
    machines = Topology((machine((4, 5, 6, 7), 2), machine((8, 9, 10, 11), 2, name="big")))
    plan = make_plan(placement, machines, 8)
    assert [(h.name, h.cores, h.threads, h.device_names, h.render) for h in plan.hosts] == [
        ("sim-0", (4, 5), 2, ("cpu:4", "cpu:5"), "gpu:0"),
        ("sim-1", (6, 7), 2, ("cpu:6", "cpu:7"), "gpu:1"),
        ("policy-0", (10, 11), 2, ("big/gpu:1",), ""),  # with its share of the cores there
        ("policy-1", (10, 11), 2, ("big/gpu:1",), ""),
        ("learner-0", (4, 5, 6, 7), 1, ("fake:0",), ""),
        ("learner-1", (4, 5, 6, 7), 1, ("fake:7",), ""),
        ("learner-2", (8, 9, 10, 11), 1, ("big/fake:0",), ""),
    ]
    assert plan.describe()[1:3] == ["2 x sim on cores 4-7, 2 each, drawing on gpu:0-1", "2 x policy on gpu:1 of big"]


def test_named_hardware_has_as_many_workers_as_there_is_of_it():
    here = Topology((machine(TWO, 0, "arm:0", "arm:1"),))
    plan = make_plan({"sim": "arm:0-1", "policy,learner": "cpu:0"}, here, 8)
    assert [(host.device, host.cores) for host in plan.hosts] == [("arm:0", TWO), ("arm:1", TWO), ("", (0,))]


@given(
    mode=st.sampled_from(["auto", "collocated", "disaggregated", "hybrid"]),
    cores=st.sets(st.integers(0, 300), min_size=3, max_size=70).map(sorted).map(tuple),
    num_envs=st.integers(1, 600),
    stages=st.integers(1, 3),
)
def test_every_mode_makes_a_plan_that_holds(mode, cores, num_envs, stages):
    num_envs *= stages
    plan = make_plan(mode, cores, num_envs, stages)
    assert num_envs % (plan.count("sim") * stages) == 0
    assert plan.count("policy") <= plan.count("sim") * stages
    assert 1 <= plan.count("learner") <= num_envs
    assert all(set(host.cores) <= set(cores) and host.threads == len(host.cores) for host in plan.hosts)
    assert not any({"sim", "learner"} <= set(host.roles) for host in plan.hosts)
    names = [host.name for host in plan.hosts]
    assert len(names) == len(set(names))
    assert set(plan.idle) == set(cores) - {core for host in plan.hosts for core in host.cores}
    assert make_plan(mode, cores, num_envs, stages) == plan


def test_a_plan_without_learners_drops_only_them():
    plan = make_plan("hybrid", TWO, 64).restricted_to("sim", "policy")
    assert [host.roles for host in plan.hosts] == [("sim",), ("policy",)]
    assert make_plan("auto", TWO, 64).restricted_to("sim", "policy").count("learner") == 0


EIGHT = Topology((machine(tuple(range(16)), 8),))
TWO_NODES = Topology(tuple(machine(tuple(range(8)), 4, name=f"node{i}") for i in range(2)))


@pytest.mark.parametrize(
    ("mode", "machines", "policies", "learners"),
    [
        ("auto", EIGHT, ["gpu:0 gpu:1", "gpu:2 gpu:3", "gpu:4 gpu:5", "gpu:6 gpu:7"], 8),
        ("collocated", EIGHT, ["gpu:0 gpu:1", "gpu:2 gpu:3", "gpu:4 gpu:5", "gpu:6 gpu:7"], 8),
        ("hybrid", EIGHT, ["gpu:0 gpu:1", "gpu:2 gpu:3", "gpu:4 gpu:5", "gpu:6 gpu:7"], 8),
        ("disaggregated", EIGHT, ["gpu:4 gpu:5", "gpu:6 gpu:7"], 4),
        ("disaggregated", TWO_NODES, ["node0/gpu:2 node0/gpu:3", "node1/gpu:2 node1/gpu:3"], 4),
        ({"sim": "cpu:0-1*2", "policy": "gpu:1-4", "learner": "gpu:0"}, EIGHT, ["gpu:1 gpu:2", "gpu:3 gpu:4"], 1),
    ],
)
def test_policies_of_several_gpus_have_gpus_of_one_machine_and_no_learner_in_their_process(
    mode, machines, policies, learners
):
    plan = make_plan(mode, machines, 64, networks="gpu", policy_gpus=2)
    assert [" ".join(host.device_names) for host in plan.hosts if host.roles == ("policy",)] == policies
    assert plan.count("learner") == learners
    assert any(line.endswith(", 2 each") for line in plan.describe()) == (machines is EIGHT)
    assert [len(host.gpus) for host in plan.hosts if host.roles == ("policy",)] == [2] * len(policies)


@pytest.mark.parametrize(
    ("placement", "gpus", "answer"),
    [
        ("disaggregated", 8, "with placement=disaggregated there are 4; try policy.tensor_parallel=4"),
        ("auto", 16, "there are 8; try policy.tensor_parallel=8"),
        ("disaggregated", 6, "there are 4; try policy.tensor_parallel=3"),
        ("hybrid", 12, "there are 8; try policy.tensor_parallel=6"),
        ({"sim": "cpu:0", "policy": "gpu:0-2", "learner": "gpu:3"}, 2, "and 3 GPUs cannot be divided so"),
        ({"sim": "cpu:0", "policy": "gpu:0*2", "learner": "gpu:3"}, 2, "name every GPU once"),
        ({"sim": "cpu:0", "policy,learner": "gpu:0-1"}, 2, "give policy a place of its own; try placement='{"),
    ],
)
def test_gpus_that_do_not_divide_among_policies_of_several_are_refused(placement, gpus, answer):
    with pytest.raises(PlacementError) as refused:
        make_plan(placement, EIGHT, 64, networks="gpu", policy_gpus=gpus)
    assert answer in str(refused.value)
    _, found, works = str(refused.value).partition("try placement='")
    if found:
        assert make_plan(json.loads(works.removesuffix("'")), EIGHT, 64, networks="gpu", policy_gpus=gpus).hosts
