"""Batched physics is used for a task of one's own once both were played here and were equal; else it is said what
single envs cost."""

import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from needed import requires

from embodied import check, train
from embodied.config.recipe import load
from embodied.envs import env_class
from embodied.envs.maniskill import env as maniskill_env
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.maniskill.equality_proof import DECIDES, compare, larger, proof_path
from embodied.envs.maniskill.tasks import BATCHED_TASKS, to_prove
from embodied.run import launch

pytestmark = pytest.mark.filterwarnings("ignore")  # ManiSkill's and SAPIEN's own
requires("mani_skill")

TASKS = """
import torch
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.utils.registration import register_env


@register_env("Plain{n}-v1", max_episode_steps=6)
class Plain{n}(PushCubeEnv):
    pass


@register_env("ByCompany{n}-v1", max_episode_steps=6)
class ByCompany{n}(PushCubeEnv):
    def compute_normalized_dense_reward(self, obs, action, info):
        return super().compute_normalized_dense_reward(obs, action, info) * self.num_envs
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def write(folder: Path, number: int) -> str:
    (folder / f"proved_{number}.py").write_text(TASKS.replace("{n}", str(number)))
    return f"proved_{number}"


def dry(capsys, *arguments: str) -> str:
    assert train.main(["recipe=maniskill_ppo", "--dry-run", *arguments]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_differences_are_relative_for_large_numbers():
    worst = larger(0.0, np.array([1000.0, 0.5]), np.array([1000.01, 0.5]))  # 0.01 of 1,000 is 1e-5
    assert worst == pytest.approx(1e-5) and larger(worst, np.array([0.5]), np.array([0.75])) == 0.25
    assert np.isnan(larger(worst, np.array([np.nan]), np.zeros(1)))


@pytest.mark.slow
def test_a_task_found_different_stays_with_single_envs_and_it_is_said_why(folder, capsys):
    module = write(folder, 2)
    task = f"env.task={module}:ByCompany2-v1"
    assert check.main([task]) == 0
    assert "Batched physics is not used for this task: it differs: initial 0.0e+00" in " ".join(
        capsys.readouterr().out.split()
    )
    (kept,) = (folder / "runs" / "profiles").glob("physics-ByCompany2-v1-*.json")
    proof = json.loads(kept.read_text())
    assert proof["equal"] is False and proof["worst"]["reward"] > 0.1 and proof["speedup"] > 0
    assert f"batched physics would be {proof['speedup']} times as fast, but it differs" in dry(capsys, task)
    assert train.main(["recipe=maniskill_ppo", "--dry-run", task, "env.backend=cpu_batched"]) == 2
    assert "does not hold here: it differs" in capsys.readouterr().err


@pytest.mark.parametrize("limit_s", [0.01, pytest.param(300.0, marks=pytest.mark.slow)])
def test_training_finds_out_within_a_limit_and_once(folder, capsys, monkeypatch, limit_s):
    monkeypatch.setattr(maniskill_env, "PROOF_S", limit_s)
    config = load(["recipe=maniskill_ppo", f"env.task={write(folder, 3)}:Plain3-v1"]).config
    physics = launch.planned(config)[0].env.backend
    told = " ".join(capsys.readouterr().out.split())
    assert f"played both ways once, for {limit_s:g} s at most" in told
    late = f"single envs are used: to find out took more than {limit_s:g} s; python -m embodied.check" in told
    assert late == (limit_s < 1) and physics == ("cpu" if late else "cpu_batched")
    assert launch.planned(config)[0].env.backend == physics and not capsys.readouterr().out


def test_the_limits_that_are_known_without_maniskill_are_its_own():
    from embodied.envs.maniskill.tasks import registered

    assert {task: registered()[task].max_episode_steps for task in BATCHED_TASKS} == BATCHED_TASKS


@pytest.mark.parametrize(
    ("arguments", "limit"),
    [
        ([], 50),
        (["env.task=PushCube-v1"], 50),
        (["env.task=RollBall-v1"], None),
        (["env.task=RollBall-v1", "env.max_episode_steps=20"], 20),
        (["env.task=my_tasks:Mine-v1"], None),
    ],
)
def test_a_recipes_step_limit_is_that_of_its_own_task(arguments, limit):
    assert load(["recipe=maniskill_ppo", *arguments]).config.env.max_episode_steps == limit


def test_the_view_of_a_recipes_task_is_not_that_of_another_unless_a_trained_policy_is_evaluated(tmp_path):
    rgb = ["recipe=maniskill_ppo_rgb", "env.task=my_tasks:Mine-v1"]
    loaded = load(rgb)
    assert loaded.config.env.image_fov is loaded.config.env.image_region is None
    (line,) = loaded.left_out
    assert "for env.task=PushCube-v1: env.max_episode_steps=50, " in line
    assert "env.image_fov=60, env.image_region=[0.17" in line
    mine = load([*rgb, "env.image_fov=50"])
    assert mine.config.env.image_fov == 50 and "image_fov" not in mine.left_out[0]
    assert load(rgb[:1]).config.env.image_fov == 60 and not load(["recipe=pullcube_ppo_rgb"]).left_out
    (tmp_path / "mine.yaml").write_text("extends: maniskill_ppo_rgb\nenv: {task: RollBall-v1}\n")
    assert "env.image_fov=60" in load([f"recipe={tmp_path / 'mine.yaml'}"]).left_out[0]
    evaluated = load([*rgb, "checkpoint=random"], "evaluate").config.env
    assert evaluated.image_fov == 60 and evaluated.image_region and evaluated.max_episode_steps is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("env.control_mode=pd_joint_delta_pso", "did you mean 'pd_joint_delta_pos'"),
        ("env.cameras=[basecamera]", "PushCube-v1 has no such camera; it has base_camera, render_camera"),
        ("env.robot=pandaa", "env.robot=pandaa: no robot of this name is registered; did you mean 'panda'"),
    ],
)
def test_a_dry_run_refuses_what_the_task_does_not_have(folder, argument, message, capsys):
    assert train.main(["recipe=maniskill_ppo", "env.task=PushCube-v1", "--dry-run", argument]) == 2
    told = capsys.readouterr().err
    assert message in told and told.count("\n") == 1


def test_batched_scenes_all_have_a_ground(folder):
    """ManiSkill gives a plane to the first scene of a batch only."""
    (folder / "on_the_ground.py").write_text(GROUND)
    config = ManiSkillConfig(task="on_the_ground:Lies", control_mode="pd_joint_delta_pos", max_episode_steps=8)
    worst, envs = compare(env_class(config), config)
    assert worst["equal"], worst
    assert [env.config.backend for env in envs] == ["cpu_batched", "cpu"]


GROUND = """
import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.building import actors
from mani_skill.utils.building.ground import build_ground


