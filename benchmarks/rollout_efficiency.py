"""What the policy, the channels and the recording cost: rollouts beside bare stepping of the same envs.

    python -m benchmarks.rollout_efficiency [--recipe maniskill_ppo] [--rounds 3] [--iterations 8]

Both sides play the same number of decisions in as many processes on the same cores and include resets. The policy is
a random one and stays so (learning rate 0), so that episodes end as they do under the random actions of bare stepping.
On a machine with other work the speeds differ by chance; processor time per env step, of the processes with sims (and
policies, where they share these), hardly does. `in the simulator` is the share of a rollout's own time that went into
steps and resets of the envs (pictures included), where sims and policies take turns on their cores.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import (
    RESULTS,
    code_commit,
    environment,
    hosts,
    machine,
    markdown,
    measure,
    only_run,
    packages,
    process_cpu_s,
    read_metrics,
    resolved,
    train_command,
    write_json,
)

TIMEOUT_S = 900.0
START_S = 120.0  # the most that one process may be ready after another


def rollout_speed(recipe: str, iterations: int, seed: int, env: dict, num_sims: int) -> tuple[float, float, float]:
    """Env steps per second of rollouts in a real run, their processor time in ms per env step, and which share of them
    is simulation; the first iteration is left out."""
    with tempfile.TemporaryDirectory() as folder:
        length = [f"run.iterations={iterations + 1}", "run.env_steps=null"]
        random = ["algo.lr=0", "algo.epochs=1"]
        rest = [f"run.dir={folder}", f"seed={seed}", "eval.episodes=1", "eval.videos=0"]
        spent: dict[int, float] = {}  # by the number of iterations that are over

        def look() -> None:
            for run in Path(folder).glob("*/metrics.jsonl"):
                over = run.read_text().count("\n")
                sims = [pid for name, pid in hosts(run.parent / "logs").items() if "sim" in name]
                if over and over not in spent and len(sims) == num_sims:
                    with suppress(OSError):  # they have just ended
                        spent[over] = sum(map(process_cpu_s, sims))

        measure(train_command(recipe, *length, *random, *rest), env, TIMEOUT_S, look)
        rows = read_metrics(only_run(Path(folder)))
    if len(spent) < 2:
        raise SystemExit(f"{iterations} iterations were too short to look at; try --iterations {4 * iterations}")
    first, last = min(spent), max(spent)
    cpu_s = (spent[last] - spent[first]) / (rows[last - 1]["env_steps"] - rows[first - 1]["env_steps"])
    steps = rows[-1]["env_steps"] - rows[0]["env_steps"]
    seconds, simulating = (
        sum(row[f"time/{name}_s"] for row in rows[1:] for name in names) for names in (["rollout"], ["step", "reset"])
    )
    return steps / seconds, 1e3 * cpu_s, simulating / seconds


def stepping_speed(recipe: str, iterations: int, seed: int, shares: list[tuple[int, ...]]) -> tuple[float, float]:
    """Env steps per second of as many pinned processes as the run has sim workers, started together, and their
    processor time in ms per env step."""
    context = multiprocessing.get_context("spawn")
    together, answers = context.Barrier(len(shares)), context.Queue()
    told = [(recipe, iterations, seed, rank, shares, together, answers) for rank in range(len(shares))]
    workers = [context.Process(target=step_randomly, args=arguments, daemon=True) for arguments in told]
    for worker in workers:
        worker.start()
    parts = [answers.get(timeout=TIMEOUT_S) for _ in workers]
    for worker in workers:
        worker.join(timeout=60)
    steps = sum(part[0] for part in parts)
    return steps / max(part[1] for part in parts), 1e3 * sum(part[2] for part in parts) / steps


def step_randomly(recipe: str, iterations: int, seed: int, rank: int, shares: list, together, answers) -> None:
    """One process: the decisions of one iteration to warm up, then those of `iterations`."""
    os.sched_setaffinity(0, shares[rank])
    from embodied.config.recipe import load
    from embodied.core.types import EpisodeList, head_start
    from embodied.envs import make_env

    config = load([f"recipe={recipe}"]).config
    num_envs = config.env.num_envs // len(shares)
    env = make_env(config.env, num_envs)
    episodes = EpisodeList(seed, "train", (config.env.task,))
    rng = np.random.default_rng([seed, rank])
    played = np.zeros(num_envs, int)
    horizon = config.algo.rollout_decisions
    first, total = rank * num_envs, config.env.num_envs
    start = head_start(first + np.arange(num_envs), env.env_spec.max_episode_steps)

    def begin(rows: np.ndarray) -> None:
        """The next episodes of these rows, as a sim worker takes them."""
        specs = [episodes[int(first + row + played[row] * total)] if rows[row] else None for row in range(num_envs)]
        played[rows] += 1
        elapsed = start * (played == 1) if config.env.stagger else 0 * start
        env.reset(options={"reset_mask": rows, "episodes": specs, "elapsed": elapsed})

    begin(np.ones(num_envs, bool))
    steps, started, used = 0, time.perf_counter(), time.process_time()
    for decision in range(horizon * (iterations + 1)):
        if decision == horizon:
            together.wait(timeout=START_S)
            steps, started, used = 0, time.perf_counter(), time.process_time()
        result = env.step_chunk(random_actions(env.env_spec.action, num_envs, config.policy.chunk, rng))
        steps += int(result.mask.sum())
        if result.done.any():
            begin(result.done)
    answers.put((steps, time.perf_counter() - started, time.process_time() - used))
    env.close()


def random_actions(action, num_envs: int, chunk: int, rng: np.random.Generator) -> np.ndarray:
    shape = (num_envs, chunk, action.dim)
    if action.discrete:
        return rng.integers(action.num_choices, size=shape)
    return rng.uniform(-1, 1, shape).astype(np.float32)


def sim_shares(config: dict) -> list[tuple[int, ...]]:
    """The cores of each sim worker in the plan of a run on this machine."""
    from embodied.placement.placement_plan import make_plan

    cores = tuple(sorted(os.sched_getaffinity(0)))
    plan = make_plan(config["placement"], cores, config["env"]["num_envs"], config["pipeline"]["stages"])
    return [host.cores for host in plan.hosts if "sim" in host.roles]


def report(speeds: dict) -> str:
    """`speeds` as they are written: a list with one number for every round, and the number of processes."""
    header = ["", "env steps/s: median", "lowest", "highest", "ms of processor per env step"]
    rows = [
        [
            name,
            *(f"{value:,.0f}" for value in (median(speeds[key]), min(speeds[key]), max(speeds[key]))),
            f"{median(speeds[f'{key}_cpu_ms']):.3f}",
        ]
        for name, key in (("rollouts with the policy", "rollouts"), ("stepping with random actions", "stepping"))
    ]
    ratio = median(speeds["rollouts"]) / median(speeds["stepping"])
    by_cpu = median(speeds["stepping_cpu_ms"]) / median(speeds["rollouts_cpu_ms"])
    return (
        f"{markdown(header, rows)}\n\nrollouts / stepping: {ratio:.1%}, by processor time {by_cpu:.1%}; "
        f"{speeds['processes']} processes each; in the simulator: {median(speeds['simulating']):.1%}"
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--recipe", default="maniskill_ppo")
    ask.add_argument("--rounds", type=int, default=3)
    ask.add_argument("--iterations", type=int, default=8, help="iterations that are measured in every round")
    options = ask.parse_args()

    env, config, where = environment(), resolved(options.recipe), machine()
    os.environ.update(env)  # the processes of bare stepping inherit it
    shares = sim_shares(config)
    names = ("rollouts", "rollouts_cpu_ms", "simulating", "stepping", "stepping_cpu_ms")
    speeds: dict = {name: [] for name in names} | {"processes": len(shares)}
    for seed in range(options.rounds):
        found = rollout_speed(options.recipe, options.iterations, seed, env, len(shares))
        found += stepping_speed(options.recipe, options.iterations, seed, shares)
        for name, value in zip(names, found, strict=True):
            speeds[name].append(value)
        print(f"round {seed + 1}: rollouts {found[0]:,.0f}, stepping {found[3]:,.0f} env steps/s", flush=True)
    about = {"commit": code_commit(), "machine": where, "packages": packages(), "config": config}
    write_json(RESULTS / f"rollout_efficiency-{Path(options.recipe).stem}.json", about | speeds)
    print(report(speeds))


if __name__ == "__main__":
    main()
