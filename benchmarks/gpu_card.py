"""Measures this toolkit on one GPU and writes a card: the GPU's name, driver and versions, and figures by block.

    python -m benchmarks.gpu_card --ppo PATH/ppo.py --ppo-fast PATH/ppo_fast.py
    python -m benchmarks.gpu_card --blocks openvla pi0    # some blocks; smolvla also runs without a GPU
    python -m benchmarks.gpu_card --tiny                  # all of it in small on a CPU, to see that it runs

The most valuable blocks come first, for a card that is there for half an hour. Each has four minutes in a separate
process and writes OUT/BLOCK.json. A finished block is not repeated, so an interrupted card continues; results of
another GPU have a folder of their own (OUT/GPU). The card is card.json and card.md. `--ppo` and `--ppo-fast` are
ManiSkill's own scripts (examples/baselines/ppo); without them their blocks are left out. A machine without a network
needs wheels of missing packages (`scripts/card_wheels.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.common import (
    RESULTS,
    ROOT,
    code_commit,
    environment,
    machine,
    markdown,
    measure,
    only_run,
    packages,
    read_metrics,
    train_command,
    write_json,
)

LIMIT_S = 240.0  # of a block; small ones on a busy CPU may take longer
TINY_LIMIT_S = 590.0
CARD = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # the measured GPU
GOAL = 0.95  # success of an evaluation
PREFIX = "block-"
GPU_ENV = ["env.num_envs=1024", "eval.episodes=128", "eval.videos=0", "run.eval_every=5"]
SMALL_ENV = [
    "env.num_envs=8",
    "algo.rollout_decisions=16",
    "algo.minibatch_size=32",
    "eval.episodes=4",
    "eval.videos=0",
]
MOVE = re.compile(r"(offload|onload) (.+), ([\d.e+]+) MB")

Figures = dict[str, Any]


# PPO from states, ours and ManiSkill's


def ppo(asked: argparse.Namespace) -> Figures:
    """maniskill_ppo_gpu."""
    with tempfile.TemporaryDirectory() as folder:
        more = [f"run.dir={folder}", f"run.env_steps={asked.steps}"]
        recipe, options = ("pointmass_ppo", SMALL_ENV) if asked.tiny else ("maniskill_ppo_gpu", GPU_ENV)
        started = time.time()
        measure(train_command(recipe, *options, *more), environment(), LIMIT_S)
        run = only_run(Path(folder))
        rows, reached = read_metrics(run), None
        for file in sorted(run.glob("eval/v*/results.json")):
            if reached is None and (success_of(json.loads(file.read_text())) or 0) >= GOAL:
                reached = file.stat().st_mtime - started
        late = rows[len(rows) // 2 :]  # after compilation and other one-time costs
        return {"steps_per_s": median(row["steps_per_s"] for row in late), "seconds_to_95": reached}


def success_of(results: Figures) -> float | None:
    """The success rate in an evaluation's file, in any of its forms."""
    found = results.get("success_once")
    if isinstance(found, Mapping):
        return found.get("rate")
    return next((rate for part in results.values() if isinstance(part, Mapping) and (rate := success_of(part))), None)


def maniskills_own(script: str, asked: argparse.Namespace, *options: str) -> Figures:
    """One of ManiSkill's scripts, whose figures are in its TensorBoard file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    words = ["--env-id=PickCube-v1", "--num-envs=1024", f"--total-timesteps={asked.steps}", "--no-capture-video"]
    with tempfile.TemporaryDirectory() as folder:
        started = time.time()
        command = [sys.executable, str(Path(script).resolve()), *words, *options]
        subprocess.run(command, cwd=folder, env=environment(), check=True, timeout=LIMIT_S, stdout=subprocess.DEVNULL)
        (file,) = Path(folder).glob("runs/*/events.*")
        events = EventAccumulator(str(file)).Reload()
        speeds = [event.value for event in events.Scalars("charts/SPS")]
        successes = [(event.wall_time - started, event.value) for event in events.Scalars("eval/success_once")]
    return {"steps_per_s": speeds[-1], "seconds_to_95": next((at for at, rate in successes if rate >= GOAL), None)}


def ppo_maniskill(asked: argparse.Namespace) -> Figures:
    """ManiSkill's ppo.py."""
    return maniskills_own(asked.ppo, asked)


def ppo_fast(asked: argparse.Namespace) -> Figures:
    """ManiSkill's ppo_fast.py, compiled and with CUDA graphs."""
    return maniskills_own(asked.ppo_fast, asked, *([] if asked.tiny else ["--compile", "--cudagraphs"]))


