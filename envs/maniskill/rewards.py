"""The reward modes that a ManiSkill task has, and the refusal of one that it lacks.

The option is `env.reward_mode` in `config.py`. ManiSkill lists shaped modes for tasks that do not write them, and
playing those fails: they are left out here.
"""

from __future__ import annotations

from typing import Any

from embodied.core.errors import ConfigError
from embodied.envs.capabilities import CataloguedTask
from embodied.envs.maniskill.bridge.bridge_tasks import TWINS, source_of
from embodied.envs.maniskill.config import REWARD_MODES, ManiSkillConfig
from embodied.envs.maniskill.tasks import find_task, missing_assets

SHAPED = ("dense", "normalized_dense")


def reward_modes(cls: type) -> list[str]:
    """The reward modes of a task's class, without shaped ones that it does not implement."""
    from mani_skill.envs.sapien_env import BaseEnv

    own_way = cls.get_reward is not BaseEnv.get_reward
    missing = [mode for mode in SHAPED if not own_way and not has_reward(cls, mode, BaseEnv)]
    return [mode for mode in cls.SUPPORTED_REWARD_MODES if mode not in missing]


def has_reward(cls: type, mode: str, base: type) -> bool:
    """True if a task's class writes this reward itself."""
    name = f"compute_{mode}_reward"
    return getattr(cls, name) is not getattr(base, name)


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
    """What `embodied.list tasks` says of a task that ManiSkill registered so."""
    rewards = [mode for mode in reward_modes(class_of(task)) if mode in REWARD_MODES]
    limit = f"{spec.max_episode_steps} steps" if spec.max_episode_steps else "no step limit"
    way = "" if "normalized_dense" in rewards or not rewards else f", with env.reward_mode={rewards[0]}"
    missing = {asset: source_of(asset) for asset in missing_assets(task)}
    return {"about": limit + way, "problem": "" if rewards else "it has no reward", "missing": missing}


def class_of(task: str) -> type:
    """The class that plays a task: of ManiSkill's bridge tasks one of ours, with rewards."""
    if task in TWINS:
        from embodied.envs.maniskill.bridge.twins import KINDS

        return KINDS[task]
    return find_task(task).cls
