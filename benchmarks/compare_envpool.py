"""Our PPO beside stable-baselines3's on tasks of EnvPool: env steps per second, and the return that each learned.

    .venv/bin/python -m pip install --target SB3 --no-deps stable-baselines3==2.9.2
    python -m benchmarks.compare_envpool --packages SB3

Both simulate with EnvPool, with the same network, minibatches and gradient steps for each env step. stable-baselines3
has one process and EnvPool's threads, as EnvPool's own examples; ours is placed as users get it. They take turns, a run
each. Seconds are of rollouts and updates. Evaluations play the best action, at the end of training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import common, compare_sb3

RECIPE, PEER, NEEDS = "envpool_ppo", "--peer", ("stable-baselines3==2.9.2",)
TASKS = ("MetaWorld/Reach-v3", "Ant-v5")
GIVEN = {
    "MetaWorld/Reach-v3": ["env.on_success=continue"],
    "Ant-v5": ["env.kwargs={}", "env.max_episode_steps=null"],
}
EPISODES, TIMEOUT_S = 20, 3600.0
HEADER = ["task", "PPO", "env steps/s", "return, by round", "times as fast, by round"]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--packages", type=Path, help="folder that stable-baselines3 was installed in, with --target")
    ask.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    ask.add_argument("--steps", type=int, default=100_000, help="env steps of each run")
    ask.add_argument("--tasks", nargs="+", default=TASKS)
    asked = ask.parse_args()
    env = common.peer_environment(asked.packages, NEEDS)
    print(common.machine(), common.code_commit(), NEEDS, flush=True)
    rows = []
    for task in asked.tasks:
        runs: dict[str, list[tuple[float, float]]] = {"ours": [], "stable-baselines3": []}
        for seed in range(asked.rounds):
            options = [f"env.name=envpool:{task}", *GIVEN.get(task, []), *compare_sb3.PPO, f"seed={seed}"]
            options += [f"run.env_steps={asked.steps}", "eval.videos=0", f"eval.episodes={EPISODES}"]
            options += ["eval.protocol=as-trained-v1"]
            runs["ours"].append(our_run(options))
            runs["stable-baselines3"].append(peer_run(options, asked.steps, env))
            print(task, seed, {who: done[-1] for who, done in runs.items()}, flush=True)
        rows += [row_of(task, who, done, runs["stable-baselines3"]) for who, done in runs.items()]
    print(common.markdown(HEADER, rows))


def our_run(options: list[str]) -> tuple[float, float]:
    """Env steps per second, and the return at the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = common.train_command(RECIPE, *options, f"run.dir={folder}")
        common.measure(command, common.environment(), TIMEOUT_S)
        run = common.only_run(Path(folder))
        rows = common.read_metrics(run)
        (path,) = run.glob("eval/*/results.json")
        steps, seconds = (rows[-1][key] - rows[0][key] for key in ("env_steps", "train_s"))
        return steps / seconds, json.loads(path.read_text())["overall"]["return"]


def peer_run(options: list[str], steps: int, env: dict[str, str]) -> tuple[float, float]:
    config = common.resolved(RECIPE, *options)
    num_envs, items = config["env"]["num_envs"], compare_sb3.items_of(config)
    iterations = -(-steps // items)
    asked = {"config": config, "processes": num_envs, "iterations": iterations}
    asked["options"] = compare_sb3.peer_options(config, num_envs)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = [sys.executable, "-m", "benchmarks.compare_envpool", PEER, json.dumps(asked), str(out)]
        common.measure(command, env, TIMEOUT_S)
        told = json.loads(out.read_text())
    return items * (iterations - 1) / (told["ends"][-1] - told["ends"][0]), told["evaluations"][-1][1]


def row_of(task: str, who: str, runs: list[tuple[float, float]], peers: list[tuple[float, float]]) -> list[str]:
    ratios = sorted(mine / theirs for (mine, _), (theirs, _) in zip(runs, peers))
    spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    speed = f"{median(speed for speed, _ in runs):,.0f}"
    return [task, who, speed, ", ".join(f"{value:,.0f}" for _, value in runs), spread]


def vec_env(config: dict, num_envs: int, seed: int | None = None) -> Any:
    """EnvPool as an env of stable-baselines3."""
    import os

    import envpool
    from stable_baselines3.common.vec_env.base_vec_env import VecEnv

    class Pool(VecEnv):
        def __init__(self) -> None:
            limit = config["env"]["max_episode_steps"]
            self.pool = envpool.make_gymnasium(
                config["env"]["name"].partition(":")[2],
                num_envs=num_envs,
                num_threads=min(num_envs, len(os.sched_getaffinity(0))),
                seed=config["seed"] if seed is None else seed,
                **{"max_episode_steps": limit} if limit else {},
                **config["env"]["kwargs"] or {},
            )
            super().__init__(num_envs, self.pool.observation_space, self.pool.action_space)

        def reset(self) -> np.ndarray:
            return self.pool.reset()[0].astype(np.float32)

        def step_async(self, actions: np.ndarray) -> None:
            self.pool.send(actions)

        def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict]]:
            obs, rewards, terminated, truncated, _ = self.pool.recv()
            done = terminated | truncated
            infos: list[dict] = [{} for _ in range(num_envs)]
            if (rows := np.flatnonzero(done)).size:
                for row in rows:
                    infos[row] = {"terminal_observation": obs[row].copy(), "TimeLimit.truncated": bool(truncated[row])}
                obs = obs.copy()
                obs[rows] = self.pool.reset(rows.astype(np.int32))[0]
            return obs.astype(np.float32), rewards, done, infos

        def close(self) -> None:
            self.pool = None

        def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
            return [None] * num_envs

        def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
            raise NotImplementedError

        def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
            raise NotImplementedError

        def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
            return [False] * num_envs

    return Pool()


def mean_return(config: dict, model: Any, envs: Any) -> float:
    """Of one episode of each row of new simulations, with the statistics of observations of `envs`."""
    from stable_baselines3.common.vec_env import VecNormalize

    pool = vec_env(config, EPISODES, compare_sb3.EVAL_SEED)
    fresh = VecNormalize(pool, training=False, norm_reward=False, epsilon=envs.epsilon)
    fresh.obs_rms = envs.obs_rms
    obs, returns, is_open = fresh.reset(), np.zeros(EPISODES), np.ones(EPISODES, bool)
    while is_open.any():
        obs, rewards, done, _ = fresh.step(model.predict(obs, deterministic=True)[0])
        returns += rewards * is_open
        is_open &= ~done
    return float(returns.mean())


def peer(config: dict, iterations: int, **asked: Any) -> dict:
    score = partial(mean_return, config)
    return compare_sb3.peer(
        config, iterations=iterations, make_envs=vec_env, score=score, eval_every=iterations, **asked
    )


if __name__ == "__main__":
    if sys.argv[1:2] == [PEER]:
        Path(sys.argv[3]).write_text(json.dumps(peer(**json.loads(sys.argv[2]))))
    else:
        main()
