"""Learners that learn while sims and policies collect have devices of their own, by default, or the run is refused."""

import re

import pytest

from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.placement import PlacedRole, make_plan
from embodied.placement.grammar import EMBODIED
from embodied.placement.topology import read_topology
from embodied.run import launch

PPO = ("recipe=pointmass_ppo", "pipeline.schedule=async")
GRPO = ("recipe=pointmass_grpo", "pipeline.schedule=periodic", "algo.epochs=1", "algo.minibatch_size=null")
ASYNC = "pipeline.schedule=async"


def planned(tmp_path, *recipe):
    return launch.planned(load([*recipe, f"run.dir={tmp_path}"]).config, dry=True)


def places(plan):
    return {(host.roles, host.device or host.cores) for host in plan.hosts}


@pytest.mark.parametrize("recipe", [PPO, GRPO])
def test_on_two_cores_learners_have_the_second_one(tmp_path, recipe):
    config, plan = planned(tmp_path, *recipe, "cluster.machines=2xCPU")
    assert places(plan) == {(("sim", "policy"), (0,)), (("learner",), (1,))}
    assert f"with pipeline.schedule={config.pipeline.schedule} learners work during the rollout" in plan.reason
    told = launch.describe(config, plan)
    assert re.search(r"^schedule    (async|periodic): ", told, re.M)
    assert ("algo.decoupled=true" in told) == (config.pipeline.schedule == "async")
    if config.pipeline.schedule == "async":
        assert "algo.decoupled" not in launch.describe(*planned(tmp_path, *recipe, "algo.decoupled=true"))
    assert "schedule " not in launch.describe(
        config, plan.restricted_to("sim", "policy")
    )  # nothing learns in an evaluation


@pytest.mark.parametrize(
    ("recipe", "cluster", "learners", "others"),
    [
        ("pointmass_ppo", "8xCPU", 2, 6),
        ("maniskill_ppo_rgb", "2xGPU", 1, 1),  # sims on cores
        ("maniskill_ppo_gpu", "2xGPU", 1, 1),
        ("maniskill_ppo_gpu", "8xGPU", 4, 4),
        ("pointmass_ppo", "2x4xCPU", 2, 6),
    ],
)
def test_wherever_auto_places_it_learners_are_alone_on_their_devices(recipe, cluster, learners, others):
    machines = read_topology(cluster)
    networks, gpu_sims = ("gpu" if machines.gpus else "cpu"), recipe.endswith("gpu")
    plan = make_plan("auto", machines, 1920, 1, networks, gpu_sims, overlap=ASYNC)
    assert plan.has_own_devices("learner")
    assert (plan.count("learner"), plan.count("policy")) == (learners, others)
    assert not make_plan("auto", machines, 1920, 1, networks, gpu_sims).has_own_devices("learner")


def test_roles_of_the_rollout_are_beside_policies_and_those_of_the_update_beside_learners():
    roles = (*EMBODIED, PlacedRole("reward"), PlacedRole("critic", "update"))
    plan = make_plan("auto", (0, 1), 8, roles=roles, overlap=ASYNC)
    assert places(plan) == {(("sim", "policy"), (0,)), (("reward",), (0,)), (("learner", "critic"), (1,))}
    assert plan.has_own_devices("learner", "critic")


def test_policies_may_share_the_learners_devices_where_others_are_left_to_act(tmp_path):
    shared = 'placement={"sim": "cpu:0", "policy": "cpu:0-1*2", "learner": "cpu:1"}'
    two = ("cluster.machines=2xCPU", "pipeline.stages=2")
    planned(tmp_path, *PPO, *two, shared)
    all_share = 'placement={"sim": "cpu:0", "policy": "cpu:1", "learner": "cpu:1"}'
    sims_share = 'placement={"sim": "cpu:0-1*2", "policy": "cpu:0-1*2", "learner": "cpu:1"}'
    for recipe, refused in ((PPO, all_share), (PPO, sims_share), (GRPO, shared)):
        with pytest.raises(ConfigError, match="take turns with other roles on their devices"):
            planned(tmp_path, *recipe, *two, refused)


@pytest.mark.parametrize("placement", ["auto", "collocated"])
def test_the_automatic_schedule_is_sync_where_nothing_was_measured(tmp_path, placement):
    asked = ("recipe=pointmass_grpo", f"placement={placement}", "cluster.machines=2xCPU")
    config, plan = planned(tmp_path, *asked, "pipeline.schedule=auto")
    assert config.pipeline.schedule == "sync"
    assert plan == planned(tmp_path, *asked)[1]
