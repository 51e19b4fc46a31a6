"""Machines one has and machines one does not have are described alike."""

import os
import subprocess
import sys

import pytest

from embodied.placement import PlacementError
from embodied.placement.topology import GB, DeviceClass, Gpu, read_topology
from embodied.run import devices


def test_64x8xgpu_are_512_gpus_and_their_cores():
    classes = read_topology("64x8xGPU").classes()
    assert classes == [DeviceClass("gpu", "gpu", 512, 80 * GB, 64, "GPU"), DeviceClass("cpu", "cpu", 8192, 8 * GB, 64)]
    assert read_topology("8xL4").describe() == ["1 node: 8 x L4, 24 GB each, 128 cores"]
    assert [c.name for c in read_topology("2xCPU").classes()] == ["cpu"]
    assert [c.kind for c in read_topology("4xFAKE").classes()] == ["fake", "cpu"]


def test_a_file_names_nodes_one_by_one(tmp_path):
    path = tmp_path / "lab.yaml"
    path.write_text(
        "nodes:\n"
        "  - {name: big, count: 2, gpus: 8, gpu: H100, cores: 128}\n"
        "  - {name: old, gpus: 4, gpu: GTX1080, gpu_memory_gb: 8, cores: 32}\n"
        '  - {name: desk, cores: 16, memory_gb: 32, devices: ["arm:0"]}\n'
    )
    topology = read_topology(str(path))
    assert [node.name for node in topology.nodes] == ["big-0", "big-1", "old", "desk"]
    assert topology.classes() == [
        DeviceClass("gpu-H100", "gpu", 16, 80 * GB, 2, "H100"),
        DeviceClass("gpu-GTX1080", "gpu", 4, 8 * GB, 1, "GTX1080"),
        DeviceClass("cpu", "cpu", 304, 2 * GB, 4),
    ]
    assert topology.describe()[-1] == "1 node: 16 cores, arm:0"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("8xG", "does not describe machines; examples: 8xGPU"),
        ("eight", "examples: 8xGPU"),
        ("0xGPU", "has no device"),
        ("99999xGPU", "counts to 99999; at most 9999"),
        ("nowhere.yaml", "cannot be read"),
    ],
)
def test_machines_that_are_not_described_are_refused(text, answer):
    with pytest.raises(PlacementError, match=answer):
        read_topology(text)


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("nodes: []", "no list `nodes`"),
        ("nodes: [{gpu_count: 8}]", "entry 1 of nodes: gpu_count=8: .*; keys: name"),
        ("nodes: [{gpus: 1, gpu: X99}]", "a X99 is not known here, so say its memory"),
        ("nodes: [{name: a, cores: 1}, {name: a, cores: 1}]", "repeated: a"),
        ("nodes: [{gpus: 1, gpu_memory_gb: .nan}]", "gpu_memory_gb=nan: "),
        ("nodes: [{cores: 1, devices: 'arm:0'}]", "devices='arm:0': Input should be a valid list"),
        ("nodes: [{cores: 1, name: a/b}]", "name='a/b': "),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_files_that_describe_no_machines_are_refused(tmp_path, content, answer):
    (tmp_path / "t.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(PlacementError, match=answer):
        read_topology(str(tmp_path / "t.yaml"))


def test_this_machine_is_discovered(tmp_path):
    node = tmp_path / "devices/system/node"
    for name, cores in (("node0", "0-3,8"), ("node1", "4-7")):
        (node / name).mkdir(parents=True)
        (node / name / "cpulist").write_text(cores + "\n")
    assert devices.numa_nodes(tmp_path, [0, 2, 5, 8]) == ((0, 2, 8), (5,))
    (topology,) = devices.discover().nodes
    assert topology.cores >= 1


def test_a_container_has_the_memory_that_it_may_take(tmp_path):
    whole = devices.memory_bytes(tmp_path)
    (tmp_path / "fs/cgroup").mkdir(parents=True)
    limit = tmp_path / "fs/cgroup/memory.max"
    for text, found in {"max\n": whole, "2000000000\n": 2e9}.items():
        limit.write_text(text)
        assert devices.memory_bytes(tmp_path) == found


def test_a_gpu_is_read_from_the_drivers_answer(tmp_path):
    device = tmp_path / "bus/pci/devices/0000:3b:00.0"
    (device / "drm/renderD129").mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    row = ["3", "NVIDIA H100 80GB HBM3", "81559", "00000000:3B:00.0", "GPU-8932f937"]
    assert devices.read_gpu(row, tmp_path) == Gpu(3, "H100", 81559 * 2**20, 1, "renderD129", 3, "GPU-8932f937")
    assert devices.model_of("NVIDIA A100-SXM4-80GB") == "A100"
    assert devices.model_of("NVIDIA GeForce RTX 4090") == "4090"


LISTED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa-1)
  MIG 3g.40gb     Device  0: (UUID: MIG-bbbb-1)
  MIG 1g.10gb+me  Device  1: (UUID: MIG-bbbb-2)
GPU 1: NVIDIA A16-4Q (UUID: GPU-cccc-1)
"""


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (None, ["MIG-bbbb-1", "MIG-bbbb-2", "GPU-cccc-1"]),
        ("MIG-bbbb-2,1", ["MIG-bbbb-2", "GPU-cccc-1"]),
        ("MIG-bbbb-1", ["MIG-bbbb-1"]),
        ("MIG-bbbb", []),  # of two
        ("MIG-dddd,1", []),
    ],
)
def test_slices_and_virtual_gpus_are_devices_of_their_own_by_uuid(chosen, names, tmp_path):
    """An H100 in two slices, whose own number names none of them, and a virtual A16."""
    h100 = devices.read_gpu(["0", "NVIDIA H100 80GB HBM3", "81559", "00000000:3B:00.0", "GPU-aaaa-1"], tmp_path)
    a16 = devices.read_gpu(["1", "NVIDIA A16-4Q", "4096", "00000000:02:01.0", "GPU-cccc-1"], tmp_path)
    found = devices.visible_gpus(devices.with_slices([h100, a16], LISTED), chosen)
    assert [gpu.cuda_name for gpu in found] == names and [gpu.index for gpu in found] == list(range(len(names)))
    sizes = {"MIG-bbbb-1": 40e9, "MIG-bbbb-2": 10e9, "GPU-cccc-1": 4096 * 2**20}
    assert [gpu.memory_bytes for gpu in found] == [sizes[name] for name in names]
    assert devices.with_slices([h100, a16], "") == [h100, a16]


SMI = """#!/bin/sh
echo "0, NVIDIA L4, 23034, 00000000:3B:00.0, GPU-0000aaaa"
echo "1, NVIDIA H100 80GB HBM3, 81559, 00000000:5E:00.0, GPU-1111bbbb"
"""
ON_A_NODE = """
import os, subprocess, sys
look = "from embodied.run.devices import on_ray_node; print(on_ray_node(1, 1).gpus)"
subprocess.run([sys.executable, "-c", look], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=True)
"""


def test_a_ray_node_has_the_gpus_that_it_was_started_with_though_a_task_sees_none(tmp_path):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    started = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": "GPU-1111,0"}
    done = subprocess.run([sys.executable, "-c", ON_A_NODE], env=started, capture_output=True, text=True, timeout=120)
    h100 = Gpu(0, "H100", 81559.0 * 2**20, None, "", 1, "GPU-1111bbbb")
    assert done.stdout.strip() == str((h100,)), done.stderr
