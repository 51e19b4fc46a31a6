"""`placement=auto` takes the plan that a stored profile says is fastest, and says so."""

import re
from dataclasses import replace

import pytest

from embodied.config.recipe import load
from embodied.placement import Topology
from embodied.placement.profile import Cost, Curve, Profile, Sync, constant, read_profile, write_profile
from embodied.placement.topology import GB, Gpu, Node, one_machine, read_topology
from embodied.plan import compare_predictions, plan
from embodied.profiling.stored_profiles import (
    cost_key,
    dataflow_of,
    device_counts,
    fitted_to,
    plan_from_profile,
    profile_for,
    profile_path,
)
from embodied.run import devices, launch

ENVS = ("recipe=pointmass_ppo", "env.num_envs=8", "algo.rollout_decisions=8", "algo.minibatch_size=32")


def recipe(tmp_path, *more):
    return load([*ENVS, f"run.dir={tmp_path}", *more]).config


TWO = one_machine((0, 1))
H200 = Topology((Node("", 16, (Gpu(0, "H200", 141 * GB),)),))
CLUSTER = Topology((Node("one", 2), Node("two", 2)))


def store(config, sim, copy_s=0.0, machines=TWO, networks="cpu", **made):
    costs = {"sim": {"cpu": Cost(sim)}, "policy": {networks: Cost(constant(0.001))}}
    costs["learner"] = costs["policy"]
    made = {"key": cost_key(config), "date": "2026-01-02T03:04:05+00:00", "stages": [1, 2], **made}
    made |= {"devices": device_counts(machines), "nodes": len(machines.nodes)} if machines else {}
    profile = Profile(dataflow_of(config), costs, Sync(0, constant(copy_s)), made=made)
    path = profile_path(config, made)
    write_profile(profile, path)
    return path


def auto(config, machines=TWO):
    path, why_none = profile_for(config, machines)
    assert path, why_none
    return plan_from_profile(config, machines, path)


def test_without_a_profile_auto_follows_its_rule(tmp_path):
    assert profile_for(recipe(tmp_path), TWO) == (None, "")
    _, plan = launch.planned(recipe(tmp_path))
    assert plan.reason.startswith("collocated: sims take turns with one learner")


@pytest.mark.parametrize(
    ("name", "more", "learners"),
    [
        ("pointmass_ppo", (), 1),
        ("gym_ppo", (), 1),
        ("maniskill_ppo", (), 2),
        ("libero_ppo", (), 2),
        ("pointmass_ppo", ("policy.hidden=[512,512]",), 2),
        ("pointmass_ppo", ("algo.minibatch_size=null", "algo.rollout_decisions=512"), 2),
        ("pointmass_ppo", ("placement=collocated",), 2),
        ("pointmass_ppo", ("policy.name=mine:Net",), 2),  # of which nothing is known
    ],
)
def test_the_rule_divides_gradient_steps_among_learners_only_where_they_are_large(name, more, learners):
    config = load([f"recipe={name}", "cluster.machines=2xCPU", *more]).config
    assert launch.with_placement(config, devices.machines(config), learn=True)[1].count("learner") == learners


def test_weights_that_are_dear_to_hand_over_stay_in_one_process(tmp_path):
    config = recipe(tmp_path)
    store(config, constant(0.01), copy_s=5.0)
    _, plan = auto(config)
    assert [host.roles for host in plan.hosts] == [("sim",), ("policy", "learner")]
    assert "hybrid" in plan.reason


def test_of_placements_that_were_timed_the_fastest_is_taken_where_the_predicted_one_is_among_them(tmp_path, capsys):
    config = recipe(tmp_path)
    path = store(config, Curve((1, 8), (0.01, 0.08)))
    modes = plan(fitted_to(config, path), TWO).forecasts
    assert next(iter(modes)) == "collocated"

    def time(mode, seconds):
        stored = read_profile(path)
        run = {**modes[mode], "rounds": [{"seconds": each} for each in (seconds, 9 * seconds, seconds)]}
        write_profile(replace(stored, runs=[*stored.runs, run]), path)
        return auto(config)[1]

    assert "collocated: the fastest by the profile" in time("hybrid", 0.5).reason  # nothing compares with it
    placed = time("collocated", 1.0)
    assert [host.roles for host in placed.hosts] == [("sim",), ("policy", "learner")]
    assert "hybrid with 2 stages: the fastest of those timed here (02 Jan 2026" in placed.reason
    assert "128 env steps/s measured" in placed.reason
    assert "collocated: the fastest of those timed" in time("collocated", 0.25).reason  # the newest time counts
    assert auto(config.with_values("env", num_envs=4))[1].reason.startswith("collocated: the fastest by the profile")
    assert compare_predictions([*ENVS, f"run.dir={tmp_path}", "cluster=2xCPU", f"out={tmp_path}/plan"])
    assert re.search(
        r"\nmode +s/iteration +measured .*\ncollocated +\S+ +0.25 .*\nhybrid +\S+ +0.5 ", capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("measured", "there", "why"),
    [
        (one_machine(tuple(range(64))), TWO, "measured on 64 cores, this machine has 2 cores"),
        (TWO, H200, "measured on 2 cores, this machine has 1 GPU (H200) and 16 cores"),
        (read_topology("1xH100"), H200, "measured on 1 GPU (H100) and 16 cores, this machine has 1 GPU (H200)"),
        (TWO, CLUSTER, "measured on 2 cores, this run has 4 cores of 2 nodes"),
        (read_topology("4xCPU"), CLUSTER, "measured on 4 cores, this run has 4 cores of 2 nodes"),
    ],
)
def test_a_profile_of_other_machines_is_not_used_and_it_is_said_why(tmp_path, monkeypatch, measured, there, why):
    config = recipe(tmp_path)
    path = store(config, constant(0.1), machines=measured)
    assert profile_for(config, there)[0] is None
    monkeypatch.setattr(launch, "machines", lambda config: there)
    config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"backend": "ray"})})
    _, plan = launch.planned(config)
    assert f"{path} does not count: {why}" in plan.reason


