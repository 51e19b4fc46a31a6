"""LIBERO in MuJoCo Warp (env.backend=warp, on cores) beside the benchmark's MuJoCo, which this interpreter has.

    python -m embodied.sims libero_warp
    python -m benchmarks.libero_warp rest        # where objects rest, and where random actions take them: 40 tasks
    python -m benchmarks.libero_warp expert      # the scripted expert's successes: 20 tasks
    python -m benchmarks.libero_warp transfer    # imitation in one physics, evaluation in both
    python -m benchmarks.libero_warp speed       # CPU seconds of an env step, and memory, by the number of rows
    python -m benchmarks.libero_warp tables

Each finished task is written to results/libero_warp.json at once, and a task that is in it is not measured again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from benchmarks import common
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.config import EnvConfig
from embodied.envs.libero.env import HAND, PLACE, state_layout
from embodied.envs.libero.scene import NO_OP
from embodied.envs.libero.tasks import files_of

RESULTS = common.RESULTS / "libero_warp.json"
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
TASKS = [f"{suite}/{number}" for suite in SUITES for number in range(10)]
BACKENDS = ("mujoco", "warp")
STILL_STEPS, RANDOM_STEPS, PART = 50, 200, 50
EXPERT_EPISODES, EVAL_EPISODES, TIMEOUT_S = 3, 20, 3600.0
TRANSFERRED = [f"{task} {seed}" for seed in (701, 702) for task in ("libero_object/2", "libero_object/9")]
ROWS = [1, 8, 32, 128]
APART_CM = 0.5  # an object that rests so far apart in the two is counted

Figures = dict[str, Any]


def env_of(backend: str, task: str, rows: int, **options: Any) -> Any:
    asked = {"name": "libero", "task": task, "backend": backend, "num_envs": rows, **options}
    asked |= {} if backend == "mujoco" else {"python": "auto"}
    return make_env(TypeAdapter(EnvConfig).validate_python(asked), rows)


def rest(task: str) -> Figures:
    """Centimetres between the two: of the object farthest apart after the settling steps and after 50 steps more, and
    of hand and object after 50 to 200 random actions."""
    movable = state_layout([files_of(task)]).movable
    actions = np.random.default_rng(0).uniform(-1, 1, (1, RANDOM_STEPS, 7)).astype(np.float32)
    still = np.tile(NO_OP.astype(np.float32), (1, STILL_STEPS, 1))
    seen, errors = {}, []
    for backend in BACKENDS:
        env = env_of(backend, task, 1, on_success="continue", max_episode_steps=1000)
        states = [env.reset(options={"episodes": [EpisodeSpec(task, 0, 7, 0)]})[0]["state"]]
        for chunk in (still, *np.split(actions, RANDOM_STEPS // PART, axis=1)):
            result = env.step_chunk(chunk)
            states.append(result.obs["state"])
            errors += [f"{backend}, part {len(states) - 2}: {why}" for _, why in result.errors]
        env.close()
        hands = np.array([state[0, :3] for state in states])
        objects = np.array([state[0, HAND : HAND + PLACE * movable].reshape(-1, PLACE)[:, :3] for state in states])
        seen[backend] = hands, objects
    apart = [
        np.linalg.norm(one.astype(float) - other, axis=-1) * 100 for one, other in zip(*seen.values(), strict=True)
    ]
    hand, objects = apart
    largest = objects.max(axis=1).round(3).tolist()
    walked = {"random_hand_cm": hand[2:].round(3).tolist(), "random_object_cm": largest[2:]}
    return {"settled_cm": largest[0], "still_cm": largest[1], **walked, **({"errors": errors} if errors else {})}


def expert(task: str) -> Figures:
    """Successes and env steps of the scripted expert in the same drawn episodes."""
    figures: Figures = {"episodes": EXPERT_EPISODES}
    for backend in BACKENDS:
        env = env_of(backend, task, EXPERT_EPISODES)
        env.reset(options={"episodes": [EpisodeSpec(task, -1, 100 + row, row) for row in range(EXPERT_EPISODES)]})
        player, steps, solved, live = env.expert(), 0, np.zeros(EXPERT_EPISODES, bool), True
        player.begin(np.arange(EXPERT_EPISODES))
        while live:
            result = env.step_chunk(player.act()[:, None])
            solved |= result.success[:, -1]
            steps, live = steps + int(result.mask.sum()), bool((~result.done & result.mask.any(axis=1)).any())
        env.close()
        figures |= {f"{backend}_solved": int(solved.sum()), f"{backend}_steps": steps}
    return figures


def transfer(task_and_seed: str) -> Figures:
    """Success of policies that imitate the expert in one physics, evaluated in both."""
    task, seed = task_and_seed.split()
    figures: Figures = {"episodes": EVAL_EPISODES}
    for learns in BACKENDS:
        with tempfile.TemporaryDirectory() as folder:
            words = ["recipe=libero_sft", f"env.task={task}", f"seed={seed}", f"run.dir={folder}", "run.name=policy"]
            embodied("sft", *words, *physics(learns), "eval.episodes=1", "eval.videos=0")
            (run,) = [path.parent for path in Path(folder).glob("*policy*/run.json")]
            for plays in BACKENDS:
                found = evaluated(run, *physics(plays), f"eval.episodes={EVAL_EPISODES}")
                figures[f"{learns}_to_{plays}"] = found["rate"]
    return figures


def physics(backend: str) -> list[str]:
    return [f"env.backend={backend}", f"env.python={'null' if backend == 'mujoco' else 'auto'}"]


def embodied(command: str, *words: str) -> None:
    common.measure([sys.executable, "-m", f"embodied.{command}", *words], common.environment(), TIMEOUT_S)


def evaluated(run: Path, *words: str) -> Figures:
    """The share of the episodes that a run's policy solves, and its interval."""
    before = {*run.glob("eval/*")}
    embodied("evaluate", f"checkpoint={run}", "eval.videos=0", *words)
    (folder,) = {*run.glob("eval/*")} - before
    return json.loads((folder / "results.json").read_text())["overall"]["success_once"]


