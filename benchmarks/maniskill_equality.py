"""Which ManiSkill tasks and control modes give the same in the batched CPU backend as in single envs.

    python -m benchmarks.maniskill_equality [--tasks PushCube-v1 ...] [--controls pd_joint_delta_pos ...]

Same episode seeds, same random actions, whole episodes; one process per pair. `envs/maniskill/env.py` lists the pairs
that pass.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from benchmarks.common import RESULTS, code_commit, environment, markdown, packages, write_json

TIMEOUT_S = 300.0


def compare(task: str, control: str) -> dict:
    """The largest differences over whole episodes."""
    from embodied.envs import env_class
    from embodied.envs.config import ManiSkillConfig
    from embodied.envs.maniskill.equality_proof import compare

    config = ManiSkillConfig(task=task, control_mode=control)
    return compare(env_class(config), config)[0]


def main() -> None:
    from embodied.envs.maniskill.tasks import BATCHED_CONTROLS, BATCHED_TASKS

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
