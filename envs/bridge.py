"""ManiSkill's bridge twins as envs like all others: states and rewards, images of any size before the photograph of the
real scene, and initial states that do not depend on what was played before.

ManiSkill keeps the photograph and the list of what stands before it once for all envs of a process; here every env
has its own. Its tasks let objects settle with the arm wherever the last episode left it; here it is out of the way.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import sapien
import torch
from mani_skill.envs.tasks.digital_twins.bridge_dataset_eval import put_on_in_scene as scenes
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils.geometry.rotation_conversions import quaternion_to_matrix
from mani_skill.utils.structs.pose import Pose

from embodied.envs.bridge_tasks import CAMERA, TWINS

FOCAL, MIDDLE, WIDTH, HEIGHT = 623.588, (319.501, 239.545), 640, 480  # of the camera, in pixels
SCORE = {"is_src_obj_grasped": 0.1, "consecutive_grasp": 0.1}  # and 1 for what was grasped and is where it should be
ASIDE = sapien.Pose([0.147, 0.028, 1.87], [0, 0, 0, 1])  # where the arm is while objects are put down
BASES = {"flat_table": ([0.147, 0.028, 0.870], [0, 0, 0, 1]), "sink": ([0.127, 0.060, 0.85], [0, 0, 0, 1])}


class BridgeScene:
    """Goes before one of ManiSkill's tasks as a base class."""

    SUPPORTED_OBS_MODES = ("none", "state")
    SUPPORTED_REWARD_MODES = ("normalized_dense", "dense", "sparse")

    def __init__(self, sensor_configs: dict[str, Any], **options: Any) -> None:
        self._rgb_overlay_images: dict[str, Any] = {}
        self._objects_to_remove_from_greenscreen: list[Any] = []
        self._photos: dict[tuple, np.ndarray] = {}
        if sensor_configs:
            sensor_configs = {**sensor_configs, "intrinsic": scaled(sensor_configs["height"], sensor_configs["width"])}
        super().__init__(sensor_configs=sensor_configs, **options)

    @property
    def _default_human_render_camera_configs(self) -> CameraConfig:
        """The middle of what the robot's camera sees."""
        (camera,) = self.agent._sensor_configs
        pose = sapien.Pose(*BASES[self.scene_setting]) * camera.pose.sp
        fov = 2 * np.arctan(HEIGHT / 2 / FOCAL)
        return CameraConfig("render_camera", pose=pose, width=256, height=256, fov=float(fov), near=0.01, far=100)

    def _after_reconfigure(self, options: dict) -> None:
        super()._after_reconfigure(options)
        self._kept = self._segmentation_ids_to_keep.cpu().numpy()

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict) -> None:
        """Drawn on the CPU, so that a seed means the same episode on a GPU."""
        states = len(self.xyz_configs) * len(self.quat_configs)
        drawn = torch.randint(states, (len(env_idx),), device="cpu")
        options = {"episode_id": drawn.to(self.device), **options}
        if self.gpu_sim_enabled:
            self._begin_settled(env_idx, options["episode_id"].to(self.device))
            return
        self.agent.robot.set_pose(ASIDE)
        super()._initialize_episode(env_idx, options)

    def _begin_settled(self, env_idx: torch.Tensor, state: torch.Tensor) -> None:
        """On a GPU nothing may be simulated for some scenes alone: objects lie where they once came to rest."""
        if not hasattr(self, "_settled"):
            self._settled = self._settle_all()
        for number, actor in enumerate(self.objs.values()):
            actor.set_pose(Pose.create(self._settled[state, number]))
        start = BASES[self.scene_setting]
        self.agent.robot.set_pose(sapien.Pose(*start))
        self.agent.reset(init_qpos=self._start_qpos)
        turned = quaternion_to_matrix(self._settled[state, 0, 3:])
        size = self.episode_model_bbox_sizes[self.source_obj_name].float()
        self.episode_source_obj_bbox_world[:, env_idx] = (turned @ size[:, None])[:, :, 0].T
        self.consecutive_grasp[env_idx] = 0
        for flag in self.episode_stats.values():
            flag[env_idx] = False

    def _settle_all(self) -> torch.Tensor:
        """Poses [states, objects, 7] at rest; every scene takes one state after the other."""
        count, found = len(self.xyz_configs) * len(self.quat_configs), []
        everyone = torch.arange(self.num_envs, device=self.device)
        for first in range(0, count, self.num_envs):
            self.agent.robot.set_pose(ASIDE)
            state = (first + everyone) % count
            super()._initialize_episode(everyone, {"episode_id": state})
            found.append(torch.stack([actor.pose.raw_pose.clone() for actor in self.objs.values()], dim=1))
        self._start_qpos = self.agent.robot.qpos[0].clone()
        size = self.episode_source_obj_bbox_world
        self.episode_source_obj_bbox_world = size[:, None].repeat(1, self.num_envs)  # ManiSkill knows the first's only
        return torch.cat(found)[:count]

    def _get_obs_extra(self, info: dict) -> dict[str, torch.Tensor]:
        """Where things are, for those who may know."""
        if self._obs_mode != "state":
            return {}
        return {name: self.objs[name].pose.raw_pose for name in (self.source_obj_name, self.target_obj_name)}

    def compute_dense_reward(self, obs: Any, action: Any, info: dict) -> torch.Tensor:
        """How far the task has come: grasped, held for a second, put down where it should be. With
        `env.reward=difference` what a step adds."""
        done = info["success"] & info["is_src_obj_grasped"]
        return sum(weight * info[part].float() for part, weight in SCORE.items()) + done.float()

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: dict) -> torch.Tensor:
        return self.compute_dense_reward(obs, action, info) / (1 + sum(SCORE.values()))

    def before_photo(self, seen: np.ndarray, segments: np.ndarray, scene: int, square: bool) -> np.ndarray:
        """An image [H, W, 3] with the photograph wherever there is neither robot nor object; `square`: its middle."""
        photo = self.photo(scene, *seen.shape[:2], square)
        return np.where(np.isin(segments, self._kept)[..., None], seen, photo)

    def before_photos(self, seen: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """The same of all scenes [N, H, W, 3], on their device."""
        photos = [self.photo(scene, *seen.shape[1:3], False) for scene in range(len(seen))]
        kept = torch.isin(segments, torch.as_tensor(self._kept, device=seen.device))
        return torch.where(kept, seen, torch.as_tensor(np.stack(photos), device=seen.device))

    def photo(self, scene: int, height: int, width: int, square: bool) -> np.ndarray:
        path = self.rgb_overlay_paths[CAMERA]
        key = (path, height, width, square)
        if key not in self._photos:
            self._photos[key] = read_photo(path, height, width, square)
        return self._photos[key]


def read_photo(path: str, height: int, width: int, square: bool) -> np.ndarray:
    picture = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)
    if square:
        side = min(picture.shape[:2])
        left = (picture.shape[1] - side) // 2
        picture = picture[:side, left : left + side]
    return cv2.resize(picture, (width, height), interpolation=cv2.INTER_AREA)


def scaled(height: int, width: int) -> np.ndarray:
    """The camera's intrinsics for its whole picture in so many pixels."""
    across, down = width / WIDTH, height / HEIGHT
    return np.array([[FOCAL * across, 0, MIDDLE[0] * across], [0, FOCAL * down, MIDDLE[1] * down], [0, 0, 1]])


KINDS: dict[str, type] = {
    task: type(kind.__name__, (BridgeScene, kind), {})
    for task, kind in zip(
        TWINS,
        (
            scenes.PutCarrotOnPlateInScene,
            scenes.PutSpoonOnTableClothInScene,
            scenes.StackGreenCubeOnYellowCubeBakedTexInScene,
            scenes.PutEggplantInBasketScene,
        ),
        strict=True,
    )
}
