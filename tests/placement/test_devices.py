"""What a host's process sees of the devices it holds, and placements that contradict the rest of the recipe."""

import pytest

from embodied.config import load
from embodied.devices import check_devices, devices_here, environment
from embodied.errors import ConfigError
from embodied.placement import Host, PlacementError, make_plan


def recipe(*arguments):
    return load(["recipe=pointmass_ppo", "env.num_envs=8", *arguments]).config


def test_a_host_sees_the_gpu_it_holds_or_draws_on_and_no_other(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")  # those that the run may use
    card = {"CUDA_VISIBLE_DEVICES": "6", "MUJOCO_EGL_DEVICE_ID": "6"}
    held = Host("policy-0", ("policy",), (0,), 1, device="gpu:1")
    assert environment(held) == {"EMBODIED_DEVICE": "gpu:1", **card}
    drawing = Host("sim-0", ("sim",), (0,), 1, render="gpu:1")
    assert environment(drawing) == {"EMBODIED_RENDER": "gpu:1", **card}
    assert environment(Host("sim-1", ("sim",), (0,), 1)) == {}
    assert environment(Host("sim-2", ("sim",), (0,), 1, device="arm:0")) == {"EMBODIED_DEVICE": "arm:0"}


def test_gpus_are_looked_for_where_a_placement_names_one_or_a_mode_computes_there(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert devices_here(recipe("placement=hybrid", "learner.device=cuda")) == ("gpu:0", "gpu:1")
    assert devices_here(recipe("placement=hybrid", "cluster.devices=[arm:0,node1/arm:1]")) == ("arm:0",)
    assert devices_here(recipe('placement={"sim,policy": gpu:1, learner: cpu:0}')) == ("gpu:0", "gpu:1")


@pytest.mark.parametrize(
    ("placement", "answer"),
    [
        ('{sim: gpu:0, "policy,learner": cpu:0}', 'try sim: {devices: "cpu:0", render: "gpu:0"} to draw on the GPU'),
        ('{"sim,policy": cpu:0, learner: gpu:0}', "learner on gpu:0, but learner.device=cpu; try learner.device=auto"),
    ],
)
def test_placements_that_contradict_the_recipe_are_refused(placement, answer):
    config = recipe(f"placement={placement}", "learner.device=cpu")
    plan = make_plan(config.placement, (0, 1), 8, devices=("gpu:0",))
    with pytest.raises(ConfigError) as caught:
        check_devices(config, plan)
    assert answer in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "gpus", "gpu_sims", "hosts"),
    [
        ("collocated", 8, True, {("sim", "policy"): range(8), ("learner",): range(8)}),  # taking turns on all
        ("collocated", 3, True, {("sim", "policy"): range(2), ("learner",): range(3)}),  # 64 envs do not divide by 3
        ("disaggregated", 8, True, {("sim",): range(2), ("policy",): range(2, 4), ("learner",): range(4, 8)}),
        ("hybrid", 8, True, {("sim",): range(4), ("policy", "learner"): range(4, 8)}),
        ("hybrid", 1, False, {("sim",): None, ("policy", "learner"): range(1)}),  # None: on cores
        ("disaggregated", 4, False, {("sim",): None, ("policy",): range(2), ("learner",): range(2, 4)}),
        ("auto", 2, False, {("sim", "policy"): range(2), ("learner",): range(2)}),
    ],
)
def test_a_mode_is_laid_out_on_gpus_where_there_are_some(mode, gpus, gpu_sims, hosts):
    devices = tuple(f"gpu:{i}" for i in range(gpus))
    plan = make_plan(mode, tuple(range(16)), 64, devices=devices, gpu_sims=gpu_sims)
    found = {}
    for host in plan.hosts:
        found.setdefault(host.roles, []).append(host.device)
    assert {roles: set(held) for roles, held in found.items()} == {
        roles: {""} if on is None else {f"gpu:{i}" for i in on} for roles, on in hosts.items()
    }
    assert plan.mode == mode and bool(plan.reason) == (mode == "auto")


@pytest.mark.parametrize(
    ("mode", "gpus", "gpu_sims", "answer"),
    [
        ("hybrid", 1, True, r"needs 2 GPUs, this run may use 1; try placement=collocated"),
        ("disaggregated", 2, True, r"needs 3 GPUs, this run may use 2; try placement=hybrid"),
        ("disaggregated", 1, False, r"needs 2 GPUs, this run may use 1; try placement=hybrid"),
    ],
)
def test_a_mode_that_lacks_gpus_says_how_many_it_needs(mode, gpus, gpu_sims, answer):
    with pytest.raises(PlacementError, match=answer):
        make_plan(mode, (0, 1), 64, devices=tuple(f"gpu:{i}" for i in range(gpus)), gpu_sims=gpu_sims)
