"""Builds ManiSkill's own env for a config."""

from __future__ import annotations

import fcntl
import math
import os
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

from embodied.core.errors import EmbodiedError, in_a_line
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.maniskill.tasks import (
    BATCHED_TASKS,
    DRAWING,
    ROLLING,
    check_choices,
    is_bridge,
    maker,
    numbers,
    quiet,
    refused,
)
from embodied.system.vulkan_driver import ensure_vulkan, has_nvidia

NO_DRAWING = (
    "this GPU does not draw, since its driver lacks the graphics part; in a container start it with "
    "NVIDIA_DRIVER_CAPABILITIES=all"
)
DOWNLOADS = "https://github.com/sapien-sim/physx-precompiled/releases/download"


def draws_on_gpu() -> bool:
    """True if this process can render on a GPU; SAPIEN uses the GPU that CUDA sees. Containers often lack the driver's
    graphics part; images are then rendered on cores."""
    return bool(os.environ.get("EMBODIED_RENDER")) and has_nvidia()


def gpu_draws() -> bool:
    """True if the simulator's GPU can render: its driver may support computing only."""
    import sapien

    try:
        return sapien.Device("cuda").can_render()
    except RuntimeError:  # without a GPU ManiSkill raises its own error later
        return False


def load_gpu_physics() -> None:
    """Loads PhysX's library for GPUs. SAPIEN downloads it on first use, so one process loads it at a time."""
    import sapien.physx

    version = sapien.physx.version()
    folder = Path.home() / ".sapien" / "physx" / version
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            sapien.physx.enable_gpu()
        except (OSError, BadZipFile) as err:
            if (folder / "libPhysXGpu_64.so").exists():
                raise
            raise EmbodiedError(
                f"env.backend=cuda: PhysX's library for GPUs is not in {folder}, and SAPIEN cannot download it: "
                f"{in_a_line(err)}; unzip {DOWNLOADS}/{version}/linux-so.zip there, fetched where there is a network"
            ) from None


def render_backend(config: ManiSkillConfig) -> str:
    """ManiSkill's name of the render device; none for states on a GPU that cannot render."""
    if config.backend != "cuda":
        return "gpu" if draws_on_gpu() else "cpu"
    if gpu_draws():
        return "gpu"
    if config.cameras:
        raise EmbodiedError(f"env.cameras with env.backend=cuda: {NO_DRAWING}, or try env.backend=cpu")
    return "none"


def build(config: ManiSkillConfig, num_envs: int) -> list[Any]:
    """One batched env, or `num_envs` plain ones."""
    ensure_vulkan()
    if config.backend == "cuda":
        load_gpu_physics()
    draws = render_backend(config)
    height, width = config.image_size
    view = {"height": height, "width": width} if config.cameras else {}
    if config.image_fov is not None and config.image_region:
        from embodied.envs.maniskill.images import of_square

        view |= {"fov": None, "intrinsic": of_square(height, width, config.image_region, config.image_fov)}
    elif config.image_fov is not None:
        view["fov"] = math.radians(config.image_fov)
    solver = {"scene_config": {"solver_position_iterations": config.solver_iterations}}
    with quiet(), DRAWING:

        def make(num_envs: int = 1) -> Any:
            try:
                return maker(config.task)(
                    num_envs=num_envs,
                    obs_mode="state" if config.state == "full" else "none",
                    control_mode=config.control_mode,
                    reward_mode=config.reward_mode,
                    sim_backend="physx_cuda" if config.backend == "cuda" else "physx_cpu",
                    render_backend=draws,
                    sensor_configs=view,
                    human_render_camera_configs={"shader_pack": config.shader, **view},
                    **({"robot_uids": config.robot} if config.robot else {}),
                    **({"sim_config": solver} if config.solver_iterations else {}),
                    **({"object_set": config.object_set} if config.object_set else {}),
                    **({"image_region": config.image_region} if is_bridge(config.task) and config.image_region else {}),
                )
            except (AssertionError, NotImplementedError) as err:  # raised by ManiSkill for options that a task lacks
                raise refused(config, err) from None

        check_choices(config)
        if config.backend == "cpu_batched":
            from embodied.envs.maniskill.cpu_batch import make_batched

            listed = config.task in BATCHED_TASKS
            planes = not listed or config.task in ROLLING
            return [make_batched(make, num_envs, partial(numbers, config=config), trimmed=listed, planes=planes)]
        if config.backend == "cuda":
            return [make(num_envs).unwrapped]
        return [make().unwrapped for _ in range(num_envs)]
