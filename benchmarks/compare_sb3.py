"""Our PPO beside stable-baselines3's on PushCube-v1: env steps per second, and training seconds until 95% succeed.

    .venv/bin/python -m pip install --target SB3 --no-deps stable-baselines3==2.9.2
    python -m benchmarks.compare_sb3 --packages SB3
    python -m benchmarks.compare_sb3 --packages SB3 --rounds 7 --processes 4 --steps 24000

Same network, minibatches and gradient steps for each env step. "Alike" has ManiSkill's own physics, observations and
episodes on both sides; "as shipped" is the recipe that users get. stable-baselines3 steps one env in each process. All
take turns, a run each; seconds are of rollouts and updates, and the first iteration does not count as speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import gymnasium
import numpy as np

from benchmarks import common

RECIPE, PEER, NEEDS = "maniskill_ppo", "--peer", ("stable-baselines3==2.9.2",)
PHYSICS = (
    *("env.after_success=0", "env.retries=0", "env.relative_positions=false"),
    *("env.action_cost=0", "env.solver_iterations=null"),
)
# What stable-baselines3 has no option for, at the value at which both do the same.
PPO = ("policy.chunk=1", "algo.target_kl=null", "algo.value_clip=null", "algo.huber_delta=null", "algo.dual_clip=null")
OURS = {"ours, alike": (*PHYSICS, *PPO, "env.on_success=truncate"), "ours, as shipped": ()}
ENOUGH, EVAL_EVERY, EVAL_EPISODES, EVAL_SEED, TIMEOUT_S = 0.95, 5, 56, 10_000, 3600.0
HEADER = ["PPO", "env steps/s", "seconds to 95%", "times as fast, by round"]
Result = tuple[float, float | None]  # env steps per second, and training seconds to 95%; None: never


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--packages", type=Path, help="folder that stable-baselines3 was installed in, with --target")
    ask.add_argument("--rounds", type=int, default=3, help="runs of each contestant")
    ask.add_argument("--steps", type=int, default=80_000, help="env steps of each run")
    ask.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8], help="of stable-baselines3")
    asked = ask.parse_args()
    env = common.peer_environment(asked.packages, NEEDS)
    print(common.machine(), common.code_commit(), NEEDS, flush=True)
    found: dict[str, list[Result]] = {}
    for seed in range(asked.rounds):
        for name, options in OURS.items():
            found.setdefault(name, []).append(our_run(options, seed, asked.steps))
        for count in asked.processes:
            found.setdefault(f"stable-baselines3, {count} processes", []).append(
                peer_run(count, seed, asked.steps, env)
            )
        print(f"round {seed + 1}: " + ", ".join(f"{who} {runs[-1][0]:,.0f}" for who, runs in found.items()), flush=True)
    print(table(found))


def our_run(options: Sequence[str], seed: int, steps: int) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        where = [f"run.dir={folder}", f"run.env_steps={steps}", f"seed={seed}", f"run.eval_every={EVAL_EVERY}"]
        evaluation = [f"eval.episodes={EVAL_EPISODES}", f"eval.seed={EVAL_SEED}", "eval.videos=0"]
        command = common.train_command(RECIPE, *options, *where, *evaluation)
        common.measure(command, common.environment(), TIMEOUT_S)
        run = common.only_run(Path(folder))
        results = [json.loads(path.read_text()) for path in run.glob("eval/*/results.json")]
        return our_result(common.read_metrics(run), results)


def our_result(rows: list[dict], evaluations: list[dict]) -> Result:
    steps, seconds = (rows[-1][key] - rows[0][key] for key in ("env_steps", "train_s"))
    good = {e["policy_version"] for e in evaluations if e["overall"]["success_once"]["rate"] >= ENOUGH}
    return steps / seconds, next((row["train_s"] for row in rows if row["policy_version"] in good), None)


def peer_run(processes: int, seed: int, steps: int, env: dict[str, str]) -> Result:
    config = common.resolved(RECIPE, *OURS["ours, alike"], f"seed={seed}", f"run.env_steps={steps}")
    options, items = peer_options(config, processes), items_of(config)
    iterations = -(-steps // items)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        asked = json.dumps({"config": config, "processes": processes, "iterations": iterations, "options": options})
        common.measure([sys.executable, "-m", "benchmarks.compare_sb3", PEER, asked, str(out)], env, TIMEOUT_S)
        told = json.loads(out.read_text())
    wanted = iterations * options["n_epochs"] * -(-items // options["batch_size"])
    assert told["steps"] == wanted, f"stable-baselines3 took {told['steps']} gradient steps, ours {wanted}"
    reached = (seconds for seconds, success in told["evaluations"] if success >= ENOUGH)
    return items * (iterations - 1) / (told["ends"][-1] - told["ends"][0]), next(reached, None)


def items_of(config: dict) -> int:
    """Env steps of an iteration."""
    return config["env"]["num_envs"] * config["algo"]["rollout_decisions"]


def peer_options(config: dict, processes: int) -> dict:
    """Our recipe in stable-baselines3's words, so that both take the same gradient steps for the same env steps."""
    algo, items = config["algo"], items_of(config)
    if items % processes:
        raise SystemExit(f"{items} env steps of an iteration do not divide among {processes} processes; try 2, 4 or 8")
    return {
        **{key: algo[key] for key in ("gamma", "gae_lambda", "max_grad_norm")},
        "n_steps": items // processes,
        "batch_size": algo["minibatch_size"],
        "n_epochs": algo["epochs"],
        "clip_range": algo["clip_low"],
        "ent_coef": algo["entropy_coef"],
        "vf_coef": algo["value_coef"] / 2,  # its value loss is the squared error, ours half of it
    }


