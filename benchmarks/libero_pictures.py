"""LIBERO's pictures by Warp (env.renderer=warp) beside MuJoCo's own, which software draws, of the same states.

    python -m embodied.sims libero_warp
    python -m benchmarks.libero_pictures differences  # grey levels between the two: 40 tasks
    python -m benchmarks.libero_pictures speed        # CPU milliseconds of a picture
    python -m benchmarks.libero_pictures success      # a policy that imitates in MuJoCo's pictures, evaluated in both
    python -m benchmarks.libero_pictures sheet        # six pictures side by side, assets/libero_pictures.png
    python -m benchmarks.libero_pictures tables

Each finished task is written to results/libero_pictures.json at once, and a task that is in it is not measured again.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from benchmarks import common
from benchmarks.libero_warp import SUITES, TASKS, cpu_s, embodied, evaluated
from embodied.core.types import EpisodeSpec
from embodied.envs import make_env
from embodied.envs.config import EnvConfig

RESULTS = common.RESULTS / "libero_pictures.json"
SHEET = common.ROOT / "assets" / "libero_pictures.png"
SHOWN = ["libero_spatial/5", "libero_object/0", "libero_goal/2", "libero_10/0", "libero_10/3", "libero_10/8"]
RENDERERS = {"mujoco": "cores", "warp": "warp"}
CAMERAS = ("agentview", "wrist")
SIDES = ["128", "256"]
REPEATS = 4
EVAL_EPISODES = 100

Figures = dict[str, Any]


def pictures(task: str, side: int, cameras: tuple[str, ...] = CAMERAS) -> dict[str, np.ndarray]:
    """By renderer: uint8 [cameras, side, side, 3] of the first stored state."""
    env, drawn = env_of(task, "cores", side, cameras), {}
    env.reset(options={"episodes": [EpisodeSpec(task, 0, 7, 0)]})
    for name, renderer in RENDERERS.items():
        env.config = env.config.model_copy(update={"renderer": renderer})
        images = env._paint(np.array([0]))  # of the same state
        drawn[name] = np.stack([images[camera][0] for camera in cameras])
    env.close()
    return drawn


def env_of(task: str, renderer: str, side: int, cameras: tuple[str, ...]) -> Any:
    asked = {"name": "libero", "task": task, "num_envs": 1, "renderer": renderer, "image_size": side}
    return make_env(TypeAdapter(EnvConfig).validate_python(asked | {"cameras": cameras, "tasks_in_memory": 1}), 1)


def differences(task: str) -> Figures:
    """Mean absolute differences in grey levels of 256 of pictures of 256 pixels, and of brightness."""
    drawn = pictures(task, 256)
    apart = drawn["warp"].astype(int) - drawn["mujoco"]
    figures = dict(zip(CAMERAS, np.abs(apart).mean(axis=(1, 2, 3)).round(2).tolist(), strict=True))
    return figures | {"brighter": round(float(apart.mean()), 2)}


def speed(side: str) -> Figures:
    """CPU milliseconds of a picture, both cameras in turn."""
    figures = {}
    for name, renderer in RENDERERS.items():
        env = env_of(TASKS[0], renderer, int(side), CAMERAS)
        env.reset(options={"episodes": [EpisodeSpec(TASKS[0], 0, 7, 0)]})
        before = cpu_s()
        for _ in range(REPEATS):
            env._paint(np.array([0]))
        figures[name] = round(1000 * (cpu_s() - before) / REPEATS / len(CAMERAS), 1)
        env.close()
    return figures


def success(recipe: str) -> Figures:
    """Successes of a policy that imitates the expert in MuJoCo's pictures, evaluated in both."""
    figures: Figures = {"episodes": EVAL_EPISODES}
    with tempfile.TemporaryDirectory() as folder:
        demos, drawn = Path(folder) / "demos", (f"recipe={recipe}", "env.fast_images=false")  # which MuJoCo alone has
        embodied("collect", *drawn, f"out={demos}")
        words = [f"sft.data={demos}", f"policy.statistics={demos}", f"run.dir={folder}", "run.name=policy"]
        embodied("sft", *drawn, *words, "eval.episodes=1", "eval.videos=0")
        (run,) = [path.parent for path in Path(folder).glob("*policy*/run.json")]
        for name, renderer in RENDERERS.items():
            figures[name] = evaluated(run, f"env.renderer={renderer}", f"eval.episodes={EVAL_EPISODES}")
    return figures


def sheet() -> None:
    """Six scenes, MuJoCo's picture left and Warp's right: agentview, and the wrist's of every other scene."""
    from PIL import Image

    pairs = []
    for at, task in enumerate(SHOWN):
        drawn = pictures(task, 128, ("wrist" if at % 2 else "agentview",))
        pairs.append(np.concatenate([drawn["mujoco"][0], drawn["warp"][0]], axis=1))
    rows = [
        np.concatenate([np.pad(pair, ((2, 2), (4, 4), (0, 0)), constant_values=255) for pair in pairs[at : at + 3]], 1)
        for at in (0, 3)
    ]
    image = Image.fromarray(np.concatenate(rows)).quantize(128)
    image.save(SHEET, optimize=True)
    print(f"{SHEET}: {SHEET.stat().st_size / 1e3:.0f} kB")


PARTS: dict[str, tuple[Callable[[str], Figures], list[str]]] = {
    "differences": (differences, TASKS),
    "speed": (speed, SIDES),
    "success": (success, ["recipes/tiny/libero_sft_pi0_tiny.yaml"]),
}


def stored() -> Figures:
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def tables(content: Figures) -> str:
    """What is measured so far, as Markdown."""
    told = []
    if done := content.get("differences"):
        rows = []
        for suite in SUITES:
            found = [each for task, each in done.items() if task.startswith(f"{suite}/")]
            means = [f"{np.mean([each[key] for each in found]):.2f}" for key in (*CAMERAS, "brighter")] if found else []
            largest = max((each[camera] for each in found for camera in CAMERAS), default=0.0)
            rows.append([suite, str(len(found)), *means, f"{largest:.2f}"])
        told.append(common.markdown(["suite", "tasks", *CAMERAS, "brighter", "largest"], rows))
    if done := content.get("speed"):
        rows = [[side, *(str(each[name]) for name in RENDERERS)] for side, each in done.items()]
        told.append(common.markdown(["pixels", "MuJoCo, CPU ms a picture", "Warp"], rows))
    if done := content.get("success"):
        rows = [
            [recipe, name, f"{100 * rate['rate']:.0f}%", "-".join(f"{100 * end:.0f}" for end in rate["interval"])]
            for recipe, each in done.items()
            for name, rate in ((name, each[name]) for name in RENDERERS)
        ]
        told.append(common.markdown(["recipe", "pictures", "success", "95% interval"], rows))
    return "\n\n".join(told)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("part", choices=[*PARTS, "sheet", "tables"])
    ask.add_argument("--only", nargs="+", help="these tasks, sizes or recipes")
    asked = ask.parse_args()
    if asked.part == "sheet":
        return sheet()
    if asked.part == "tables":
        return print(tables(stored()))
    measure, names = PARTS[asked.part]
    for name in asked.only or names:
        if name not in stored().get(asked.part, {}):
            figures = {**measure(name), "commit": common.code_commit()}
            with RESULTS.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                content = {"machine": common.machine()["cpu"], **stored()}
                content.setdefault(asked.part, {})[name] = figures
                common.write_json(RESULTS, content)
            print(name, figures, flush=True)


if __name__ == "__main__":
    sys.exit(main())
