"""ManiSkill's four bridge twins, and the scene that they and PutOnPlate-25 share: a WidowX arm before the photograph of
a real table, with states, rewards, and images of any size.

ManiSkill has one photograph and foreground list for all envs of a process; here every env has its own. Its tasks let
objects settle at every reset, with the arm wherever the last episode left it; here every initial state settles once,
with the arm out of the way, and is restored later, so it does not depend on earlier episodes.
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

from embodied.envs.config import Region
from embodied.envs.maniskill.bridge import CAMERA, TWINS
from embodied.envs.maniskill.images import intrinsics

FOCAL, MIDDLE, WIDTH, HEIGHT = 623.588, (319.501, 239.545), 640, 480  # camera intrinsics, in pixels
WHOLE: Region = (0.0, 0.0, 1.0, 1.0)
MIDDLE_SQUARE: Region = (0.125, 0.0, 0.875, 1.0)  # the square in the middle of a 4:3 image
SCORE = {"is_src_obj_grasped": 0.1, "consecutive_grasp": 0.1}  # and 1 for success after a grasp
BASES = {"flat_table": ([0.147, 0.028, 0.870], [0, 0, 0, 1]), "sink": ([0.127, 0.060, 0.85], [0, 0, 0, 1])}
ASIDE = sapien.Pose([0.147, 0.028, 1.87], [0, 0, 0, 1])  # the arm's pose while objects settle


class BridgeScene:
    """A base class that precedes a ManiSkill env. The env defines the foreground and the photograph (`kept_ids` and
    `photo`), and the robot's place as `scene_setting`."""

    SUPPORTED_OBS_MODES = ("none", "state")
    SUPPORTED_REWARD_MODES = ("normalized_dense", "dense", "sparse")

    def __init__(self, sensor_configs: dict[str, Any], image_region: Region = WHOLE, **options: Any) -> None:
        self._photos: dict[tuple, np.ndarray] = {}
        self._region = image_region
        if sensor_configs:
            size = sensor_configs["height"], sensor_configs["width"]
            sensor_configs = {**sensor_configs, "intrinsic": scaled_intrinsics(*size, image_region)}
        super().__init__(sensor_configs=sensor_configs, **options)

    def kept_ids(self) -> torch.Tensor:
        """[N, K]: in each scene, the ids of foreground objects."""
        raise NotImplementedError

    def photo(self, scene: int, height: int, width: int, square: bool) -> np.ndarray:
        """uint8 [height, width, 3]; `square`: its middle."""
        raise NotImplementedError

    def laid_out(self) -> tuple[torch.Tensor, ...]:
        """Returns poses of the objects and of their places [N, 7], sides of the objects [N, 3], the height of the
        place's top above its middle [N], and True where the hand holds the object [N]."""
        raise NotImplementedError

    @property
    def _default_human_render_camera_configs(self) -> CameraConfig:
        """The middle of the robot's camera image."""
        (camera,) = self.agent._sensor_configs
        pose = sapien.Pose(*BASES[self.scene_setting]) * camera.pose.sp
        fov = 2 * np.arctan(HEIGHT / 2 / FOCAL)
        return CameraConfig("render_camera", pose=pose, width=256, height=256, fov=float(fov), near=0.01, far=100)

    def compute_dense_reward(self, obs: Any, action: Any, info: dict) -> torch.Tensor:
        """The task's progress: grasped, held for a second, put down at its place. `env.reward=difference` rewards the
        increase."""
        done = info["success"] & info["is_src_obj_grasped"]
        return sum(weight * info[name].float() for name, weight in SCORE.items()) + done.float()

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: dict) -> torch.Tensor:
        return self.compute_dense_reward(obs, action, info) / (1 + sum(SCORE.values()))

    def before_photo(self, seen: np.ndarray, segments: np.ndarray, scene: int, square: bool) -> np.ndarray:
        """An image [H, W, 3] with the photograph wherever there is neither robot nor object."""
        kept = np.isin(segments, self.kept_ids()[scene].cpu().numpy())
        return np.where(kept[..., None], seen, self.photo(scene, *seen.shape[:2], square))

    def before_photos(self, seen: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        """The same of all scenes, [N, H, W, 3] and [N, H, W, 1], on their device."""
        photos = np.stack([self.photo(scene, *seen.shape[1:3], False) for scene in range(len(seen))])
        kept = (segments == self.kept_ids().to(seen.device)[:, None, None]).any(-1, keepdim=True)
        return torch.where(kept, seen, torch.as_tensor(photos, device=seen.device))

    def read_photo(self, path: str, height: int, width: int, square: bool) -> np.ndarray:
        key = (path, height, width, MIDDLE_SQUARE if square else self._region)
        if key not in self._photos:
            self._photos[key] = read_photo(*key)
        return self._photos[key]


def read_photo(path: str, height: int, width: int, region: Region) -> np.ndarray:
    picture = cv2.cvtColor(cv2.imread(path), cv2.COLOR_BGR2RGB)
    down, across = picture.shape[:2]
    left, top, right, bottom = np.round(np.multiply(region, [across, down, across, down])).astype(int)
    return cv2.resize(picture[top:bottom, left:right], (width, height), interpolation=cv2.INTER_AREA)


def scaled_intrinsics(height: int, width: int, region: Region = WHOLE) -> np.ndarray:
    """The camera's intrinsics for this region of its image in so many pixels."""
    return intrinsics(height, width, region, (WIDTH, HEIGHT), FOCAL, MIDDLE)


SETTLED: dict[tuple, torch.Tensor] = {}


class Twin(BridgeScene):
    def __init__(self, **options: Any) -> None:
        self._rgb_overlay_images: dict[str, Any] = {}
        self._objects_to_remove_from_greenscreen: list[Any] = []
        super().__init__(**options)

    def kept_ids(self) -> torch.Tensor:
        return self._segmentation_ids_to_keep.expand(self.num_envs, -1)

    def photo(self, scene: int, height: int, width: int, square: bool) -> Any:
        return self.read_photo(self.rgb_overlay_paths[CAMERA], height, width, square)

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict) -> None:
        """Objects are placed at rest. Draws on the CPU, so that a seed gives the same episode on a GPU."""
        if not hasattr(self, "_start_qpos"):
            self._settle_all()
        drawn = torch.randint(len(self._settled), (len(env_idx),), device="cpu")
        state = options.get("episode_id", drawn).to(self.device)
        for number, actor in enumerate(self.objs.values()):
            actor.set_pose(Pose.create(self._settled[state, number]))
        self.agent.robot.set_pose(sapien.Pose(*BASES[self.scene_setting]))
        self.agent.reset(init_qpos=self._start_qpos)
        turned = quaternion_to_matrix(self._settled[state, 0, 3:])
        size = self.episode_model_bbox_sizes[self.source_obj_name].float()
        self.episode_source_obj_bbox_world[:, env_idx] = (turned @ size[:, None])[:, :, 0].T
        self.consecutive_grasp[env_idx] = 0
        for flag in self.episode_stats.values():
            flag[env_idx] = False

    def _settle_all(self) -> None:
        """Find the poses [states, objects, 7] at rest, once per process for equal envs; scenes take the states in
        turn."""
        count, poses = len(self.xyz_configs) * len(self.quat_configs), []
        everyone = torch.arange(self.num_envs, device=self.device)
        kind = (type(self), self.num_envs, str(self.device))
        for first in range(0, 1 if kind in SETTLED else count, self.num_envs):
            self.agent.robot.set_pose(ASIDE)
            super()._initialize_episode(everyone, {"episode_id": (first + everyone) % count})
            poses.append(torch.stack([actor.pose.raw_pose.clone() for actor in self.objs.values()], dim=1))
        self._settled = SETTLED.setdefault(kind, torch.cat(poses)[:count])
        self._start_qpos = self.agent.robot.qpos[0].clone()
        size = self.episode_source_obj_bbox_world
        self.episode_source_obj_bbox_world = size[:, None].repeat(1, self.num_envs)  # ManiSkill sets one env only

    def laid_out(self) -> tuple[torch.Tensor, ...]:
        thing, place = self.objs[self.source_obj_name], self.objs[self.target_obj_name]
        size = self.episode_model_bbox_sizes[self.source_obj_name].float().expand(self.num_envs, 3)
        top = torch.full((self.num_envs,), self.model_db[self.target_obj_name]["bbox"]["max"][2])
        return thing.pose.raw_pose, place.pose.raw_pose, size, top, self.agent.is_grasping(thing)

    def _get_obs_extra(self, info: dict) -> dict[str, torch.Tensor]:
        """The poses of objects, for policies that observe them."""
        if self._obs_mode != "state":
            return {}
        return {name: self.objs[name].pose.raw_pose for name in (self.source_obj_name, self.target_obj_name)}


KINDS: dict[str, type] = {
    task: type(kind.__name__, (Twin, kind), {})
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
