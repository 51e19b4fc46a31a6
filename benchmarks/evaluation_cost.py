"""What an evaluation costs beyond stepping its simulator, and whether memory stays flat over many of them.

    python -m benchmarks.evaluation_cost [--checkpoint random] [--task PushCube-v1] [--rounds 6] [--episodes 200]

One process: evaluations of ManiSkill episodes take turns with stepping the same number of equal envs for as many env
steps, resets included: with random actions, and with the very actions of the evaluation, since physics takes longer
where a policy touches things. With --videos, drawing as many frames from a standing env is measured too. Time is CPU
time of the process and of the encoders it started, since every side keeps one core busy.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, code_commit, environment, machine, markdown, packages, tree_bytes, write_json

WARM_UP = 2  # rounds whose memory is not counted: allocators and caches fill up


def configured(arguments, folder: Path):
    """The workers of an evaluation, in this process."""
    from embodied.config.recipe import load
    from embodied.run import launch
    from embodied.run.policy_source import find_all
    from embodied.workflows.rl_loop import PLAYERS
    from embodied.workflows.workers import Workers

    told = [f"checkpoint={arguments.checkpoint}", "recipe=maniskill_ppo", f"env.task={arguments.task}"]
    told += [f"eval.episodes={arguments.episodes}", f"eval.videos={arguments.videos}", "cluster.backend=inline"]
    told += ['placement={"sim,policy": "cpu:0", learner: "cpu:0"}', f"run.dir={folder}"]
    loaded = load(told, entry="evaluate")
    (target,) = find_all(loaded)
    config, plan = launch.planned(loaded.config, learn=False)
    config = config.model_copy(update={"policy": target.config})
    cluster = launch.cluster(config, plan, folder / "logs")
    return config, target, cluster, lambda: Workers(PLAYERS, config, cluster.__enter__())


def cost(work) -> tuple[float, float]:
    """CPU and wall seconds of some work."""
    gc.collect()
    cpu, wall = cpu_s(), time.perf_counter()
    work()
    return cpu_s() - cpu, time.perf_counter() - wall


def cpu_s() -> float:
    """CPU seconds of this process and of those it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@contextmanager
def recorded(kind):
    """What is asked of envs of this kind: a list of ("reset", options) and ("step_chunk", actions)."""
    asked: list[tuple[str, Any]] = []
    before = kind.reset, kind.step_chunk

    def reset(env, *, seed=None, options=None):
        asked.append(("reset", options))
        return before[0](env, seed=seed, options=options)

    def step_chunk(env, actions, on_frame=None):
        asked.append(("step_chunk", np.array(actions)))
        return before[1](env, actions, on_frame)

    kind.reset, kind.step_chunk = reset, step_chunk
    try:
        yield asked
    finally:
        kind.reset, kind.step_chunk = before


def replay(env, asked: list[tuple[str, Any]]) -> None:
    for what, how in asked:
        if what == "reset":
            env.reset(options=how)
        else:
            env.step_chunk(how)


def draw(env, frames: int) -> None:
    """Renders as many frames as an evaluation records, of one row."""
    for _ in range(frames):
        env.render_rows(np.array([0]))


def bare_stepping(env, episodes: int) -> None:
    """Plays as many episodes as an evaluation does, with random actions."""
    rng = np.random.default_rng(0)
    size = (env.num_envs, 1, env.env_spec.action.dim)
    env.reset(seed=0)
    left = episodes - env.num_envs
    while True:
        result = env.step_chunk(rng.uniform(-1, 1, size).astype(np.float32))
        if result.done.any():
            if left <= 0:
                return
            left -= int(result.done.sum())
            env.reset(options={"reset_mask": result.done})


def slope(megabytes: list[float], episodes: int) -> float:
    """Growth of memory in MB per 100 episodes, once warm."""
    warm = megabytes[WARM_UP:]
    return float(np.polyfit(np.arange(len(warm)) * episodes / 100, warm, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", default="random")
    parser.add_argument("--task", default="PushCube-v1")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--videos", type=int, default=0)
    parser.add_argument("--out", default="evaluation_cost.json", help="name of the file of results")
    arguments = parser.parse_args()
    if arguments.rounds < WARM_UP + 2:
        parser.error(f"--rounds: at least {WARM_UP + 2}, for a slope of memory after {WARM_UP} to warm up")
    os.environ.update(environment())
    import torch

    torch.set_num_threads(1)
    from embodied.envs import make_env
    from embodied.envs.vector_env import VectorEnv
    from embodied.workflows.evaluator import Evaluator, eval_rows

    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config, target, cluster, make = configured(arguments, Path(folder))
        workers = make()
        workers.adopt(target.weights_for(workers.spec))
        evaluator = Evaluator(workers)
        env = make_env(evaluator.env, eval_rows(arguments.episodes, config.env.num_envs, 1))
        with recorded(VectorEnv) as asked:
            evaluator.evaluate(Path(folder) / "recorded")
        asked = list(asked)
        for number in range(arguments.rounds):
            row = measured(evaluator, env, asked, Path(folder) / str(number), arguments)
            for name, value in row.items():
                found.setdefault(name, []).append(round(value, 3))
            print(row, flush=True)
        env.close()
        cluster.__exit__(None, None, None)
    growth = slope(found["resident_mb"], arguments.episodes)
    rows = [[name, *[f"{pick(values):.2f}" for pick in (median, min, max)]] for name, values in found.items()]
    print(markdown([f"{arguments.episodes} episodes", "median", "lowest", "highest"], rows))
    print(f"memory grows by {growth:.2f} MB per 100 episodes")
    told = {"commit": code_commit(), "machine": machine(), "packages": packages(), **vars(arguments)}
    told["checkpoint"] = target.name
    write_json(RESULTS / arguments.out, told | found | {"mb_per_100_episodes": growth})


def measured(evaluator, env, asked: list[tuple[str, Any]], out: Path, arguments) -> dict[str, float]:
    """One round of every side."""
    played, played_wall = cost(lambda: evaluator.evaluate(out))
    random, random_wall = cost(lambda: bare_stepping(env, arguments.episodes))
    same, _ = cost(lambda: replay(env, asked))
    row = {"evaluate": played, "random_actions": random, "same_actions": same}
    if arguments.videos:
        films = len(list((out / "videos").glob("*.mp4")))
        steps = env.env_spec.max_episode_steps
        frames = films * (steps + 1)
        row["drawing"], _ = cost(lambda: draw(env, frames))
        again = (films - arguments.videos) * steps * same / (arguments.episodes * steps)  # failures, played once more
        row |= {"films": films, "filming_ratio": (played - same - again) / row["drawing"]}
    else:
        row |= {"ratio": played / random, "ratio_same_actions": played / same, "wall_ratio": played_wall / random_wall}
    gc.collect()
    return row | {"resident_mb": tree_bytes(os.getpid()) / 1e6}


if __name__ == "__main__":
    main()
