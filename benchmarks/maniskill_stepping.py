"""Bare stepping with random actions on all cores: our batched CPU backend beside plain single envs looped in as many
processes.

    python -m benchmarks.maniskill_stepping [--task PushCube-v1] [--rounds 5] [--steps 150]

One pinned process per core, 32 envs each; both sides include the resets at the end of episodes. The plain side is
ManiSkill as a user would loop it: `gymnasium.make` and `step`, sixteen envs per process.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from statistics import median

import numpy as np

from benchmarks.common import RESULTS, code_commit, environment, machine, markdown, packages, write_json

BATCHED, PLAIN, START_S, TIMEOUT_S = 32, 16, 120.0, 600.0


def batched(task: str, steps: int, ready) -> tuple[int, float]:
    from embodied.envs import make_env
    from embodied.envs.config import ManiSkillConfig

    env = make_env(ManiSkillConfig(task=task, backend="cpu_batched", on_success="continue"), BATCHED)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    ready.wait(timeout=START_S)
    started = time.perf_counter()
    for _ in range(steps):
        actions = rng.uniform(-1, 1, (BATCHED, 1, env.env_spec.action.dim)).astype(np.float32)
        result = env.step_chunk(actions)
        if result.done.any():
            env.reset(options={"reset_mask": result.done})
    return steps * BATCHED, time.perf_counter() - started


def plain(task: str, steps: int, ready) -> tuple[int, float]:
    from embodied.envs.maniskill.tasks import quiet
    from embodied.system.vulkan_driver import ensure_vulkan

    ensure_vulkan()
    with quiet():
        import gymnasium
        import mani_skill.envs  # noqa: F401

        options = {"obs_mode": "state", "sim_backend": "physx_cpu", "render_backend": "cpu"}
        made = [
            gymnasium.make(task, control_mode="pd_joint_delta_pos", reward_mode="normalized_dense", **options)
            for _ in range(PLAIN)
        ]
    for row, env in enumerate(made):
        env.reset(seed=row)
    rng = np.random.default_rng(0)
    ready.wait(timeout=START_S)
    started = time.perf_counter()
    for _ in range(steps):
        for env in made:
            _, _, _, truncated, _ = env.step(rng.uniform(-1, 1, env.action_space.shape).astype(np.float32))
            if truncated:
                env.reset()
    return steps * PLAIN, time.perf_counter() - started


def work(side: str, task: str, steps: int, core: int, ready, answers) -> None:
    os.sched_setaffinity(0, {core})
    import torch

    torch.set_num_threads(1)
    answers.put({"batched": batched, "plain": plain}[side](task, steps, ready))


def speed(side: str, task: str, steps: int) -> float:
    context = multiprocessing.get_context("spawn")
    cores = sorted(os.sched_getaffinity(0))
    ready, answers = context.Barrier(len(cores)), context.Queue()
    told = [(side, task, steps, core, ready, answers) for core in cores]
    workers = [context.Process(target=work, args=arguments, daemon=True) for arguments in told]
    for worker in workers:
        worker.start()
    parts = [answers.get(timeout=TIMEOUT_S) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    return sum(done for done, _ in parts) / max(seconds for _, seconds in parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="PushCube-v1")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=150)
    arguments = parser.parse_args()
    os.environ.update(environment())
    found: dict[str, list[float]] = {"batched": [], "plain": []}
    for _ in range(arguments.rounds):
        for side in found:
            found[side].append(speed(side, arguments.task, arguments.steps))
            print(side, round(found[side][-1]), flush=True)
    ratios = [a / b for a, b in zip(found["batched"], found["plain"], strict=True)]
    rows = [
        [name, f"{median(values):,.0f}", f"{min(values):,.0f}", f"{max(values):,.0f}"] for name, values in found.items()
    ]
    rows.append(["ratio", f"{median(ratios):.2f}", f"{min(ratios):.2f}", f"{max(ratios):.2f}"])
    print(markdown(["env steps/s", "median", "lowest", "highest"], rows))
    told = {"commit": code_commit(), "machine": machine(), "packages": packages(), "task": arguments.task}
    write_json(RESULTS / "maniskill_stepping.json", told | {"env_steps_per_s": found, "ratio": ratios})


if __name__ == "__main__":
    main()
