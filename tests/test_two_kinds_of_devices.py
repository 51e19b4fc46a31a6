"""Profile, plan, auto and benchmark on cores and GPUs: a machine that is said to have a GPU, whose torch computes on
the CPU all the same. What would run there does; how fast it would be is not what is tested."""

import json
import os

import pytest

from embodied import benchmark, plan
from embodied.config.recipe import load
from embodied.placement import Topology
from embodied.placement.profile import read_profile
from embodied.placement.topology import GB, Gpu, Node
from embodied.profiling import measure
from embodied.run import devices, launch

RECIPE = (
    *("recipe=pointmass_ppo", "env.num_envs=4", "algo.rollout_decisions=8", "algo.minibatch_size=16"),
    "learner.device=cuda",
)


@pytest.fixture
def one_gpu(monkeypatch):
    cores = tuple(sorted(os.sched_getaffinity(0)))[:2]
    node = Node("", len(cores), (Gpu(0, "H200", 141 * GB),), core_ids=cores)
    monkeypatch.setattr(devices, "discover", lambda: Topology((node,), "this machine"))
    asked = []
    monkeypatch.setattr(devices, "torch_device", lambda kind: asked.append(kind) or "cpu")
    monkeypatch.setattr(devices, "environment", lambda host: {})  # else workers would ask CUDA what they take
    return len(cores), asked


def test_profile_plan_auto_and_benchmark_follow_each_other_on_cores_and_a_gpu(tmp_path, capsys, one_gpu):
    arguments, (num_cores, asked) = [*RECIPE, f"run.dir={tmp_path}"], one_gpu
    assert measure.main([*arguments, "seconds=3"]) == 0
    assert asked[:2] == ["cpu", "gpu"], "of the simulators' probe, and of the networks'"
    (path,) = (tmp_path / "profiles").glob("*.json")
    profile = read_profile(path)
    assert {name: [*on] for name, on in profile.costs.items()} == {
        "sim": ["cpu"],
        "policy": ["gpu-H200"],
        "learner": ["gpu-H200"],
    }
    assert profile.made["devices"] == {"gpu-H200": 1, "cpu": num_cores}
    told = capsys.readouterr().out
    assert "sim on 2 cores, policy and learner on 1 GPU (H200)" in told

    assert plan.main([*arguments, f"out={tmp_path}/plan"]) == 0
    assert {"collocated", "hybrid"} <= json.loads((tmp_path / "plan/plan.json").read_text())["modes"].keys()

    _, placed = launch.planned(load(arguments).config)
    assert "the fastest by the profile measured here" in placed.reason
    assert {host.device for host in placed.hosts if "learner" in host.roles} == {"gpu:0"}
    assert {host.device for host in placed.hosts if "sim" in host.roles} == {""}

    assert benchmark.main([*arguments, "rounds=1", "modes=[hybrid]", "profile=stored", f"out={tmp_path}/bench"]) == 0
    told = capsys.readouterr().out
    assert "1 GPU (H200) and 2 cores" in told and "per GPU" in told
    (found,) = json.loads((tmp_path / "bench/bench.json").read_text())["results"]
    assert found["devices"] == {"gpu-H200": 1, "cpu": num_cores}
    assert found["expected"]["hybrid"]["placement"]["policy,learner"] == "gpu:0"
    assert found["table"]["hybrid"]["measured_s"] > 0


@pytest.mark.gpu
def test_profile_and_benchmark_run_on_a_real_gpu(tmp_path, capsys):
    arguments = [*RECIPE, f"run.dir={tmp_path}"]
    assert measure.main([*arguments, "seconds=30"]) == 0
    (path,) = (tmp_path / "profiles").glob("*.json")
    (model,) = read_profile(path).costs["learner"]
    assert model.startswith("gpu-")
    assert benchmark.main([*arguments, "rounds=2", "modes=all", "profile=stored", f"out={tmp_path}/bench"]) == 0
    (found,) = json.loads((tmp_path / "bench/bench.json").read_text())["results"]
    assert found["table"]["hybrid"]["env_steps_per_s_and_gpu"] > 0
    assert "per GPU" in capsys.readouterr().out
