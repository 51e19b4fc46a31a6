"""How often the scripted experts solve LIBERO's tasks, from every stored initial state, played as libero-v1 says.

    python -m benchmarks.libero_experts [--resume] [--task libero_object --task libero_spatial/3] [--states 50]
    python -m benchmarks.libero_experts --task libero_object/3 --states 2 --videos runs/experts

Writes results/libero_experts.json task by task; --resume leaves out those measured with the same code. With --videos
only films.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from queue import SimpleQueue

from benchmarks.common import RESULTS, ROOT, code_commit, machine, markdown, packages, write_json

PLACE = RESULTS / "libero_experts.json"
SUITES = ("libero_object", "libero_spatial")
ROWS = 10
CODE = ("expert", "scene", "env")  # what a result depends on, besides MuJoCo


def measure_task(task: str, states: int, videos: Path | None) -> list:
    """The outcomes of the stored states 0 to `states` - 1, in order."""
    from embodied.core.types import EpisodeList, Recording
    from embodied.envs.action_sources import ExpertActions
    from embodied.envs.config import LiberoConfig
    from embodied.envs.evaluation import play_episodes
    from embodied.envs.libero.env import LiberoEnv
    from embodied.envs.libero.expert import LiberoExpert
    from embodied.reporting.video_recorder import VideoRecorder
    from embodied.runtime import Timers

    episodes = EpisodeList(0, "eval", (task,), stored_states=states).first(states)
    env = LiberoEnv(LiberoConfig(name="libero", task=task), min(ROWS, states))
    try:
        with_videos = Recording(video_episodes=frozenset(range(states)), videos=videos, recorders=(VideoRecorder,))
        recording = with_videos if videos else Recording()
        action_source = ExpertActions(LiberoExpert(env), "expert")
        played = play_episodes(env, episodes, action_source, recording, SimpleQueue(), frozenset(), Timers())
    finally:
        env.close()
    return sorted(played, key=lambda result: result.index)


def describe(task: str, results: list) -> dict:
    from embodied.envs.libero.tasks import task_files

    solved = [result.init_state_id for result in results if result.success_once]
    return {
        "instruction": task_files(task).instruction,
        "states": len(results),
        "solved": len(solved),
        "not_solved": [result.init_state_id for result in results if not result.success_once],
        "mean_steps_when_solved": round(sum(r.length for r in results if r.success_once) / max(len(solved), 1), 1),
    }


def report(tasks: dict[str, dict]) -> str:
    rows = [
        [task, about["instruction"], f"{about['solved']} of {about['states']}", str(about["mean_steps_when_solved"])]
        for task, about in sorted(tasks.items())
    ]
    table = markdown(["task", "instruction", "solved", "env steps"], rows)
    totals = []
    for suite in SUITES:
        mine = [about for task, about in tasks.items() if task.startswith(suite + "/")]
        solved, states = (sum(about[key] for about in mine) for key in ("solved", "states"))
        if states:
            totals.append(f"{suite}: {solved} of {states} ({solved / states:.1%}), {len(mine)} tasks")
    return "\n".join([table, "", *totals])


def code_hash() -> str:
    text = b"".join((ROOT / "envs" / "libero" / f"{name}.py").read_bytes() for name in CODE)
    return hashlib.sha256(text + version("mujoco").encode()).hexdigest()[:16]


def main() -> None:
    from embodied.envs.libero.config import tasks_of

    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--resume", action="store_true", help="leave out what was measured with this code")
    ask.add_argument("--task", action="append", help="a task or a suite; may be repeated")
    ask.add_argument("--states", type=int, default=50, help="how many of the stored initial states")
    ask.add_argument("--videos", type=Path, help="film into this folder and write no results")
    options = ask.parse_args()

    code = code_hash()
    stored = json.loads(PLACE.read_text()) if PLACE.is_file() else {"tasks": {}}
    tasks = stored["tasks"]
    for task in tasks_of(options.task or SUITES):
        before = tasks.get(task, {})
        if options.resume and before.get("code") == code and before["states"] >= options.states:
            continue
        about = {**describe(task, measure_task(task, options.states, options.videos)), "code": code}
        print(f"{task}: {about['solved']} of {about['states']}, not {about['not_solved']}", flush=True)
        if not options.videos:
            tasks[task] = about
            write_json(PLACE, {"commit": code_commit(), "machine": machine(), "packages": packages(), "tasks": tasks})
    if not options.videos:
        print(report(tasks))


if __name__ == "__main__":
    main()
