"""Options of the envs: one model per kind, chosen by `name`. Free of torch and simulators."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from embodied.core.errors import nearest
from embodied.core.options import LocalPath, Strict
from embodied.envs.libero.suites import is_own, tasks_of
from embodied.envs.option_values import (
    EXTERNAL,
    SIZE_HELP,
    ImageSize,
    Modules,
    Region,
    Tasks,
    known_reward,
)

OnSuccess = Literal["truncate", "terminate", "continue"]


PRIVILEGED = Field(
    False,
    description="With state=proprio: give the learner, never the actor, the numbers that `full` has beyond it; the "
    "critic reads them.",
)


class CommonEnvConfig(Strict):
    shaped: ClassVar[str] = ""
    """The `reward_mode` to try in place of one that pays for success alone; empty where none is set."""

    num_envs: int = Field(32, gt=0, le=2**20, description="Env rows in the whole run, dealt out to the sim workers.")
    max_episode_steps: int | None = Field(
        None, gt=0, description="Env steps after which an episode is cut off; unset: the task's own limit."
    )
    on_success: OnSuccess = Field(
        "truncate", description="A success ends the episode with bootstrapping, without it, or not at all."
    )
    after_success: int = Field(0, ge=0, description="With truncate: env steps that are played on after a success.")
    reward: Annotated[str, AfterValidator(known_reward)] = Field(
        "own",
        description="Reward per env step: own (as the simulator gives it), success (1 when the task is solved, else "
        "0), difference (own minus that of the step before), or a function of yours, my_pkg.my_module:my_reward.",
    )
    modules: Modules = Field(
        (),
        description="Modules of yours that are imported wherever envs are made, before they are: tasks, robots, "
        "controllers that register themselves. Found in the working directory and wherever Python looks.",
    )
    stagger: bool = Field(
        False,
        description="Cut the first training episode of each env short, each at another step, so that a rollout "
        "holds early and late parts of episodes from the start; evaluation is not affected.",
    )

    @property
    def physics(self) -> str:
        """The kind of physics, where the simulator has several."""
        return ""

    @property
    def on_gpu(self) -> bool:
        """True if the simulator itself runs on a GPU."""
        return self.physics == "cuda"

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        """Height and width of the images that are observed, by camera, as far as the options say."""
        return {}

    def worker_bytes(self, rows: int) -> float:
        """Memory of a sim worker with so many env rows; 0 where it is not known."""
        return 0.0


REWARD_MODES = ("normalized_dense", "dense", "sparse")  # of ManiSkill's own tasks


class ManiSkillConfig(CommonEnvConfig):
    of_task: ClassVar = ("max_episode_steps", "solver_iterations")

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
        description="How actions move the robot: a control mode it has; unset: pd_joint_delta_pos, or the only one.",
    )
    action_units: tuple[Annotated[float, Field(gt=0, le=1)], Annotated[float, Field(gt=0, le=1)]] | None = Field(
        None,
        description="Metres and radians that an action of 1 means in the bridge tasks, whose control has no units of "
        "its own; unset: [1, 1], as published models have them.",
    )
    object_set: Literal["train", "test", "all"] | None = Field(
        None,
        description="Which things, plates and images of tables the PutOnPlateInScene25 tasks draw; unset: train for "
        "those to train on (Main, Single), test for the variants that ask for what was not seen.",
    )
    reward_mode: str = Field(
        "normalized_dense",
        description="The simulator's own reward: normalized_dense (shaped, within 0 to 1), dense, sparse (1 for "
        "success), or a mode that a task of yours has.",
    )
    robot: str | None = Field(
        None, description="The robot, by ManiSkill's name or one that env.modules register; unset: the task's own."
    )
    backend: Literal["auto", "cuda", "cpu_batched", "cpu"] = Field(
        "auto",
        description="Physics on a GPU, on the CPU in one batch, or one env at a time; auto: the fastest on cores.",
    )
    solver_iterations: Annotated[int, Field(gt=0, lt=256)] | None = Field(
        None,
        description="Contact solver's iterations in rollouts; unset: the task's own, often 15, as in evaluations.",
    )
    state: Literal["full", "proprio"] = Field(
        "full", description="Observed numbers: everything, or only what ManiSkill gives beside images: the robot's own."
    )
    relative_positions: bool = Field(
        False,
        description="Add to the state where the things that it locates, a gripper, a cube and a goal say, are from "
        "each other: a small network learns faster from that.",
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
        description="Left, top, right and bottom, in parts of width and height, of the square image that cameras "
        "with env.image_fov see, or of the bridge tasks' 640 x 480; unset: all of it.",
    )
    fast_images: bool = Field(
        False, description="Observe coarse copies of fine meshes: several times faster on a CPU, other pixels."
    )
    shader: Literal["default", "minimal", "rt-fast", "rt-med", "rt"] = Field(
        "default", description="ManiSkill shader pack of the camera that records videos; rt traces rays, slowly."
    )
    video_size: int = Field(256, gt=15, multiple_of=2, description="Width and height of video frames, in pixels.")

    @property
    def physics(self) -> str:
        return self.backend

    @property
    def shaped(self) -> str:
        return "normalized_dense" * (self.reward_mode == "sparse")

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, self.image_size)

    @model_validator(mode="after")
    def _something_is_hidden(self) -> ManiSkillConfig:
        check_privileged(self)
        return self

    @model_validator(mode="after")
    def _reward_mode_exists(self) -> ManiSkillConfig:
        """Refuse unknown modes as far as they are known without the simulator: a user's tasks may have others."""
        tasks = (self.task,) if isinstance(self.task, str) else self.task
        if self.reward_mode not in REWARD_MODES and not self.modules and not any(":" in task for task in tasks):
            raise ValueError(
                f"env.reward_mode={self.reward_mode!r} is unknown (known: {', '.join(REWARD_MODES)})"
                f"{nearest(self.reward_mode, REWARD_MODES)}"
            )
        return self


