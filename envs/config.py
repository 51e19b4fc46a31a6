"""The options of an env: a model for each `env.name`, imported when it is named. They are in the `config.py` of the
env's folder, free of torch and simulators.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from embodied.core.errors import nearest
from embodied.core.options import ChosenByName, LocalPath, Requirement, Strict, never_with, only_with
from embodied.core.plugins import ENVS, OURS, Plugins

OnSuccess = Literal["truncate", "terminate", "continue"]

PRIVILEGED = Field(
    False, description="With state=proprio: give the critic, never the actor, the other numbers of `full`."
)
RENDERER = Field(
    "auto",
    description="What draws the images of simulators on cores: GPUs, the cores themselves by software, or auto: GPUs "
    "if a probe shows that they draw while they compute (docs/gpu.md).",
)
Renderer = Literal["auto", "gpu", "cores"]
REWARDS = ("own", "success", "difference")
OWN_SCORE = "correct"  # stands for the env's own reward in env.rewards
EXTERNAL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


def played_task(name: Any, task: Any) -> str:
    """The env and its tasks: `maniskill PushCube-v1`; `my_envs:Count` if the name ends with the task; the tasks alone
    of a class of ours, such as that of eval.sets."""
    tasks = ", ".join(map(str, task)) if isinstance(task, (list, tuple)) else str(task)
    if str(name).startswith("embodied."):
        return tasks
    return str(name) if str(name).endswith(f":{tasks}") else f"{name} {tasks}"


def a_name_or_names(value: Any) -> Any:
    names = value if isinstance(value, (list, tuple)) else [value]
    if not names or not all(isinstance(name, str) for name in names):
        raise ValueError("should be the name of a task, or a list of names")
    return value


def known_reward(name: str) -> str:
    if name not in REWARDS and not EXTERNAL.fullmatch(name):
        mode = f"; did you mean env.reward_mode={name}?" if name.endswith(("dense", "sparse")) else ""
        raise ValueError(
            f"env.reward={name!r} is unknown (known: {', '.join(REWARDS)}, my_pkg.my_module:my_reward)"
            f"{mode or nearest(name, REWARDS)}"
        )
    return name


def not_empty(region: tuple[float, float, float, float]) -> tuple[float, float, float, float]:
    left, top, right, bottom = region
    if left >= right or top >= bottom:
        raise ValueError("is empty: left and top come first, then right and bottom; try [0.2, 0, 0.8, 0.8]")
    return region


SIZE_HELP = "Height and width of these images in pixels; one number for both."
Side = Annotated[int, Field(ge=8, le=2048)]
ImageSize = Annotated[tuple[Side, Side], BeforeValidator(lambda size: (size, size) if isinstance(size, int) else size)]
Share = Annotated[float, Field(ge=0, le=1)]
Region = Annotated[tuple[Share, Share, Share, Share], AfterValidator(not_empty)]
Tasks = Annotated[Union[str, tuple[str, ...]], BeforeValidator(a_name_or_names)]  # noqa: UP007  # for Python 3.9
Modules = Annotated[tuple[str, ...], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]


def side_by_side(of: str = "") -> Any:
    """The option of text envs, ours or the user's."""
    return Field(
        16,
        gt=0,
        le=1024,
        description=f"{of}Conversations of a sim worker whose steps and scores may run at the same time, in threads, "
        "if they take milliseconds; 1: one after the other. Results are the same.",
    )


class WeightedReward(Strict):
    name: str
    weight: float = Field(1.0, allow_inf_nan=False)

    @property
    def label(self) -> str:
        """Its name in metrics and transcripts."""
        return self.name.rpartition(":")[2]

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    def conflicts(self) -> Iterator[str]:
        if self.name != OWN_SCORE and not EXTERNAL.fullmatch(self.name):
            yield f"{self.name!r} is neither {OWN_SCORE} nor my_pkg.my_module:my_reward"


def different_labels(rewards: tuple[WeightedReward, ...]) -> tuple[WeightedReward, ...]:
    labels = [reward.label for reward in rewards]
    if again := next((label for label in labels if labels.count(label) > 1), None):
        raise ValueError(f"{again} is there twice: metrics could not tell them apart")
    return rewards


Rewards = Annotated[tuple[WeightedReward, ...], AfterValidator(different_labels)]


