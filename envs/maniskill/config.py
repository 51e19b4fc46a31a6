"""Options of ManiSkill's tasks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from embodied.core.errors import nearest
from embodied.core.options import Requirement, never_with
from embodied.envs.config import PRIVILEGED, RENDERER, SIZE_HELP, CommonEnvConfig, ImageSize, Region, Renderer, Tasks
from embodied.envs.maniskill.bridge import CONTROL, PLATES, asset_folder, is_bridge

REWARD_MODES = ("normalized_dense", "dense", "sparse")  # reward modes of ManiSkill's own tasks

GpuCapacity = Literal[
    "temp_buffer_capacity",
    "max_rigid_contact_count",
    "max_rigid_patch_count",
    "heap_capacity",
    "found_lost_pairs_capacity",
    "found_lost_aggregate_pairs_capacity",
    "total_aggregate_pairs_capacity",
    "collision_stack_size",
]


class ManiSkillConfig(CommonEnvConfig):
    """ManiSkill's tasks from states and images, on the CPU or on its own GPU physics."""

    env = "embodied.envs.maniskill.env:ManiSkillEnv"
    needs = Requirement(("mani-skill", "sapien"), "maniskill", vulkan=True)
    task_base = "mani_skill.envs.sapien_env.BaseEnv"
    of_task: ClassVar = ("max_episode_steps", "solver_iterations", "solver_episodes", "retries", "action_cost")
    view_of_task: ClassVar = ("image_fov", "image_region")

    name: Literal["maniskill"] = Field(
        "maniskill",
        description="Which env: maniskill, libero, robosuite, pointmass, gym:<id> or my_pkg.my_module:MyEnv.",
    )
    task: Tasks = Field("PushCube-v1", description="Any registered ManiSkill task; an evaluation takes a list as well.")
    on_failure: Literal["terminate", "continue"] = Field(
        "terminate", description="A failure that the task reports ends the episode, or does not."
    )
    control_mode: str | None = Field(
        None,
        description="How actions move the robot: one of its control modes; unset: pd_joint_delta_pos, or the only one.",
    )
    action_units: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] | None = Field(
        None, description="Bridge tasks: metres and radians of an action of 1; unset: [1, 1], as for published models."
    )
    object_set: Literal["train", "test", "all"] | None = Field(
        None,
        description="Things, plates and images of tables that the PutOnPlateInScene25 tasks draw from; unset: train "
        "for the training tasks (Main, Single), test for the variants with unseen objects.",
    )
    reward_mode: str = Field(
        "normalized_dense",
        description="The simulator's own reward: normalized_dense (shaped, within 0 to 1), dense, sparse (1 for "
        "success), or a mode of your own task.",
    )
    robot: str | None = Field(
        None, description="The robot's name in ManiSkill, or a robot registered by env.modules; unset: the task's own."
    )
    backend: Literal["auto", "cuda", "cpu_batched", "cpu"] = Field(
        "auto",
        description="Physics on a GPU, on the CPU in one batch, or one env at a time; auto: a GPU for 128 rows "
        "with images if it draws while it computes, else the fastest on cores.",
    )
    gpu_memory: dict[GpuCapacity, Annotated[int, Field(gt=0)]] = Field(
        {},
        description="Capacities of PhysX on a GPU by ManiSkill's names (GPUMemoryConfig) that are not to follow from "
        "env.num_envs, such as {max_rigid_patch_count: 524288}.",
    )
    solver_iterations: Annotated[int, Field(gt=0, lt=256)] | None = Field(
        None, description="Contact solver's iterations in rollouts; unset: the task's own, often 15, as in evaluations."
    )
    solver_episodes: Annotated[int, Field(gt=0)] | None = Field(
        None,
        description="How many episodes of a run have env.solver_iterations; later ones have the task's own. Unset, and "
        "on a GPU: all.",
    )
    state: Literal["full", "proprio", "joints"] = Field(
        "full",
        description="Observed numbers: all; only the numbers that ManiSkill adds to images (the robot's own and "
        "often a goal); or only joints and hand.",
    )
    relative_positions: bool = Field(
        False,
        description="Add to the state the offsets between the things whose positions it has, such as gripper, cube "
        "and goal, from which a small network learns faster.",
    )
    privileged: bool = PRIVILEGED
    cameras: tuple[str, ...] = Field(
        (), description="Cameras whose images are observed, by ManiSkill's names: base_camera, render_camera, ..."
    )
    image_size: ImageSize = Field((64, 64), description=SIZE_HELP)
    image_fov: float | None = Field(
        None, gt=0, lt=180, description="Their angle of view, in degrees; unset: each camera's own."
    )
    image_region: Region | None = Field(
        None,
        description="Region of the image: left, top, right and bottom as fractions of width and height (of the square "
        "image with env.image_fov, of 640 x 480 in bridge tasks); unset: the whole image.",
    )
    renderer: Renderer = RENDERER
    fast_images: bool = Field(
        False, description="Render coarse copies of fine meshes: several times faster on a CPU, with different pixels."
    )
    shader: Literal["default", "minimal", "rt-fast", "rt-med", "rt"] = Field(
        "default", description="ManiSkill shader pack of the camera that records videos; rt traces rays, slowly."
    )
    video_size: int = Field(256, gt=15, multiple_of=2, description="Width and height of video frames, in pixels.")

    rules = (never_with({"renderer": "cores"}, {"backend": "cuda"}, "the GPU draws what it simulates; leave it out"),)

    @classmethod
    def is_task(cls, task: str) -> bool:
        return is_bridge(task)

    @classmethod
    def advice(cls, lacking: Collection[str], environ: Mapping[str, str]) -> list[str]:
        if not any("mani_skill" in line or "MS_ASSET_DIR" in line for line in lacking):
            return []
        here = asset_folder(environ)
        return [
            f"Files of ManiSkill's tasks are looked for in {here}; MS_ASSET_DIR names another folder that has data/."
        ]

    @property
    def changes_solver(self) -> bool:
        """True if contacts are solved as the task says from some episode on."""
        return bool(self.solver_iterations and self.solver_episodes) and self.backend != "cuda"

    @property
    def physics(self) -> str:
        return self.backend

    @property
    def shaped(self) -> str:
        return "normalized_dense" * (self.reward_mode == "sparse")

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, self.image_size)

    def conflicts(self) -> Iterator[str]:
        """Yields mistakes that can be found without the simulator; a user's tasks may have other modes."""
        tasks = (self.task,) if isinstance(self.task, str) else self.task
        yield from self._bridge_conflicts(tasks)
        if self.reward_mode not in REWARD_MODES and not self.modules and not any(":" in task for task in tasks):
            yield (
                f"env.reward_mode={self.reward_mode!r} is unknown (known: {', '.join(REWARD_MODES)})"
                f"{nearest(self.reward_mode, REWARD_MODES)}"
            )

    def _bridge_conflicts(self, tasks: tuple[str, ...]) -> Iterator[str]:
        """Yields options that only bridge tasks, or only other tasks, have."""
        bridge, named = is_bridge(tasks), ", ".join(tasks)
        if self.action_units and not bridge:
            yield f"env.action_units is for bridge tasks; {named} has units of its own, leave it out"
        if self.image_region and not bridge and self.image_fov is None:
            yield (
                "env.image_region is a part of the image that env.image_fov describes; set both, such as "
                "env.image_fov=60"
            )
        if self.object_set and not all(task.startswith(PLATES) for task in tasks):
            yield f"env.object_set is for {PLATES}...; {named} has one set of things, leave it out"
        if bridge and self.control_mode not in (None, CONTROL):
            yield (
                f"env.control_mode={self.control_mode} is not for the arm of {named}; env.control_mode=null takes the "
                "one it has"
            )
        if bridge and self.image_fov is not None:
            yield f"env.image_fov: the photograph behind {named} has its own angle of view; leave it out"