class PointMassConfig(CommonEnvConfig):
    name: Literal["pointmass"] = Field(description="A toy: move a point to a target, numpy only.")
    task: Literal["reach"] = Field("reach", description="The only task.")
    size: float = Field(1.0, gt=0, description="The world is the square from -size to size.")
    discrete: bool = Field(False, description="Stay, left, right, down, up instead of a force in two dimensions.")
    state: Literal["full", "proprio"] = Field(
        "full", description="Observed numbers: everything, or only what the point feels: its place and speed."
    )
    privileged: bool = PRIVILEGED
    cameras: tuple[Literal["top", "near"], ...] = Field(
        (), description="Cameras whose images are observed: the whole world from above, the point's surroundings."
    )
    image_size: ImageSize = Field((32, 32), description=SIZE_HELP)
    instruction: bool = Field(False, description="Observe an instruction text as well.")
    dtype: Literal["float32", "float64"] = Field("float32", description="Precision of the physics, states and rewards.")

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, self.image_size)

    @model_validator(mode="after")
    def _something_is_hidden(self) -> PointMassConfig:
        check_privileged(self)
        return self


SIM_BYTES, SCENE_BYTES, SCENE_WITH_IMAGES_BYTES = 0.7e9, 0.3e9, 0.8e9  # of LIBERO, measured: worker, each task


class LiberoConfig(CommonEnvConfig):
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

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, (self.image_size, self.image_size))

    def worker_bytes(self, rows: int) -> float:
        """Memory of a sim worker with so many env rows: a task's scene weighs, a row in it hardly does."""
        loaded = min(len(tasks_of(self.task)), max(rows, self.tasks_in_memory))
        return SIM_BYTES + loaded * (SCENE_WITH_IMAGES_BYTES if self.cameras else SCENE_BYTES)


ROBOSUITE_BYTES, ROW_BYTES, ROW_WITH_IMAGES_BYTES = 0.7e9, 0.07e9, 0.4e9  # measured: worker, each row


class RobosuiteConfig(CommonEnvConfig):
    of_task: ClassVar = ("max_episode_steps",)

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
        None, description="Shaped or not, where the task has both; unset: dense."
    )
    kwargs: dict[str, Any] = Field(
        default_factory=dict, description="More options of the task's class: {gripper_types: RethinkGripper}."
    )
    state: Literal["full", "proprio"] = Field(
        "full", description="Observed numbers: the robots' and the objects', or only the robots' own."
    )
    cameras: tuple[str, ...] = Field((), description="Cameras whose images are observed: agentview, frontview, ...")
    image_size: int = Field(84, ge=16, le=1024, description="Width and height of these images, in pixels.")
    video_size: int = Field(256, gt=15, le=1024, multiple_of=2, description="Width and height of video frames.")

    @property
    def shaped(self) -> str:
        return "dense" * (self.reward_mode == "sparse")

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        return dict.fromkeys(self.cameras, (self.image_size, self.image_size))

    def worker_bytes(self, rows: int) -> float:
        """Memory of a sim worker with so many env rows."""
        return ROBOSUITE_BYTES + rows * (ROW_WITH_IMAGES_BYTES if self.cameras else ROW_BYTES)


