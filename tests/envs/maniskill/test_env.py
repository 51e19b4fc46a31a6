"""Real ManiSkill on the CPU. One process builds each env once; rows are few and episodes short, so the file takes
seconds."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from needed import requires, without_files

from embodied.config.read import recipe_of_task
from embodied.config.recipe import load
from embodied.config.recipe_files import BY_TASK, recipe_names
from embodied.core.errors import ConfigError, MissingAsset
from embodied.core.types import EpisodeSpec
from embodied.envs import env_class, make_env, plugin
from embodied.envs.env_checker import check_vector_env
from embodied.envs.maniskill import tasks
from embodied.envs.maniskill.bridge import SVG
from embodied.envs.maniskill.config import ManiSkillConfig

pytestmark = pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
requires("mani_skill")


def spec(seed: int) -> EpisodeSpec:
    return EpisodeSpec("task", -1, seed, seed)


def reset(env, rows, seeds):
    by_row = [None] * env.num_envs
    mask = np.zeros(env.num_envs, bool)
    for row, seed in zip(rows, seeds, strict=True):
        by_row[row], mask[row] = spec(seed), True
    return env.reset(options={"reset_mask": mask, "episodes": by_row})[0]["state"]


@pytest.fixture(scope="module")
def batched():
    env = make_env(ManiSkillConfig(task="PushCube-v1", backend="cpu_batched"), 4)
    yield env
    env.close()


@pytest.mark.parametrize("task", ["PushCube-v1", "PickCube-v1", "TwoRobotPickCube-v1", "MS-CartpoleBalance-v1"])
def test_batched_rows_equal_single_envs(task, batched):
    """Same seeds, same random actions, a whole episode: states, rewards and successes agree."""
    many = batched if task == "PushCube-v1" else make_env(ManiSkillConfig(task=task, backend="cpu_batched"), 4)
    singles = make_env(ManiSkillConfig(task=task, backend="cpu", on_success="continue"), 4)
    seeds = [11, 12, 13, 14]
    np.testing.assert_allclose(reset(many, range(4), seeds), reset(singles, range(4), seeds), atol=1e-6)
    rng = np.random.default_rng(0)
    for _ in range(50):
        actions = rng.uniform(-1, 1, (4, 1, many.env_spec.action.dim)).astype(np.float32)
        a, b = many.step_chunk(actions), singles.step_chunk(actions)
        live = a.mask[:, 0]
        np.testing.assert_allclose(a.obs["state"][live], b.obs["state"][live], atol=1e-4)
        np.testing.assert_allclose(a.rewards[live], b.rewards[live], atol=1e-4)
        assert a.success is b.success is None or np.array_equal(a.success[live], b.success[live])


@pytest.mark.parametrize("backend", ["cpu_batched", "cpu"])
def test_relative_positions_follow_the_state_and_are_its_differences(backend):
    """PushCube-v1's state: 18 numbers of joints, then the poses of gripper, goal (a place alone) and cube."""
    env = make_env(ManiSkillConfig(task="PushCube-v1", backend=backend, relative_positions=True), 2)
    began = reset(env, range(2), [1, 2])
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 3, env.env_spec.action.dim)).astype(np.float32)
    for state in (began, env.step_chunk(actions).obs["state"]):
        tcp, goal, cube = state[:, 18:21], state[:, 25:28], state[:, 28:31]
        assert state.shape == (2, 35 + 9) == (2, env.env_spec.state_dim)
        np.testing.assert_allclose(state[:, 35:], np.concatenate([goal - tcp, cube - tcp, cube - goal], 1), atol=1e-6)
    assert "relative.tcp_to_goal 3, relative.tcp_to_obj 3, relative.goal_to_obj 3" in env.facts()["state"]
    env.close()


def test_fewer_solver_iterations_are_for_rollouts_alone():
    """A batch takes them as a single env does; what an evaluation plays is the task's own physics."""
    config = ManiSkillConfig(task="PushCube-v1", solver_iterations=2)
    judged = env_class(config).protocols(config)[0].apply(config)
    few, single, own, default = (
        make_env(each.model_copy(update={"on_success": "continue"}), 2)
        for each in (config, config.model_copy(update={"backend": "cpu"}), judged, ManiSkillConfig(task="PushCube-v1"))
    )
    envs = (few, single, own, default)
    assert [env.envs[0].sim_config.scene_config.solver_position_iterations for env in envs] == [2, 2, 15, 15]
    seen = [reset(env, range(2), [1, 2]) for env in envs]
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 30, 8)).astype(np.float32)
    actions[:, :, 1] = 1  # down to the table
    for t in range(30):
        seen = [env.step_chunk(actions[:, t : t + 1]).obs["state"] for env in envs]
    np.testing.assert_allclose(seen[0], seen[1], atol=1e-4)
    np.testing.assert_array_equal(seen[2], seen[3])
    assert np.abs(seen[0] - seen[2]).max() > 1e-4
    for env in envs:
        env.close()


