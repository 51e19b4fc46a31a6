"""The machines that a run may use, the devices that a process sees, and the devices of its networks.

Modes, `auto`, profiles, benchmarks and the memory check all call `machines`, so they plan for the same machines.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from typing import Any

from embodied.config.recipe import RunConfig
from embodied.core.errors import ConfigError
from embodied.envs import env_class
from embodied.placement import PlacementError, PlacementPlan, PlannedHost, Topology
from embodied.placement.grammar import parse_map
from embodied.placement.topology import read_topology
from embodied.policies.config import PolicyOptions
from embodied.run.memory_check import decisions_of
from embodied.runtime import HostPlan, nodes_of
from embodied.system.discovery import discover, on_ray_node

SMALL_STEP = 16_000_000  # items times weights: about 4 ms on a core; a second core saves at most 1 ms
SMALL_WEIGHTS = 1_000_000  # of an MLP: up to this size, a core computes a pass faster than a GPU's kernels are launched


def machines(config: RunConfig) -> Topology:
    """The declared machines for a dry run, else all nodes of a Ray cluster, else this machine. The driver's machine is
    first."""
    cluster = config.cluster
    if cluster.machines:
        try:
            topology = read_topology(cluster.machines)
        except PlacementError as err:
            raise ConfigError(f"cluster.machines={cluster.machines}: {err}") from None
    elif address := cluster.joined:
        nodes = nodes_of(address, on_ray_node)
        topology = Topology(tuple(replace(node, name=name) for name, node in nodes.items()), address)
    else:
        topology = discover()
        topology = replace(topology, nodes=(replace(topology.nodes[0], name=""),))
    return replace(
        topology, nodes=tuple(with_hardware(node, i == 0, cluster.devices) for i, node in enumerate(topology.nodes))
    )


def with_hardware(node, first: bool, declared: tuple[str, ...]):
    """The node with the user's own devices: arm:0 is on the first machine, node1/arm:0 on node 1."""
    parted = [name.rpartition("/") for name in declared]
    devices = tuple(device for where, _, device in parted if (where == node.name if where else first))
    return replace(node, devices=(*node.devices, *devices))


def networks_on(config: RunConfig, machines: Topology) -> str:
    """ "gpu" or "cpu": the networks' device unless placement is a map."""
    wanted = config.learner.device
    if wanted == "cuda" and not machines.gpus:
        raise ConfigError(
            "learner.device=cuda needs an NVIDIA GPU, and this machine shows none; try learner.device=cpu"
        )
    if wanted != "auto":
        return "gpu" if wanted == "cuda" else "cpu"
    if not machines.gpus:
        return "cpu"
    return "gpu" if config.env.on_gpu or not is_small(config.policy) else "cpu"


def for_all_gpus(config: RunConfig, machines: Topology) -> RunConfig:
    """The recipe with env rows and minibatch of one GPU multiplied by the GPUs of the run. All modes use all GPUs, so
    they are compared at the same work; a map of roles to devices says on which GPUs it simulates."""
    env, where = config.env, config.placement
    if not (env.on_gpu and config.run.per_gpu):
        return config
    count = max(1, machines.gpus)
    if not isinstance(where, str):
        with suppress(PlacementError):  # which planning reports
            slots = [slot for roles, each in parse_map(where, more=True).items() if "sim" in roles for slot in each]
            count = len({(slot.node, slot.devices) for slot in slots})
    config = config.with_values("run", per_gpu=False).with_values("env", num_envs=count * env.num_envs)
    size = config.algo.minibatch_size
    return config.with_values("algo", minibatch_size=size and count * size)


def check_simulator(config: RunConfig, machines: Topology) -> None:
    """Raise ConfigError if the simulator needs a GPU and the machine has none."""
    if config.env.on_gpu and not machines.gpus:
        raise ConfigError("env.backend=cuda needs an NVIDIA GPU, and this machine shows none; try env.backend=auto")


