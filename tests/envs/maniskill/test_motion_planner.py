"""ManiSkill's motion planner as an expert: how a plan is followed, what it solves, and what is refused."""

import sys

import numpy as np
import pytest
from expert_episodes import played_by_expert
from needed import requires

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeList
from embodied.envs.maniskill import motion_planner
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.maniskill.env import ManiSkillEnv
from embodied.envs.maniskill.motion_planner import CONTROLS, SOLVERS, Plan, PlannerExpert, PlanReplay

requires("mani_skill")
REST = np.array([0, np.pi / 8, 0, -np.pi * 5 / 8, 0, np.pi * 3 / 4, np.pi / 4])


def plan_of(offsets, grip):
    joints = np.tile(REST, (len(offsets), 1))
    joints[:, 0] += offsets
    return Plan(joints, np.array(grip, float), solved=True)


def test_the_hand_is_never_aimed_beyond_where_the_fingers_have_to_move_first():
    plan = plan_of([0.0, 0.1, 0.2, 0.2, 0.2, 0.3, 0.4], [1, 1, 1, -1, -1, -1, -1])
    assert plan.stops.tolist() == [2, 2, 2, 3, 4, 6, 6]
    begins_closed = plan_of([0.0, 0.0, 0.0, 0.1], [-1, -1, -1, -1])
    assert begins_closed.stops.tolist() == [0, 1, 2, 3]


def test_a_replay_cuts_a_move_short_but_no_wait_for_the_fingers():
    plan = plan_of([0.0, 0.02, 0.04, 0.06, 0.06, 0.06, 0.08], [1, 1, 1, 1, -1, -1, -1])
    replay, aims = PlanReplay(plan, turns=True), []
    joints = REST[None]
    for _ in range(6):
        hand, turned, _ = motion_planner.hand_pose(joints)
        aims.append(int(replay.advance(hand[0], turned[0])))
        joints = plan.joints[[aims[-1]]]
    assert aims == [3, 4, 5, 6, 6, 6], "0.06 rad of this joint move the hand by less than 4 cm"


def test_a_hand_that_does_not_arrive_goes_on_after_a_while():
    plan = plan_of([0.0, 1.0, 1.0], [1, 1, -1])
    hand, turned, _ = motion_planner.hand_pose(REST[None])
    replay = PlanReplay(plan, turns=True)
    aims = [int(replay.advance(hand[0], turned[0])) for _ in range(3 * motion_planner.PATIENCE)]
    assert aims[0] == 0 and aims[-1] == 2 and sorted(aims) == aims


def played(task, mode, count, rows, **options):
    env = ManiSkillEnv(ManiSkillConfig(task=task, control_mode=mode, **options), rows)
    episodes = EpisodeList(0, "demonstrations", (task,)).first(count)
    results = played_by_expert(env, episodes, "planner")
    env.close()
    return results


@pytest.mark.slow
def test_the_planners_plan_is_replayed_within_the_tasks_own_time():
    (result,) = played("PushCube-v1", "pd_joint_delta_pos", 1, 1)
    assert result.success_once and result.length <= 50


@pytest.mark.slow
@pytest.mark.parametrize("mode", CONTROLS)
@pytest.mark.parametrize("task", SOLVERS)
def test_plans_are_replayed_in_every_control_mode(task, mode):
    results = played(task, mode, 4, 2, max_episode_steps=150)
    assert sum(result.success_once for result in results) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("task", SOLVERS)
def test_a_plan_follows_from_its_episode_and_not_from_what_was_planned_before(task):
    planner = PlannerExpert(ManiSkillEnv(ManiSkillConfig(task=task), 1)).planner
    first, _, again = planner.plan(3), planner.plan(4), planner.plan(3)
    assert first.solved and len(first) > 50
    assert (first.joints == again.joints).all() and (first.grip == again.grip).all()


@pytest.mark.slow
def test_an_episode_does_not_depend_on_the_episode_beside_it():
    alone = played("StackCube-v1", "pd_ee_delta_pose", 2, 1)
    together = played("StackCube-v1", "pd_ee_delta_pose", 2, 2)
    by_index = lambda results: [(one.seed, one.length) for one in sorted(results, key=lambda one: one.index)]  # noqa: E731
    assert by_index(alone) == by_index(together)


def test_without_the_planner_the_error_names_the_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, motion_planner.SOLUTIONS, None)
    with pytest.raises(ConfigError, match=r"cannot be loaded here.*pip install mplib==0\.1\.1"):
        motion_planner.solver("PickCube-v1")
