"""ManiSkill's tasks by name: the registered ones, what each offers (control modes, rewards, cameras, robots), and its
observed numbers and actions. Errors list what there is.

ManiSkill prompts for downloads; here an error lists missing files before anything starts. It lists shaped rewards
(`env.reward_mode`) also for tasks that do not implement them; these are left out.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import io
import itertools
import logging
import math
import threading
from collections.abc import Callable
from itertools import combinations
from shlex import join
from typing import Any

import numpy as np
from gymnasium.spaces import Dict

from embodied.core.errors import ConfigError, MissingAsset, nearest
from embodied.core.vulkan_driver import ensure_vulkan
from embodied.envs.capabilities import CataloguedTask
from embodied.envs.maniskill.bridge import CONTROL, PLATES, SVG, TWINS, is_bridge, missing_bridge_assets, source_of
from embodied.envs.maniskill.config import REWARD_MODES, ManiSkillConfig
from embodied.envs.own_modules import is_own, line_of, own_task, simulator_of, tasks_in

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
    tasks = registered(bridge=is_bridge(task))
    if task not in tasks:
        tasks = registered()
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
    task_ids = [*(uid for uid, spec in tasks.items() if spec.cls in classes.values()), *classes]
    known_tasks = f"has the ManiSkill tasks {', '.join(task_ids)}" if task_ids else "defines no ManiSkill task"
    if value is not None:
        raise ConfigError(
            f"env.task={task!r}: {name} is no subclass of ManiSkill's BaseEnv; {module.__file__} {known_tasks}"
        )
    raise ConfigError(f"env.task={task!r}: {module.__file__} {known_tasks}, not {name}{nearest(name, task_ids)}")


def control_of(config: ManiSkillConfig) -> str:
    return config.control_mode or (CONTROL if is_bridge(config.task) else "pd_joint_delta_pos")


def is_listed(config: ManiSkillConfig) -> bool:
    """True if this is one of the tasks and controls for which batched physics is proven equal."""
    listed = config.task in BATCHED_TASKS and control_of(config) in BATCHED_CONTROLS
    return (listed or config.task in BATCHED_BRIDGE) and not config.robot


def to_prove(config: ManiSkillConfig) -> str:
    """The command that proves a task."""
    settings = {"task": config.task, "control_mode": control_of(config), "robot": config.robot}
    settings |= {"solver_iterations": config.solver_iterations, "object_set": config.object_set}
    settings |= {"modules": f"[{','.join(config.modules)}]" if config.modules else None}
    settings |= {"reward_mode": config.reward_mode if config.reward_mode != "normalized_dense" else None}
    return f"python -m embodied.check {join(f'env.{key}={value}' for key, value in settings.items() if value)}"


def registered(bridge: bool = True) -> dict[str, Any]:
    """All registered tasks by name: ManiSkill's, the user's, and ours if `bridge` is set."""
    with quiet():
        import mani_skill.envs  # noqa: F401  registers the tasks
        from mani_skill.utils.registration import REGISTERED_ENVS

        if bridge:
            import embodied.envs.maniskill.bridge.put_on_plate  # noqa: F401  registers ours

    return REGISTERED_ENVS


def maker(task: str) -> Any:
    """The function that builds a task's env."""
    import gymnasium

    if task in TWINS:
        from embodied.envs.maniskill.bridge.scene import KINDS

        return functools.partial(environment_of, KINDS[task], gymnasium.spec(task))
    if is_own(task):  # without Gymnasium, whose wrapping makes its errors harder to read
        registration = find_task(task)
        return functools.partial(environment_of, registration.make, registration.gym_spec)
    return functools.partial(gymnasium.make, task)


def environment_of(kind: Callable[..., Any], spec: Any, **options: Any) -> Any:
    env = kind(**options)
    env.spec = spec
    return env


def missing_assets(task: str) -> list[str]:
    """The downloads of a registered task that are missing or incomplete on this machine."""
    from mani_skill import ASSET_DIR

    if is_bridge(task):
        return missing_bridge_assets(task, ASSET_DIR)
    undeclared = [names for begin, names in UNDECLARED.items() if task.startswith(begin)]
    return [name for name in itertools.chain(find_task(task).asset_download_ids or [], *undeclared) if lacking(name)]


def lacking(asset: str) -> list[str]:
    """The missing parts of a download."""
    from mani_skill.utils import assets

    if asset == SVG:
        return [] if importlib.util.find_spec(SVG) else [SVG]
    grouped = asset in assets.DATA_GROUPS
    parts = assets.expand_data_group_into_individual_data_source_ids(asset) if grouped else [asset]
    return sorted(name for name in parts if not assets.is_data_source_downloaded(name))


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


