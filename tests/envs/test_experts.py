"""Scripted experts: the arm's kinematics, what they solve, and what they refuse."""

from types import SimpleNamespace

import numpy as np
import pytest
from expert_episodes import played_by_expert

from embodied.core.errors import ConfigError
from embodied.core.types import EpisodeList
from embodied.envs.gym.config import GymConfig
from embodied.envs.libero.config import LiberoConfig
from embodied.envs.libero.expert import grasps_at_rim
from embodied.envs.maniskill import experts
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.pointmass.config import PointMassConfig
from embodied.envs.pointmass.env import PointMassEnv

REST = np.array([0, np.pi / 8, 0, -np.pi * 5 / 8, 0, np.pi * 3 / 4, np.pi / 4])


def play(env, count):
    return played_by_expert(env, EpisodeList(0, "demonstrations", (env.config.task,)).first(count))


def test_the_jacobian_tells_how_small_joint_steps_move_the_hand():
    joints = REST + np.random.default_rng(0).uniform(-0.5, 0.5, (5, 7))
    at, turned, jacobian = experts.hand_pose(joints)
    for joint in range(7):
        step = np.zeros(7)
        step[joint] = 1e-6
        moved, turned_then, _ = experts.hand_pose(joints + step)
        spin = (turned_then - turned) @ turned.transpose(0, 2, 1) / 1e-6
        assert np.allclose((moved - at) / 1e-6, jacobian[:, :3, joint], atol=1e-5)
        assert np.allclose(spin[:, [2, 0, 1], [1, 2, 0]], jacobian[:, 3:, joint], atol=1e-5)


def test_a_joint_step_moves_the_hand_as_asked():
    joints = REST[None] + 0.1
    at, _, jacobian = experts.hand_pose(joints)
    asked = np.array([[0.001, -0.002, 0.001, 0, 0, 0.002]])
    moved, _, _ = experts.hand_pose(joints + experts.joint_step(jacobian, asked))
    assert np.allclose(moved - at, asked[:, :3], atol=1e-4)


def test_the_small_arms_expert_holds_the_cube_and_the_arm_is_where_its_kinematics_say():
    pytest.importorskip("mani_skill")
    from embodied.envs.maniskill import small_arm
    from embodied.envs.maniskill.env import ManiSkillEnv

    config = ManiSkillConfig(task="PickCubeSO100-v1", control_mode="pd_joint_target_delta_pos")
    env = ManiSkillEnv(config, 8)
    assert sum(result.success_once for result in play(env, 8)) >= 7
    agent = env.envs[0].agent
    joints = agent.robot.get_qpos().numpy()[:, :-1].astype(float)
    hand, turned, jacobian = small_arm.hand_pose(joints)
    tip = agent.finger1_tip.pose.p - agent.robot.pose.p  # 2 cm beside the cube's place, along the fixed jaw's x axis
    away = experts.in_arm_frame(tip.numpy(), experts.horizontal_axis(agent.robot.pose.q.numpy())) - hand
    assert np.allclose(away, 0.02 * turned[:, :, 1], atol=1e-5)
    for joint in range(5):
        moved = small_arm.hand_pose(joints + 1e-6 * np.eye(5)[joint])[0]
        assert np.allclose((moved - hand) / 1e-6, jacobian[:, :3, joint], atol=1e-5)


@pytest.mark.parametrize("discrete", [False, True])
def test_the_toys_expert_always_arrives(discrete):
    env = PointMassEnv(PointMassConfig(name="pointmass", discrete=discrete), 8)
    assert all(result.success_once for result in play(env, 24))


def test_maniskills_expert_picks_the_cube_and_the_arm_is_where_its_kinematics_say():
    pytest.importorskip("mani_skill")
    from embodied.envs.maniskill.env import ManiSkillEnv
    from embodied.envs.maniskill.experts import look

    env = ManiSkillEnv(ManiSkillConfig(task="PickCube-v1"), 6)
    assert sum(result.success_once for result in play(env, 6)) >= 5
    world, agent = look(env, 0), env.envs[0].agent
    assert np.allclose(world.hand, (agent.tcp.pose.p - agent.robot.pose.p).numpy(), atol=1e-5)
    env.close()


TASKS = "PlaceSphere-v1 PullCubeTool-v1 PokeCube-v1 LiftPegUpright-v1 PegInsertionSide-v1 TwoRobotPickCube-v1".split()


@pytest.mark.parametrize("task", TASKS)
def test_maniskills_expert_places_uses_tools_raises_inserts_and_hands_over(task):
    pytest.importorskip("mani_skill")
    from embodied.envs.maniskill.env import ManiSkillEnv

    rows = 2 if task == "PegInsertionSide-v1" else 4  # the peg's physics take long, and no insertion may fail
    env = ManiSkillEnv(ManiSkillConfig(task=task), rows)
    assert sum(result.success_once for result in play(env, rows)) >= 0.75 * rows
    env.close()


