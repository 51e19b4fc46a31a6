"""Our recipe in stable-baselines3's words, so that both take the same gradient steps for the same env steps."""

from __future__ import annotations

# Options that stable-baselines3 has no counterpart for, and the value at which both mean the same.
SAME_ONLY_AT = {
    "env.on_success": "truncate",
    "env.after_success": 0,
    "env.retries": 0,
    "env.relative_positions": False,
    "env.solver_iterations": None,
    "policy.name": "mlp",
    "policy.chunk": 1,
    "policy.dtype": "float32",
    "algo.name": "ppo",
    "algo.normalize_advantages": True,
    "algo.logprob_level": "chunk",
    "algo.dual_clip": None,
    "algo.target_kl": None,
    "algo.value_clip": None,
    "algo.huber_delta": None,
}


def items(config: dict) -> int:
    """Decisions, here env steps, of one iteration."""
    return config["env"]["num_envs"] * config["algo"]["rollout_decisions"]


def gradient_steps(config: dict) -> int:
    """Gradient steps in one iteration; the last minibatch of an epoch may be smaller."""
    return config["algo"]["epochs"] * -(-items(config) // config["algo"]["minibatch_size"])


def sb3_settings(config: dict, processes: int, seed: int, env_steps: int, evaluation: dict | None = None) -> dict:
    """What sb3_ppo.py is told. Raises ValueError where the two would not do the same."""
    check_comparable(config)
    algo, total = config["algo"], items(config)
    if total % processes:
        raise ValueError(f"{total} items an iteration do not divide among {processes} processes")
    return {
        "n": processes,
        "seed": seed,
        "items": total,
        "iterations": -(-env_steps // total),
        "env": {key: config["env"][key] for key in ("task", "control_mode", "reward_mode", "max_episode_steps")},
        "hidden": list(config["policy"]["hidden"]),
        "activation": config["policy"]["activation"],
        "log_std": config["policy"]["initial_log_std"],
        "normalize_floor": config["policy"]["normalize_floor"] if config["policy"]["normalize_observations"] else None,
        "value_lr_factor": 1.0 if algo["value_lr"] is None else algo["value_lr"] / algo["lr"],
        "adam_eps": algo["adam_eps"],
        "lr_schedule": algo["lr_schedule"],
        "ppo": {
            "n_steps": total // processes,
            "batch_size": algo["minibatch_size"],
            "n_epochs": algo["epochs"],
            "learning_rate": algo["lr"],
            "gamma": algo["gamma"],
            "gae_lambda": algo["gae_lambda"],
            "clip_range": algo["clip_low"],
            "ent_coef": algo["entropy_coef"],
            "vf_coef": algo["value_coef"] / 2,  # its value loss is the squared error, ours half of it
            "max_grad_norm": float("inf") if algo["max_grad_norm"] is None else algo["max_grad_norm"],
        },
        "evaluation": evaluation,
    }


def check_comparable(config: dict) -> None:
    wrong = [
        f"{key}={have}, comparable only at {wanted}"
        for key, wanted in SAME_ONLY_AT.items()
        if (have := config[key.split(".")[0]][key.split(".")[1]]) != wanted
    ]
    algo = config["algo"]
    if algo["clip_low"] != algo["clip_high"]:
        wrong.append(
            f"algo.clip_low={algo['clip_low']} and algo.clip_high={algo['clip_high']}: it knows one clip range"
        )
    if wrong:
        raise ValueError("this recipe cannot be compared with stable-baselines3:\n" + "\n".join(wrong))
