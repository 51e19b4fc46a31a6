"""Do all 130 tasks of LIBERO run here? Each is built, reset to a stored initial state and stepped.

    python -m benchmarks.libero_tasks [--resume] [--task libero_90]

A task passes if the simulation, before it settles, holds the stored numbers, and if observations stay finite; else it
is skipped with the reason. Writes results/libero_tasks.json task by task; --resume leaves out those that passed before.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json

PLACE = RESULTS / "libero_tasks.json"
STEPS = 3
STATE = 7  # which of the 50 stored initial states


def try_task(task: str) -> dict:
    """What there is to say of a task; "skipped" with the reason if it does not run."""
    from embodied.envs.config import LiberoConfig
    from embodied.envs.libero.env import LiberoEnv
    from embodied.envs.libero.tasks import task_files

    about: dict = {"instruction": task_files(task).instruction}
    started = time.process_time()
    try:
        env = LiberoEnv(LiberoConfig(name="libero", task=task), 1)
    except Exception as err:
        return about | {"skipped": f"{type(err).__name__}: {err}"}
    try:
        reset(env, task)
        shift = float(np.abs(restored(env) - task_files(task).initial_states()[STATE]).max())
        reset(env, task)
        success = [bool(env.step(np.zeros((1, 7), np.float32))[4]["success"][0]) for _ in range(STEPS)]
        state = env.reset(options={"reset_mask": np.zeros(1, bool)})[0]["state"]
    except Exception as err:
        return about | {"skipped": f"{type(err).__name__}: {err}"}
    finally:
        env.close()
    reasons = [
        *([f"the stored state differs by {shift:g} after the reset"] if shift else []),
        *([] if np.isfinite(state).all() else ["observations are not finite"]),
        *(["solved before anything was done"] if any(success) else []),
    ]
    about |= {"numbers_observed": int(state.shape[1]), "cpu_s": round(time.process_time() - started, 2)}
    return about | ({"skipped": "; ".join(reasons)} if reasons else {})


def reset(env, task: str) -> None:
    from embodied.core.types import EpisodeSpec

    spec = EpisodeSpec(task, STATE, 0, 0)
    env.reset(options={"reset_mask": np.ones(1, bool), "episodes": [spec]})


def restored(env) -> np.ndarray:
    """The simulation's numbers right after the stored state was set, before the steps in which it settles."""
    from embodied.envs.libero import scene
    from embodied.envs.libero.tasks import task_files

    row = env.row(0)
    settling, scene.SETTLING_STEPS = scene.SETTLING_STEPS, 0
    try:
        row.scene.begin(row, 0, task_files(row.scene.files.name).initial_states()[STATE])
    finally:
        scene.SETTLING_STEPS = settling
    data = row.data._data
    return np.concatenate([[data.time], data.qpos, data.qvel])


def report(tasks: dict[str, dict]) -> str:
    rows = [
        [task, about["instruction"], f"skipped: {about['skipped']}" if "skipped" in about else "passed"]
        for task, about in tasks.items()
    ]
    passed = sum("skipped" not in about for about in tasks.values())
    return f"{markdown(['task', 'instruction', 'result'], rows)}\n\n{passed} of {len(tasks)} tasks passed"


def main() -> None:
    from embodied.envs.libero.config import BENCHMARK, tasks_of

    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--resume", action="store_true", help="leave out tasks that have passed")
    ask.add_argument("--task", action="append", help="a task or a suite; may be repeated")
    options = ask.parse_args()

    tasks = json.loads(PLACE.read_text())["tasks"] if PLACE.is_file() else {}
    for task in tasks_of(options.task or tuple(BENCHMARK)):
        if options.resume and task in tasks and "skipped" not in tasks[task]:
            continue
        tasks[task] = try_task(task)
        print(f"{task}: {tasks[task].get('skipped', 'passed')}", flush=True)
        write_json(PLACE, {"commit": code_commit(), "machine": machine(), "packages": packages(), "tasks": tasks})
    print(report(tasks))


if __name__ == "__main__":
    main()
