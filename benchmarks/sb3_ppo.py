"""stable-baselines3's PPO on a ManiSkill task, as its documentation would have you run it: one env per process.

Run by compare_sb3.py in the peers' environment: python benchmarks/sb3_ppo.py '<settings as JSON>' OUT.json
Nothing of ours is imported here.
"""

from __future__ import annotations

import functools
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium
import numpy as np


class SuccessTruncates(gymnasium.Wrapper):
    """A success ends the episode like the time limit does, so that PPO bootstraps through it, as our recipe does."""

    def reset(self, **kwargs):
        return self.env.reset(**kwargs)[0], {}

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, float(reward), False, bool(terminated or truncated), {"success": bool(info["success"])}


def make_env(env: dict) -> gymnasium.Env:
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    import torch
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    torch.set_num_threads(1)
    made = gymnasium.make(
        env["task"],
        num_envs=1,
        obs_mode="state",
        control_mode=env["control_mode"],
        reward_mode=env["reward_mode"],
        max_episode_steps=env["max_episode_steps"],
        sim_backend="physx_cpu",
        render_backend="cpu",
    )
    return SuccessTruncates(CPUGymWrapper(made))


def make_envs(settings: dict):
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize

    build = functools.partial(make_env, settings["env"])
    envs = SubprocVecEnv([build] * settings["n"], start_method="forkserver")
    floor = settings["normalize_floor"]
    return envs if floor is None else VecNormalize(envs, norm_reward=False, clip_obs=10.0, epsilon=floor**2)


def timed_ppo(settings: dict):
    """PPO that notes the seconds of its two phases and stops once it is good enough."""
    import torch
    from stable_baselines3 import PPO

    class TimedPPO(PPO):
        def collect_rollouts(self, *args, **kwargs) -> bool:
            if self.enough:
                return False
            started = time.perf_counter()
            super().collect_rollouts(*args, **kwargs)
            self.rollout_s.append(time.perf_counter() - started)
            return True

        def _update_learning_rate(self, optimizers) -> None:
            super()._update_learning_rate(optimizers)
            for group in self.policy.optimizer.param_groups:
                group["lr"] *= group["factor"]

        def train(self) -> None:
            started = time.perf_counter()
            super().train()
            self.update_s.append(time.perf_counter() - started)
            self.after_iteration()

    activations = {"tanh": torch.nn.Tanh, "relu": torch.nn.ReLU, "silu": torch.nn.SiLU}
    network = {
        "net_arch": {"pi": settings["hidden"], "vf": settings["hidden"]},
        "activation_fn": activations[settings["activation"]],
        "log_std_init": settings["log_std"],
    }
    envs = make_envs(settings)
    ppo = dict(settings["ppo"])
    if settings["lr_schedule"] == "linear":  # `left` is what is left after this iteration's steps, ours before them
        ppo["learning_rate"] = lambda left: (
            settings["ppo"]["learning_rate"] * min(1.0, left + 1 / settings["iterations"])
        )
    model = TimedPPO("MlpPolicy", envs, policy_kwargs=network, seed=settings["seed"], device="cpu", **ppo)
    value = {name: part for name, part in model.policy.named_parameters() if "value_net" in name}
    others = [part for name, part in model.policy.named_parameters() if name not in value]
    groups = [
        {"params": others, "factor": 1.0},
        {"params": list(value.values()), "factor": settings["value_lr_factor"]},
    ]
    model.policy.optimizer = torch.optim.Adam(groups, lr=settings["ppo"]["learning_rate"], eps=settings["adam_eps"])
    model.rollout_s, model.update_s, model.enough, model.after_iteration = [], [], False, lambda: None
    return model


def success_once(model, envs, episodes: int, seed: int) -> float:
    """Every env plays as many episodes: counting the first to finish would favour the short ones, which succeed."""
    each = -(-episodes // envs.num_envs)
    envs.seed(seed)
    obs = envs.reset()
    played, succeeded = np.zeros(envs.num_envs, int), np.zeros(envs.num_envs, int)
    once = np.zeros(envs.num_envs, bool)
    while (played < each).any():
        obs, _, dones, infos = envs.step(model.predict(obs, deterministic=True)[0])
        once |= [info["success"] for info in infos]
        counted = dones & (played < each)
        succeeded += counted & once
        played += counted
        once &= ~dones
    return float(succeeded.sum() / played.sum())


def main(settings: dict) -> dict:
    import torch

    torch.set_num_threads(1)
    started = time.perf_counter()
    model = timed_ppo(settings)
    gradient_steps, evaluations = [], []
    model.policy.optimizer.register_step_post_hook(lambda *_: gradient_steps.append(1))
    evaluation = settings["evaluation"]
    eval_envs = make_envs(settings) if evaluation else None
    if eval_envs is not None and (trained := model.get_vec_normalize_env()) is not None:
        eval_envs.training, eval_envs.obs_rms = False, trained.obs_rms

    def evaluate() -> None:
        """Does nothing: between iterations, outside both phases."""
        if len(model.update_s) % evaluation["every"]:
            return
        rate = success_once(model, eval_envs, evaluation["episodes"], evaluation["seed"])
        train_s = sum(model.rollout_s) + sum(model.update_s)
        evaluations.append({"env_steps": model.num_timesteps, "train_s": train_s, "success_once": rate})
        model.enough = rate >= evaluation["enough"]

    if evaluation:
        model.after_iteration = evaluate
    start_s = time.perf_counter() - started
    model.learn(settings["iterations"] * settings["items"], log_interval=None)
    for envs in (model.get_env(), eval_envs):
        if envs is not None:
            envs.close()
    return {
        "start_s": start_s,
        "rollout_s": model.rollout_s,
        "update_s": model.update_s,
        "gradient_steps": len(gradient_steps),
        "parameters": sum(parameter.numel() for parameter in model.policy.parameters()),
        "torch_threads": torch.get_num_threads(),
        "evaluations": evaluations,
        "packages": {name: version(name) for name in ("stable-baselines3", "torch", "mani-skill", "gymnasium")},
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))
