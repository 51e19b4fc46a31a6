"""What a command line of runs that share devices means, which devices they get, and what is refused."""

import pytest

from embodied import share
from embodied.config.recipe import load_recipe
from embodied.core.errors import ConfigError
from embodied.placement import Topology, make_plan, roles_of
from embodied.placement.topology import Node, read_topology
from embodied.run import launch
from embodied.run.run_group import lock_runs
from embodied.share import read_order
from embodied.sharing.run_turns import RECORD
from embodied.sharing.runs import (
    MemorySum,
    SharedRun,
    SharedRuns,
    check_memory,
    devices_of,
    own_devices,
    placement_for,
    read_shared_runs,
)
from embodied.workflows import roles_of_run
from embodied.workflows.rl_loop import EmbodiedLoop


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no recipe: name the runs"),
        (["pointmass_ppo", "rule=fair"], "rule=fair: should be lend or remaining"),
        (["pointmass_ppo", "weights=1,2"], "weights=1,2: should be a positive number for each of the 1 runs"),
        (["resume=somewhere", "pointmass_ppo"], "leave pointmass_ppo out"),
        (["join=somewhere"], "adds one run"),
        (["pointmas_ppo", "sums_grpo"], "recipe=pointmas_ppo: no such recipe, did you mean 'pointmass_ppo'?"),
        (["devices=cpu:0", "pointmass_ppo", "placement=hybrid"], "pointmass_ppo: placement=hybrid gives sims"),
        (["devices=gpu:900", "pointmass_ppo"], "devices=gpu:900: gpu:900 is not there: "),
        (["resume=somewhere"], "somewhere holds no runs that share devices: the folder of a share has a share.json"),
        (["join=somewhere", "pointmass_ppo"], "somewhere holds no runs that share devices"),
        (["program=nowhere:Loop", "pointmass_ppo"], "run it alone: python -m embodied.train recipe=pointmass_ppo"),
    ],
)
def test_a_command_line_that_makes_no_sense_is_refused(words, said, capsys):
    assert share.main([*words, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_recipe_files_are_found_from_whatever_folder_the_runs_go_on(tmp_path, monkeypatch):
    (tmp_path / "mine.yaml").write_text("extends: pointmass_ppo\n")
    monkeypatch.chdir(tmp_path)
    assert read_order(["mine.yaml", "seed=1"]).runs == [[f"recipe={tmp_path / 'mine.yaml'}", "seed=1"]]


def test_keys_before_the_first_recipe_hold_for_all_runs_that_do_not_set_them():
    order = read_order(["run.iterations=3", "seed=7", "pointmass_ppo", "seed=1", "mine.yaml"])
    assert order.runs == [
        ["recipe=pointmass_ppo", "seed=1", "run.iterations=3"],
        ["recipe=mine.yaml", "run.iterations=3", "seed=7"],
    ]


def test_devices_are_dealt_by_weight_and_runs_beyond_them_share():
    cores = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert [len(own) for own in own_devices(cores, [1, 1])] == [2, 2]
    assert [len(own) for own in own_devices(cores, [1, 2])] == [1, 3]
    assert [len(own) for own in own_devices(cores, [1, 100, 1])] == [1, 2, 1]
    assert own_devices(cores[:2], [1, 1, 1]) == [("cpu:0",), ("cpu:0",), ("cpu:1",)]
    assert {device for own in own_devices(cores, [1, 2]) for device in own} == {*cores}


def test_memory_that_all_runs_need_together_is_summed_and_those_that_fit_are_named():
    config, machine = load_recipe("pointmass_ppo"), Topology((Node("", 2, memory_bytes=4e9),))
    small = make_plan({"sim,policy": "cpu:0", "learner": "cpu:0"}, machine, 16)
    large = make_plan({"sim": "cpu:0-1", "policy": "cpu:0-1", "learner": "cpu:0-1"}, machine, 16)
    check_memory([("a", config, small), ("b", config, small)], machine)
    with pytest.raises(ConfigError) as caught:
        check_memory([("large", config, large), ("a", config, small), ("b", config, small)], machine)
    assert "memory: this machine: large 2.0 + a 1.5 + b 1.5 = 5.0 of 4.0 GB" in str(caught.value)
    assert "these fit: large, a (this machine: large 2.0 + a 1.5 = 3.5 of 4.0 GB)" in str(caught.value)
    tight = Topology((Node("", 2, memory_bytes=3e9),))
    with pytest.raises(ConfigError, match=r"these fit: a, b \(this machine: a 1\.5 \+ b 1\.5 = 3\.0 of 3\.0 GB\)"):
        check_memory([("large", config, large), ("a", config, small), ("b", config, small)], tight)


def test_a_gpu_holds_one_active_run_and_the_memory_that_other_runs_keep_asleep():
    gpu = MemorySum("gpu:0", 40e9, {"a": 30e9, "b": 31e9, "c": 0.0}, {"a": 12e9, "b": 1e9, "c": 0.0})
    assert gpu.text("ab") == "gpu:0: b 31.0 + a asleep 12.0 = 43.0 of 40.0 GB" and not gpu.fits("ab")
    assert gpu.fits("ac") and gpu.fits("bc")


def test_two_commands_do_not_go_on_with_the_same_runs(tmp_path, capsys):
    shared = SharedRuns(tmp_path, ("cpu:0",), "lend", (SharedRun("a", ("recipe=pointmass_ppo",), ("cpu:0",)),), "s")
    shared.write()
    with lock_runs(tmp_path, RECORD):
        assert share.main([f"resume={tmp_path}"]) == 1
    assert "another process continues these runs; stop it first" in capsys.readouterr().err
    assert read_shared_runs(tmp_path) == shared


def test_engines_that_several_gpus_hold_borrow_whole_sets_of_gpus_of_a_machine():
    machines = read_topology("2x4xGPU")
    gpus = devices_of(machines)
    words = ["run.start_from=null", "learner.device=cuda", "policy.engine=vllm", "policy.tensor_parallel=2"]
    config = load_recipe("sums_grpo", *words)
    other = ("node0/gpu:3", "node1/gpu:0", "node1/gpu:1", "node1/gpu:2", "node1/gpu:3")
    told = placement_for(config, machines, gpus[:2] + other, [gpus[:2], other], 0)
    assert told["policy"] == "node0/gpu:0,node0/gpu:1,node1/gpu:0,node1/gpu:1,node1/gpu:2,node1/gpu:3"
    assert told["learner"] == "node0/gpu:0,node0/gpu:1"
    config = config.model_copy(update={"placement": told})
    _, plan = launch.with_placement(config, machines, True, roles_of(roles_of_run(EmbodiedLoop, config)))
    assert [len(host.devices) for host in plan.hosts if "policy" in host.roles] == [2, 2, 2]


def test_an_engine_borrows_gpus_of_one_owner():
    machines = read_topology("2x8xGPU")
    words = ["run.start_from=null", "learner.device=cuda", "policy.engine=vllm", "policy.tensor_parallel=2"]
    config = load_recipe("sums_grpo", *words)
    owned = [[f"node0/gpu:{gpu}" for gpu in gpus] for gpus in ((0, 1), (2, 4, 6), (3, 5), (7,))]
    told = placement_for(config, machines, [gpu for own in owned for gpu in own], owned, 0)
    config = config.model_copy(update={"placement": told})
    _, plan = launch.with_placement(config, machines, True, roles_of(roles_of_run(EmbodiedLoop, config)))
    engines = [host.devices for host in plan.hosts if "policy" in host.roles]
    assert engines == [("gpu:0", "gpu:1"), ("gpu:2", "gpu:4"), ("gpu:3", "gpu:5")]
