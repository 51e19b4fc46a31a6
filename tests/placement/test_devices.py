"""What a host's process sees of the devices it holds, and placements that contradict the rest of the recipe."""

import pytest

from embodied.config import load
from embodied.devices import check_devices, devices_here, environment
from embodied.errors import ConfigError
from embodied.placement import Host, make_plan


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


def test_gpus_are_looked_for_only_where_a_placement_names_one(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
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
