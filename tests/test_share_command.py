"""Several runs with one command, on devices that they share: each learns what it learns alone, whatever happens to the
others, to the command, or to Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from talking_runs import TALK, far

from embodied import share
from embodied.config.recipe import load_recipe
from embodied.core.errors import ConfigError
from embodied.placement import Topology, make_plan
from embodied.placement.topology import Node
from embodied.run.shared_runs import MemorySum, SharedRuns, check_memory, own_devices, read_shared_runs
from embodied.share import read_order

ROBOT = [
    "recipe=pointmass_ppo",
    "env.num_envs=8",
    "env.dtype=float64",
    "policy.dtype=float64",
    "policy.hidden=[16,16]",
    "algo.rollout_decisions=16",
    "algo.minibatch_size=32",
    "run.env_steps=null",
    "run.iterations=4",
    "eval.episodes=4",
    "eval.videos=0",
]
TALKER = [word for word in TALK if not word.startswith("run.iterations")] + ["run.iterations=4"]
ENV = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": f"{Path(__file__).parent / 'support'}:{os.environ.get('PYTHONPATH', '')}",
}
LONG_S = 300


def start(folder, module, *words):
    with (folder / "said.txt").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", f"embodied.{module}", *words],
            cwd=folder,
            env=ENV,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run(folder, module, *words, code=0):
    process = start(folder, module, *words)
    assert process.wait(LONG_S) == code, (folder / "said.txt").read_text()
    return (folder / "said.txt").read_text()


def until(found, folder, process):
    """Wait until something is so, while a command goes on."""
    end = time.monotonic() + LONG_S
    while not found():
        assert time.monotonic() < end and process.poll() in (None, -signal.SIGKILL), (folder / "said.txt").read_text()
        time.sleep(0.05)


def rows(folder, name):
    """The number of iterations of a run in this folder so far."""
    return sum(len(path.read_text().splitlines()) for path in folder.glob(f"runs/{name}-20*/metrics.jsonl"))


def weights(folder, name):
    (path,) = folder.glob(f"runs/{name}-20*/checkpoints/v000004/policy/model.safetensors")
    return load_file(path)


def changed(words, *changes):
    names = {change.partition("=")[0] for change in changes}
    return [*(word for word in words if word.partition("=")[0] not in names), *changes]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The weights that two robots' runs and a language run end with by themselves."""
    folder = tmp_path_factory.mktemp("alone")
    for name, words in (("robot", ROBOT), ("second", [*ROBOT, "seed=1"]), ("talker", TALKER)):
        run(folder, "train", *words, f"run.name={name}")
    return {name: weights(folder, name) for name in ("robot", "second", "talker")}


@pytest.mark.slow
def test_ctrl_c_saves_all_runs_and_resume_goes_on_with_them(alone, tmp_path):
    process = start(tmp_path, "share", "folder=s", *ROBOT, *TALKER)
    until(lambda: rows(tmp_path, "s-sums_grpo"), tmp_path, process)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(LONG_S) == 130
    assert "go on       python -m embodied.share resume=s" in (tmp_path / "said.txt").read_text()
    run(tmp_path, "share", "resume=s")
    assert far(weights(tmp_path, "s-sums_grpo"), alone["talker"]) < 1e-9
    assert far(weights(tmp_path, "s-pointmass_ppo"), alone["robot"]) < 1e-9


def pid_of(folder, name, host="driver"):
    """The process id of one of a run's processes."""
    for path in folder.glob(f"runs/{name}-20*/run.json"):
        return json.loads(path.read_text()).get("processes", {}).get(host)


def phase_of_run(folder, name):
    """What a run that shares devices holds some for, if anything."""
    holds = {}
    for line in (folder / "s" / "share.jsonl").read_text().splitlines():
        event = json.loads(line)
        if "device" in event:
            holds[event["device"]] = (event["run"], event["phase"])
    return next((phase for run, phase in holds.values() if run == name), None)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("victim", "phase"),
    [
        *product(("policy-0", "policy-1", "sim-0", "learner-0", "driver", "command"), ("rollout", "update")),
        ("driver", "initialise"),
        ("command", "initialise"),
    ],
)
def test_whoever_is_killed_in_whatever_phase_all_runs_learn_what_they_learn_alone(alone, victim, phase, tmp_path):
    """A run whose driver, learner or command is killed goes on with resume=, from its newest checkpoint."""
    process = start(tmp_path, "share", "folder=s", *ROBOT, *TALKER)
    name = "sums_grpo"

    def at_work():
        there = (tmp_path / "s" / "share.jsonl").exists() and (phase_of_run(tmp_path, name) or "").startswith(phase)
        return there and (victim == "command" or pid_of(tmp_path, f"s-{name}", victim))

    until(at_work, tmp_path, process)
    pid = process.pid if victim == "command" else pid_of(tmp_path, f"s-{name}", victim)
    os.kill(pid, signal.SIGKILL)
    code = process.wait(LONG_S)
    if victim in ("sim-0", "policy-0", "policy-1"):
        assert code == 0, (tmp_path / "said.txt").read_text()
    if victim == "command":
        paths = list(tmp_path.glob("runs/s-*/run.json"))
        until(lambda: all(json.loads(p.read_text())["state"] != "running" for p in paths), tmp_path, process)
    if code:
        run(tmp_path, "share", "resume=s")
    assert far(weights(tmp_path, "s-sums_grpo"), alone["talker"]) < 1e-9
    assert far(weights(tmp_path, "s-pointmass_ppo"), alone["robot"]) < 1e-9


@pytest.mark.slow
@pytest.mark.chaos
def test_runs_whose_command_is_killed_end_their_step_save_and_stop(tmp_path):
    long = "run.iterations=100000"
    process = start(tmp_path, "share", "folder=s", *changed(ROBOT, long), *changed(TALKER, long))
    until(lambda: rows(tmp_path, "s-pointmass_ppo") and rows(tmp_path, "s-sums_grpo"), tmp_path, process)
    socket = Path(read_shared_runs(tmp_path / "s").socket)
    assert socket.exists()
    process.kill()
    process.wait()
    for name in ("s-pointmass_ppo", "s-sums_grpo"):
        (path,) = tmp_path.glob(f"runs/{name}-20*/run.json")
        until(lambda: json.loads(path.read_text())["state"] == "stopped", tmp_path, process)  # noqa: B023
        assert (path.parent / "checkpoints" / "latest").is_file()
    assert "resume=" in (tmp_path / "s" / "logs" / "sums_grpo.log").read_text()
    assert not socket.parent.exists()


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
        (["devices=gpu:900", "pointmass_ppo"], "gpu:900 is not there: this machine has"),
        (["resume=somewhere"], "somewhere holds no runs that share devices: the folder of a share has a share.json"),
        (["join=somewhere", "pointmass_ppo"], "somewhere holds no runs that share devices"),
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


def test_of_a_gpu_one_run_has_all_it_needs_and_the_others_what_they_keep_asleep():
    gpu = MemorySum("gpu:0", 40e9, {"a": 30e9, "b": 31e9, "c": 0.0}, {"a": 12e9, "b": 1e9, "c": 0.0})
    assert gpu.text("ab") == "gpu:0: b 31.0 + a asleep 12.0 = 43.0 of 40.0 GB" and not gpu.fits("ab")
    assert gpu.fits("ac") and gpu.fits("bc")


def test_the_folder_reads_back_as_it_was_written(tmp_path):
    shared = SharedRuns(tmp_path, ("cpu:0",), "lend")
    shared.write()
    assert read_shared_runs(tmp_path) == shared