def table(found: dict[str, list[Result]]) -> str:
    """Medians; the last column is beside stable-baselines3 with its best number of processes, round by round."""
    speeds = {who: [speed for speed, _ in runs] for who, runs in found.items()}
    best = max((who for who in found if who not in OURS), key=lambda who: median(speeds[who]))
    rows = []
    for who, runs in found.items():
        reached = ", ".join("never" if seconds is None else f"{seconds:.0f}" for _, seconds in runs)
        ratios = sorted(one / other for one, other in zip(speeds[who], speeds[best]))
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([who, f"{median(speeds[who]):,.0f}", reached, spread])
    return common.markdown(HEADER, rows)


class SuccessTruncates(gymnasium.Wrapper):
    """A success ends the episode as the time limit does, so that PPO bootstraps through it, as our recipe does."""

    def reset(self, **options: Any) -> tuple[Any, dict]:
        return self.env.reset(**options)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict]:
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward), False, bool(terminated or truncated), {"success": bool(info["success"])}


def make_env(config: dict) -> gymnasium.Env:
    import mani_skill.envs  # noqa: F401  registers the tasks
    import torch
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    torch.set_num_threads(1)
    given = {key: config[key] for key in ("control_mode", "reward_mode", "max_episode_steps")}
    fixed = {"num_envs": 1, "obs_mode": "state", "sim_backend": "physx_cpu", "render_backend": "cpu"}
    return SuccessTruncates(CPUGymWrapper(gymnasium.make(config["task"], **fixed, **given)))


def peer(
    config: dict,
    processes: int,
    iterations: int,
    options: dict,
    make_envs: Callable[[dict, int], Any] | None = None,
    score: Callable[[Any, Any], float] | None = None,
    eval_every: int = EVAL_EVERY,
) -> dict:
    """stable-baselines3's PPO, in a process of its own, as its documentation would have you run it.
    `make_envs(config, processes)` makes its envs, and `score(model, envs)` evaluates it."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

    from embodied.policies.networks import ACTIVATIONS

    ends: list[float] = []  # seconds of training at the end of each iteration
    evaluations: list[tuple[float, float]] = []  # seconds of training, success
    steps: list[int] = []

    class Clock(BaseCallback):
        began = 0.0  # moved by evaluations, which do not count

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if not self.began:
                self.began = time.perf_counter()
                return
            ends.append(time.perf_counter() - self.began)
            if len(ends) % eval_every == 0:
                evaluations.append((ends[-1], (score or success_once)(self.model, evaluated)))
                self.began = time.perf_counter() - ends[-1]

        _on_training_end = _on_rollout_start

    class TwoRates(PPO):
        def _update_learning_rate(self, optimizers: Any) -> None:
            super()._update_learning_rate(optimizers)
            for group in self.policy.optimizer.param_groups:
                group["lr"] *= group["factor"]

    torch.set_num_threads(1)
    algo, policy = config["algo"], config["policy"]
    norm = {"norm_reward": False, "epsilon": policy["normalize_floor"] ** 2}
    make_envs = make_envs or (lambda config, count: SubprocVecEnv([lambda: make_env(config["env"])] * count))
    envs, evaluated = (VecNormalize(make_envs(config, processes), **norm) for _ in range(2))
    evaluated.training, evaluated.obs_rms = False, envs.obs_rms
    network = {"net_arch": dict.fromkeys(("pi", "vf"), policy["hidden"]), "log_std_init": policy["initial_log_std"]}
    network["activation_fn"] = ACTIVATIONS[policy["activation"]]
    # It asks for the rate of what is left after an iteration's steps, ours before them.
    options["learning_rate"] = lambda left: algo["lr"] * min(1.0, left + 1 / iterations)
    model = TwoRates("MlpPolicy", envs, policy_kwargs=network, seed=config["seed"], device="cpu", **options)
    groups: list[dict] = [
        {"params": [], "factor": 1.0},
        {"params": [], "factor": (algo["value_lr"] or algo["lr"]) / algo["lr"]},
    ]
    for name, part in model.policy.named_parameters():
        groups["value_net" in name]["params"].append(part)
    model.policy.optimizer = torch.optim.Adam(groups, lr=algo["lr"], eps=algo["adam_eps"])
    model.policy.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    model.learn(iterations * items_of(config), Clock(), log_interval=None)
    envs.close()
    evaluated.close()
    return {"ends": ends, "evaluations": evaluations, "steps": len(steps)}


def success_once(model: Any, envs: Any) -> float:
    """Every env plays as many episodes: counting the first to finish would favour the short ones, which succeed."""
    each = -(-EVAL_EPISODES // envs.num_envs)
    envs.seed(EVAL_SEED)
    obs = envs.reset()
    played, succeeded = np.zeros((2, envs.num_envs), int)
    once = np.zeros(envs.num_envs, bool)
    while (played < each).any():
        obs, _, dones, infos = envs.step(model.predict(obs, deterministic=True)[0])
        once |= [info["success"] for info in infos]
        counted = dones & (played < each)
        succeeded += counted & once
        played += counted
        once &= ~dones
    return float(succeeded.sum() / played.sum())


if __name__ == "__main__":
    if sys.argv[1:2] == [PEER]:
        Path(sys.argv[3]).write_text(json.dumps(peer(**json.loads(sys.argv[2]))))
    else:
        main()