@pytest.mark.parametrize("backend", ["cpu_batched", "cpu"])
def test_later_episodes_of_a_run_are_solved_in_the_tasks_own_iterations(backend):
    """Row by row: the second one is in its later episode while the first one is in an early one."""
    played = []
    for options in ({"solver_iterations": 2}, {"solver_iterations": 2, "solver_episodes": 2}, {}):
        env = make_env(ManiSkillConfig(task="PushCube-v1", backend=backend, on_success="continue", **options), 2)
        states = []
        for indices in ((0, 1), (1, 2), (2, 1)):
            episodes = [
                EpisodeSpec("PushCube-v1", -1, seed, index) for seed, index in zip((1, 2), indices, strict=True)
            ]
            env.reset(options={"reset_mask": np.ones(2, bool), "episodes": episodes})
            actions = np.random.default_rng(0).uniform(-1, 1, (2, 20, 8)).astype(np.float32)
            actions[:, :, 1] = 1  # down to the table
            states.append(env.step_chunk(actions).obs["state"])
        played.append(states)
        env.close()
    few, late, own = played
    assert np.abs(few[0] - own[0]).max() > 1e-4
    np.testing.assert_array_equal(late[0], few[0])
    np.testing.assert_array_equal(late[1], [few[1][0], own[1][1]])
    np.testing.assert_array_equal(late[2], [own[2][0], few[2][1]])


def test_frozen_rows_stand_still_and_the_others_go_on_bitwise_as_in_full_company(batched):
    """Row 0 alone runs on while the others are over; then they begin again."""
    rng = np.random.default_rng(3)
    actions = rng.uniform(-1, 1, (4, 20, 8)).astype(np.float32)
    reset(batched, range(4), [21, 22, 23, 24])
    together = [batched.step_chunk(actions[:, t : t + 1]) for t in range(20)]
    reset(batched, range(4), [21, 22, 23, 24])
    batched.step_chunk(actions[:, :1])
    batched._live[1:] = False
    stood = batched.step_chunk(actions[:, 1:2]).obs["state"]
    alone = [batched.step_chunk(actions[:, t : t + 1]) for t in range(2, 20)]
    for one, other in zip(alone, together[2:], strict=True):
        np.testing.assert_array_equal(one.obs["state"][0], other.obs["state"][0])
        assert one.rewards[0, 0] == other.rewards[0, 0]
        np.testing.assert_array_equal(one.obs["state"][1:], stood[1:])
    np.testing.assert_array_equal(reset(batched, [2], [9])[2], reset(batched, [1], [9])[1])
    assert len(batched.envs[0].scene.px.active) == 1


def test_steps_that_are_put_off_lead_to_the_same_bits(batched, monkeypatch):
    actions = np.random.default_rng(5).uniform(-1, 1, (4, 50, 8)).astype(np.float32)
    physics, seen = batched.envs[0].scene.px, []
    for puts_off in (True, False):
        monkeypatch.setattr(physics, "puts_off", puts_off)
        began = reset(batched, range(4), [31, 32, 33, 34])
        played = [batched.step_chunk(actions[:, t : t + 1]) for t in range(50)]
        seen.append([began, *(each for one in played for each in (one.obs["state"], one.rewards))])
    for one, other in zip(*seen, strict=True):
        np.testing.assert_array_equal(one, other)


def test_code_between_physics_steps_finds_every_one_taken(monkeypatch):
    from mani_skill.envs.tasks import PushCubeEnv

    heights = []
    see = lambda env: heights.append(env.obj._bodies[0].entity.pose.p[2])  # noqa: E731
    monkeypatch.setattr(PushCubeEnv, "_after_simulation_step", see)
    env = make_env(ManiSkillConfig(task="PushCube-v1", backend="cpu_batched"), 1)
    reset(env, [0], [1])
    env.envs[0].obj._bodies[0].entity.set_pose(type(env.envs[0].obj._bodies[0].entity.pose)([0, 0, 1]))
    heights.clear()
    env.step_chunk(np.zeros((1, 1, 8), np.float32))
    env.close()
    assert len(heights) == 5 and (np.diff(heights) < 0).all()  # it falls from step to step


def test_the_contract_holds(batched):
    check_vector_env(batched, atol=2e-5)


def test_frames_show_each_row_from_the_tasks_camera(batched):
    reset(batched, range(4), [1, 2, 3, 4])
    frames = batched.render_rows(np.array([0, 3]))
    assert frames.shape == (2, 256, 256, 3) and frames.dtype == np.uint8
    assert frames.std() > 20
    assert np.abs(frames[0].astype(int) - frames[1]).max() > 30  # the cubes lie elsewhere


def test_a_task_without_a_camera_for_people_is_filmed(batched, monkeypatch):
    monkeypatch.setattr(type(batched.envs[0]), "_default_human_render_camera_configs", [])
    monkeypatch.setattr(batched, "_cameras", {})
    assert batched.render_rows(np.array([1])).std() > 10