SHAPED = ("dense", "normalized_dense")


def check_choices(config: ManiSkillConfig) -> None:
    """Refuse an unknown task, missing files, and a reward mode or robot that the task lacks."""
    check_task(config.task)
    check_reward(config)
    from mani_skill.agents.registration import REGISTERED_AGENTS

    if config.robot is not None and config.robot not in REGISTERED_AGENTS:
        raise ConfigError(
            f"env.robot={config.robot}: no robot of this name is registered{nearest(config.robot, REGISTERED_AGENTS)}; "
            "one of your own is registered by a module that env.modules names"
        )


def refused(config: ManiSkillConfig, err: Exception) -> ConfigError:
    """Translates ManiSkill's error for an option that a task lacks."""
    mode = config.control_mode
    _, names_it, modes = str(err).partition(f"{mode} not in supported modes: ")
    if names_it:
        names = ast.literal_eval(modes)
        return ConfigError(f"env.control_mode={mode}: the robot has {', '.join(names)}{nearest(mode, names)}")
    asked = ", ".join(f"env.{name}={getattr(config, name)}" for name in ("control_mode", "reward_mode"))
    return ConfigError(f"ManiSkill refuses {config.task} with {asked}: {' '.join(str(err).split())}{line_of(err)}")


def reward_modes(cls: type) -> list[str]:
    """The reward modes of a task's class; shaped rewards that it does not implement are left out."""
    from mani_skill.envs.sapien_env import BaseEnv

    if cls.get_reward is not BaseEnv.get_reward:  # it computes rewards in its own way
        return list(cls.SUPPORTED_REWARD_MODES)
    methods = {mode: f"compute_{mode}_reward" for mode in SHAPED}
    missing = [mode for mode, name in methods.items() if getattr(cls, name) is getattr(BaseEnv, name)]
    return [mode for mode in cls.SUPPORTED_REWARD_MODES if mode not in missing]


def check_reward(config: ManiSkillConfig) -> None:
    """Refuses a reward mode that the task does not have."""
    cls = class_of(config.task)
    modes = reward_modes(cls)
    if config.reward_mode in modes:
        return
    text = f"env.reward_mode={config.reward_mode}: {config.task} has no such reward"
    if config.reward_mode in cls.SUPPORTED_REWARD_MODES:
        text += f", its class does not write compute_{config.reward_mode}_reward"
    pays = " or ".join(mode for mode in modes if mode != "none")
    raise ConfigError(f"{text}; {f'set env.reward_mode={pays}' if pays else 'it has none at all'}")


def task_entry(task: str, spec: Any) -> CataloguedTask:
    """The entry of a registered task in `embodied.list tasks`."""
    rewards = [mode for mode in reward_modes(class_of(task)) if mode in REWARD_MODES]
    limit = f"{spec.max_episode_steps} steps" if spec.max_episode_steps else "no step limit"
    way = "" if "normalized_dense" in rewards or not rewards else f", with env.reward_mode={rewards[0]}"
    missing = {asset: source_of(asset) for asset in missing_assets(task)}
    return {"about": limit + way, "problem": "" if rewards else "it has no reward", "missing": missing}


def class_of(task: str) -> type:
    """The class of a task; ManiSkill's bridge tasks have a class here, with rewards."""
    if task in TWINS:
        from embodied.envs.maniskill.bridge.scene import KINDS

        return KINDS[task]
    return find_task(task).cls


def facts(env: Any, config: ManiSkillConfig) -> dict[str, str]:
    """The choices of a built env by topic, the chosen one first."""
    from embodied.envs.maniskill.images import cameras_of

    spec = find_task(config.task)
    cls = type(env)
    robot = robots_named(env.robot_uids)
    supported = [name for name in map(robots_named, cls.SUPPORTED_ROBOTS or ()) if name != robot]
    agents = getattr(env.agent, "agents", None) or [env.agent]
    controls = list(dict.fromkeys(mode for agent in agents for mode in agent.supported_control_modes))
    cameras = [f"{name} ({camera.config.width}x{camera.config.height})" for name, camera in cameras_of(env).items()]
    state = state_groups(env, env.get_info(), config)["state"]
    limit = f"{spec.max_episode_steps} an episode" if spec.max_episode_steps else "no limit of its own: 100 an episode"
    return {
        "class": f"{cls.__name__} in {inspect.getsourcefile(cls)}",
        "steps": f"{limit}, {env.control_freq:g} a second",
        "rewards": chosen_first(env.reward_mode, reward_modes(cls), "env.reward_mode"),
        "state": ", ".join(f"{name} {width}" for name, width in part_widths(state)),
        "controls": chosen_first(env.control_mode, controls, "env.control_mode"),
        "robots": chosen_first(robot, [robot, *supported], "env.robot"),
        "cameras": ", ".join(cameras) + " (env.cameras=[...]; none is observed unless named)" if cameras else "none",
    }


