"""ManiSkill's four bridge twins.

ManiSkill has one photograph and foreground list for all envs of a process; here every env has its own. Its tasks let
objects settle at every reset, with the arm wherever the last episode left it; here every initial state settles once,
with the arm out of the way, and is restored later.
"""

from __future__ import annotations

from typing import Any

import sapien
import torch
from mani_skill.envs.tasks.digital_twins.bridge_dataset_eval import put_on_in_scene as scenes
from mani_skill.utils.geometry.rotation_conversions import quaternion_to_matrix
from mani_skill.utils.structs.pose import Pose

from embodied.envs.maniskill.bridge.bridge_scene import ASIDE, BASES, BridgeScene
from embodied.envs.maniskill.bridge.bridge_tasks import CAMERA, TWINS

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
