"""Which machines a run may use, what a host's process sees of them, and placements that contradict the recipe."""

from dataclasses import replace

import pytest

from embodied.config.recipe import load
from embodied.placement import PlacementError, PlannedHost, make_plan
from embodied.placement.topology import GB, Gpu, Node, Topology, read_topology
from embodied.run import devices
from embodied.run.devices import environment, machines, networks_on

CARDS = [Gpu(i, "H100", 80 * GB, i // 4, f"renderD{128 + i}", i, f"GPU-{i}a") for i in range(8)]


def recipe(*arguments, name="pointmass_ppo"):
    return load([f"recipe={name}", *arguments]).config


@pytest.fixture
def eight_gpus(monkeypatch):
    """As if nvidia-smi told of them."""
    monkeypatch.setattr(devices, "gpus", lambda sys=None: CARDS)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_this_machine_has_its_cores_and_the_gpus_that_the_process_may_use(eight_gpus, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 5})
    (node,) = machines(recipe("cluster.devices=[arm:0,node1/arm:1]")).nodes
    assert (node.name, node.cores, node.core_numbers) == ("", 3, (2, 3, 5))
    assert node.named == (*(f"gpu:{i}" for i in range(8)), "arm:0")
    for chosen, cards in {"4,6": [4, 6], "GPU-6a,1": [6, 1], "3,9,2": [3], "-1": [], "": []}.items():
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        (node,) = machines(recipe()).nodes
        assert [gpu.card for gpu in node.gpus] == cards
        assert [gpu.index for gpu in node.gpus] == list(range(len(cards)))


def test_a_host_sees_the_gpu_it_holds_or_draws_on_and_no_other():
    card = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "6", "MUJOCO_EGL_DEVICE_ID": "6"}
    card |= {"EMBODIED_RENDER_FILE": "renderD130"}
    sixth = Gpu(1, card=6, render="renderD130")
    held = PlannedHost("policy-0", ("policy",), (0,), 1, devices=("gpu:1",), gpus=(sixth,))
    assert environment(held) == {"EMBODIED_DEVICE": "gpu:1", **card}
    both = replace(held, devices=("gpu:1", "gpu:0"), gpus=(sixth, Gpu(0, card=5)))
    assert environment(both) == {"EMBODIED_DEVICE": "gpu:1", **card, "CUDA_VISIBLE_DEVICES": "6,5"}
    drawing = PlannedHost("sim-0", ("sim",), (0,), 1, render="gpu:1", gpus=(sixth,))
    assert environment(drawing) == {"EMBODIED_RENDER": "gpu:1", **card}
    assert environment(PlannedHost("sim-1", ("sim",), (0,), 1)) == {}
    assert environment(PlannedHost("sim-2", ("sim",), (0,), 1, devices=("arm:0",))) == {"EMBODIED_DEVICE": "arm:0"}


def test_runs_take_turns_in_the_memory_that_a_gpu_has_on_whatever_machine(monkeypatch, tmp_path):
    from embodied.run import launch

    started = []
    monkeypatch.setattr(launch, "Cluster", lambda backend, hosts, *more: started.extend(hosts))
    there = Topology((Node("here", 4, (Gpu(0, memory_bytes=8e9),)), Node("there", 4, (Gpu(0, memory_bytes=24e9),))))
    placement = {"sim": "cpu:0-1*2", "policy,learner": "gpu:0,there/gpu:0"}
    launch.cluster(recipe(), make_plan(placement, there, 8), tmp_path)
    assert {plan.devices: plan.device_bytes for plan in started if plan.node or plan.roles != ("sim",)} == {
        ("gpu:0",): 8e9,
        ("there/gpu:0",): 24e9,
    }
    assert all(plan.device_bytes == float("inf") for plan in started if plan.roles == ("sim",))


def test_hosts_on_gpus_get_cores_of_their_numa_node():
    numa = (tuple(range(0, 32, 2)), tuple(range(1, 32, 2)))
    node = Node("", 32, tuple(CARDS), numa=numa)
    plan = make_plan({"sim": "cpu:0-7*8", "policy,learner": "gpu:0-7"}, Topology((node,)), 8)
    cores = [host.cores for host in plan.hosts if host.device]
    assert cores[0] == (0, 2, 4, 6) and cores[3] == (24, 26, 28, 30)
    assert cores[4] == (1, 3, 5, 7) and cores[7] == (25, 27, 29, 31)