def rewards(of: str = "") -> Any:
    """The option of text envs, ours or the user's."""
    return Field(
        (),
        description=f"{of}Rewards to add up instead of the env's own: correct is that, my_pkg.my_module:my_reward a "
        "function of the prompt and the last answer, such as [correct, {name: my_pkg:short, weight: 0.1}].",
    )


class CommonEnvConfig(Strict):
    if TYPE_CHECKING:  # each env describes its own
        name: Any
        task: Any

    env: ClassVar[str] = ""
    """The env's class, as my_pkg.my_module:MyEnv."""

    needs: ClassVar[Requirement] = Requirement()
    """Packages that it needs."""

    speaks: ClassVar[bool] = False
    """True if it asks in words; what a class of yours does, follows from its base."""

    task_base: ClassVar[str] = ""
    """The simulator's class whose subclasses are its tasks; empty if users cannot add tasks with
    env.task=my_pkg.my_module:MyTask."""

    shaped: ClassVar[str] = ""
    """The `reward_mode` to suggest instead of a sparse one; empty if there is none."""

    num_envs: int = Field(32, gt=0, le=2**20, description="Env rows of the whole run, divided among the sim workers.")
    max_episode_steps: int | None = Field(
        None, gt=0, description="Env steps after which an episode is cut off; unset: the task's own limit."
    )
    on_success: OnSuccess = Field(
        "truncate", description="A success ends the episode with bootstrapping, without it, or not at all."
    )
    after_success: int = Field(
        0, ge=0, description="With truncate: env steps that an episode continues after a success."
    )
    reward: Annotated[str, AfterValidator(known_reward)] = Field(
        "own",
        description="Reward per env step: own (as the simulator gives it), success (1 when the task is solved, else "
        "0), difference (own minus that of the step before), or a function or class of yours, "
        "my_pkg.my_module:my_reward.",
    )
    reward_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of the class that env.reward names; every env makes an object."
    )
    action_cost: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="What the mean square of an env step's actions (-1 to 1) costs while training, so that a policy "
        "that has solved its task comes to rest. Evaluations leave it out.",
    )
    modules: Modules = Field(
        (),
        description="Your modules to import before envs are made: tasks, robots, controllers that register "
        "themselves. They are found in the working directory and on Python's path.",
    )
    python: LocalPath | Literal["auto"] | None = Field(
        None,
        description="Another interpreter for the simulator, FOLDER/bin/python, with packages of its own "
        "(docs/own_task.md); auto: the locked one that python -m embodied.sims makes.",
    )
    stagger: bool = Field(
        False,
        description="Cut the first training episode of each env short, each at a different step, so that rollouts "
        "have early and late parts of episodes from the beginning and after a restart. This lowers the "
        "return of these iterations, but not of evaluations.",
    )

    retries: int = Field(
        0,
        ge=0,
        description="How often an env repeats a failed training episode from the same initial state. Hard initial "
        "states are practised more, which lowers the success shown in training, but not in evaluations.",
    )

    section = "env."
    rules = (
        never_with("privileged", {"state": "full"}, "it hides nothing from the actor; try env.state=proprio"),
        only_with(
            "reward_kwargs",
            {"reward": lambda name: ":" in name},
            "leave it out, or name a class of yours: env.reward=my_pkg.my_module:MyReward",
        ),
        only_with("after_success", {"on_success": "truncate"}, "try env.after_success=0"),
    )

    @classmethod
    def tasks_in_words(cls, name: str) -> list[tuple[str, str]]:
        """The name and description of each value of `env.task` if it takes fixed names, else one description; for
        `embodied.list tasks`. `name` is the env's name, if several envs have these options."""
        field = cls.model_fields["task"]
        fixed = get_args(field.annotation) if get_origin(field.annotation) is Literal else ("",)
        return [(task, field.description or "") for task in fixed]

    @classmethod
    def is_task(cls, task: str) -> bool:
        """True if this name alone identifies a task of this env, for evaluations that name no env."""
        return False

    @classmethod
    def advice(cls, lacking: Collection[str], environ: Mapping[str, str]) -> list[str]:
        """Lines that say where this env's files are searched, if `lacking` names some of them."""
        return []

    @classmethod
    def training_only(cls, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Options of a training with these values that an evaluation drops, unless its command sets the first one."""
        return ()

    @property
    def elsewhere(self) -> bool:
        """True if the simulator runs in an interpreter of its own."""
        return self.python is not None and not self.speaks

    @property
    def plays(self) -> str:
        """The env's class, as its options choose it."""
        return self.env

    @property
    def lock(self) -> str:
        """The name of the locked environment that `env.python=auto` takes (interpreter/locks)."""
        return str(self.name).partition(":")[0]

    @property
    def physics(self) -> str:
        """The kind of physics, if the simulator has several."""
        return ""

    @property
    def on_gpu(self) -> bool:
        """True if the simulator itself runs on a GPU."""
        return self.physics == "cuda"

    @property
    def observed_images(self) -> dict[str, tuple[int, int]]:
        """Height and width of the observed images by camera, as far as the options say."""
        return {}

    def worker_bytes(self, rows: int, num_tasks: int) -> float:
        """Memory of a sim worker whose env rows play at most `num_tasks` tasks; 0 if unknown."""
        return 0.0


class NamedWithKind(CommonEnvConfig):
    """Envs whose name is KIND:NAME: the task is NAME, unless `env.task` gives it another name for results."""

    written: ClassVar[str]
    """The task as `env.name` gives it, for messages."""

    @model_validator(mode="before")
    @classmethod
    def _task_is_the_name(cls, values: Any) -> Any:
        return with_task(values, str(values.get("name", "")).partition(":")[2]) if isinstance(values, dict) else values


def with_task(values: dict[str, Any], task: str) -> dict[str, Any]:
    return values if values.get("task") else {**values, "task": task}


class ExternalEnvConfig(CommonEnvConfig):
    name: str = Field(description="Your own env class, my_pkg.my_module:MyEnv, importable in every worker.")
    task: Tasks = Field(
        description="Handed to your env with every episode, one of them if it is a list; unset: the name of its class."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict, description="Options for your own class.")
    side_by_side: int = side_by_side("Text envs: ")
    rewards: Rewards = rewards("Text envs: ")

    @model_validator(mode="before")
    @classmethod
    def _names_a_class(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = values.get("name", "")
        name = f"{next(iter(given))}:" if isinstance(given, dict) and len(given) == 1 else str(given)  # YAML of "gym:"
        if not EXTERNAL.fullmatch(name):
            raise ValueError(unknown_env(name))
        return with_task(values, name.rpartition(":")[2])


ENV_CONFIGS = Plugins(ENVS, "env.name", {"external": ExternalEnvConfig})


def unknown_env(name: str) -> str:
    """The message for a name that is neither an env's nor a class."""
    kind = name.rstrip(":")
    if form := getattr(ENV_CONFIGS.get(kind), "written", ""):
        return f"env.name={name} names no env: write env.name={form}; python -m embodied.list envs tasks says which"
    ours = [getattr(ENV_CONFIGS[kind], "written", kind) for kind in OURS[ENVS]]
    names = [*ours, *(kind for kind in ENV_CONFIGS.names if kind not in OURS[ENVS])]
    choices = ", ".join([*names, "my_pkg.my_module:MyEnv"])
    if re.fullmatch(r"[\w/-]+-v\d+", name):
        meant = f"env.name=gym:{name}, of Gymnasium, or env.name=maniskill env.task={name}"
        return f"env.name={name!r} is unknown; did you mean {meant}? (known: {choices})"
    return f"env.name={name!r} is unknown (known: {choices}){nearest(name, [word.partition('<')[0] for word in names])}"


def kind_of(value: Any) -> str:
    """The tag of the model that an env section belongs to."""
    name = value.get("name", "maniskill") if isinstance(value, dict) else getattr(value, "name", "maniskill")
    kind, _, task = str(name).partition(":")
    return kind if kind in ENV_CONFIGS and issubclass(ENV_CONFIGS[kind], NamedWithKind) == bool(task) else "external"


EnvConfig = Annotated[CommonEnvConfig, ChosenByName(ENV_CONFIGS, kind_of)]


def env_that_knows(tasks: str | tuple[str, ...] | list[str]) -> str | None:
    """The `env.name` that follows from the names of these tasks alone; None if it does not."""
    names = [tasks] if isinstance(tasks, str) else tasks
    return next((name for name, kind in ENV_CONFIGS.items() if names and all(map(kind.is_task, names))), None)
