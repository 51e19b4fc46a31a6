"""A ManiSkill task of your own: a Panda learns to hold its hand at a marked place. About a minute.

    python maniskill_task.py

docs/own_task.md has a task with objects and cameras, robots and controllers of your own.
"""

import sapien
import torch
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.utils.building import actors
from mani_skill.utils.building.ground import build_ground
from mani_skill.utils.registration import register_env
from mani_skill.utils.structs import Pose

import embodied

NEAR = 0.08  # metres


@register_env("Reach-v1", max_episode_steps=20)
class Reach(BaseEnv):
    """Bring the hand to the green ball, which touches nothing."""

    def __init__(self, *args, robot_uids="panda", **options):
        super().__init__(*args, robot_uids=robot_uids, **options)

    def _load_scene(self, options):
        build_ground(self.scene)
        look = {"name": "goal", "body_type": "kinematic", "add_collision": False, "initial_pose": sapien.Pose()}
        self.goal = actors.build_sphere(self.scene, NEAR / 3, [0, 0.7, 0.2, 1], **look)

    def _initialize_episode(self, env_idx, options):  # only the rows env_idx: other rows are in mid-episode
        with torch.device(self.device):
            rest = torch.as_tensor(self.agent.keyframes["rest"].qpos, dtype=torch.float32)
            self.agent.reset(rest.repeat(len(env_idx), 1))
            self.agent.robot.set_pose(sapien.Pose([-0.615, 0, 0]))
            place = torch.rand(len(env_idx), 3) * 0.3 + torch.tensor([-0.15, -0.15, 0.1])
            self.goal.set_pose(Pose.create_from_pq(place))

    def evaluate(self):
        return {"success": self.agent.tcp.pose.p.sub(self.goal.pose.p).norm(dim=1) < NEAR}

    def _get_obs_extra(self, info):
        return {"to_goal": self.goal.pose.p - self.agent.tcp.pose.p}

    def compute_dense_reward(self, obs, action, info):
        return 1 - torch.tanh(5 * self.agent.tcp.pose.p.sub(self.goal.pose.p).norm(dim=1))

    compute_normalized_dense_reward = compute_dense_reward


if __name__ == "__main__":
    task = ["env.task=maniskill_task:Reach-v1", "env.control_mode=pd_joint_delta_pos"]
    embodied.check(*task)  # also finds out whether the physics of many envs can be computed as a batch: faster
    short = ["run.env_steps=12800", "eval.episodes=20", "eval.videos=1", "run.name=reach"]
    run = embodied.train("maniskill_ppo", *task, *short)
    print("success", [f"{row['success_once']:.0%}" for row in run.metrics if row.get("success_once") is not None])