def is_small(policy: PolicyOptions) -> bool:
    """True if one core is enough for the policy."""
    return policy.few_weights <= SMALL_WEIGHTS


def has_small_steps(config: RunConfig) -> bool:
    """True if a core computes a gradient step so fast that more ranks save nothing."""
    weights = max(config.policy.few_weights, config.policy.least_weights)  # 0: unknown
    items = config.algo.minibatch_size or decisions_of(config)
    return 0 < items * weights < SMALL_STEP and not config.learner.shard


def draws_on_gpus(env: Any) -> bool:
    """True if simulators of this env run on cores and render on the machine's GPUs."""
    return bool(env.observed_images) and env_class(env).draws_on_gpus


def torch_device(kind: str) -> str:
    """Torch's name for this kind of device."""
    return "cuda" if kind == "gpu" else "cpu"


def environment(host: PlannedHost) -> dict[str, str]:
    """Environment variables of a host's process, set before it imports anything. GPUs are counted by PCI address, as
    nvidia-smi does: CUDA would put the fastest first."""
    variables = {"EMBODIED_DEVICE": host.device} if host.device else {}
    if host.gpus:
        first, names = host.gpus[0], ",".join(gpu.cuda_name for gpu in host.gpus)
        variables |= {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names}
        variables |= {"MUJOCO_EGL_DEVICE_ID": str(first.index if first.card is None else first.card)}
        variables |= {"EMBODIED_RENDER_FILE": first.render} if first.render else {}
    return variables | ({"EMBODIED_RENDER": host.render} if host.render else {})


def host_plans(
    plan: PlacementPlan, with_policy: Collection[str] = (), imports: tuple[str, ...] = ("torch",)
) -> list[HostPlan]:
    """The hosts that a cluster starts for this plan. Roles `with_policy` have networks, which need these `imports`."""
    return [
        HostPlan(
            *(host.name, host.roles, host.cores, host.threads, environment(host), host.node, host.held),
            min((gpu.memory_bytes for gpu in host.gpus if host.devices), default=float("inf")),
            imports=imports if {*with_policy} & {*host.roles} else (),
        )
        for host in plan.hosts
    ]


def check_devices(config: RunConfig, plan: PlacementPlan) -> None:
    """Raise ConfigError if a device option of the recipe contradicts the placement."""
    wanted = config.learner.device
    for host in plan.hosts:
        on_gpu = host.device.startswith("gpu:")
        where = host.device or f"cpu:{','.join(map(str, host.cores))}"
        if on_gpu and host.roles == ("sim",) and not config.env.on_gpu:
            raise ConfigError(
                f"placement: sim on {host.device}, but {config.env.name} simulates on CPU cores here; "
                f'try sim: {{devices: "cpu:0", render: "{host.device}"}} to draw on the GPU, or env.backend=cuda'
            )
        if not on_gpu and "sim" in host.roles and config.env.on_gpu:
            raise ConfigError(
                f"placement: sim on {where}, but env.backend=cuda simulates on a GPU; try gpu:0, or placement=auto"
            )
        if {"policy", "learner"} & {*host.roles} and wanted != "auto" and on_gpu != (wanted == "cuda"):
            raise ConfigError(
                f"placement: {' and '.join(host.roles)} on {where}, but learner.device={wanted}; "
                "try learner.device=auto"
            )
    learning = [device for host in plan.hosts if "learner" in host.roles for device in host.held if "gpu:" in device]
    if shared := [device for device in learning if learning.count(device) > 1]:
        raise ConfigError(
            f"placement: {len(shared)} learners on {shared[0]}, but NCCL, which sums gradients on GPUs, takes one of "
            f"a GPU; try learner: {shared[0]}"
        )


def divides_requests(config: RunConfig) -> bool:
    """True if several policy workers may share a request: by prompts, or by rows if requests are merged."""
    return env_class(config.env).speaks or config.merged_rows > 1