def test_a_profile_above_a_gpus_peak_is_not_used_and_it_is_said_why(tmp_path):
    config = recipe(tmp_path)
    path = store(config, constant(0.1), machines=H200, networks="gpu-H200")
    stored = read_profile(path)
    costs = stored.costs | {"policy": {"gpu-H200": Cost(constant(0.001), item_flop=1e13)}}
    write_profile(replace(stored, costs=costs), path)
    used, why = profile_for(config, H200)
    assert used is None and f"{path} does not count: the profile's policy takes 0.001 s" in why


def test_beside_a_gpu_the_plan_of_the_profile_puts_networks_there_and_sims_on_cores(tmp_path):
    config = recipe(tmp_path)
    store(config, Curve((1, 8), (0.01, 0.08)), machines=H200, networks="gpu-H200")
    _, plan = auto(config, H200)
    assert {(host.roles, host.device) for host in plan.hosts} == {(("sim",), ""), (("policy", "learner"), "gpu:0")}
    assert plan.count("sim") == 8  # a row each; the other eight cores have none
    assert "hybrid: the fastest by the profile measured here" in plan.reason


GROUPS = ("recipe=pointmass_grpo", "env.num_envs=8", "algo.group_size=4", "algo.epochs=1", "algo.minibatch_size=null")


def grouped(tmp_path, *more):
    return load([*GROUPS, "algo.groups=8", f"run.dir={tmp_path}", *more]).config


def store_costs(config, sim, learner):
    """A profile in which two cores are no faster than one, of either part."""
    costs = {"sim": Cost(constant(sim)), "policy": Cost(constant(0.0)), "learner": Cost(learner)}
    made = {"key": cost_key(config), "stages": [1], "episode_decisions": 25, "devices": {"cpu": 2}, "nodes": 1}
    profile = Profile(dataflow_of(config, 25), {name: {"cpu": cost} for name, cost in costs.items()}, made=made)
    write_profile(profile, profile_path(config, made))


# Four waves of 25 decisions take 100 s; 800 items two ranks 50 s each, or one rank, by groups, 100 s.
EVEN = Curve((0, 800), (0.0, 100.0))


@pytest.mark.parametrize(
    ("learner", "schedule"),
    [
        (EVEN, "periodic"),  # 100 + 25 s instead of 100 + 50
        (Curve((0, 800), (0.0, 1.0)), "sync"),  # hardly anything to overlap: a gain that may be an error of the prices
    ],
)
def test_the_automatic_schedule_is_periodic_where_that_pays_by_the_profile(tmp_path, learner, schedule):
    config = grouped(tmp_path, "pipeline.schedule=auto")
    store_costs(config, 1.0, learner)
    config, plan = auto(config)
    assert config.pipeline.schedule == schedule
    assert plan.has_own_devices("learner") == (schedule == "periodic")
    assert plan.reason.startswith("periodic, custom: the fastest" if schedule == "periodic" else "collocated: ")


def test_the_automatic_schedule_is_sync_where_periodic_would_learn_something_else(tmp_path):
    """Sync carries over the groups that resampling played beyond a batch, and periodic discards them."""
    config = grouped(tmp_path, "pipeline.schedule=auto", "algo.filter=resample")
    store_costs(config, 1.0, EVEN)
    assert auto(config)[0].pipeline.schedule == "sync"


@pytest.mark.parametrize("asked", ["sync", "periodic", "async"])
def test_a_schedule_that_is_named_is_taken_whatever_was_measured(tmp_path, asked):
    config = grouped(tmp_path, f"pipeline.schedule={asked}")
    store_costs(config, 1.0, EVEN if asked == "sync" else Curve((0, 800), (0.0, 1.0)))
    config, plan = auto(config)
    assert config.pipeline.schedule == asked
    assert plan.has_own_devices("learner") == (asked != "sync")


def heavy(config):
    """Policies need 0.03 MB, learners 0.1 MB, and moving a learner takes a second."""
    policy = Cost(constant(0.001), bytes=constant(3e4), onload_s=0.0, offload_s=0.0)
    learner = Cost(constant(0.001), bytes=constant(1e5), onload_s=0.5, offload_s=0.5)
    costs = {"sim": Cost(Curve((1, 8), (0.01, 0.08)), bytes=constant(1e6)), "policy": policy, "learner": learner}
    return Profile(dataflow_of(config), {name: {"cpu": cost} for name, cost in costs.items()}, made={"stages": [1]})


@pytest.mark.parametrize(("memory_gb", "swaps"), [(None, False), (0.00014, False), (0.00012, True)])
def test_a_limit_of_memory_is_planned_for_as_a_run_keeps_to_it(tmp_path, memory_gb, swaps):
    planned = plan(heavy(recipe(tmp_path)), read_topology("1xCPU"), memory_gb)
    layout = planned.modes["collocated"].layout
    assert bool(layout.swapped) == swaps
    assert planned.modes["collocated"].price.seconds == pytest.approx(8 * 0.081 + 0.008 + swaps * 1.0)
