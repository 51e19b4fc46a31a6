"""LIBERO's objects rest where they rest in MuJoCo 3.3 when a policy first looks: later versions throw them about."""

import json
from pathlib import Path

import numpy as np
import pytest

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # robosuite's, numba's and bddl's own
    pytest.mark.skipif("not __import__('importlib.util').util.find_spec('libero')", reason="needs LIBERO"),
]
RECORDED = json.loads((Path(__file__).parent / "resting_places.json").read_text())["tasks"]  # task, state, object
THROWN = "libero_10/0"  # about, by later versions


@pytest.mark.parametrize(
    "task",
    [pytest.param(task, marks=[] if task == THROWN else [pytest.mark.slow]) for task in RECORDED],
)
def test_objects_lie_still_where_the_benchmark_wants_them(task):
    found = resting_objects(task)
    assert found.keys() == RECORDED[task].keys()
    for state, objects in found.items():
        for name, about in objects.items():
            assert np.linalg.norm(np.subtract(about["position"], RECORDED[task][state][name])) < 1e-3
            assert about["speed"] < 1e-3 and about["sideways"] < 0.02, (name, about)


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
    for state in RECORDED[task]:
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