def test_building_leaves_no_replacement_behind(batched):
    import sapien
    from mani_skill.envs import sapien_env

    from embodied.envs.maniskill.cpu_physics import BatchedCpuPhysics

    assert sapien.physx.PhysxGpuSystem is not BatchedCpuPhysics
    assert "physx_cpu" in sapien_env.CPU_SIM_BACKENDS
    assert sapien_env.BaseEnv._setup_scene.__module__ == "mani_skill.envs.sapien_env"
    import gymnasium

    with pytest.raises(RuntimeError, match="multiple environments"):
        gymnasium.make("PushCube-v1", num_envs=2, sim_backend="physx_cpu", render_backend="cpu")
    plain = gymnasium.make("PushCube-v1", obs_mode="state", sim_backend="physx_cpu", render_backend="cpu")
    first, _ = plain.reset(seed=1)
    np.testing.assert_allclose(first[0].numpy(), reset(batched, [0], [1])[0], atol=1e-6)
    plain.close()


def test_a_late_reader_of_an_unfetched_link_gets_nan_not_yesterdays_pose(batched):
    env = batched.envs[0]
    pose = env.agent.robot.links_map["panda_link3"].pose.raw_pose
    assert np.isnan(pose.numpy()).all()
    assert np.isfinite(env.agent.tcp.pose.raw_pose.numpy()).all()


def resolved(**options) -> str:
    config = ManiSkillConfig(**options)
    return env_class(config).resolve(config).backend


def test_auto_takes_the_batched_backend_only_where_it_was_proven():
    assert resolved(task="PushCube-v1") == "cpu_batched"
    assert resolved(task="PushCube-v1", control_mode="pd_ee_delta_pose") == "cpu"
    assert resolved(task="PegInsertionSide-v1") == "cpu"


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"task": "PushCub-v1"}, ConfigError, "PushCube-v1"),
        ({"task": "PutCarrotOnPlateInScene-v1"}, MissingAsset, "download_asset bridge_v2_real2sim"),
        ({"task": "PegInsertionSide-v1", "backend": "cpu_batched"}, ConfigError, "env.backend=cpu"),
        ({"control_mode": "pd_ee_delta_pose", "backend": "cpu_batched"}, ConfigError, "pd_joint_delta_pos"),
    ],
)
def test_an_env_that_cannot_run_is_refused_before_the_run(options, error, says, monkeypatch, tmp_path):
    without_files(monkeypatch, tmp_path)
    config = ManiSkillConfig(**options)
    with pytest.raises(error, match=says):
        env_class(config).check(env_class(config).proven(config, tmp_path))


def test_undeclared_assets_of_maniskill_tasks_are_reported_missing(monkeypatch):
    from mani_skill.utils.assets import DATA_GROUPS, DATA_SOURCES

    monkeypatch.setattr("embodied.envs.maniskill.tasks.lacking", lambda asset: [asset])
    assert tasks.missing_assets("UnitreeH1Stand-v1") == ["unitree_h1"]
    assert tasks.missing_assets("PickSingleYCB-v1") == ["ycb"]
    known = tasks.registered()
    for begin, assets in tasks.UNDECLARED.items():
        assert any(task.startswith(begin) for task in known), begin
        assert {*assets} <= {*DATA_SOURCES, *DATA_GROUPS, SVG}


def test_envs_in_threads_draw_as_they_do_alone():
    """The inline backend runs several sim workers in one process, and one may be built while another resets."""

    def states(task: str) -> np.ndarray:
        env = make_env(ManiSkillConfig(task=task, backend="cpu_batched"), 2)
        begun = []
        for seed in range(20):
            episodes = [EpisodeSpec(task, -1, seed + row, row) for row in range(2)]
            begun.append(env.reset(options={"episodes": episodes})[0]["state"].copy())
        env.close()
        return np.array(begun)

    tasks = ["PushCube-v1", "StackCube-v1"]
    alone = [states(task) for task in tasks]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(states, tasks))
    assert all(np.array_equal(one, other) for one, other in zip(alone, together, strict=True))


def test_tasks_are_listed_with_their_limit_rewards_and_what_they_lack():
    listed = plugin("maniskill").list_tasks()
    assert listed["PushCube-v1"] == {"about": "50 steps", "problem": "", "missing": {}}
    assert listed["DrawTriangle-v1"]["about"] == "300 steps, with env.reward_mode=sparse"
    assert listed["Empty-v1"]["problem"] == "it has no reward"
    assert all(source for facts in listed.values() for source in facts["missing"].values())


# Recipes with settings that were found for one task


@pytest.mark.parametrize("name", recipe_names(*BY_TASK))
def test_a_recipe_of_a_task_keeps_its_step_limit_and_is_found_by_it(name):
    env = load([f"recipe={name}"]).config.env
    assert env.max_episode_steps is None
    assert recipe_of_task(env.task) == name
    assert name.removesuffix("_ppo") in env.task.replace("-", "").lower()
    assert env.solver_iterations == (4 if name == "pullcube_ppo" else None)  # which what is held does not bear
