"""Control modes, rewards, cameras and robots that a ManiSkill task offers, and errors that list them.

ManiSkill lists shaped rewards (`env.reward_mode`) also for tasks that do not implement them; these are left out here.
"""

from __future__ import annotations

import ast
import inspect
from typing import Any

from embodied.core.errors import ConfigError, nearest
from embodied.envs.capabilities import CataloguedTask
from embodied.envs.maniskill.bridge.bridge_tasks import TWINS, source_of
from embodied.envs.maniskill.config import REWARD_MODES, ManiSkillConfig
from embodied.envs.maniskill.state_numbers import groups, widths
from embodied.envs.maniskill.tasks import check_task, find_task, missing_assets
from embodied.envs.own_modules import where

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
    _, names_it, known = str(err).partition(f"{mode} not in supported modes: ")
    if names_it:
        names = ast.literal_eval(known)
        return ConfigError(f"env.control_mode={mode}: the robot has {', '.join(names)}{nearest(mode, names)}")
    asked = ", ".join(f"env.{name}={getattr(config, name)}" for name in ("control_mode", "reward_mode"))
    return ConfigError(f"ManiSkill refuses {config.task} with {asked}: {' '.join(str(err).split())}{where(err)}")


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
    known = reward_modes(cls)
    if config.reward_mode in known:
        return
    text = f"env.reward_mode={config.reward_mode}: {config.task} has no such reward"
    if config.reward_mode in cls.SUPPORTED_REWARD_MODES:
        text += f", its class does not write compute_{config.reward_mode}_reward"
    pays = " or ".join(mode for mode in known if mode != "none")
    raise ConfigError(f"{text}; {f'set env.reward_mode={pays}' if pays else 'it has none at all'}")


def catalogued(task: str, spec: Any) -> CataloguedTask:
    """The entry of a registered task in `embodied.list tasks`."""
    rewards = [mode for mode in reward_modes(class_of(task)) if mode in REWARD_MODES]
    limit = f"{spec.max_episode_steps} steps" if spec.max_episode_steps else "no step limit"
    way = "" if "normalized_dense" in rewards or not rewards else f", with env.reward_mode={rewards[0]}"
    missing = {asset: source_of(asset) for asset in missing_assets(task)}
    return {"about": limit + way, "problem": "" if rewards else "it has no reward", "missing": missing}


def class_of(task: str) -> type:
    """The class of a task; ManiSkill's bridge tasks have a class here, with rewards."""
    if task in TWINS:
        from embodied.envs.maniskill.bridge.twins import KINDS

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
    state = groups(env, env.get_info(), config)["state"]
    limit = f"{spec.max_episode_steps} an episode" if spec.max_episode_steps else "no limit of its own: 100 an episode"
    return {
        "class": f"{cls.__name__} in {inspect.getsourcefile(cls)}",
        "steps": f"{limit}, {env.control_freq:g} a second",
        "rewards": first(env.reward_mode, reward_modes(cls), "env.reward_mode"),
        "state": ", ".join(f"{name} {width}" for name, width in widths(state)),
        "controls": first(env.control_mode, controls, "env.control_mode"),
        "robots": first(robot, [robot, *supported], "env.robot"),
        "cameras": ", ".join(cameras) + " (env.cameras=[...]; none is observed unless named)" if cameras else "none",
    }


def robots_named(robots: Any) -> str:
    """The names of robots, which ManiSkill gives as uid or class, or a tuple of these."""
    if isinstance(robots, tuple | list):
        return ", ".join(map(robots_named, robots))
    return robots if isinstance(robots, str) else robots.uid


def first(chosen: Any, names: list[str], key: str) -> str:
    others = [name for name in names if name != chosen]
    return f"{chosen} (chosen)" + (f"; {key}= also takes {', '.join(others)}" if others else "")
