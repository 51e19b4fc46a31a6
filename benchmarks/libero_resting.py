"""Where do LIBERO's objects rest when a policy first looks? After the settling steps, in stored states 0 and 25.

    python -m benchmarks.libero_resting [--task libero_spatial/5 ...] [--compare]

Writes results/libero_resting.json; --compare writes nothing and says how far from there objects rest in the MuJoCo that
is installed (tests/envs/libero/test_resting.py does so too). Without --task: the 40 tasks of the four suites.
"""

from __future__ import annotations

import argparse
import json
from importlib.metadata import version

import numpy as np

from benchmarks.common import RESULTS, code_commit, machine, markdown, packages, write_json

PLACE = RESULTS / "libero_resting.json"
SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
STATES = ("0", "25")


def resting_objects(task: str) -> dict[str, dict[str, dict]]:
    """State -> object -> position (m) after settling, how far it went sideways (m) meanwhile, and its speed (m/s)."""
    from embodied.envs.libero.env import SHOWN, things_in
    from embodied.envs.libero.scene import Scene, SceneRow
    from embodied.envs.libero.tasks import task_files

    files = task_files(task)
    scene = Scene(files, SHOWN)
    row, (movable, _) = SceneRow(scene), things_in(scene)
    bodies = {name: scene.env.obj_body_id[name] for name in movable}
    places = {name: scene.model.jnt_qposadr[scene.model.body_jntadr[body]] for name, body in bodies.items()}
    found = {}
    for state in STATES:
        stored = files.initial_states()[int(state)]
        scene.begin(row, 0, stored)
        data = row.data._data
        found[state] = {
            name: {
                "position": data.xpos[body].round(5).tolist(),
                "sideways": round(float(np.linalg.norm((data.xpos[body] - stored[1 + places[name] :][:3])[:2])), 5),
                "speed": round(float(np.linalg.norm(data.cvel[body][3:])), 4),
            }
            for name, body in bodies.items()
        }
    scene.close()
    return found


def recorded() -> dict[str, dict[str, dict[str, dict]]]:
    return json.loads(PLACE.read_text())["tasks"] if PLACE.exists() else {}


def farthest(task: str, found: dict[str, dict[str, dict]]) -> float:
    """The largest distance (m) of an object from where it rests in the recorded measurement."""
    return max(
        float(np.linalg.norm(np.subtract(about["position"], recorded()[task][state][name]["position"])))
        for state, objects in found.items()
        for name, about in objects.items()
    )


def main() -> None:
    from embodied.envs.libero.config import tasks_of

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", action="append")
    parser.add_argument("--compare", action="store_true")
    options = parser.parse_args()
    tasks, rows = {} if options.compare else recorded(), []
    for task in tasks_of(options.task or SUITES):
        found = resting_objects(task)
        objects = [about for state in found.values() for about in state.values()]
        rows.append(
            [
                task,
                f"{100 * farthest(task, found):.2f} cm" if task in recorded() else "-",
                f"{100 * max(about['sideways'] for about in objects):.2f} cm",
                f"{max(about['speed'] for about in objects):.4f} m/s",
            ]
        )
        if not options.compare:
            tasks[task] = found
            about = {"commit": code_commit(), "machine": machine(), "packages": packages()}
            write_json(PLACE, about | {"tasks": tasks})
    print(f"MuJoCo {version('mujoco')}")
    print(markdown(["task", "from the recorded place", "sideways while settling", "fastest object"], rows))


if __name__ == "__main__":
    main()
