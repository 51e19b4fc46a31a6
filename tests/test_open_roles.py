"""A program's own roles are placed, measured, planned and benchmarked as simulators, policies and learners are."""

import json

import pytest
from scored_loop import ScoredLoop

import embodied
from embodied import benchmark, plan
from embodied.config.recipe import load
from embodied.core.errors import ConfigError
from embodied.placement import PlacedRole, PlacementError, make_plan, roles_of
from embodied.placement.grammar import EMBODIED
from embodied.placement.profile import read_profile
from embodied.placement.topology import one_machine, read_topology
from embodied.profiling import measure
from embodied.run import launch

PROGRAM = "program=scored_loop:ScoredLoop"
SMALL = ("recipe=pointmass_ppo", "env.num_envs=4", "algo.rollout_decisions=8", "algo.minibatch_size=16")
REWARD = (*EMBODIED, PlacedRole("reward"))
CORES = one_machine(tuple(range(8)))


def hosts(placement, roles=REWARD, machines=CORES, **more):
    planned = make_plan(placement, machines, 64, roles=roles, **more)
    return {host.roles: host.cores or host.device for host in planned.hosts}


def test_another_role_goes_with_the_learner_and_has_a_device_of_its_own_disaggregated():
    """Simulators stay where a crash of theirs takes nothing with it that cannot be replaced."""
    assert set(hosts("collocated")) == {("sim", "policy"), ("learner", "reward")}
    assert set(hosts("hybrid")) == {("sim",), ("policy", "learner", "reward")}
    apart = hosts("disaggregated")
    assert apart[("reward",)] == (7,)
    assert all(7 not in cores for roles, cores in apart.items() if roles != ("reward",))


def test_a_role_that_goes_with_none_has_a_device_of_its_own_in_every_mode():
    alone = (*EMBODIED, PlacedRole("reward", beside=""))
    assert all(("reward",) in hosts(mode, alone) for mode in ("collocated", "hybrid", "disaggregated"))
    gpus = make_plan("hybrid", read_topology("4xGPU"), 64, networks="gpu", roles=alone)
    assert [host.device for host in gpus.hosts if "reward" in host.roles] == ["gpu:3"]
    assert "gpu:3" not in [host.device for host in gpus.hosts if "reward" not in host.roles]


CLIMBERS = (PlacedRole("climber"), PlacedRole("judge"))
CLIMBED = (*CLIMBERS, PlacedRole("guide", "update", beside="climber"))


@pytest.mark.parametrize(
    ("roles", "mode", "expected"),
    [
        (CLIMBERS, "auto", {("climber",): 8, ("judge",): 8}),
        (CLIMBERS, "collocated", {("climber",): 8, ("judge",): 8}),
        (CLIMBERS, "hybrid", {("climber",): 4, ("judge",): 4}),
        (CLIMBED, "collocated", {("climber", "guide"): 8, ("judge",): 8}),
        (CLIMBED, "hybrid", {("climber", "guide"): 4, ("judge",): 4}),
        (CLIMBED, "disaggregated", {("climber",): 2, ("judge",): 2, ("guide",): 2}),
        ((*CLIMBERS, PlacedRole("camera", beside="")), "collocated", {("climber",): 4, ("judge",): 4, ("camera",): 4}),
    ],
)
def test_modes_place_a_program_without_simulators_policies_and_learners_as_its_roles_declare(roles, mode, expected):
    plan = make_plan(mode, CORES, roles=roles)
    kinds = [host.roles for host in plan.hosts]
    assert {kind: kinds.count(kind) for kind in kinds} == expected
    assert plan.has_own_devices("judge") == (mode in ("hybrid", "disaggregated"))
    assert not any("envs" in line for line in plan.describe())


def test_simulators_of_such_a_program_share_out_the_envs_and_have_the_cores_beside_gpus():
    roles = roles_of(("sim", "policy", "trainer"))
    plan = make_plan("hybrid", read_topology("4xGPU"), 12, networks="gpu", roles=roles)
    assert [host.device for host in plan.hosts if host.roles == ("policy",)] == ["gpu:0", "gpu:1"]
    assert 12 % plan.count("sim") == 0 and all(not host.device for host in plan.hosts if "sim" in host.roles)


def test_a_mode_that_such_a_program_has_no_devices_for_names_a_map_that_works():
    with pytest.raises(PlacementError, match="gives climber and judge cores of their own: that needs 2") as refused:
        make_plan("hybrid", one_machine((0,)), roles=CLIMBERS)
    works = json.loads(str(refused.value).partition("placement='")[2].rstrip("'"))
    assert make_plan(works, one_machine((0,)), roles=CLIMBERS).count("judge") == 1
    with pytest.raises(PlacementError, match="'jury' is not a role; roles: climber, judge; try placement="):
        make_plan({"climber": "cpu:0", "jury": "cpu:1"}, CORES, roles=CLIMBERS)


