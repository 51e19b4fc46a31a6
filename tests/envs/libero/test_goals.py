"""Goals on arrays against LIBERO's own predicates."""

from types import SimpleNamespace

import numpy as np
import pytest

from embodied.envs.libero.goals import Goal
from embodied.envs.libero.scene import Scene, SceneRow
from embodied.envs.libero.tasks import files_of

NUM_STATES = 40
pytestmark = pytest.mark.usefixtures("plain_scenes")


def arrays_of(data, goal):
    """The arrays of one row, from MuJoCo's own data."""
    touching = 0
    for at, (first, second) in enumerate(goal.pairs):
        pairs = [{*contact} for contact in data.contact.geom.tolist()]
        contact = any({a, b} in pairs for a in first for b in second)
        touching |= int(contact) << at
    return SimpleNamespace(
        qpos=data.qpos[None].copy(),
        xpos=data.xpos[None].copy(),
        site_xpos=data.site_xpos[None].copy(),
        site_xmat=data.site_xmat.reshape(1, -1, 3, 3).copy(),
        touching=np.array([touching]),
    )


def near_the_goal(scene, data, rng):
    """Move what the goal names to, or close to, where it should be."""
    env, model = scene.env, scene.env.sim.model
    for _, what, *where in env.parsed_problem["goal_state"]:
        state = env.object_states_dict[what]
        if where:
            target = env.object_states_dict[where[0]].get_geom_state()["pos"]
            joint = model.get_joint_qpos_addr(env.get_object(what).joints[-1])
            data.qpos[joint[0] : joint[0] + 3] = target + rng.uniform(-0.04, 0.04, 3) * (1, 1, 1.5)
        else:
            thing = env.object_sites_dict[what] if state.object_state_type == "site" else env.get_object(what)
            for name in thing.joints:
                at = model.get_joint_qpos_addr(name)
                low, high = model._model.jnt_range[model.joint_name2id(name)]
                data.qpos[at] = rng.uniform(low - 0.1 * (high - low), high + 0.1 * (high - low))


def compare(task):
    """How many of the states reach the goal, in LIBERO's words and in ours."""
    import mujoco

    scene = Scene(files_of(task), ("qpos",), keep_files=False)
    goal, row, rng = Goal(scene.env, task), SceneRow(scene), np.random.default_rng(0)
    scene.begin(row, 0, files_of(task).initial_states()[0], 0)
    data, start = row.data._data, row.data._data.qpos.copy()
    theirs, ours = [], []
    for number in range(NUM_STATES):
        data.qpos[:] = start
        if number:
            near_the_goal(scene, data, rng)
        mujoco.mj_forward(scene.model, data)
        arrays = arrays_of(data, goal)
        theirs.append([bool(scene.env._eval_predicate(s)) for s in scene.env.parsed_problem["goal_state"]])
        ours.append([bool(term(arrays)[0]) for term in goal._terms])
        assert bool(goal.reached(arrays)[0]) == bool(scene.env._check_success())
    scene.close()
    return np.array(theirs), np.array(ours)


@pytest.mark.parametrize(
    "task",
    [
        "libero_10/3",  # an object in a drawer that is closed
        *(
            pytest.param(task, marks=pytest.mark.slow)
            for task in (
                "libero_spatial/5",  # on an object
                "libero_object/0",  # in a region of an object
                "libero_goal/0",  # a drawer open
                "libero_goal/3",  # an object in a drawer that opens
                "libero_goal/7",  # a stove turned on
                "libero_10/9",  # in a microwave that is closed
            )
        ),
    ],
)
def test_goals_on_arrays_agree_with_libero_on_the_same_states(task):
    theirs, ours = compare(task)
    np.testing.assert_array_equal(ours, theirs)
    assert theirs.any(axis=0).all() and not theirs.all(axis=0).any()
