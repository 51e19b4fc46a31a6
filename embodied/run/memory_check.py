"""Checks before anything starts: whether a run fits into the machines' memory, and a policy's options to its env.

Memory is estimated from recipe and plan: large policies in policy workers and learners, a language model's engine, the
images of an iteration, simulators with large scenes, and CUDA's and NCCL's own memory. Not counted are small policies,
simulators' other GPU memory, and activations of layers whose width is an option. A worker's GPU memory can be offloaded
to the host while other workers use the GPU, as in the run (`runtime/device_leases.py`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import lcm, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from embodied.config.recipe import RunConfig
from embodied.config.sections import SCORERS
from embodied.core.arrays import gather, padded_rows
from embodied.core.errors import CheckpointError, ConfigError
from embodied.core.files import as_path
from embodied.core.options import broken_rules, never_with, only_with
from embodied.core.types import deal_by_task
from embodied.envs import env_class, import_class
from embodied.envs.config import OWN_SCORE
from embodied.placement import PlacementPlan, PlannedHost, Topology
from embodied.placement.topology import PEAK_FLOPS
from embodied.runtime.published_weights import read_safetensors

if TYPE_CHECKING:
    from embodied.learners.memory_estimate import Memory

# Copies of an image: in the sim's buffer, in shared memory, in the learner's batch, and in its minibatches.
COPIES = 4
EXACT = 4  # bytes of a float32
PROCESS_BYTES = 0.5e9  # of a process of a run, with torch and a simulator; assumed
CUDA_BYTES = 0.78e9  # of CUDA and cuBLAS, for every process on a GPU: 739 MiB on an H200, CUDA 13.0
DRAWING_BYTES = 0.3e9  # of a GPU, for every process that renders there; assumed
NCCL_BYTES = 0.63e9  # of a GPU, for a rank's all-reduce: 598 MiB on an H200, NCCL 2.28
LARGE_BYTES = 1e9  # a folder with more weights holds a model of full size
TEXT_SIMS = 4  # for each GPU
NETWORKS = ("reference", "critic")  # roles with networks like the policy's
START, ROLLOUT, UPDATE = "start", "rollout", "update"
counted: dict[str, Memory | None] = {}  # cached in this process, since counting takes seconds


@dataclass(frozen=True)
class Load:
    """Bytes that a part of the run takes of one memory."""

    what: str
    bytes: float
    node: str
    device: str = ""  # gpu:3; "": the machine's own memory
    phase: str = ""  # the phase in which it is present; "": always
    discarded: float = 0.0  # part of `bytes` that is freed instead of copied when the worker offloads


@dataclass(frozen=True)
class Need:
    """One memory, its content, and its peak use."""

    node: str
    device: str
    has: float
    loads: tuple[Load, ...]

    @property
    def whole(self) -> float:
        """The sum without offloading."""
        return max(self._after_start, self._during(START))

    @property
    def least(self) -> float:
        """On a GPU the peak over phases, since workers take turns; on a host the sum over phases."""
        return max(self._during(phase) for phase in (START, ROLLOUT, UPDATE)) if self.device else self.whole

    @property
    def excess(self) -> float:
        """Bytes that are too many, summed over the phases in which workers take turns."""
        peaks = [self._during(phase) for phase in (START, ROLLOUT, UPDATE)] if self.device else [self.whole]
        return sum(max(0.0, peak - self.has) for peak in peaks)

    def _during(self, phase: str) -> float:
        return sum(load.bytes for load in self.loads if load.phase in ("", phase))

    @property
    def _after_start(self) -> float:
        return sum(load.bytes for load in self.loads if load.phase != START)

    @property
    def place(self) -> str:
        return "/".join(filter(None, [self.node, self.device])) or "this machine"

    def __str__(self) -> str:
        begins = self._during(START) > self._after_start  # then the start is the peak
        loads = [load for load in self.loads if load.phase == "" or (load.phase == START) == begins]
        needed = self.whole if self.whole <= self.has else self.least
        if needed == self.whole:
            parts = describe_sum(loads)
        else:
            phases = (f"{phase}: {' + '.join(describe_sum(self._loads_in(phase)))}" for phase in (ROLLOUT, UPDATE))
            parts = [*describe_sum(self._loads_in("")), f"in turns ({'; '.join(phases)})"]
        has = f" of {number(self.has)}" if self.has < float("inf") else ""
        total = f" = {number(needed)}" if len(parts) > 1 or " x " in parts[0] else ""
        return f"{' + '.join(parts)}{total}{has} GB"

    def _loads_in(self, phase: str) -> list[Load]:
        return [load for load in self.loads if load.phase == phase]


def describe_sum(loads: list[Load]) -> list[str]:
    """Loads as text, grouped by name."""
    merged = gather((load.what, load.bytes) for load in loads)
    return [
        f"{f'{len(sizes)} x ' if len(sizes) > 1 else ''}{what} {number(sum(sizes) / len(sizes))}"
        for what, sizes in merged.items()
    ]


def is_large(config: RunConfig) -> bool:
    """True if its policy has billions of weights, or is a full-size model whose weights are not here."""
    policy = config.policy
    if not policy.published:
        return EXACT * policy.least_weights > LARGE_BYTES
    stored = stored_bytes(as_path(policy.pretrained)) if policy.pretrained else 0
    planned = policy.speaks and policy.pretrained is not None and not stored
    return policy.preset == "full" or stored > LARGE_BYTES or planned


def stored_bytes(folder: Path) -> int:
    """Bytes of a model's weights on disk; 0 without such a folder."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def stored_weights(folder: Path) -> int:
    """The number of a model's weights on disk; 0 without such a folder."""
    blobs = (blob for path in folder.glob("*.safetensors") for blob in read_safetensors(path).values())
    return sum(prod(blob.spec.shape) for blob in blobs)


