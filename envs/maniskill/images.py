"""Camera images of single env rows of ManiSkill, drawn when they are observed.

Cameras are ManiSkill's own, the task's and the robot's, at the recipe's size. On a CPU the time of an image depends on
the scene's triangles (a Panda arm: 136,000), not on its size; `fast_images` renders a tenth of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import sapien
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils.sapien_utils import look_at
from PIL import Image
from sapien.render import RenderBodyComponent, RenderShapeTriangleMesh

from embodied.core.errors import ConfigError, nearest
from embodied.envs.config import Region

FINE = 1000  # a mesh with more triangles is thinned
CELLS = 16  # cells along the longest side of a mesh; the vertices of a cell are merged


def cameras_of(env: Any) -> dict[str, Any]:
    """ManiSkill's sensors and its cameras for people, by name."""
    return {**env._sensors, **env._human_render_cameras}


def check_cameras(env: Any, cameras: tuple[str, ...]) -> None:
    own_cameras = cameras_of(env)
    if unknown := [camera for camera in cameras if camera not in own_cameras]:
        raise ConfigError(
            f"env.cameras={unknown[0]}: {env.spec.id} has no such camera; it has {', '.join(sorted(own_cameras))}"
            f"{nearest(unknown[0], own_cameras)}"
        )


def paint(env: Any, scene: int, cameras: tuple[str, ...]) -> dict[str, np.ndarray]:
    """uint8 [H, W, 3] by camera, of one of the env's scenes as it is now."""
    scene_cameras = cameras_of(env)
    with hidden(env, scene):
        env.scene.sub_scenes[scene].update_render()
        return {name: look(env, scene, scene_cameras[name].camera._render_cameras[scene]) for name in cameras}


def paint_all(env: Any, cameras: tuple[str, ...]) -> dict[str, Any]:
    """uint8 [N, H, W, 3] by camera, tensors on the env's device, of all scenes together."""
    for obj in env._hidden_objects:
        obj.hide_visual()
    for_people = any(name in env._human_render_cameras for name in cameras)  # other cameras would cost GPU memory
    env.scene.update_render(update_sensors=True, update_human_render_cameras=for_people)
    scene_cameras = cameras_of(env)
    for name in cameras:
        scene_cameras[name].capture()
    composed = hasattr(env, "before_photos")
    wanted = {"rgb": True, "depth": False, "position": False, "segmentation": composed}
    seen = {name: scene_cameras[name].get_obs(**wanted) for name in cameras}
    if composed:
        return {name: env.before_photos(picture["rgb"], picture["segmentation"]) for name, picture in seen.items()}
    return {name: picture["rgb"] for name, picture in seen.items()}


def look(env: Any, scene: int, camera: Any, square: bool = False) -> np.ndarray:
    """A camera's image; for a digital twin in front of its photograph."""
    if env._render_device.is_cpu() and env.scene.sub_scenes[scene].render_system.cubemap is None:
        camera._internal_renderer.set_custom_texture("BRDFLUT", no_reflections()[-1])
    seen = picture(camera)
    return env.before_photo(seen, segments(camera), scene, square) if hasattr(env, "before_photo") else seen


@cache
def no_reflections() -> tuple[Any, Any, Any]:
    """A table for scenes without an environment map, which reflect nothing whatever it holds, and what has to stay for
    it. SAPIEN would compute its own with a process's first picture, on cores for 20 seconds."""
    folder, renderer = TemporaryDirectory(), sapien.render.SapienRenderer(sapien.Device("cpu"))
    Image.new("RGB", (1, 1)).save(file := f"{folder.name}/table.png")  # which SAPIEN reads when it draws
    return folder, renderer, renderer._internal_context.create_texture_from_file(file, 1, "linear", "edge")


def segments(camera: Any) -> np.ndarray:
    """The segmentation [H, W] by ManiSkill's ids; its small shader packs them with positions."""
    if "Segmentation" in camera.get_picture_names():
        return camera.get_picture("Segmentation")[..., 1]
    return camera.get_picture("PositionSegmentation")[..., 3]


def picture(camera: Any) -> np.ndarray:
    """A camera's image of the scene, uint8, also from shaders that give numbers from 0 to 1."""
    camera.take_picture()
    color = camera.get_picture("Color")[..., :3]
    return color if color.dtype == np.uint8 else (np.clip(color, 0, 1) * 255).astype(np.uint8)


