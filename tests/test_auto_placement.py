"""`placement=auto` takes the plan that a stored profile says is fastest, and says so."""

from dataclasses import replace

import pytest

from embodied import commands
from embodied.auto import plan_from_profile
from embodied.config import load
from embodied.placement import PlacementError
from embodied.placement.curves import Curve, constant
from embodied.placement.profile import Cost, Profile, Sync, write_profile
from embodied.placement.topology import read_topology
from embodied.plan import plan
from embodied.profiles import cost_key, profile_path, workflow_of

ENVS = ("recipe=pointmass_ppo", "env.num_envs=8", "algo.rollout_decisions=8", "algo.minibatch_size=32")


def recipe(tmp_path, *more):
    return load([*ENVS, f"run.dir={tmp_path}", *more]).config


def store(config, sim, copy_s=0.0, cores=2):
    costs = {"sim": sim, "policy": constant(0.001), "learner": constant(0.001)}
    made = {"key": cost_key(config), "cores": cores, "date": "2026-01-02T03:04:05+00:00", "stages": [1, 2]}
    sync = Sync(0, constant(copy_s))
    profile = Profile(workflow_of(config), {name: {"cpu": Cost(c)} for name, c in costs.items()}, sync, made=made)
    write_profile(profile, profile_path(config))


def test_without_a_profile_auto_follows_its_rule(tmp_path):
    assert plan_from_profile(recipe(tmp_path), (0, 1)) is None
    _, plan = commands.planned(recipe(tmp_path))
    assert plan.reason.startswith("collocated: sims and learners take turns")


def test_sims_that_divide_are_collocated(tmp_path):
    config = recipe(tmp_path)
    store(config, Curve((1, 8), (0.01, 0.08)))
    _, plan = plan_from_profile(config, (0, 1))
    assert [host.roles for host in plan.hosts][:2] == [("sim", "policy")] * 2
    assert plan.mode == "auto"
    assert "collocated: the fastest by the profile measured here (02 Jan 2026" in plan.reason
    assert "env steps/s expected" in plan.reason


def test_weights_that_are_dear_to_hand_over_stay_in_one_process(tmp_path):
    config = recipe(tmp_path)
    store(config, constant(0.01), copy_s=5.0)
    _, plan = plan_from_profile(config, (0, 1))
    assert [host.roles for host in plan.hosts] == [("sim",), ("policy", "learner")]
    assert "hybrid" in plan.reason


def test_a_profile_of_another_number_of_cores_is_not_used(tmp_path):
    config = recipe(tmp_path)
    store(config, constant(0.1), cores=64)
    assert plan_from_profile(config, (0, 1)) is None


def heavy(config):
    """Policies need 0.03 MB, learners 0.1 MB, and moving a learner takes a second."""
    policy = Cost(constant(0.001), bytes=constant(3e4), onload_s=0.0, offload_s=0.0)
    learner = Cost(constant(0.001), bytes=constant(1e5), onload_s=0.5, offload_s=0.5)
    costs = {"sim": Cost(Curve((1, 8), (0.01, 0.08)), bytes=constant(1e6)), "policy": policy, "learner": learner}
    return Profile(workflow_of(config), {name: {"cpu": cost} for name, cost in costs.items()}, made={"stages": [1]})


@pytest.mark.parametrize(("memory_gb", "swaps"), [(None, False), (0.00014, False), (0.00012, True)])
def test_a_limit_of_memory_is_planned_for_as_a_run_keeps_to_it(tmp_path, memory_gb, swaps):
    planned = plan(heavy(recipe(tmp_path)), read_topology("1xCPU"), memory_gb)
    layout = planned.modes["collocated"].layout
    assert bool(layout.swapped) == swaps
    assert planned.modes["collocated"].price.seconds == pytest.approx(8 * 0.081 + 0.008 + swaps * 1.0)


def test_memory_that_holds_no_mode_is_refused_with_the_arithmetic(tmp_path):
    config = recipe(tmp_path, "cluster.memory_gb=0.00009")
    profile = heavy(config)
    write_profile(replace(profile, made={**profile.made, "key": cost_key(config), "cores": 2}), profile_path(config))
    with pytest.raises(
        PlacementError, match=r"collocated: the fastest, .*, needs 0.00013 GB on each cpu, which has 9e-05"
    ):
        plan_from_profile(config, (0, 1))


@pytest.mark.parametrize("placement", ["collocated", "hybrid"])
def test_a_named_mode_does_not_depend_on_what_was_measured(tmp_path, placement):
    config = recipe(tmp_path, f"placement={placement}")
    before = commands.planned(config)
    store(config, constant(0.1))
    assert commands.planned(config) == before