def measured_memory(config: RunConfig, ranks: int) -> Memory | None:
    """The counted memory of a large policy; None for a small one."""
    if not is_large(config):
        return None
    if not config.policy.published:
        return of_layers(config.policy.least_weights)
    rows = -(-(config.algo.minibatch_size or max(1, decisions_of(config))) // ranks)
    rows = min(rows, config.learner.micro_batch_size or rows)
    alike = config.with_values("learner", micro_batch_size=rows, shard=False, reduce_each_pass=None)
    alike = alike.with_values("policy", **({"cache_gb": None} if config.policy.speaks else {"preset": "full"}))
    files = {} if config.policy.speaks else {"policy": {"pretrained", "statistics"}}  # robot policies need none here
    settings = alike.model_dump_json(include={"policy", "learner", "algo", "env", "roles"}, exclude=files)
    if settings not in counted:
        from embodied.learners.memory_estimate import estimate

        counted[settings] = estimate(alike)
    memory, whole = counted[settings], config.learner.reduce_each_pass is False
    return memory and dataclasses.replace(memory, gradient=memory.gradient if whole else memory.gradient_of_block)


def of_layers(num_weights: int) -> Memory:
    """Memory of `num_weights` float32 weights; trained ones also have a gradient and Adam's two moments."""
    from embodied.learners.memory_estimate import Memory

    weights = EXACT * num_weights
    return Memory(num_weights, num_weights, weights, training=3 * weights, activations=0, trained=weights)


# What workers hold where


def loads(config: RunConfig, plan: PlacementPlan, learn: bool, memory: Memory | None) -> Iterator[Load]:
    """All counted memory, with its place."""
    learners, bytes_of_sim = (
        [host for host in plan.hosts if "learner" in host.roles],
        sim_bytes(config, plan.count("sim"), learn),
    )
    for host in plan.hosts:
        if "sim" in host.roles and bytes_of_sim:
            yield Load("simulators", bytes_of_sim, host.node)
    if learn and (images := image_bytes(config)):
        for host in learners:
            yield Load("images", copies(config) * images / len(learners), host.node, phase=UPDATE)
    added = role_bytes(config, memory, plan) if learn else {}
    for host in plan.hosts:
        device = host.device if host.device.startswith("gpu:") else ""
        for role in (role for role in host.roles if role in added):
            yield Load(role, added[role], host.node, device, ROLLOUT)
    if memory is None:
        cache = vllm_cache(config)
        for host in plan.hosts:
            if cache and "policy" in host.roles:
                yield from divided_load("vLLM's cache", cache, host)
        return
    sharded = config.learner.shard and len(learners) > 1
    rows = -(-config.env.num_envs // plan.count("policy"))
    acting, graphs = acting_bytes(config, memory, rows), graph_bytes(config, memory, rows)
    engine = memory.weights + acting if config.policy.speaks and config.policy.engine == "vllm" else 0
    divided = config.policy.worker_gpus > 1  # then GPUs hold parts of the engine's weights, the host the policy's
    for host in plan.hosts:
        on_gpu = host.device.startswith("gpu:")
        device = host.device if on_gpu else ""
        if host.render:
            yield Load("drawing", DRAWING_BYTES, host.node, host.render)
        for gpu in host.devices if on_gpu else ():
            yield Load("CUDA", CUDA_BYTES, host.node, gpu)
        if on_gpu and learn and "learner" in host.roles and len(learners) > 1:
            yield Load("NCCL", NCCL_BYTES, host.node, device)
        if on_gpu and divided and "policy" in host.roles:
            for gpu in host.devices:
                yield Load("vLLM's NCCL", NCCL_BYTES, host.node, gpu)
        if on_gpu and set(host.roles) & {"policy", "learner"}:
            yield Load("weights on their way to GPUs", memory.weights, host.node, phase=START)
        shared = learn and {"policy", "learner"} <= set(host.roles) and not sharded
        apart = 0 if shared else memory.weights
        if shared:
            yield Load("weights of both", memory.weights, host.node, device)
        if learn and "learner" in host.roles:
            learner_memory = memory.sharded(len(learners)) if sharded else memory.total - memory.weights + apart
            gradients = memory.gradient if sharded else 2 * EXACT * memory.num_trained
            yield Load("learner", learner_memory, host.node, device, UPDATE, discarded=memory.activations + gradients)
        cache = 0 if engine else acting + (graphs if on_gpu else 0)
        if "policy" in host.roles and (learner_memory := apart + cache):
            yield Load("policy", learner_memory, host.node, "" if divided else device, ROLLOUT, discarded=cache)
        if "policy" in host.roles and engine:  # a sleeping engine keeps no memory
            yield from divided_load("vLLM", engine, host)
        if "policy" in host.roles and divided:
            yield Load("weights on their way to vLLM", memory.weights, host.node, phase=ROLLOUT)
    if learn and (sharded or any("policy" in h.roles and "learner" not in h.roles for h in plan.hosts)):
        yield Load("weights handed over", memory.trained, learners[0].node)


def divided_load(what: str, num_bytes: float, host: PlannedHost) -> Iterator[Load]:
    """What an engine holds during rollouts and discards afterwards, equally on all GPUs of its worker."""
    gpus = [device for device in host.devices if device.startswith("gpu:")] or [""]
    for device in gpus:
        bytes_of_gpu = num_bytes / len(gpus)
        yield Load(what, bytes_of_gpu, host.node, device, ROLLOUT, discarded=bytes_of_gpu)


def role_bytes(config: RunConfig, memory: Memory | None, plan: PlacementPlan) -> dict[str, float]:
    """Bytes of a worker of each extra role with a large model; of a reference without the activations of its passes."""
    roles, policy = config.roles, config.policy
    needed: dict[str, float] = {}
    shards = {role: plan.count(role) for role in NETWORKS if config.shards_role(role, [h.roles for h in plan.hosts])}
    if memory and roles.reference:
        count = shards.get("reference", 0)
        needed["reference"] = memory.weights / count + memory.gathered if count else memory.weights
    if memory and roles.critic:
        count, whole = shards.get("critic", 0), memory.weights + memory.training + memory.activations
        alone = dataclasses.replace(memory, reference=0, averaged=0)
        needed["critic"] = alone.sharded(count) if count else whole
    if roles.reward_model and (stored := stored_bytes(as_path(roles.reward_model))) > LARGE_BYTES:
        needed["reward"] = stored
    if roles.judge:
        judging = config.model_copy(update={"policy": roles.judge_policy(policy)})
        model = measured_memory(judging, 1)
        needed |= {"judge": model.weights + acting_bytes(judging, model, policy.max_running)} if model else {}
    return needed


def vllm_cache(config: RunConfig) -> float:
    """Bytes of `policy.cache_gb`; vLLM reserves them also for a small model. 0 for other engines."""
    policy = config.policy
    return 1e9 * (policy.cache_gb or 0.0) if policy.speaks and policy.engine == "vllm" else 0.0


def acting_bytes(config: RunConfig, memory: Memory, rows: int) -> float:
    """Bytes of a policy worker's activations for `rows` env rows; for language policies its KV cache, at most
    `policy.cache_gb`."""
    policy = config.policy
    if not policy.speaks:
        return memory.acting * rows
    given = 1e9 * policy.cache_gb if policy.cache_gb else None
    if policy.engine == "http":  # on the server
        return 0.0
    if policy.engine == "vllm":  # vLLM reserves its whole cache at the start
        return given or memory.acting * policy.max_running
    return min(memory.acting * min(policy.max_running, rows), given or float("inf"))


def graph_bytes(config: RunConfig, memory: Memory, rows: int) -> int:
    """Bytes of a policy worker's captured decisions, one for each number of rows up to its own."""
    if config.learner.graphs == "off":
        return 0
    return memory.deciding * sum({padded_rows(count) for count in range(1, rows + 1)})


def needs(config: RunConfig, plan: PlacementPlan, machines: Topology, learn: bool = True) -> list[Need]:
    """Every memory of the machines with counted contents."""
    estimated = measured_memory(config, plan.count("learner") if learn else 1)
    by_place = gather(((load.node, load.device), load) for load in loads(config, plan, learn, estimated))
    nodes = {"": machines.nodes[0], **{node.name: node for node in machines.nodes}}
    limit = float("inf") if config.cluster.memory_gb is None else config.cluster.memory_gb * 1e9
    gpus = []
    for (name, device), device_loads in by_place.items():
        if device:
            memory = {f"gpu:{gpu.index}": gpu.memory_bytes for gpu in nodes[name].gpus}
            gpus.append(Need(name, device, min(limit, memory[device]), tuple(device_loads)))
    for need in gpus:  # offloaded data is copied to host memory, which stays allocated
        if need.whole > need.has and need.whole > need.least:
            copied = sum(load.bytes - load.discarded for load in need.loads if load.phase)
            aside = Load("set aside from GPUs", copied, need.node, phase=UPDATE)  # not allocated at the start
            by_place.setdefault((need.node, ""), []).append(aside)
    on_hosts = {name: device_loads for (name, device), device_loads in by_place.items() if not device}
    return [
        *gpus,
        *(Need(name, "", nodes[name].memory_bytes, tuple(device_loads)) for name, device_loads in on_hosts.items()),
    ]


def with_saved_memory(config: RunConfig, plan: PlacementPlan, machines: Topology) -> tuple[RunConfig, PlacementPlan]:
    """The config with learner.checkpoint_activations=auto and learner.reduce_each_pass=null decided, and the plan with
    the reason. The first of the options that fits: the least to compute again, and gradients summed once a step."""
    again, each_pass = config.learner.checkpoint_activations, config.learner.reduce_each_pass
    recomputed = (False, "half", "language", True) if again == "auto" else (again,)
    reduced = (False, True) if each_pass is None and config.learner.shard else (each_pass,)
    options = [
        config.with_values("learner", checkpoint_activations=blocks, reduce_each_pass=exchanges)
        for blocks, exchanges in product(recomputed, reduced)
    ]
    fitting = (option for option in options[:-1] if not any(need.excess for need in needs(option, plan, machines)))
    decided = next(fitting, options[-1])
    if not decided.learner.reduce_each_pass or each_pass:
        return decided, plan
    saving = "gradients are summed after each pass, since whole gradients do not fit (learner.reduce_each_pass)"
    return decided, dataclasses.replace(plan, reason="; ".join(filter(None, [plan.reason, saving])))


def describe_memory(memories: list[Need]) -> list[str]:
    """One line for each group of equal memories."""
    alike = gather(((bool(need.device), str(need)), need) for need in memories)
    more = [f" and {len(same) - 1} more alike" if len(same) > 1 else "" for same in alike.values()]
    return [f"{same[0].place}{others}: {text}" for ((_, text), same), others in zip(alike.items(), more)]


# Refusals


def describe_seconds(config: RunConfig, plan: PlacementPlan, machines: Topology) -> str:
    """A line with the time that an iteration's gradient steps on full-length answers take at the peak rate of the
    learners' GPUs; empty for robots, and on cores."""
    memory, algo = measured_memory(config, plan.count("learner")), config.algo
    nodes = {"": machines.nodes[0], **{node.name: node for node in machines.nodes}}
    held = [(host.node, host.device) for host in plan.hosts if "learner" in host.roles]
    if memory is None or not memory.products or not all(device.startswith("gpu:") for _, device in held):
        return ""
    models = [gpu.model for node, at in held for gpu in nodes[node].gpus if f"gpu:{gpu.index}" == at]
    peaks = [PEAK_FLOPS.get(model, PEAK_FLOPS["H100"]) for model in models]
    # A backward pass costs as much as two forward passes
    passes = {False: 3.0, "half": 3.5}.get(config.learner.checkpoint_activations, 4.0)
    answers = algo.groups * algo.group_size
    operations = 2 * passes * memory.products * answers * algo.epochs
    return (
        f"time        {answers:,} answers of full length take at least {operations / sum(peaks):.2g} s an iteration to "
        f"learn from: {operations / 1e15:,.1f} PFLOP at the peak of {len(peaks)} GPUs ({peaks[0] / 1e12:.0f} TFLOP/s)\n"
    )


def copies(config: RunConfig) -> int:
    """The number of copies of an iteration's images; with schedule=async batches of older rollouts wait in the
    learners."""
    pipeline = config.pipeline
    return COPIES + (pipeline.async_level if pipeline.schedule == "async" else 0)


# Images and simulators


def image_bytes(config: RunConfig) -> int:
    """Bytes of one copy of an iteration's images; 0 without cameras, or if the length of episodes is unknown."""
    pixels = sum(height * width * 3 for height, width in config.env.observed_images.values())
    return decisions_of(config) * pixels if pixels else 0


def decisions_of(config: RunConfig) -> int:
    """Decisions of an iteration. GRPO's groups play whole episodes, so the longest episode counts."""
    algo = config.algo
    if not algo.whole_episodes:
        return config.env.num_envs * algo.rollout_decisions
    steps = env_class(config.env).longest_episode(config.env) or 0
    return algo.groups * algo.group_size * -(-steps // config.policy.chunk)


def check_images(config: RunConfig, memory_bytes: float) -> None:
    """Raise if machines with so much memory could not hold them."""
    num_bytes = copies(config)
    need = num_bytes * image_bytes(config)
    if need > memory_bytes:
        env, algo = config.env, config.algo
        if not algo.whole_episodes:
            played = f"env.num_envs={env.num_envs} * algo.rollout_decisions={algo.rollout_decisions}"
            key, value = "algo.rollout_decisions", int(algo.rollout_decisions * memory_bytes / need / 2)
        else:
            played = f"algo.groups={algo.groups} * algo.group_size={algo.group_size} episodes,"
            key, value = "algo.groups", int(algo.groups * memory_bytes / need / 2)
        works = f"{key}={value}" if value else "a smaller env.image_size"
        raise ConfigError(
            f"{played} images of {len(env.cameras)} "
            f"camera(s) are {gigabytes(need / num_bytes)} an iteration and are held up to {num_bytes} times: "
            f"{gigabytes(need)}, and this machine has {gigabytes(memory_bytes)}; try {works}"
        )


def sim_bytes(config: RunConfig, num_sims: int, learn: bool) -> float:
    """Bytes of the largest of `num_sims` sim workers, the one with most tasks."""
    env, tasks = config.env, most_tasks(config, num_sims, learn)
    if learn:
        return env.worker_bytes(-(-env.num_envs // num_sims), tasks)
    share, num_envs = -(-config.eval.episodes // num_sims), config.eval.num_envs or env.num_envs
    return env.worker_bytes(min(-(-num_envs // num_sims), share), tasks)


def most_tasks(config: RunConfig, num_sims: int, learn: bool) -> int:
    """The largest number of tasks of one of `num_sims` sim workers: the tasks of its env rows (all, if the rows are no
    multiple of the tasks) and of its share of an evaluation."""
    num_tasks = len(env_class(config.env).tasks(config.env))
    if num_tasks == 1:
        return 1
    played = [{at % num_tasks for at in dealt} for dealt in deal(config.eval.episodes, num_sims, num_tasks)]
    if learn:
        groups = config.algo.groups if config.algo.whole_episodes else config.env.num_envs
        if groups % num_tasks:
            return num_tasks
        rows = deal(groups, num_sims, num_tasks)
        played = [tasks | {at % num_tasks for at in dealt} for tasks, dealt in zip(played, rows, strict=True)]
    return max(map(len, played))


def deal(count: int, num_sims: int, num_tasks: int) -> list[list[int]]:
    return deal_by_task(np.arange(count) % num_tasks, num_sims)


def check_simulators(config: RunConfig, num_sims: int, memory_bytes: float, learn: bool = True) -> None:
    """Raise if machines with so much memory could not hold them."""
    env = config.env
    bytes_of_sim = sim_bytes(config, num_sims, learn)
    if num_sims * bytes_of_sim > memory_bytes:
        works = [*smaller_simulators(config, num_sims, memory_bytes, learn)] or ["fewer env.num_envs"]
        raise ConfigError(
            f"{num_sims} sim workers of env.name={env.name} take about {gigabytes(bytes_of_sim)} each, "
            f"{gigabytes(num_sims * bytes_of_sim)} in all, and this machine has {gigabytes(memory_bytes)}; try "
            f"{', or '.join(works)}"
        )


def smaller_simulators(config: RunConfig, num_sims: int, memory_bytes: float, learn: bool) -> Iterator[str]:
    """Options with which the simulators fit into `memory_bytes`: fewer tasks in each, or fewer workers."""
    env = config.env

    def fits(workers: int, **options: int) -> bool:
        return workers * sim_bytes(config.with_values("env", **options), workers, learn) <= memory_bytes

    num_tasks = len(env_class(env).tasks(env))
    if learn and not config.algo.whole_episodes and env.num_envs % num_tasks:  # every worker has rows of every task
        step = lcm(num_tasks, num_sims * config.pipeline.stages)
        rows = max(1, env.num_envs // step) * step
        if fits(num_sims, num_envs=rows):
            yield f"env.num_envs={rows}, which {num_tasks} tasks divide, so that a worker plays few of them"
    for tasks in range(getattr(env, "tasks_in_memory", 1) - 1, 0, -1):
        if fits(num_sims, tasks_in_memory=tasks):
            yield f"env.tasks_in_memory={tasks}"
            break
    for workers in range(num_sims - 1, 0, -1):
        if env.num_envs % workers == 0 and fits(workers):
            cores = f"cpu:0-{workers - 1}*{workers}" if workers > 1 else "cpu:0"
            yield f"""{workers} sim worker(s), placement='{{"sim,policy": "{cores}", learner: "cpu:0"}}'"""
            break


def most_sims(config: RunConfig, machines: Topology, learn: bool) -> int | None:
    """The largest number of sim workers that leaves a third of the machines' memory free. Text envs mostly score, so
    they get a few for each GPU. None: any number."""
    if config.policy.speaks:
        return TEXT_SIMS * machines.gpus or None
    memory = sum(node.memory_bytes for node in machines.nodes) * 2 / 3
    if memory == float("inf"):
        return None
    counts = range(1, config.env.num_envs + 1)
    return max((n for n in counts if n * sim_bytes(config, n, learn) <= memory), default=1)


def gigabytes(num_bytes: float) -> str:
    return f"{number(num_bytes)} GB"


def number(num_bytes: float) -> str:
    """Bytes as text, in GB."""
    return f"{num_bytes / 1e9:.0f}" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g}"


LARGE_MODEL = 3e9  # weights of a language model for which these are usually too large:
HIGHEST_LR, HIGHEST_EPS = 1e-5, 1e-7
PICTURES = (never_with("policy.verify", {}, "proofs of answers to pictures are not checked; leave it out"),)
LEARNING = (
    never_with(
        {"policy.weights": None},
        {"policy.engine": "http"},
        "the server needs the learned weights; set a folder that it sees as well, such as policy.weights=/dev/shm",
    ),
)
ACTING = (never_with("env.side_by_side", {}, "only text envs hold conversations; leave it out"),)
TEXT = {"policy.speaks": True}
PLAYING = (
    never_with(
        "eval.overlay eval.cameras eval.mosaic eval.dataset",
        TEXT,
        "all conversations are written down anyway; leave it out",
    ),
    never_with(
        "eval.top_p eval.top_k eval.min_p",
        {"eval.temperature": 0, **TEXT},
        "it takes the likeliest token; leave it out",
    ),
    only_with("eval.top_p eval.top_k eval.min_p", TEXT, "actions are no tokens; leave it out"),
    only_with("eval.samples eval.sets", TEXT, "only text envs are asked questions, in samples and sets; leave it out"),
    *(
        never_with(
            "env.rewards",
            {f"roles.{scorer}": bool, "roles.reward_weight": None},
            "it replaces them; set roles.reward_weight to add its reward to theirs",
        )
        for scorer in SCORERS
    ),
    only_with("env.rewards", TEXT, "a robot's reward is env.reward=my_pkg.my_module:my_reward"),
)


def check_pictures(config: RunConfig, kind: Any) -> None:
    """Refuse a text-only model for an env with pictures, and options that do not work with pictures."""
    if not kind.shows_pictures(config.env):
        return
    policy, given = config.policy, f"env.name={config.env.name} shows pictures"
    if not policy.reads_pictures:
        keys = [key for key in ("pretrained", "preset", "name") if getattr(policy, key, None)]
        model = f"policy.{keys[0]}={getattr(policy, keys[0])}"
        raise ConfigError(
            f"{given}, and {model} reads only text; take a model that reads pictures (policy.preset=tiny_vl, or a "
            "folder of Qwen2.5-VL, Idefics3 or SmolVLM)"
        )
    if policy.engine != "transformers" and kind.shows_videos(config.env):
        raise ConfigError(
            f"env.name={config.env.name} shows videos, which policy.engine={policy.engine} does not read; try "
            "policy.engine=transformers"
        )
    refuse(f"{given}: {problem}" for problem in broken_rules(PICTURES, config))


def check_speech(config: RunConfig, kind: Any, learn: bool) -> None:
    """Refuse a robot policy for a text env, a language policy for a simulator, and options of the other kind."""
    refuse(config.language_gap(kind.speaks, "policy.name=language, or a checkpoint of such a policy"))
    refuse(broken_rules((*PLAYING, *(LEARNING if learn else ())), config))
    options = config.eval
    if options.episodes % options.samples and not options.sets:
        fit = max(options.episodes // options.samples, 1) * options.samples
        raise ConfigError(
            f"eval.episodes={options.episodes} counts all answers and is not a multiple of "
            f"eval.samples={options.samples}; try eval.episodes={fit}"
        )


def check_scorers(config: RunConfig) -> None:
    """Refuse rewards and a verifier that cannot be imported, and folders without a reward model or judge."""
    roles = config.roles
    for reward in getattr(config.env, "rewards", ()):
        if reward.name != OWN_SCORE:
            import_class(reward.name, "env.rewards")
    if roles.verifier and not callable(verifier := import_class(roles.verifier, "roles.verifier")):
        raise ConfigError(f"roles.verifier={roles.verifier} is of type {type(verifier).__name__}, not a function")
    for key in ("reward_model", "judge"):
        name = getattr(roles, key)
        if name not in (None, "start") and not (as_path(name) / "config.json").is_file():
            raise CheckpointError(f"roles.{key}={name}: config.json is missing, so it is not a folder of a model")


def remarks(config: RunConfig, learns: bool) -> Iterator[str]:
    """Notes for the first screen: imitated questions that evaluations ask, and settings for the size of a model."""
    policy, algo, file = config.policy, config.algo, getattr(config.env, "file", None)
    if file and config.sft.data == file and not (getattr(config.env, "held_out", file) or config.eval.sets):
        yield "evaluations ask questions that are imitated, since sft.data has all of env.file; try env.held_out=FILE"
    if not (learns and policy.speaks and policy.published and policy.pretrained) or config.sft.data:
        return
    better = {"lr": 1e-6} if algo.lr > HIGHEST_LR and not (policy.lora_rank or policy.train_layers) else {}
    better |= {"adam_eps": 1e-8} if algo.adam_eps > HIGHEST_EPS else {}
    if better and (weights := num_weights(config)) >= LARGE_MODEL:
        keys = " and ".join(f"algo.{key}={value:g} (now {getattr(algo, key):g})" for key, value in better.items())
        yield f"{weights / 1e9:.2g} billion weights learn in smaller steps than this recipe's: try {keys}"


def num_weights(config: RunConfig) -> int:
    """The number of weights of the model in a folder, from its files or its shape."""
    stored = stored_weights(as_path(config.policy.pretrained))
    counted_by_shape = None if stored else measured_memory(config, 1)
    return counted_by_shape.num_weights if counted_by_shape else stored


def refuse(problems: Iterable[str]) -> None:
    if sentences := [*problems]:
        raise ConfigError("\n".join(sentences))
