"""recipe=maniskill_ppo_gpu beside ManiSkill's own PPO script, on one GPU and at the same settings.

    python -m benchmarks.maniskill_gpu --script PATH/examples/baselines/ppo/ppo.py [--rounds 3]

The script comes with ManiSkill's repository, not with its wheel. Each side trains for two lengths, neither evaluates;
the extra env steps over the extra seconds are its speed, so what a start costs counts for nobody. No figure of this has
been published yet: it needs a machine with an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.common import (
    RESULTS,
    code_commit,
    environment,
    machine,
    markdown,
    measure,
    packages,
    resolved,
    train_command,
    write_json,
)

RECIPE = "maniskill_ppo_gpu"
ITERATIONS = (10, 40)
TIMEOUT_S = 1800.0


def our_command(config: dict, iterations: int, seed: int, folder: str) -> list[str]:
    length = [f"run.iterations={iterations}", "run.env_steps=null", "run.eval_every=null", f"seed={seed}"]
    return train_command(RECIPE, *length, f"run.dir={folder}", "eval.episodes=1", "eval.num_envs=1", "eval.videos=0")


def their_command(config: dict, iterations: int, seed: int, script: Path) -> list[str]:
    """ManiSkill's script, told what our recipe says."""
    env, algo = config["env"], config["algo"]
    batch = env["num_envs"] * algo["rollout_decisions"]
    said = {
        "env_id": env["task"],
        "num_envs": env["num_envs"],
        "num_steps": algo["rollout_decisions"],
        "total_timesteps": iterations * batch,
        "num_minibatches": batch // algo["minibatch_size"],
        "update_epochs": algo["epochs"],
        "learning_rate": algo["lr"],
        "gamma": algo["gamma"],
        "gae_lambda": algo["gae_lambda"],
        "target_kl": algo["target_kl"],
        "num_eval_envs": 1,
        "eval_freq": iterations + 1,
        "seed": seed,
    }
    flags = ["--no-capture_video", "--no-save_model"]
    return [sys.executable, str(script), *(f"--{name}={value}" for name, value in said.items()), *flags]


def speed(seconds: dict[int, float], batch: int) -> float:
    """Env steps per second between the two lengths."""
    short, long = ITERATIONS
    return (long - short) * batch / (seconds[long] - seconds[short])


def one_round(config: dict, seed: int, script: Path, env: dict) -> tuple[float, float]:
    batch = config["env"]["num_envs"] * config["algo"]["rollout_decisions"]
    ours, theirs = {}, {}
    for iterations in ITERATIONS:
        with tempfile.TemporaryDirectory() as folder:
            ours[iterations] = measure(our_command(config, iterations, seed, folder), env, TIMEOUT_S).wall_s
            started = time.perf_counter()
            command = their_command(config, iterations, seed, script)
            subprocess.run(command, check=True, cwd=folder, timeout=TIMEOUT_S, stdout=subprocess.DEVNULL)
            theirs[iterations] = time.perf_counter() - started
    return speed(ours, batch), speed(theirs, batch)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--script", type=Path, required=True, help="ManiSkill's ppo.py")
    ask.add_argument("--rounds", type=int, default=3)
    options = ask.parse_args()
    if not Path("/dev/nvidiactl").exists():
        raise SystemExit("this compares GPU simulation, and this machine shows no NVIDIA GPU")

    config, env = resolved(RECIPE), environment()
    pairs = [one_round(config, seed, options.script.resolve(), env) for seed in range(options.rounds)]
    ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
    about = {"commit": code_commit(), "machine": machine(), "packages": packages(), "config": config}
    write_json(RESULTS / "maniskill_gpu.json", about | {"ours": ours, "theirs": theirs})
    rows = [[name, f"{median(speeds):,.0f}"] for name, speeds in ((RECIPE, ours), ("ManiSkill's ppo.py", theirs))]
    print(markdown(["env steps/s", "median"], rows))
    print(f"\nratio: {median(ours) / median(theirs):.2f}")


if __name__ == "__main__":
    main()