def speed(rows: int, backend: str = "warp", task: str = TASKS[0], steps: int = 4) -> Figures:
    """CPU seconds of an env step of all rows, random actions, and memory of the processes."""
    env = env_of(backend, task, rows, max_episode_steps=10 * steps, settling_steps=1)
    env.reset(seed=0)
    rng = np.random.default_rng(0)
    play = lambda: env.step_chunk(rng.uniform(-1, 1, (rows, steps, 7)).astype(np.float32))  # noqa: E731
    play()  # compiles, records
    before = cpu_s()
    play()
    spent = (cpu_s() - before) / steps
    gigabytes = common.tree_bytes(os.getpid()) / 1e9
    env.close()
    return {"cpu_s_per_step": round(spent, 4), "row_steps_per_cpu_s": round(rows / spent, 1), "gb": round(gigabytes, 2)}


def cpu_s() -> float:
    """CPU seconds of this process and its children that run."""
    ticks = os.sysconf("SC_CLK_TCK")
    own = resource.getrusage(resource.RUSAGE_SELF)
    stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in common.tree_pids(os.getpid())]
    return max(own.ru_utime + own.ru_stime, sum(int(stat[11]) + int(stat[12]) for stat in stats) / ticks)


def both_speeds(rows: str) -> Figures:
    return {backend: speed(int(rows), backend) for backend in BACKENDS}


PARTS: dict[str, tuple[Callable[[str], Figures], list[str]]] = {
    "rest": (rest, TASKS),
    "expert": (expert, TASKS[:20]),
    "transfer": (transfer, TRANSFERRED),
    "speed": (both_speeds, [str(rows) for rows in ROWS]),
}


def stored() -> Figures:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def store(part: str, name: str, figures: Figures) -> None:
    """Add figures to the file, which several commands may write at a time."""
    with RESULTS.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        content = {"machine": common.machine()["cpu"], **stored()}
        content.setdefault(part, {})[name] = {**figures, "commit": common.code_commit()}
        common.write_json(RESULTS, content)


def tables(content: Figures) -> str:
    """What is measured so far, as Markdown."""
    told = []
    if done := content.get("rest"):
        rows = [
            [suite, *rest_row([found for task, found in done.items() if task.startswith(f"{suite}/")])]
            for suite in SUITES
        ]
        told.append(common.markdown(["suite", "tasks", *REST], rows))
    if done := content.get("expert"):
        rows = []
        for suite in SUITES[:2]:
            found = [each for task, each in done.items() if task.startswith(f"{suite}/")]
            total = sum(each["episodes"] for each in found)
            rows.append([suite, *(f"{sum(each[f'{b}_solved'] for each in found)} of {total}" for b in BACKENDS)])
        told.append(common.markdown(["expert's successes", "MuJoCo", "Warp"], rows))
    if done := content.get("transfer"):
        rows = [
            [task, a, *(f"{100 * each[f'{a}_to_{b}']:.0f}%" for b in BACKENDS)]
            for task, each in done.items()
            for a in BACKENDS
        ]
        told.append(common.markdown(["task and seed", "imitated in", "evaluated in mujoco", "in warp"], rows))
    if done := content.get("speed"):
        rows = [
            [rows, *(str(each[b][key]) for b in BACKENDS for key in ("row_steps_per_cpu_s", "gb"))]
            for rows, each in done.items()
        ]
        told.append(
            common.markdown(["rows", "MuJoCo: env steps per CPU s", "GB", "Warp: env steps per CPU s", "GB"], rows)
        )
    return "\n\n".join(told)


REST = [
    f"objects over {APART_CM} cm apart when settled",
    "50 steps later",
    "largest, cm",
    "median after 200 random steps, cm: hand",
    "object",
]


def rest_row(found: list[Figures]) -> list[str]:
    settled, still = ([each[key] for each in found] for key in ("settled_cm", "still_cm"))
    counts = [str(sum(value > APART_CM for value in values)) for values in (settled, still)]
    last = [
        np.median([each[key][-1] for each in found]) if found else 0 for key in ("random_hand_cm", "random_object_cm")
    ]
    return [str(len(found)), *counts, f"{max([*settled, *still, 0]):.2f}", *(f"{value:.2f}" for value in last)]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("part", choices=[*PARTS, "tables"])
    ask.add_argument("--only", nargs="+", help="these tasks, or numbers of rows")
    asked = ask.parse_args()
    if asked.part == "tables":
        return print(tables(stored()))
    measure, names = PARTS[asked.part]
    for name in asked.only or names:
        if name not in stored().get(asked.part, {}):
            figures = measure(name)
            store(asked.part, name, figures)
            print(name, figures, flush=True)


if __name__ == "__main__":
    main()
