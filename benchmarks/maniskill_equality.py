"""Which ManiSkill tasks and control modes give the same in the batched CPU backend as in single envs.

    python -m benchmarks.maniskill_equality [--tasks PushCube-v1 ...] [--controls pd_joint_delta_pos ...]

Same episode seeds, same random actions, whole episodes; one process per pair. `envs/maniskill.py` lists the pairs
that pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

import numpy as np

from benchmarks.common import RESULTS, code_commit, environment, markdown, packages, write_json

ROWS, TOLERANCE, TIMEOUT_S = 6, 1e-4, 300.0


def compare(task: str, control: str) -> dict:
    """The largest differences over a whole episode in ROWS rows."""
    from embodied.data import EpisodeSpec
    from embodied.envs import env_class, make_env
    from embodied.envs.config import ManiSkillConfig

    batched_class = env_class(ManiSkillConfig())

    def build(backend: str):
        config = ManiSkillConfig(task=task, control_mode=control, backend=backend, on_success="continue")
        return batched_class(config, ROWS) if backend == "cpu" else make_env(config, ROWS)

    envs = [build("cpu_batched"), build("cpu")]
    episodes = [EpisodeSpec(task, -1, 100 + row, row) for row in range(ROWS)]
    starts = [env.reset(options={"episodes": episodes})[0]["state"] for env in envs]
    worst = {"initial": float(np.abs(starts[0] - starts[1]).max()), "state": 0.0, "reward": 0.0, "success": 0}
    rng = np.random.default_rng(0)
    for _ in range(envs[0].env_spec.max_episode_steps):
        actions = rng.uniform(-1, 1, (ROWS, 1, envs[0].env_spec.action.dim)).astype(np.float32)
        a, b = (env.step_chunk(actions) for env in envs)
        live = a.mask[:, 0] & b.mask[:, 0]
        if not live.any():
            break
        worst["state"] = max(worst["state"], float(np.abs(a.obs["state"] - b.obs["state"])[live].max()))
        worst["reward"] = max(worst["reward"], float(np.abs(a.rewards - b.rewards)[live].max()))
        if a.success is not None:
            worst["success"] += int((a.success != b.success)[live].sum())
    worst["equal"] = max(worst["initial"], worst["state"], worst["reward"]) < TOLERANCE and not worst["success"]
    return worst


def main() -> None:
    from embodied.envs.maniskill import BATCHED_CONTROLS, BATCHED_TASKS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", default=list(BATCHED_TASKS))
    parser.add_argument("--controls", nargs="+", default=list(BATCHED_CONTROLS))
    parser.add_argument("--pair", nargs=2, help="compare one pair in this process and print JSON")
    arguments = parser.parse_args()
    if arguments.pair:
        print(json.dumps(compare(*arguments.pair)))
        return
    rows, found = [], {}
    for task in arguments.tasks:
        for control in arguments.controls:
            command = [sys.executable, "-m", "benchmarks.maniskill_equality", "--pair", task, control]
            ended = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S)
            lines = ended.stdout.splitlines()
            told = json.loads(lines[-1]) if ended.returncode == 0 else {"error": ended.stderr.strip().splitlines()[-1]}
            found[f"{task} {control}"] = told
            figures = [f"{told[name]:.1e}" for name in ("initial", "state", "reward")] if "equal" in told else ["-"] * 3
            rows.append(
                [task, control, *figures, str(told.get("success", "-")), str(told.get("equal", told.get("error")))]
            )
            print(rows[-1], flush=True)
    print(markdown(["task", "control", "initial state", "state", "reward", "success mismatches", "equal"], rows))
    write_json(RESULTS / "maniskill_equality.json", {"commit": code_commit(), "packages": packages(), "pairs": found})


if __name__ == "__main__":
    main()