class Lies(BaseEnv):
    def __init__(self, *args, robot_uids="panda", **options):
        super().__init__(*args, robot_uids=robot_uids, **options)

    def _load_scene(self, options):
        build_ground(self.scene)
        self.ball = actors.build_sphere(self.scene, 0.1, [1, 0, 0, 1], "ball", initial_pose=sapien.Pose([1, 0, 0.3]))

    def _initialize_episode(self, env_idx, options):
        self.agent.reset(torch.tensor(self.agent.keyframes["rest"].qpos).float().repeat(len(env_idx), 1))
        self.ball.set_pose(sapien.Pose([1, 0, 0.3]))

    def evaluate(self):
        return {}

    def _get_obs_extra(self, info):
        return {"ball": self.ball.pose.p}

    def compute_normalized_dense_reward(self, obs, action, info):
        return self.ball.pose.p[:, 2]
"""


def test_the_command_that_is_named_proves_what_a_run_asks_for(tmp_path):
    asked = {"task": "PickCube-v1", "control_mode": "pd_ee_delta_pos", "robot": "fetch", "reward_mode": "sparse"}
    config = ManiSkillConfig(**asked, solver_iterations=4)
    named = load(["run.iterations=1", *to_prove(config).split()[3:]], entry="check").config.env
    assert proof_path(named, tmp_path) == proof_path(config, tmp_path)
    words = shlex.split(to_prove(config.model_copy(update={"modules": ("my_robots",), "object_set": "test"})))[3:]
    assert {word.partition("=")[0] for word in words} == {f"env.{key}" for key in DECIDES}