@pytest.mark.parametrize(
    ("name", "arguments", "where"),
    [
        ("maniskill_ppo", [], "cpu"),  # a small MLP
        ("maniskill_ppo", ["policy.hidden=[1024,1024,1024]"], "gpu"),
        ("maniskill_ppo", ["learner.device=cuda"], "gpu"),
        ("maniskill_ppo_gpu", [], "gpu"),  # simulated there
        ("maniskill_ppo_rgb", [], "gpu"),
        ("pointmass_ppo_openvla_tiny", [], "gpu"),
        ("libero_grpo_openvla_oft", [], "gpu"),
        ("libero_published_pi0", [], "gpu"),
        ("libero_published_pi0", ["learner.device=cpu"], "cpu"),
        ("pointmass_ppo", ["policy.name=mine:Net"], "cpu"),
    ],
)
def test_networks_compute_on_gpus_where_there_are_any_and_it_pays(name, arguments, where):
    config = recipe(*arguments, name=name)
    assert networks_on(config, read_topology("8xGPU")) == where
    if "learner.device=cuda" not in arguments:
        assert networks_on(config, read_topology("2xCPU")) == "cpu"


@pytest.mark.parametrize(
    ("mode", "gpus", "gpu_sims", "hosts"),
    [
        ("collocated", 8, True, {("sim", "policy"): range(8), ("learner",): range(8)}),  # taking turns on all
        ("collocated", 3, True, {("sim", "policy"): range(2), ("learner",): range(3)}),  # 64 envs do not divide by 3
        ("disaggregated", 8, True, {("sim",): range(2), ("policy",): range(2, 4), ("learner",): range(4, 8)}),
        ("hybrid", 8, True, {("sim",): range(4), ("policy", "learner"): range(4, 8)}),
        ("auto", 2, True, {("sim", "policy"): range(2), ("learner",): range(2)}),
        ("collocated", 8, False, {("sim",): None, ("policy",): range(8), ("learner",): range(8)}),  # None: on cores
        ("hybrid", 1, False, {("sim",): None, ("policy", "learner"): range(1)}),
        ("disaggregated", 4, False, {("sim",): None, ("policy",): range(2), ("learner",): range(2, 4)}),
        ("auto", 2, False, {("sim",): None, ("policy", "learner"): range(2)}),
    ],
)
def test_a_mode_is_laid_out_on_gpus_where_networks_compute_there(mode, gpus, gpu_sims, hosts):
    plan = make_plan(mode, read_topology(f"{gpus}xGPU"), 64, networks="gpu", gpu_sims=gpu_sims)
    found = {}
    for host in plan.hosts:
        found.setdefault(host.roles, []).append(host.device)
    assert {roles: set(held) for roles, held in found.items()} == {
        roles: {""} if on is None else {f"gpu:{i}" for i in on} for roles, on in hosts.items()
    }
    assert plan.mode == mode and bool(plan.reason) == (mode == "auto")


@pytest.mark.parametrize("mode", ["auto", "collocated", "hybrid", "disaggregated"])
def test_simulators_on_cores_beside_gpus_are_as_many_as_there_are_cores_to_feed_them(mode):
    eight = read_topology("8xGPU")  # 128 cores
    assert make_plan(mode, eight, 64, networks="gpu", rows=1).count("sim") == 64
    assert make_plan(mode, eight, 64, networks="gpu", rows=4).count("sim") == 16
    assert make_plan(mode, eight, 512, networks="gpu", rows=1).count("sim") == 128
    assert make_plan(mode, eight, 64, networks="gpu", rows=1, most_sims=20).count("sim") == 16
    assert make_plan(mode, read_topology("8xGPU"), 64).count("sim") == 16  # networks on cores: as without GPUs


@pytest.mark.parametrize("mode", ["auto", "collocated", "hybrid", "disaggregated"])
@pytest.mark.parametrize(
    ("cluster", "networks", "gpu_sims"),
    [("2x2xCPU", "cpu", False), ("3x16xCPU", "cpu", False), ("2x2xGPU", "gpu", False), ("4x8xGPU", "gpu", True)],
)
def test_every_mode_uses_all_machines(mode, cluster, networks, gpu_sims):
    there = read_topology(cluster)
    plan = make_plan(mode, there, 96, networks=networks, gpu_sims=gpu_sims)
    assert {host.node for host in plan.hosts} == {node.name for node in there.nodes}
    assert len({host.device_names for host in plan.hosts if "sim" in host.roles}) == plan.count("sim")
    assert next(host.node for host in plan.hosts if "learner" in host.roles) == "node0"  # which writes checkpoints


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
        make_plan(mode, read_topology(f"{gpus}xGPU"), 64, networks="gpu", gpu_sims=gpu_sims)