def points(asked: argparse.Namespace) -> Figures:
    """maniskill_ppo_gpu with an almost free simulator (`gpu_points.py`): the toolkit's own cost with graphs, without
    graphs, and with rollouts through the host's memory."""
    device, where = ("cpu", "cpu:0") if asked.tiny else ("cuda", "gpu:0")
    figures: Figures = {}
    for arm, tensors, more in (("graphs", True, []), ("no_graphs", True, ["learner.graphs=off"]), ("host", False, [])):
        env = {"name": "benchmarks.gpu_points:GpuPoints", "num_envs": 8 if asked.tiny else 1024}
        env |= {"on_success": "continue", "kwargs": {"device": device, "tensors": tensors}}
        kept = [f"env={json.dumps(env)}", f'placement={{"sim,policy": "{where}", learner: "{where}"}}', *more]
        kept += ["algo.minibatch_size=40"] if asked.tiny else []
        kept += ["run.per_gpu=false", "run.env_steps=null", "run.eval_every=null", "eval.episodes=4", "eval.num_envs=4"]
        with tempfile.TemporaryDirectory() as folder:
            command = train_command("maniskill_ppo_gpu", *kept, f"run.dir={folder}")
            command.append(f"run.iterations={2 if asked.tiny else 10}")
            measure(command, environment(), LIMIT_S / 3)
            rows = read_metrics(only_run(Path(folder)))
        figures[f"{arm}_steps_per_s"] = median(row["steps_per_s"] for row in rows[len(rows) // 2 :])
    return figures


# Plans, memory and weights


def plan(asked: argparse.Namespace) -> Figures:
    """Profile and plan: the prediction for every mode, and its error."""
    with tempfile.TemporaryDirectory() as folder:
        recipe, options = ("pointmass_ppo", SMALL_ENV) if asked.tiny else ("maniskill_ppo_gpu", GPU_ENV)
        more = [f"out={folder}", "profile=new", f"rounds={1 if asked.tiny else 5}", f"run.dir={folder}/runs"]
        options = [option for option in options if not option.startswith("run.")]
        command = [sys.executable, "-m", "embodied.benchmark", f"recipe={recipe}", *options, *more]
        measure([*command, f"seconds={10 if asked.tiny else 120}"], environment(), LIMIT_S)
        (found,) = json.loads((Path(folder) / "bench.json").read_text())["results"]
    figures = {}
    for mode, expected in found["expected"].items():
        seconds = median(each["seconds"] for each in found["rounds"][mode])
        figures |= {f"{mode}_s": seconds, f"{mode}_error": expected["seconds"] / seconds - 1}
    return figures


def language(asked: argparse.Namespace) -> Figures:
    """GRPO of a language model with and without offloading: tokens/s, and the memory released by learner and engine."""
    figures: Figures = {}
    memory = 0.06 if asked.tiny else 5  # GB: enough for learner or engine, not for both
    for arm, options in {"awake": [], "asleep": [f"cluster.memory_gb={memory}"]}.items():
        with tempfile.TemporaryDirectory() as folder:
            small = [
                "env.num_envs=16",
                "algo.groups=2",
                "eval.episodes=4",
                "algo.max_empty=1000",
                "run.start_from=null",
            ]
            recipe, more = (
                ("sums_grpo", small)
                if asked.tiny
                else ("smol_grpo", ["policy.engine=vllm", "policy.cache_gb=2", "eval.episodes=4"])
            )
            kept = [*options, *more, "placement=collocated", "eval.videos=0", f"run.dir={folder}"]
            command = train_command(recipe, *kept, f"run.iterations={2 if asked.tiny else 12}")
            measure(command, environment(), LIMIT_S / 2)
            run = only_run(Path(folder))
            rows = read_metrics(run)[1:]
            for name in ("text/tokens_per_s", "engine/tokens_per_s"):
                figures[f"{arm}_{name}"] = mean(row[name] for row in rows)
            figures |= {f"{arm}_{name}": value for name, value in moves(run / "trace.json").items()}
    return figures


def fused_loss(asked: argparse.Namespace) -> Figures:
    """Log-probs of tokens from hidden states and a vocabulary's weights, and their gradients: all places at once, in
    parts as learners compute them, and by liger-kernel's fused linear-cross-entropy. Milliseconds, and GB at the peak
    beside the inputs. Learners also want entropies, which the fused loss lacks."""
    import torch
    from torch.nn import functional as F

    from embodied.policies.language.policy import LOGITS_BYTES, InParts

    device, (tokens, width, vocab) = ("cpu", (64, 16, 96)) if asked.tiny else ("cuda", (16_384, 2048, 151_936))
    half = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    hidden, head = torch.randn(tokens, width, **half), torch.randn(vocab, width, **half)
    chosen, most = torch.arange(tokens, device=device) % vocab, max(1, LOGITS_BYTES // (4 * vocab))

    def score(hidden: Any, takes: Any, chosen: Any) -> tuple[Any, ...]:
        return (F.linear(hidden, head).float().log_softmax(-1)[takes, chosen],)

    def in_parts() -> Any:
        firsts, every = range(0, tokens, most), torch.arange(tokens, device=device)
        parts = [(first, every[first : first + most] - first, chosen[first : first + most]) for first in firsts]
        return -InParts.apply(score, most, parts, hidden, head)[0].mean()

    ways = {"at_once": lambda: F.cross_entropy(F.linear(hidden, head).float(), chosen), "in_parts": in_parts}
    figures: Figures = {}
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss()
        ways["liger"] = lambda: fused(head, hidden, chosen)
    except ImportError:
        figures["liger"] = "liger-kernel is not installed"
    for name, loss in ways.items():
        before = 0
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        try:
            figures[f"{name}_ms"] = 1000 * best_seconds(lambda: loss().backward(), device)  # noqa: B023
            figures[f"{name}_GB"] = (torch.cuda.max_memory_allocated() - before) / 1e9 if device == "cuda" else 0.0
        except RuntimeError as err:  # too little memory
            figures[name] = str(err)[:200]
        hidden.grad = head.grad = None
    return figures


def divided(asked: argparse.Namespace) -> Figures:
    """GRPO of a language model that vLLM divides over all GPUs, and over one: tokens/s."""
    import torch

    gpus = 2 if asked.tiny else torch.cuda.device_count()
    if gpus < 2:
        raise SystemExit("this machine shows fewer than two GPUs")
    small = ["env.num_envs=16", "algo.groups=2", "algo.max_empty=1000", "policy.preset=tiny", "policy.max_length=64"]
    recipe, more = (
        ("sums_grpo", [*small, "run.start_from=null"]) if asked.tiny else ("smol_grpo", ["policy.cache_gb=2"])
    )
    figures: Figures = {}
    for parts in (1, gpus):
        with tempfile.TemporaryDirectory() as folder:
            kept = ["policy.engine=vllm", f"policy.tensor_parallel={parts}", "placement=collocated", *more]
            kept += ["eval.episodes=4", "eval.videos=0", "faults.hang_s=500", f"run.dir={folder}"]
            command = train_command(recipe, *kept, f"run.iterations={2 if asked.tiny else 12}")
            measure(command, environment(), LIMIT_S / 2)
            rows = read_metrics(only_run(Path(folder)))[1:]
        name = "on_one" if parts == 1 else "divided"
        figures[f"{name}_tokens_per_s"] = mean(row["engine/tokens_per_s"] for row in rows)
    return figures | {"gpus": gpus}


def moves(trace: Path) -> Figures:
    """GB and seconds of offloading and onloading by part, from a run's trace."""
    told = json.loads(trace.read_text())
    seen: dict[str, list[tuple[float, float]]] = {}
    for event in told["traceEvents"] if isinstance(told, dict) else told:
        if found := MOVE.fullmatch(event.get("name", "")):
            seen.setdefault(f"{found[1]} {found[2]}", []).append((float(found[3]) / 1e3, event["dur"] / 1e6))
    return {f"{what}, {unit}": median(pair[at] for pair in pairs) for what, pairs in seen.items()
            for at, unit in enumerate(("GB", "s"))}  # fmt: skip


def swap(asked: argparse.Namespace) -> Figures:
    """Offloads and onloads a learner: GB in use before, between and after."""
    import torch

    from embodied.algorithms.config import PPOConfig
    from embodied.core.types import ActionSpec, EnvSpec
    from embodied.learners.config import LearnerConfig
    from embodied.learners.learner_worker import LearnerWorker
    from embodied.policies.config import MLPConfig
    from embodied.profiling.role_probe import moves_of, standalone_worker, used_bytes
    from embodied.runtime.weights import new_name

    width, device = (64, "cpu") if asked.tiny else (4096, "cuda")  # wider ones take minutes to draw
    policy = MLPConfig(hidden=(width,) * (3 if asked.tiny else 8))
    learner = standalone_worker(
        LearnerWorker, policy, PPOConfig(), LearnerConfig(device=device), 0, None, device, tick=lambda: None
    )
    learner.build(EnvSpec(ActionSpec(8), state_dim=42), new_name(), snapshot=False)
    for parameter in learner.policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for master in learner.optimizer.masters:
        learner.optimizer.adam.state_of(master)
    gb = lambda: used_bytes(device) / 1e9  # noqa: E731
    figures = {"before_GB": gb()}
    moved = moves_of(learner)
    figures |= {"offload_s": moved.offload_s, "onload_s": moved.onload_s, "after_GB": gb()}
    learner.offload()
    return figures | {"away_GB": gb(), "declared_GB": moved.bytes / 1e9}


def weights(asked: argparse.Namespace) -> Figures:
    """Weights to another process on the same GPU, by a CUDA IPC handle and through the host's memory."""
    import torch
    import torch.multiprocessing as processes

    from embodied.runtime.device_memory import Offloader

    size, device = (10**6, "cpu") if asked.tiny else (4 * 10**9, "cuda")
    tensor, offloader = torch.ones(size, dtype=torch.uint8, device=device), Offloader()
    with processes.get_context("spawn").Pool(1) as pool:
        handed = [pool.apply(copy_seconds, (tensor,)) for _ in range(3)]
    tensor, there_and_back = tensor.clone(), []  # sent tensors cannot be moved
    for _ in range(3):  # the first move also allocates pinned memory
        started = time.perf_counter()
        offloader.offload([tensor])
        offloader.onload()
        there_and_back.append(time.perf_counter() - started)
    rate = lambda seconds: size / 1e9 / min(seconds)  # noqa: E731
    return {"ipc_GB_per_s": rate(handed), "host_GB_per_s": rate(there_and_back)}


def copy_seconds(tensor: Any) -> float:
    """Seconds of copying another process's tensor."""
    started = time.perf_counter()
    copy = tensor.clone()
    copy[-1].item()  # waits for a GPU
    return time.perf_counter() - started


# Large policies, with random weights of their shapes


def empty(kind: str, asked: argparse.Namespace, **options: Any) -> Any:
    """A policy of full size without weights, or a tiny one."""
    from embodied.policies.openvla.config import OpenVLAConfig, OpenVLAOFTConfig
    from embodied.policies.pi0.config import Pi0Config

    preset, side = ("tiny", 32) if asked.tiny else ("full", 224)
    config = {"openvla": OpenVLAConfig, "openvla_oft": OpenVLAOFTConfig, "pi0": Pi0Config}[kind]
    half = {} if asked.tiny else {"dtype": "bfloat16"}
    return policy_of_size(kind, arm(side), config(name=kind, preset=preset, **half, **options))


def arm(side: int) -> Any:
    """What a camera, the state and the instruction of an arm look like, with square images."""
    from embodied.core.types import ActionSpec, EnvSpec

    return EnvSpec(ActionSpec(7), state_dim=8, images={"camera": (side, side, 3)}, instruction=True)


def policy_of_size(kind: str, spec: Any, config: Any) -> Any:
    """A policy without weights and files, for counting memory."""
    from embodied.policies import policy_class

    return policy_class(kind).for_memory_estimate(config, spec)


def large(kind: str, asked: argparse.Namespace, **options: Any) -> Any:
    """The same on the GPU, with random weights."""
    import torch

    policy, device = empty(kind, asked, **options), "cpu" if asked.tiny else "cuda"
    for tensor in policy.buffers():
        tensor.zero_()
    for parameter in policy.parameters():
        fresh = torch.empty_like(parameter, device=device)
        parameter.data = fresh.normal_(0, 0.01) if fresh.is_floating_point() else fresh.zero_()
    return policy.to(device).eval()


def seen(policy: Any, rows: int) -> Any:
    import numpy as np

    (name, shape), draw = next(iter(policy.spec.images.items())), np.random.default_rng(0)
    images = {name: draw.integers(0, 256, (rows, *shape), np.uint8)}
    state = np.zeros((rows, policy.spec.state_dim), np.float32)
    return {"images": images, "state": state, "instruction": ["put the carrot on the plate"] * rows}


def best_seconds(work: Callable[[], Any], device: str, tries: int = 5) -> float:
    """The best seconds of a few tries, after a first try that may compile."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    work()
    found = []
    for _ in range(tries):
        wait()
        started = time.perf_counter()
        work()
        wait()
        found.append(time.perf_counter() - started)
    return min(found)


def acting(policy: Any, asked: argparse.Namespace, read: float = 0.0) -> Figures:
    """Decisions a second by rows, eager and captured as graphs, beside the most that the device allows: its rate of
    products, counted in a decision of one row, and then its bandwidth for `read` bytes of weights (once for all rows;
    0: all weights once)."""
    import numpy as np
    from torch.utils.flop_counter import FlopCounterMode

    from embodied.learners.learner_worker import peak_rate
    from embodied.runtime.device_graphs import CapturedGraphs
    from embodied.runtime.device_memory import num_bytes

    draw, width = np.random.default_rng(1), policy.noise_spec().width
    with FlopCounterMode(display=False) as counter:
        policy.act(seen(policy, 1), draw.random((1, width)))
    device, dtype = policy.device.type, max(policy.parameters(), key=lambda each: each.numel()).dtype
    row_s = counter.get_total_flops() / peak_rate(device, dtype)
    read_s = (read or num_bytes(policy.parameters())) / bandwidth(device, asked)
    figures: Figures = {}
    for rows in (1,) if asked.tiny else (1, 8, 32):
        obs, noise = seen(policy, rows), draw.random((rows, width))
        bound = rows / max(read_s, rows * row_s)
        for arm in ("", "recorded_"):
            policy.captured_graphs = CapturedGraphs(device) if arm else None
            for _ in range(3 if arm else 0):  # fills the KV cache, is a first call, is captured
                policy.act(obs, noise)
            seconds = best_seconds(lambda obs=obs, noise=noise: policy.act(obs, noise), device)
            figures[f"{arm}decisions_per_s_{rows}"] = {"measured": rows / seconds, "bound": bound}
        policy.captured_graphs = None
    return figures


def openvla(asked: argparse.Namespace) -> Figures:
    """Acting of a 7B-shaped OpenVLA, whose language model is read once per token."""
    from embodied.runtime.device_memory import num_bytes

    policy = large("openvla", asked)
    return acting(policy, asked, num_bytes(policy.language_model.parameters()) * policy.spec.action.dim)


def openvla_oft(asked: argparse.Namespace) -> Figures:
    """Acting of a 7B-shaped OpenVLA-OFT: a chunk of eight actions in one pass."""
    return acting(large("openvla_oft", asked, head="discrete", chunk=8), asked)


def bandwidth(device: str, asked: argparse.Namespace) -> float:
    """Bytes a second of the device's memory, read and written by a copy."""
    import torch

    one = torch.ones(10**6 if asked.tiny else 2 * 10**9, dtype=torch.uint8, device=device)
    other = torch.empty_like(one)
    return 2 * len(one) / best_seconds(lambda: other.copy_(one), device)


def gradient_step(policy: Any, rows: int, algo: Any) -> Callable[[Any], None]:
    """A function that takes one gradient step with a learner's model on decisions that the policy has just made."""
    import numpy as np

    from embodied.core.arrays import text_arrays
    from embodied.core.types import BatchEnd, Trajectory, Unit
    from embodied.learners.model import PolicyOptimizer
    from embodied.learners.train_batch import build_batch
    from embodied.learners.update import update_policy
    from embodied.runtime.collective import Alone

    obs = seen(policy, rows)
    acted = policy.act(obs, np.random.default_rng(1).random((rows, policy.noise_spec().width)))
    chunk, ones = np.zeros((rows, 1), bool), np.ones(rows, np.int64)
    played = Trajectory(
        ids=np.arange(rows), lengths=ones, obs=text_arrays(obs), actions=acted.actions, logprobs=acted.logprobs,
        values=np.asarray(acted.values), next_values=np.zeros(rows, np.float32), rewards=np.ones((rows, 1), np.float32),
        terminated=~chunk, truncated=chunk, mask=~chunk, versions=0 * ones, episodes=0 * ones, replay=acted.replay,
    )  # fmt: skip
    optimizer = PolicyOptimizer(policy, algo, Alone())

    def step(model: Any) -> None:
        share = build_batch(played, Unit((), played.ids), 0, algo, Alone(), model)
        update_policy(model, optimizer, algo, share, 0, BatchEnd(0, 10))

    return step


def profiled(work: Callable[[], Any], device: str) -> Figures:
    """Number and seconds of the kernels of one call, and the slowest kernels; on a CPU of torch's operations."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as seen:
        work()
        if on_gpu:
            torch.cuda.synchronize()
    kernels = seen.key_averages()
    seconds = {
        each.key: (each.self_device_time_total if on_gpu else each.self_cpu_time_total) / 1e6 for each in kernels
    }
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)[:8]
    figures: Figures = {"kernels": sum(each.count for each in kernels), "kernels_s": sum(seconds.values())}
    return figures | {f"{name[:60]}_s": seconds[name] for name in longest}


def lora(asked: argparse.Namespace) -> Figures:
    """LoRA steps of the model, by the items of a pass: items a second beside what the GPU's peak allows, memory beside
    the planned memory, the kernels of a step, and steps that compute fewer activations again. Steps compiled by
    torch.compile are measured on a GPU alone: on a CPU its C++ compiler takes minutes."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from embodied.algorithms.config import PPOConfig
    from embodied.learners.config import LearnerConfig
    from embodied.learners.learner_worker import peak_rate
    from embodied.learners.memory_estimate import count, made_up
    from embodied.learners.model import Model, compile_blocks, recompute

    rank, rows = (2, 2) if asked.tiny else (32, 32)
    policy = large("openvla", asked, lora_rank=rank)
    device = policy.device.type
    learn = gradient_step(policy, rows, PPOConfig(rollout_decisions=1, epochs=1, minibatch_size=rows))
    policy.cache.layers.clear()  # the cache of acting
    kept = {"checkpoint_activations": not asked.tiny}
    model = Model(policy, LearnerConfig(**kept))
    figures: Figures = {}

    def options(size: int, graphs: str) -> Any:
        return LearnerConfig(**kept, micro_batch_size=size, graphs=graphs)

    def items_per_s() -> float:
        model.graphed = None
        return rows / best_seconds(partial(learn, model), device, tries=1)

    sizes = (1, 2) if asked.tiny else (4, 16, 32)
    model.config = options(sizes[0], "off")
    with FlopCounterMode(display=False) as counter:  # it keeps all activations until the pass ends
        learn(model)
    bound = rows * peak_rate(device, policy.dtype) / counter.get_total_flops()
    for size in sizes:
        model.config = options(size, "off")
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        figures[f"items_per_s_{size}"] = {"measured": items_per_s(), "bound": bound}
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
        plan = count(empty("openvla", asked, lora_rank=rank), model.config, made_up(policy, size)).total
        figures[f"memory_GB_{size}"] = {"measured": peak / 1e9, "plan": plan / 1e9}
    figures |= profiled(partial(learn, model), device)
    model.config = options(size, "on")
    figures[f"recorded_items_per_s_{size}"] = items_per_s()
    model.config = options(sizes[1], "off")
    for which in ("half", "language", not asked.tiny):  # in the end as before
        for block in policy.blocks():
            vars(block).pop("forward", None)  # as before `recompute`
        if which:
            recompute(policy, which)
        if which in ("half", "language"):
            figures[f"{which}_items_per_s_{sizes[1]}"] = items_per_s()
    if not asked.tiny:
        model.config = options(size, "off")
        compile_blocks(policy)
        figures[f"compiled_items_per_s_{size}"] = items_per_s()
    return figures


def pi0(asked: argparse.Namespace) -> Figures:
    """Acting of Pi0: a chunk in four steps."""
    return acting(large("pi0", asked), asked)


def smolvla(asked: argparse.Namespace) -> Figures:
    """SmolVLA from a folder as lerobot writes it: it is opened, acts, takes a gradient step of its expert, and is saved
    and opened again. Seconds, and GB of memory up to then; without a GPU, of the process. On a GPU also decisions and
    items a second, eager and captured."""
    import numpy as np
    import torch

    from embodied.algorithms.config import PPOConfig
    from embodied.learners.config import LearnerConfig
    from embodied.learners.memory_estimate import count, made_up
    from embodied.learners.model import Model
    from embodied.policies import make_policy
    from embodied.policies.smolvla.config import SmolVLAConfig

    device, rows = ("cuda", 8) if torch.cuda.is_available() and not asked.tiny else ("cpu", 2)
    options = {"name": "smolvla", "train": "expert", "exploration": "flow_noise", "steps": 4}
    options |= {} if asked.tiny else {"dtype": "bfloat16"}
    figures: Figures = {}

    def timed(name: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        if device == "cuda":
            torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else peak_memory_gb()
        figures.update({f"{name}_s": time.perf_counter() - started, f"{name}_GB": peak})
        return result

    with tempfile.TemporaryDirectory() as place:
        folder, again, spec = Path(place, "published"), Path(place, "again"), arm(256)
        write_smolvla(folder, asked)
        policy = timed("open", lambda: make_policy(SmolVLAConfig(pretrained=str(folder), **options), spec, 0)).to(
            device
        )
        noise = np.random.default_rng(1).random((1, policy.noise_spec().width))
        timed("act", lambda: policy.eval().act(seen(policy, 1), noise))
        learn = gradient_step(policy, rows, PPOConfig(rollout_decisions=1, epochs=1, minibatch_size=rows))
        parts = {"micro_batch_size": min(rows, 4)}
        model = Model(policy, LearnerConfig(**parts, graphs="off"))
        timed("step", lambda: learn(model))
        if device == "cuda" or asked.tiny:
            figures |= acting(policy, asked)
            for way, graphs in (("", "off"), ("recorded_", "on")):
                model.config = LearnerConfig(**parts, graphs=graphs)
                figures[f"{way}items_per_s_{rows}"] = rows / best_seconds(lambda: learn(model), device, tries=2)
        counted = policy_of_size("smolvla", spec, SmolVLAConfig(preset="tiny" if asked.tiny else "full", **options))
        figures["plan_GB"] = count(counted, model.config, made_up(policy, min(rows, 4))).total / 1e9
        timed("save", lambda: policy.save_published(again))
        opened = timed("open_again", lambda: make_policy(SmolVLAConfig(pretrained=str(again), **options), spec, 0))
        pairs = zip(opened.model.parameters(), policy.model.parameters(), strict=True)
        kept = all(torch.equal(new.bfloat16(), old.bfloat16().cpu()) for new, old in pairs)
        figures["kept"] = "every weight" if kept else "not every weight"
    return figures


def peak_memory_gb() -> float:
    """The most memory that this process has had, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def write_smolvla(folder: Path, asked: argparse.Namespace) -> None:
    """A folder in lerobot's layout, with random weights and a tokenizer that knows no word."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    from embodied.policies.smolvla.policy import FULL, TINY, SmolVLANetwork, settings_of

    config = TINY if asked.tiny else FULL
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in SmolVLANetwork(settings_of(config)).state_dict().items()}
    draw = torch.Generator().manual_seed(0)
    weights = {
        name: torch.empty(size, dtype=torch.bfloat16).normal_(0, 0.01, generator=draw) for name, size in shapes.items()
    }
    folder.mkdir()
    save_file({f"model.{name}": tensor for name, tensor in weights.items()}, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    step = {"registry_name": "normalizer_processor", "state_file": "policy_preprocessor.safetensors"}
    write_json(folder / "policy_preprocessor.json", {"steps": [step]})
    figures = {f"{part}.{key}": torch.full((dim,), value) for part, dim in (("observation.state", 8), ("action", 7))
               for key, value in (("mean", 0.0), ("std", 1.0))}  # fmt: skip
    save_file(figures, folder / step["state_file"])
    Tokenizer(models.WordLevel({"?": 0}, unk_token="?")).save(str(folder / "tokenizer.json"))


def bridge(asked: argparse.Namespace) -> Figures:
    """A bridge twin on the GPU: env steps a second with images."""
    import numpy as np

    from embodied.core.types import EpisodeList
    from embodied.envs import make_env
    from embodied.envs.maniskill.config import ManiSkillConfig
    from embodied.envs.pointmass.config import PointMassConfig

    rows = 2 if asked.tiny else 64
    task = {"task": "PutCarrotOnPlateInScene-v1", "cameras": ("3rd_view_camera",), "backend": "cuda"}
    env = make_env(PointMassConfig(name="pointmass") if asked.tiny else ManiSkillConfig(**task), rows)
    try:
        env.reset(options={"episodes": EpisodeList(0, "train", ("task",)).first(rows)})
        actions = np.zeros((rows, 1, env.env_spec.action.dim), np.float32)
        device = "cpu" if asked.tiny else "cuda"
        return {"env_steps_per_s": rows / best_seconds(lambda: env.step_chunk(actions), device, tries=10)}
    finally:
        env.close()


def drawing(asked: argparse.Namespace) -> Figures:
    """Eight processes draw beside matrix products: whether that works, and milliseconds for a decision's pictures."""
    from embodied.envs.libero.config import LiberoConfig
    from embodied.envs.maniskill.config import ManiSkillConfig
    from embodied.envs.pointmass.config import PointMassConfig
    from embodied.run.devices import discover, seats_on
    from embodied.system.drawing import Limits, probe

    views = {
        "libero": LiberoConfig(name="libero", cameras=("agentview", "wrist"), image_size=256),
        "maniskill": ManiSkillConfig(task="PickCube-v1", cameras=("base_camera",), image_size=(128, 128)),
    }
    seats, limits = [{}], Limits(together=1)
    if asked.tiny:
        views = {"points": PointMassConfig(name="pointmass", cameras=("near",))}
    else:
        seats, limits = seats_on(discover().nodes[0].gpus, 8), Limits()
    figures: Figures = {}
    for name, env in views.items():
        result = probe(env, seats, limits)
        figures |= {name: result.problem or "works", f"{name}_by": result.by, f"{name}_grey_levels_off": result.off}
        figures |= {f"{name}_ms": 1000 * result.picture_s, f"{name}_software_ms": 1000 * result.software_s}
        if result.one_each is not None:
            figures[f"{name}_in_one_process"] = result.one_each or "works"
    return figures


def libero(asked: argparse.Namespace) -> Figures:
    """A small Pi0 plays 256 rows of LIBERO that draw on the GPU, in two stages: env steps a second."""
    options = ["policy.preset=tiny", "pipeline.stages=2", "env.task=libero_spatial/0", "env.num_envs=256"]
    options += ["algo.rollout_decisions=32"]
    recipe, more = ("pointmass_ppo", SMALL_ENV) if asked.tiny else ("libero_ppo_pi0", options)
    with tempfile.TemporaryDirectory() as folder:
        kept = [*more, "run.env_steps=null", "run.eval_every=null", "eval.episodes=4", "eval.videos=0"]
        kept = [*{word.partition("=")[0]: word for word in kept}.values(), f"run.dir={folder}"]
        measure(train_command(recipe, *kept, "run.iterations=3"), environment(), LIMIT_S)
        rows = read_metrics(only_run(Path(folder)))
    return {"env_steps_per_s": median(row["steps_per_s"] for row in rows[1:])}


def libero_warp(asked: argparse.Namespace) -> Figures:
    """LIBERO's rows in MuJoCo Warp on the GPU: env steps a second from states, and with two cameras' pictures by Warp
    after every fourth step, beside the GB of GPU memory in use."""
    import numpy as np
    import torch

    from benchmarks.libero_warp import TASKS, env_of
    from embodied.core.errors import EmbodiedError
    from embodied.envs import make_env
    from embodied.envs.pointmass.config import PointMassConfig

    figures: Figures = {}
    pictures = {"cameras": ("agentview", "wrist"), "renderer": "warp"}
    cases = [("", rows, {}) for rows in (64, 256, 1024, 4096)] + [("pictures_", rows, pictures) for rows in (64, 256)]
    for name, rows, more in [("", 4, {})] if asked.tiny else cases:
        try:
            tiny = asked.tiny and make_env(PointMassConfig(name="pointmass"), rows)
            env = tiny or env_of("warp_cuda", TASKS[0], rows, settling_steps=1, on_success="continue", **more)
            env.reset(seed=0)
            actions = np.zeros((rows, 4, env.env_spec.action.dim), np.float32)
            seconds = best_seconds(lambda: env.step_chunk(actions), "cpu")  # noqa: B023
        except (EmbodiedError, RuntimeError) as err:
            figures[f"{name}{rows}_rows"] = str(err)[:200]
            continue
        figures[f"{name}{rows}_rows_env_steps_per_s"] = 4 * rows / seconds
        if not asked.tiny:
            free, whole = torch.cuda.mem_get_info()
            figures[f"{name}{rows}_rows_gb"] = (whole - free) / 1e9
        env.close()
    return figures


def gpu_tests(asked: argparse.Namespace) -> Figures:
    """The tests that need a GPU: how many passed, failed and were skipped."""
    where = "tests/envs/maniskill" if asked.tiny else "tests"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu and not slow", "-p", "no:cacheprovider", where]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=LIMIT_S - 10)
    lines = done.stdout.strip().splitlines()
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|errors?|skipped)", lines[-1])}
    failed = [line.partition(" ")[2][:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"passed": 0, "failed": 0, **counts} | {f"failed_{i}": line for i, line in enumerate(failed)}


BLOCKS: dict[str, Callable[[argparse.Namespace], Figures]] = {  # the most valuable first
    "drawing": drawing,
    "openvla": openvla, "openvla_oft": openvla_oft, "pi0": pi0, "smolvla": smolvla, "lora": lora,
    "points": points, "language": language, "swap": swap, "weights": weights, "libero_warp": libero_warp,
    "gpu_tests": gpu_tests, "fused_loss": fused_loss, "ppo": ppo, "ppo_maniskill": ppo_maniskill, "ppo_fast": ppo_fast,
    "bridge": bridge, "libero": libero, "plan": plan, "divided": divided,
}  # fmt: skip


# The card


def about_gpu() -> Figures:
    """The GPU's name, driver and memory, and the versions of packages."""
    import torch

    figures: Figures = {"gpu": "none", "torch": torch.__version__, "cuda": torch.version.cuda}
    if program := shutil.which("nvidia-smi"):
        query = [program, f"--id={CARD}", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        with suppress(subprocess.SubprocessError):
            told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
            figures |= dict(zip(("gpu", "driver", "memory"), told[0].split(", "), strict=True))
    return figures


def run_block(name: str, words: list[str], file: Path, limit_s: float) -> Figures:
    """Run a block in a separate process; returns the reason if it has no figures."""
    started = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.gpu_card", *words, "--only", name]
    try:
        env = environment() | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        env |= {} if name == "divided" else {"CUDA_VISIBLE_DEVICES": CARD}  # that takes all GPUs
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {limit_s:.0f} s"}
    lines = done.stdout.splitlines()
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1][-300:]}
    found = {"seconds": round(time.perf_counter() - started, 1), "figures": json.loads(lines[-1])}
    write_json(file, found)
    return found


def card(about: Figures, blocks: Mapping[str, Figures]) -> str:
    """The card as markdown; a figure may have a bound and a plan beside it."""
    shown = ", ".join(f"{key} {value}" for key, value in about.items() if isinstance(value, str))
    columns = ("measured", "bound", "plan")
    rows = []
    for name, found in blocks.items():
        for key, value in found.get("figures", {"not measured": found.get("error")}).items():
            values = value if isinstance(value, Mapping) else {"measured": value}
            rows.append([name, key, *(in_words(values[column]) if column in values else "" for column in columns)])
    return f"# {about['gpu']}\n\n{shown}\n\n{markdown(['block', 'figure', *columns], rows)}\n"


def in_words(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else "not reached" if value is None else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--ppo", help="ManiSkill's ppo.py")
    parser.add_argument("--ppo-fast", help="ManiSkill's ppo_fast.py")
    parser.add_argument("--steps", type=int, default=10_000_000, help="env steps of each PPO")
    parser.add_argument("--blocks", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_card")
    parser.add_argument("--only", choices=BLOCKS, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print("\n" + json.dumps(BLOCKS[asked.only](asked)))
        return
    given = {"ppo_maniskill": asked.ppo, "ppo_fast": asked.ppo_fast}
    about = about_gpu() | {"commit": code_commit()}
    out, words = asked.out.resolve() / about["gpu"].replace(" ", "-"), sys.argv[1:]
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Figures] = {}
    limit_s = TINY_LIMIT_S if asked.tiny else LIMIT_S
    for name in asked.blocks:
        file = out / f"{PREFIX}{name}.json"
        if not given.get(name, True):
            found[name] = {"error": f"--{name.replace('_maniskill', '').replace('_', '-')} is not given"}
        else:
            found[name] = json.loads(file.read_text()) if file.is_file() else run_block(name, words, file, limit_s)
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    write_json(out / "card.json", about | {"machine": machine(), "packages": packages(), "blocks": found})
    (out / "card.md").write_text(card(about, found))
    print(f"card {out / 'card.md'}")


if __name__ == "__main__":
    main()