@contextmanager
def hidden(env: Any, scene: int) -> Iterator[None]:
    """Inside, markers for people, like the goal of PickCube-v1, are hidden."""
    bodies = [obj._objs[scene].find_component_by_type(RenderBodyComponent) for obj in env._hidden_objects]
    before = [body.visibility for body in bodies]
    for body in bodies:
        body.visibility = 0.0
    try:
        yield
    finally:
        for body, visibility in zip(bodies, before, strict=True):
            body.visibility = visibility


def simplify_meshes(env: Any) -> None:
    """Replace the fine meshes of all scenes by coarse ones of the same colours."""
    made: dict[tuple, list[RenderShapeTriangleMesh]] = {}
    for scene in env.scene.sub_scenes:
        for entity in scene.entities:
            body = entity.find_component_by_type(RenderBodyComponent)
            if body is not None and any(is_fine(shape) for shape in body.render_shapes):
                replace(entity, body, made)


def is_fine(shape: Any) -> bool:
    return isinstance(shape, RenderShapeTriangleMesh) and sum(len(part.triangles) for part in shape.parts) > FINE


def replace(entity: sapien.Entity, body: RenderBodyComponent, made: dict) -> None:
    coarse = RenderBodyComponent()
    coarse.name, coarse.visibility, coarse.shading_mode = body.name, body.visibility, body.shading_mode
    for shape in body.render_shapes:
        if is_fine(shape):
            key = (shape.filename or id(shape), *np.asarray(shape.scale).tolist())
            if key not in made:
                made[key] = [merge_vertices(part, shape.scale) for part in shape.parts]
            parts = [part.clone() for part in made[key]]
        else:
            parts = [shape.clone()]
        for part in parts:
            part.local_pose = shape.local_pose
            coarse.attach(part)
    entity.remove_component(body)
    entity.add_component(coarse)


def merge_vertices(mesh: Any, scale: np.ndarray) -> RenderShapeTriangleMesh:
    """The mesh with the vertices of each cell merged."""
    vertices, triangles = np.asarray(mesh.vertices) * scale, np.asarray(mesh.triangles).astype(np.int64)
    cell = max(np.ptp(vertices, axis=0).max() / CELLS, 1e-6)
    _, kept, cell_of = np.unique(
        np.round(vertices / cell).astype(np.int64), axis=0, return_index=True, return_inverse=True
    )
    corners = cell_of.reshape(-1)[triangles]
    a, b, c = corners.T
    corners = corners[(a != b) & (b != c) & (a != c)]
    normals, uvs = np.asarray(mesh.get_vertex_normal()), np.asarray(mesh.get_vertex_uv())
    uvs = uvs[kept] if len(uvs) else uvs.reshape(0, 2)
    return RenderShapeTriangleMesh(
        vertices[kept].astype(np.float32), corners.astype(np.uint32), normals[kept], uvs, mesh.material
    )


# Frames for videos, from the task's camera for people. A batched CPU env has a scene and renderer per row; its camera
# is made when a row is first recorded. A task without such a camera is seen as most of ManiSkill's table tasks are.
DEFAULT_CAMERA = CameraConfig("default", look_at([0.6, 0.7, 0.6], [0.0, 0.0, 0.35]), 512, 512, fov=1.0)


def video_frames(envs: list[Any], batched: bool, rows: np.ndarray, cameras: dict[int, Any], size: int) -> np.ndarray:
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
    wanted = env._default_human_render_camera_configs or DEFAULT_CAMERA
    config = (
        next(iter(wanted.values())) if isinstance(wanted, dict) else wanted[0] if isinstance(wanted, list) else wanted
    )
    fov = config.fov if config.fov is not None else 1.0
    camera = scene.add_camera(f"video-{config.uid}", size, size, fov, config.near, config.far)
    pose = config.pose.sp if hasattr(config.pose, "sp") else config.pose
    camera.set_entity_pose(pose)
    return camera


# Rendering only a region of a camera's image


def intrinsics(
    height: int, width: int, region: Region, whole: tuple[float, float], focal: float, middle: tuple[float, float]
) -> np.ndarray:
    """Intrinsics [3, 3] for `height` x `width` pixels of this region. The whole image's size (width, height), focal
    length and centre are in the same unit."""
    left, top, right, bottom = region
    across, down = width / (whole[0] * (right - left)), height / (whole[1] * (bottom - top))
    at = (middle[0] - left * whole[0]) * across, (middle[1] - top * whole[1]) * down
    return np.array([[focal * across, 0, at[0]], [0, focal * down, at[1]], [0, 0, 1]])


def of_square(height: int, width: int, region: Region, fov: float) -> np.ndarray:
    """The same for a square image with this field of view in degrees."""
    return intrinsics(height, width, region, (1, 1), 0.5 / math.tan(math.radians(fov) / 2), (0.5, 0.5))
