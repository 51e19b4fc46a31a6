"""Writes measured tables into docs/, from benchmarks/results and nothing else: how often LIBERO's experts succeed,
which ManiSkill tasks PPO solves (from images too), what RL added to imitation, what becomes of runs whose processes
die.

    python -m benchmarks.learning.page
"""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np

from benchmarks import fault_page, libero_experts
from benchmarks.common import RESULTS, ROOT, markdown
from benchmarks.learning import images, sums, tasks, vla_gain
from benchmarks.learning.grpo_gain import interval, runs_of
from benchmarks.learning.seeds import rate

TASKS = {"grpo_pickcube": "PickCube-v1", "grpo_libero": "libero_object/2"}
VLAS = {"vla_oft": "OpenVLA-OFT", "vla_pi0": "Pi0"}
CARROTS = {"vla_carrot_pi0": "Pi0"}
ROBUST = {"state": "state policy", "pi0": "small Pi0"}  # on LIBERO-Pro
PARTS = 6  # of a run, whose means are its training curve


def gains(what: str, cases: dict[str, str]) -> str:
    rows, curves = [], []
    for folder, task in cases.items():
        for name, done in runs_of(RESULTS / folder):
            if name.startswith(("start-", "splits-")):
                continue
            steps, minutes = f"{done['env_steps']:,}", f"{done['cpu_s'] / 60:.0f}"
            begin, end = rate(done["start_success"]), rate(done["final_success"])
            rows.append([task, name, begin, end, interval(done["gain"]), steps, minutes])
            if name != "control":
                curves.append([task, name, *(f"{part:.0%}" for part in course(done["curve"]))])
    header = [what, "run", "imitation", "after GRPO", "gain on the same episodes", "env steps", "CPU minutes"]
    parts = [f"{part + 1}/{PARTS}" for part in range(PARTS)]
    return f"{markdown(header, rows)}\n\n{markdown([what, 'run', *parts], curves)}"


def carrots() -> str:
    """What RL added, and success at splits that training did not show, of imitation and after GRPO."""
    header, columns = ["task"], []
    for folder, policy in CARROTS.items():
        for path in sorted((RESULTS / folder).glob("splits-*.json")):
            found = json.loads(path.read_text())
            header += [f"{policy}, seed {found['seed']}: imitation", "after GRPO"]
            columns += [
                [rate(found.get(task, {}).get(when), 0) for task in vla_gain.SPLITS] for when in ("before", "after")
            ]
    rows = [list(row) for row in zip(vla_gain.SPLITS, *columns, strict=True)]
    return f"{gains('policy', CARROTS)}\n\n{markdown(header, rows)}"


def course(curve: list[list[float]]) -> list[float]:
    """Mean success in training, its actions being random, in so many parts of the run."""
    return [float(np.mean(part)) for part in np.array_split([success for _, success, _ in curve], PARTS)]


def experts() -> str:
    found = libero_experts.PLACE
    return libero_experts.report(json.loads(found.read_text())["tasks"]) if found.exists() else "None is measured yet."


def robustness() -> str:
    """Success of policies on a task of a suite and on the same task of its perturbations."""
    found = [json.loads((RESULTS / f"libero_robustness/{name}.json").read_text())["per_task"] for name in ROBUST]
    rows = [[task, *(rate(tasks[task]["success_once"], 0) for tasks in found)] for task in found[0]]
    return markdown(["task", *ROBUST.values()], rows)


def solved() -> str:
    return tasks.report(tasks.kept())


def seen() -> str:
    return images.report(images.kept())


def added(recipe: str) -> str:
    """What one command makes of a small language model that learns to add, the worst seed first."""
    done = runs_of(RESULTS / recipe)
    return sums.report(done) if done else "None is measured yet."


BLOCKS = {
    "sums_grpo": ("reasoning.md", partial(added, "sums_grpo")),
    "sums_ppo": ("reasoning.md", partial(added, "sums_ppo")),
    "gains": ("demonstrations.md", partial(gains, "task", TASKS)),
    "vlas": ("vla.md", partial(gains, "policy", VLAS)),
    "carrots": ("bridge.md", carrots),
    "tasks": ("maniskill.md", solved),
    "images": ("images.md", seen),
    "experts": ("libero.md", experts),
    "robustness": ("libero.md", robustness),
    "kills": ("faults.md", fault_page.kills),
    "simulator kills": ("faults.md", fault_page.simulator_kills),
    "schedule kills": ("faults.md", fault_page.schedule_kills),
    "ends": ("faults.md", fault_page.ends),
    "faults": ("faults.md", fault_page.faults),
}


def told(page: str, block: str, text: str) -> str:
    """The page with this text between the marks of a block."""
    marks = re.compile(rf"(<!-- {block}: begin -->\n).*(<!-- {block}: end -->)", re.DOTALL)
    return marks.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def main() -> None:
    for block, (name, write) in BLOCKS.items():
        page = ROOT / "docs" / name
        page.write_text(told(page.read_text(), block, write()))
        print(f"written: {block} in docs/{name}")


if __name__ == "__main__":
    main()