class NamedWithKind(CommonEnvConfig):
    """Envs whose name is KIND:NAME: the task is NAME, unless results are to call it something else."""

    @model_validator(mode="before")
    @classmethod
    def _task_is_the_name(cls, values: Any) -> Any:
        return with_task(values, str(values.get("name", "")).partition(":")[2]) if isinstance(values, dict) else values


class GymConfig(NamedWithKind):
    name: str = Field(pattern=r"^gym:\S+$", description="gym:<id>, any registered Gymnasium env.")
    task: str = Field(description="How results name the task; unset: the Gymnasium id.")
    on_success: OnSuccess = Field("terminate", description="As for all envs, where the env reports success.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Handed to gymnasium.make as they are.")


class ExternalEnvConfig(CommonEnvConfig):
    name: str = Field(description="Your own env class, my_pkg.my_module:MyEnv, importable in every worker.")
    task: Tasks = Field(
        description="Handed to your env with every episode, one of them if it is a list; unset: the name of its class."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Free options, for your class to read.")

    @model_validator(mode="before")
    @classmethod
    def _names_a_class(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        name = str(values.get("name", ""))
        if not EXTERNAL.fullmatch(name):
            raise ValueError(unknown_env(name))
        return with_task(values, name.rpartition(":")[2])


class TextConfig(CommonEnvConfig):
    """The options that all text envs share: a step is a turn of the conversation, and the env says when it is over."""

    on_success: ClassVar[str] = "continue"
    after_success: ClassVar[int] = 0
    stagger: ClassVar[bool] = False

    num_envs: int = Field(
        64,
        gt=0,
        le=2**20,
        description="Conversations that go on at a time in the whole run, shared out among the sims.",
    )


TOY_TASKS = {  # env.name -> its tasks, the usual one first
    "sums": {
        "add2": "37+58=",
        "fewshot_sums": "37 + 8 = after three examples, for models that have read of such things",
        "calc2": "37*58=, where <calc>37*58</calc> asks a calculator",
    },
    "sort": {"sort4": "sort 98171: of four to six digits"},
}


class ToyTextConfig(TextConfig):
    name: Literal["sums", "sort"] = Field(description="A toy for small language models: add numbers, sort digits.")
    task: Tasks = Field(
        "",
        description="Which one, or a list to take in turn; unset: the first. sums: add2, fewshot_sums, calc2. sort: "
        "sort4. What they ask: python -m embodied.list tasks",
    )

    @model_validator(mode="before")
    @classmethod
    def _usual_task(cls, values: Any) -> Any:
        return with_task(values, next(iter(TOY_TASKS.get(str(values.get("name")), "")), ""))

    @model_validator(mode="after")
    def _tasks_exist(self) -> ToyTextConfig:
        known = TOY_TASKS[self.name]
        for task in (self.task,) if isinstance(self.task, str) else self.task:
            if task not in known:
                raise ValueError(
                    f"env.task={task!r} is not a task of {self.name} (known: {', '.join(known)}){nearest(task, known)}"
                )
        return self


class ReverseTextConfig(TextConfig):
    name: Literal["reverse_text"] = Field(description="Text to be written backwards, rewarded by similarity.")
    task: Literal["sentences", "letters"] = Field(
        "sentences", description="sentences: messages, for chat models. letters: a few, for small models."
    )
    file: LocalPath | None = Field(
        None, description='The sentences: JSONL, a line {"prompt": "..."} each; unset: some of everyday words.'
    )

    @model_validator(mode="after")
    def _letters_are_drawn(self) -> ReverseTextConfig:
        if self.file and self.task != "sentences":
            raise ValueError(f"env.file={self.file} holds sentences, and env.task={self.task}; leave one of them out")
        return self


class MathConfig(TextConfig):
    name: Literal["math"] = Field(description="Questions from a file, whose boxed answers are compared as mathematics.")
    task: str = Field("math", description="How results name it.")
    file: LocalPath | None = Field(
        None, description="JSONL, a question a line: {question or prompt or messages, answer or solutions}."
    )
    held_out: LocalPath | None = Field(
        None, description="Another such file for evaluations; unset: the first 5% of the questions, at most 500."
    )
    score_s: float = Field(5.0, gt=0, description="Seconds that comparing an answer may take; then it counts as wrong.")


class ReasoningGymConfig(TextConfig, NamedWithKind):
    name: str = Field(pattern=r"^reasoning_gym:\w+$", description="reasoning_gym:<name>, any of its tasks.")
    task: str = Field("", description="How results name it; unset: the task's name.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Options of that task, as reasoning_gym has them.")
    partial_scores: bool = Field(False, description="Reward the task's scores below 1 too; only 1 is a success.")
    score_s: float = Field(5.0, gt=0, description="As for math.")


class VerifiersConfig(TextConfig, NamedWithKind):
    name: str = Field(pattern=r"^verifiers:[\w./-]+$", description="verifiers:<environment>, as the package loads it.")
    task: str = Field("", description="How results name it; unset: the environment's name.")
    python: LocalPath | None = Field(None, description="The interpreter that has the package: FOLDER/bin/python.")
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Handed to its load_environment as they are.")
    full_score: float = Field(1.0, description="The reward from which on an answer is a success.")
    score_s: float = Field(60.0, gt=0, description="Seconds for a reply or a score; then the conversation is dropped.")
    start_s: float = Field(600.0, gt=0, description="Seconds that loading it may take, data sets included.")


def check_privileged(config: Any) -> None:
    if config.privileged and config.state == "full":
        raise ValueError("env.privileged=true, but env.state=full hides nothing from the actor; try env.state=proprio")


def with_task(values: dict[str, Any], task: str) -> dict[str, Any]:
    return values if values.get("task") else {**values, "task": task}


def unknown_env(name: str) -> str:
    """The message for a name that is neither ours nor a class."""
    more = "reasoning_gym:<task>, verifiers:<environment>, gym:<id>, my_pkg.my_module:MyEnv"
    known = f"known: {', '.join(ENV_CONFIGS)}, {more}"
    return (
        f"env.name={name!r} is unknown ({known}){nearest(name, [*ENV_CONFIGS, 'reasoning_gym:', 'verifiers:', 'gym:'])}"
    )


ENV_CONFIGS: dict[str, type[CommonEnvConfig]] = {
    "maniskill": ManiSkillConfig,
    "pointmass": PointMassConfig,
    "libero": LiberoConfig,
    "robosuite": RobosuiteConfig,
    "sums": ToyTextConfig,
    "sort": ToyTextConfig,
    "reverse_text": ReverseTextConfig,
    "math": MathConfig,
}


SIMULATORS = ("maniskill", "libero", "robosuite")  # whose tasks can be the user's own: env.task=my_pkg.my_module:MyTask


def kind_of(value: Any) -> str:
    """The tag of the model that an env section belongs to."""
    name = value.get("name", "maniskill") if isinstance(value, dict) else getattr(value, "name", "maniskill")
    name = str(name)  # "gym:" in YAML is a mapping
    if name in ENV_CONFIGS:
        return name
    kinds = ("gym", "reasoning_gym", "verifiers")
    return next((kind for kind in kinds if name.startswith(f"{kind}:")), "external")


EnvConfig = Annotated[
    Annotated[ManiSkillConfig, Tag("maniskill")]
    | Annotated[PointMassConfig, Tag("pointmass")]
    | Annotated[LiberoConfig, Tag("libero")]
    | Annotated[RobosuiteConfig, Tag("robosuite")]
    | Annotated[ToyTextConfig, Tag("sums")]
    | Annotated[ToyTextConfig, Tag("sort")]
    | Annotated[ReverseTextConfig, Tag("reverse_text")]
    | Annotated[MathConfig, Tag("math")]
    | Annotated[ReasoningGymConfig, Tag("reasoning_gym")]
    | Annotated[VerifiersConfig, Tag("verifiers")]
    | Annotated[GymConfig, Tag("gym")]
    | Annotated[ExternalEnvConfig, Tag("external")],
    Discriminator(kind_of),
]