def robots_named(robots: Any) -> str:
    """The names of robots, which ManiSkill gives as uid or class, or a tuple of these."""
    if isinstance(robots, (tuple, list)):
        return ", ".join(map(robots_named, robots))
    return robots if isinstance(robots, str) else robots.uid


def chosen_first(chosen: Any, names: list[str], key: str) -> str:
    others = [name for name in names if name != chosen]
    return f"{chosen} (chosen)" + (f"; {key}= also takes {', '.join(others)}" if others else "")


def numbers(env: Any, info: dict[str, Any], config: ManiSkillConfig) -> dict[str, Any]:
    """The observed numbers [N, D], tensors: ManiSkill's state, or its part that goes with images and, separately, the
    rest."""
    from mani_skill.utils import common

    parts = state_groups(env, info, config)
    return {name: common.flatten_state_dict(tree, use_torch=True, device=env.device) for name, tree in parts.items()}


def state_groups(env: Any, info: dict[str, Any], config: ManiSkillConfig) -> dict[str, dict[str, Any]]:
    """The observed numbers in groups, by ManiSkill's names; relative positions come last."""
    full = env.obs_mode == "state"  # some tasks compute it in their own way
    extra = {} if full else env._get_obs_extra(info)
    if config.state == "joints":  # e.g. PullCube-v1's goal tells the cube's initial position
        extra = {name: tree for name, tree in extra.items() if "tcp" in name and "_to_" not in name}
    parts = {"state": env._get_obs_state_dict(info) if full else {"agent": env._get_obs_agent(), "extra": extra}}
    if config.privileged:
        before = env._obs_mode, env.obs_mode_struct.state  # tasks read one or the other
        env._obs_mode, env.obs_mode_struct.state = "state", True
        try:
            parts["privileged"] = {name: tree for name, tree in env._get_obs_extra(info).items() if name not in extra}
        finally:
            env._obs_mode, env.obs_mode_struct.state = before
        if not parts["privileged"]:
            raise ConfigError(f"env.privileged=true, but {env.spec.id} hides no numbers where there are images")
    if config.relative_positions:
        parts["state"] = {**parts["state"], "relative": relative_positions(parts["state"].get("extra", {}))}
    return parts


def relative_positions(extra: dict[str, Any]) -> dict[str, Any]:
    """Offsets [N, 3] from every position that a task names to every later one: tcp_pose, goal_pos and obj_pose give
    tcp_to_goal, tcp_to_obj and goal_to_obj. The task's own offsets, like tcp_to_obj_pos, are skipped."""
    places = {
        name.removesuffix("_pose").removesuffix("_pos"): values[..., :3]
        for name, values in extra.items()
        if getattr(values, "ndim", 0) == 2 and "_to_" not in name and (values.shape[-1] == 7 or name.endswith("_pos"))
    }
    return {f"{a}_to_{b}": places[b] - places[a] for a, b in combinations(places, 2)}


def part_widths(group: dict[str, Any], prefix: str = "") -> list[tuple[str, int]]:
    """Name and size of each part of a state, in their order."""
    sizes: list[tuple[str, int]] = []
    for name, value in group.items():
        if isinstance(value, dict):
            sizes += part_widths(value, f"{prefix}{name}.")
        else:
            shape = getattr(value, "shape", None)
            width = (len(value) if isinstance(value, (list, tuple)) else 1) if shape is None else math.prod(shape[1:])
            sizes += [(f"{prefix}{name}", width)] * bool(width)
    return sizes


# Actions: with several robots one vector for the policy, and a part for each robot in the env.


def action_bounds(env: Any) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest action [A], robot by robot."""
    space = env.single_action_space
    parts = list(space.values()) if isinstance(space, Dict) else [space]
    return np.concatenate([box.low for box in parts]), np.concatenate([box.high for box in parts])


def for_robots(env: Any, actions: Any) -> Any:
    """Converts actions [..., A] to the env's format: with several robots a dict of parts by robot."""
    space = env.single_action_space
    if not isinstance(space, Dict):
        return actions
    ends = np.cumsum([box.shape[0] for box in space.values()]).tolist()
    return {name: actions[..., begin:end] for name, begin, end in zip(space, [0, *ends], ends, strict=False)}
