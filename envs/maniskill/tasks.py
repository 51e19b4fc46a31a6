"""ManiSkill's tasks by name: the registered tasks, how they are built, and their missing files.

ManiSkill prompts for downloads; here an error lists missing files before anything starts.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import logging
import threading
from collections.abc import Callable
from shlex import join
from typing import Any

from embodied.core.errors import ConfigError, MissingAsset, nearest
from embodied.envs.maniskill.bridge.bridge_tasks import CONTROL, PLATES, SVG, TWINS, absent, is_bridge, source_of
from embodied.envs.maniskill.config import ManiSkillConfig
from embodied.envs.own_modules import is_own, own_task, simulator_of, tasks_in
from embodied.system.vulkan_driver import ensure_vulkan

# Tasks proven equal to single envs by playing both, with their own step limits; none needs a download.
DRAWING = threading.RLock()  # torch.rand and torch's generator are global: one env draws at a time
BATCHED_TASKS = {
    "PushCube-v1": 50,
    "PullCube-v1": 50,
    "PickCube-v1": 50,
    "StackCube-v1": 50,
    "LiftPegUpright-v1": 50,
    "PlaceSphere-v1": 50,
    "RollBall-v1": 80,
    "PokeCube-v1": 50,
    "PullCubeTool-v1": 100,
    "PickCubeSO100-v1": 50,
    "TwoRobotPickCube-v1": 100,
    "MS-CartpoleBalance-v1": 1000,
}
BATCHED_BRIDGE = (f"{PLATES}Single-v1",)  # the same for bridge tasks, whose arm has one control mode
ROLLING = ("RollBall-v1",)  # tasks among these with objects that may leave the table: every scene needs the ground
BATCHED_CONTROLS = ("pd_joint_delta_pos", "pd_joint_target_delta_pos")
BATCHED_GAIN = 3.2  # batched to single on PushCube-v1, docs/results.md

UNDECLARED = {  # prefixes of task names -> assets that these tasks need but do not declare: robots, scenes, furniture
    "AnymalC-": ("anymal_c",),
    "ArchitecTHOR_": ("AI2THOR",),
    "DrawSVG-": (SVG,),
    "OpenCabinetDoor-": ("partnet_mobility_cabinet",),
    "PickCubeWidowXAI-": ("widowxai",),
    "ReplicaCAD_": ("ReplicaCAD",),
    "ReplicaCADPrepareGroceries": ("ReplicaCAD", "ReplicaCADRearrange"),
    "ReplicaCADSetTable": ("ReplicaCAD", "ReplicaCADRearrange"),
    "ReplicaCADTidyHouse": ("ReplicaCAD", "ReplicaCADRearrange"),
    "SceneManipulation-": ("ReplicaCAD",),
    "UnitreeGo2-": ("unitree_go2",),
    "UnitreeH1": ("unitree_h1",),
}


def check_task(task: str) -> None:
    """Raise if a task is unknown or needs missing files, without ManiSkill's prompt."""
    find_task(task)
    if missing := missing_assets(task):
        from mani_skill import ASSET_DIR

        sources = [f"{name}: {source_of(name)}" for name in missing[:3]]
        raise MissingAsset(
            f"env.task={task} needs files that are not in {ASSET_DIR}. Get them, or set MS_ASSET_DIR to the "
            f"folder that holds data/ with them.\n  " + "\n  ".join(sources)
        )


def find_task(task: str) -> Any:
    """ManiSkill's registration of a task; for an unregistered class of the user's an equivalent one."""
    ensure_vulkan()
    if is_own(task):
        return find_own(task)
    tasks = registered()
    if task not in tasks:
        example = task if task.replace("-", "_").isidentifier() else "MyTask-v1"
        raise ConfigError(
            f"env.task={task!r} is no ManiSkill task{nearest(task, tasks, count=3) or '.'} One of your own, in a file "
            f"my_tasks.py, is named with its module: env.task=my_tasks:{example} (docs/own_task.md)"
        )
    return tasks[task]


def find_own(task: str) -> Any:
    """Resolves `my_tasks:Name`: a registered task, or a class in that module."""
    tasks = registered()
    module, name = own_task(task)
    if name in tasks:
        return tasks[name]
    value = getattr(module, name, None)
    if simulator_of(value) == "maniskill":
        from mani_skill.utils.registration import EnvSpec

        return next((spec for spec in tasks.values() if spec.cls is value), None) or EnvSpec(name, value)
    classes = tasks_in(module, "maniskill")
    known = [*(uid for uid, spec in tasks.items() if spec.cls in classes.values()), *classes]
    known_tasks = f"has the ManiSkill tasks {', '.join(known)}" if known else "defines no ManiSkill task"
    if value is not None:
        raise ConfigError(
            f"env.task={task!r}: {name} is no subclass of ManiSkill's BaseEnv; {module.__file__} {known_tasks}"
        )
    raise ConfigError(f"env.task={task!r}: {module.__file__} {known_tasks}, not {name}{nearest(name, known)}")


