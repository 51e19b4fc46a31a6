"""Frames of single env rows for videos, from the camera the task means for people.

A batched CPU env has a scene per row with a renderer of its own; its camera is made when a row is first filmed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien

from embodied.envs.maniskill.images import look


def film(envs: list[Any], batched: bool, rows: np.ndarray, cameras: dict[int, Any], size: int) -> np.ndarray:
    """uint8 [len(rows), size, size, 3]."""
    frames = []
    for row in rows.tolist():
        env = envs[0] if batched else envs[row]
        scene = env.scene.sub_scenes[row if batched else 0]
        if row not in cameras:
            cameras[row] = add_camera(env, scene, size)
        scene.update_render()
        frames.append(look(env, row if batched else 0, cameras[row], square=True))
    return np.stack(frames)


def add_camera(env: Any, scene: sapien.Scene, size: int) -> Any:
    wanted = env._default_human_render_camera_configs
    config = (
        next(iter(wanted.values())) if isinstance(wanted, dict) else wanted[0] if isinstance(wanted, list) else wanted
    )
    fov = config.fov if config.fov is not None else 1.0
    camera = scene.add_camera(f"film-{config.uid}", size, size, fov, config.near, config.far)
    pose = config.pose.sp if hasattr(config.pose, "sp") else config.pose
    camera.set_entity_pose(pose)
    return camera