def test_maniskills_expert_rolls_the_ball_into_the_goal():
    pytest.importorskip("mani_skill")
    from embodied.envs.maniskill.env import ManiSkillEnv

    env = ManiSkillEnv(ManiSkillConfig(task="RollBall-v1"), 16)
    assert sum(result.success_once for result in play(env, 16)) >= 11
    env.close()


def test_a_movement_shared_among_joints_is_nearly_as_wanted_and_no_joint_does_most_of_it():
    _, _, jacobian = experts.hand_pose(REST + np.random.default_rng(0).uniform(-0.3, 0.3, (8, 7)))
    twist = np.tile([0.02, 0.0, 0.0, 0.0, 0.0, 0.0], (8, 1))
    shared = experts.share_among_joints(jacobian[:, :3], twist[:, :3])
    assert np.allclose((jacobian[:, :3] @ shared[:, :, None])[:, :, 0], twist[:, :3], atol=2.5e-3)
    least_squares = np.linalg.pinv(jacobian[:, :3]) @ twist[:, :3, None]
    assert (np.abs(shared).max(axis=1) < 0.95 * np.abs(least_squares[:, :, 0]).max(axis=1)).all()


def test_an_arm_sees_things_ahead_of_it_wherever_it_looks():
    from embodied.envs.maniskill.experts import in_arm_frame

    ahead = np.array([[1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    things = np.array([[0.2, 0.1, 0.3], [-0.1, 0.2, 0.3], [0.1, -0.2, 0.3]])
    assert np.allclose(in_arm_frame(things, ahead), [0.2, 0.1, 0.3])


def test_a_leaning_bowl_is_held_where_its_rim_is_and_the_higher_side_is_known():
    around = np.arange(0, 2 * np.pi, np.pi / 24)
    rim = np.stack([0.05 * np.cos(around), 0.05 * np.sin(around), 0.95 + 0.03 * np.cos(around)], axis=1)
    bottom = rim * [0.4, 0.4, 1] - [0, 0, 0.05]
    grasps = grasps_at_rim(np.concatenate([rim, bottom]), np.array([0.0, 0.0, 0.93]))
    assert all(np.linalg.norm(grasp.point[:2]) == pytest.approx(0.05, abs=1e-3) for grasp in grasps)
    highest = max(grasps, key=lambda grasp: grasp.point[2])
    assert highest.point == pytest.approx([0.05, 0, 0.98 - 0.014], abs=1e-6) and highest.closing[0] == 1


@pytest.mark.slow
@pytest.mark.skipif("not __import__('importlib.util').util.find_spec('libero')", reason="needs LIBERO")
@pytest.mark.parametrize("task", ["libero_object/2", "libero_spatial/5"])
def test_liberos_expert_solves_stored_states_also_where_a_bowl_slips_as_the_episode_begins(task):
    from embodied.envs.libero.env import LiberoEnv

    env = LiberoEnv(LiberoConfig(name="libero", task=task), 2)
    episodes = EpisodeList(0, "eval", (task,), stored_states=50).first(2)
    played = played_by_expert(env, episodes)
    env.close()
    assert all(result.success_once for result in played)


@pytest.mark.parametrize("kind", ["scripted", "planner"])
def test_experts_play_where_no_control_mode_is_set(kind):
    from embodied.envs.maniskill.env import ManiSkillEnv

    ManiSkillEnv.check_expert(ManiSkillConfig(task="StackCube-v1"), kind)
    other = ManiSkillConfig(task="StackCube-v1", control_mode="pd_joint_pos")
    with pytest.raises(ConfigError, match=r"env\.control_mode=pd_joint_pos"):
        ManiSkillEnv.check_expert(other, kind)


def test_tasks_without_an_expert_are_refused():
    from embodied.envs.gym.env import GymEnv
    from embodied.envs.maniskill.env import ManiSkillEnv

    config = ManiSkillConfig(task="PullCube-v1")
    with pytest.raises(ConfigError, match=r"no expert for env\.task=PullCube-v1.*PickCube-v1"):
        ManiSkillEnv.expert(SimpleNamespace(config=config))
    with pytest.raises(ConfigError, match=r"no expert for env\.task=PullCube-v1"):
        ManiSkillEnv.check_expert(config, "scripted")
    with pytest.raises(ConfigError, match=r"planner does not play env\.task=PullCube-v1"):
        ManiSkillEnv.check_expert(config, "planner")
    with pytest.raises(ConfigError, match=r"no expert for env\.name=gym:CartPole-v1"):
        GymEnv.check_expert(GymConfig(name="gym:CartPole-v1"), "scripted")