def check_bridge(config: ManiSkillConfig) -> None:
    """Refuse options that only bridge tasks, or only other tasks, have."""
    bridge = is_bridge(config.task)
    if config.action_units and not bridge:
        raise ConfigError(f"env.action_units is for bridge tasks; {config.task} has units of its own, leave it out")
    if config.image_region and not bridge and config.image_fov is None:
        raise ConfigError(
            "env.image_region is a part of the image that env.image_fov describes; set both, such as env.image_fov=60"
        )
    if config.object_set and not config.task.startswith(PLATES):
        raise ConfigError(f"env.object_set is for {PLATES}...; {config.task} has one set of things, leave it out")
    if bridge and config.control_mode not in (None, CONTROL):
        raise ConfigError(
            f"env.control_mode={config.control_mode} is not for the arm of {config.task}; env.control_mode=null takes "
            "the one it has"
        )
    if bridge and config.image_fov is not None:
        raise ConfigError(f"env.image_fov: the photograph behind {config.task} has its own angle of view; leave it out")


def control_of(config: ManiSkillConfig) -> str:
    return config.control_mode or (CONTROL if is_bridge(config.task) else "pd_joint_delta_pos")


def is_listed(config: ManiSkillConfig) -> bool:
    """True if this is one of the tasks and controls for which batched physics is proven equal."""
    listed = config.task in BATCHED_TASKS and control_of(config) in BATCHED_CONTROLS
    return (listed or config.task in BATCHED_BRIDGE) and not config.robot


def to_prove(config: ManiSkillConfig) -> str:
    """The command that proves a task."""
    settings = {"task": config.task, "control_mode": control_of(config), "robot": config.robot}
    settings |= {"modules": f"[{','.join(config.modules)}]" if config.modules else None}
    settings |= {"reward_mode": config.reward_mode if config.reward_mode != "normalized_dense" else None}
    return f"python -m embodied.check {join(f'env.{key}={value}' for key, value in settings.items() if value)}"


def registered() -> dict[str, Any]:
    """All registered tasks, ManiSkill's and ours, by name."""
    with quiet():
        import mani_skill.envs  # noqa: F401  registers the tasks
        from mani_skill.utils.registration import REGISTERED_ENVS

        import embodied.envs.maniskill.bridge.put_on_plate  # noqa: F401  registers ours

    return REGISTERED_ENVS


def maker(task: str) -> Any:
    """The function that builds a task's env."""
    import gymnasium

    if task in TWINS:
        from embodied.envs.maniskill.bridge.twins import KINDS

        return functools.partial(made, KINDS[task], gymnasium.spec(task))
    if is_own(task):  # without Gymnasium, whose wrapping makes its errors harder to read
        registration = find_task(task)
        return functools.partial(made, registration.make, registration.gym_spec)
    return functools.partial(gymnasium.make, task)


def made(kind: Callable[..., Any], spec: Any, **options: Any) -> Any:
    env = kind(**options)
    env.spec = spec
    return env


def missing_assets(task: str) -> list[str]:
    """The downloads of a registered task that are missing or incomplete on this machine."""
    from mani_skill import ASSET_DIR

    if is_bridge(task):
        return absent(task, ASSET_DIR)
    undeclared = [names for begin, names in UNDECLARED.items() if task.startswith(begin)]
    return [name for name in itertools.chain(find_task(task).asset_download_ids or [], *undeclared) if lacking(name)]


def lacking(asset: str) -> list[str]:
    """The missing parts of a download."""
    from mani_skill.utils import assets

    if asset == SVG:
        return [] if importlib.util.find_spec(SVG) else [SVG]
    grouped = asset in assets.DATA_GROUPS
    parts = assets.expand_data_group_into_individual_data_source_ids(asset) if grouped else [asset]
    return sorted(part for part in parts if not assets.is_data_source_downloaded(part))


@contextlib.contextmanager
def quiet():
    """Inside, ManiSkill's and SAPIEN's import notices are suppressed.

    One thread at a time: two threads that redirect the process's stdout at once would leave it redirected.
    """
    import warnings

    with QUIET, warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.getLogger("mani_skill ").addFilter(is_error)  # the logger's real name; its import sets the level
        yield


QUIET = threading.RLock()


def is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
