"""How often ManiSkill's motion planner and our scripts solve its tasks, in how many env steps, and what it costs.

    python -m benchmarks.maniskill_experts [--episodes 20] [--task PickCube-v1]

The planner once in its own env, as it is written, and its plans replayed in every control mode; the script in the one
it is for. All play the same episodes: the planner to the ends of its plans, the others 150 env steps; a task of its own
accord ends after 50 or 100. Writes results/maniskill_experts.json.
"""

from __future__ import annotations

import argparse
import json
import time
from queue import SimpleQueue

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json

PLACE = RESULTS / "maniskill_experts.json"
LONGER = 150
ROWS = 10


def measure_task(task: str, count: int) -> list[dict]:
    from embodied.core.types import EpisodeList
    from embodied.envs.maniskill.expert import ManiSkillExpert
    from embodied.envs.maniskill.motion_planner import CONTROLS, SOLVERS, PlannerExpert

    episodes = EpisodeList(0, "demonstrations", (task,)).first(count)
    found = []
    if task in SOLVERS:
        planner = PlannerExpert(make(task, "pd_joint_delta_pos", count)).planner
        started = time.process_time()
        plans = {episode.seed: planner.plan(episode.seed) for episode in episodes}
        own_s = (time.process_time() - started) / count
        lengths = [len(plan) for plan in plans.values() if plan.solved]
        found.append(about(task, "planner, in its own env", "pd_joint_pos", count, lengths, own_s))
    env = make(task, "pd_joint_delta_pos", count)
    found.append(play(env, ManiSkillExpert(env), "script", episodes))
    for mode in CONTROLS if task in SOLVERS else ():
        env = make(task, mode, count)
        expert = PlannerExpert(env)
        expert.planner = Planned(plans)
        found.append(play(env, expert, "plan, replayed", episodes))
    return found


class Planned:
    """A planner that has planned already, so that only the replay is measured."""

    def __init__(self, plans: dict) -> None:
        self.plan = plans.__getitem__


def make(task: str, mode: str, count: int):
    from embodied.envs.config import ManiSkillConfig
    from embodied.envs.maniskill.env import ManiSkillEnv

    config = ManiSkillConfig(task=task, control_mode=mode, max_episode_steps=LONGER)
    return ManiSkillEnv(config, min(ROWS, count))


def play(env, expert, who: str, episodes: list) -> dict:
    from embodied.core.types import Recording
    from embodied.envs.action_sources import ExpertActions
    from embodied.envs.evaluation import play_episodes
    from embodied.runtime import Timers

    started = time.process_time()
    action_source = ExpertActions(expert, "expert")
    results = play_episodes(env, episodes, action_source, Recording(), SimpleQueue(), frozenset(), Timers())
    cpu_s = (time.process_time() - started) / len(episodes)
    env.close()
    lengths = [result.length for result in results if result.success_once]
    return about(env.config.task, who, env.config.control_mode, len(episodes), lengths, cpu_s)


def about(task: str, who: str, mode: str, count: int, lengths: list[int], cpu_s: float) -> dict:
    """`lengths` are those of the solved episodes."""
    from mani_skill.utils.registration import REGISTERED_ENVS

    ordered, limit = sorted(lengths), REGISTERED_ENVS[task].max_episode_steps
    return {
        "task": task,
        "limit": limit,
        "expert": who,
        "control_mode": mode,
        "episodes": count,
        "solved": len(ordered),
        "solved_in_time": sum(length <= limit for length in ordered),
        "steps_median": ordered[len(ordered) // 2] if ordered else None,
        "steps_most": ordered[-1] if ordered else None,
        "cpu_s_per_episode": round(cpu_s, 3),
    }


def report(rows: list[dict]) -> str:
    header = ["task", "expert", "control mode", "solved in time", "solved", "env steps", "CPU s"]
    lines = [
        [
            one["task"],
            one["expert"],
            one["control_mode"],
            f"{one['solved_in_time']} of {one['episodes']}, within {one.get('limit', 50)}",
            f"{one['solved']} of {one['episodes']}",
            f"{one['steps_median']}, at most {one['steps_most']}",
            f"{one['cpu_s_per_episode']:.2f}",
        ]
        for one in rows
    ]
    return markdown(header, lines)


def main() -> None:
    from embodied.envs.maniskill.expert import RULES
    from embodied.envs.maniskill.motion_planner import SOLVERS

    tasks = list(SOLVERS | RULES)
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--episodes", type=int, default=20, help="of each task")
    ask.add_argument("--task", action="append", choices=tasks, help="only this one; may be repeated")
    options = ask.parse_args()

    rows = json.loads(PLACE.read_text())["rows"] if PLACE.is_file() else []
    for task in options.task or tasks:
        rows = [one for one in rows if one["task"] != task] + measure_task(task, options.episodes)
        print(report([one for one in rows if one["task"] == task]), flush=True)
        write_json(PLACE, {"commit": code_commit(), "machine": machine(), "packages": packages(), "rows": rows})


if __name__ == "__main__":
    main()