def test_a_command_plans_a_workflow_of_other_roles():
    """Nothing is counted of workers that are not known, such as the memory of simulators."""
    roles = (embodied.Role("climber", "hill:Climber"), embodied.Role("judge", "hill:Judge", phase="update"))
    _, plan = launch.planned(load([*SMALL, "placement=collocated"]).config, roles=roles)
    assert {host.roles for host in plan.hosts} == {("climber",), ("judge",)} and not plan.memory


def test_the_planner_places_components_of_any_names(tmp_path, capsys):
    """Four cores climb 24 steps of 10 ms in 60 ms, then one judges for 20 ms; three in 80 ms beside one that judges."""
    climber, judge = (
        {"name": "climber", "calls": 1, "items": 24, "even": True},
        {"name": "judge", "calls": 1, "items": 24},
    )
    edges = [{"source": "climber", "target": "judge"}, {"source": "judge", "target": "climber", "next_iteration": True}]
    costs = {
        "climber": {"cpu": {"seconds": {"sizes": [1, 24], "values": [0.01, 0.24]}}},
        "judge": {"cpu": {"seconds": 0.02}},
    }
    workflow = {"components": [climber, judge], "edges": edges, "env_steps": 24}
    file = tmp_path / "hill.json"
    file.write_text(json.dumps({"format": "embodied-profile/1", "workflow": workflow, "costs": costs}))
    assert plan.main([f"profile={file}", "cluster=4xCPU", f"out={tmp_path}/plan"]) == 0
    told = capsys.readouterr().out
    modes = json.loads((tmp_path / "plan/plan.json").read_text())["modes"]
    assert modes["collocated"]["placement"] == {"climber": "cpu:0-3*4", "judge": "cpu:0"}
    assert modes["disaggregated"]["placement"] == {"climber": "cpu:0-2*3", "judge": "cpu:3"}
    assert "collocated wins" in told and "it is for simulators apart from policies and learners" in told


def test_a_simulator_is_never_in_the_process_of_a_role_that_updates():
    roles = (*EMBODIED, PlacedRole("critic", "update"))
    with pytest.raises(PlacementError, match="'sim,critic' puts the simulator"):
        hosts({"sim,critic": "cpu:0", "policy": "cpu:0", "learner": "cpu:0"}, roles)


def test_a_role_that_the_program_does_not_declare_is_refused_before_anything_starts():
    told = "placement={sim: cpu:0, policy: cpu:0, reward: cpu:0, learner: cpu:0}"
    config = load([*SMALL, told]).config
    with pytest.raises(ConfigError, match="'reward' is not a role; roles: sim, policy, learner; try"):
        launch.planned(config)
    _, placed = launch.planned(config, roles=ScoredLoop.roles)
    assert placed.count("reward") == 1
    _, evaluated = launch.planned(config, learn=False)  # which plays without it
    assert {role for host in evaluated.hosts for role in host.roles} == {"sim", "policy"}


@pytest.mark.slow
def test_profile_plan_auto_and_benchmark_know_a_fourth_role(tmp_path, capsys):
    arguments = [*SMALL, f"run.dir={tmp_path}"]
    assert measure.main([PROGRAM, *arguments, "seconds=3"]) == 0
    (path,) = (tmp_path / "profiles").glob("*.json")
    profile = read_profile(path)
    assert profile.costs["reward"]["cpu"].seconds.at(profile.dataflow["reward"].items) > 0
    assert {("sim", "reward"), ("reward", "learner")} <= {(edge.source, edge.target) for edge in profile.dataflow.edges}
    run = profile.runs[0]  # its cost is that of as many workers as the plan prices
    workers = next(place for roles, place in run["placement"].items() if "reward" in roles).partition("*")[2] or 1
    assert profile.costs["reward"]["cpu"].seconds.sizes[-1] == -(-run["rounds"][0]["env_steps"] // int(workers))

    assert plan.main([PROGRAM, *arguments, "cluster=8xCPU", f"out={tmp_path}/plan"]) == 0
    found = json.loads((tmp_path / "plan/plan.json").read_text())
    assert all("reward" in str(mode["placement"]) for mode in found["modes"].values())

    _, placed = launch.planned(load(arguments).config, roles=ScoredLoop.roles)
    assert "the fastest by the profile measured here" in placed.reason
    assert "the fastest by the profile" not in launch.planned(load(arguments).config)[1].reason  # another program's

    options = ["rounds=1", "modes=[collocated]", "profile=stored", f"out={tmp_path}/bench"]
    capsys.readouterr()
    assert benchmark.main([PROGRAM, *arguments, *options]) == 0
    told = capsys.readouterr().out
    assert "reward" in told and "at work: sim" in told
    (measured,) = json.loads((tmp_path / "bench/bench.json").read_text())["results"]
    assert 0 < measured["rounds"]["collocated"][0]["busy"]["reward"] < 1
