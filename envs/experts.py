"""Which experts solve which tasks: scripts for the toy and some tasks of ManiSkill and LIBERO, and ManiSkill's motion
planner. Imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from embodied.core.errors import ConfigError
from embodied.envs.action_source import Expert
from embodied.envs.base import VectorEnv
from embodied.envs.maniskill.bridge.tasks import is_bridge


def make_expert(env: VectorEnv, kind: str = "scripted", tick: Callable[[], None] = lambda: None) -> Expert:
    """The expert of this `kind` (collect.expert) that plays the rows of this env; it ticks in long work."""
    name = env.config.name
    if kind == "planner" and name != "maniskill":
        raise ConfigError(f"collect.expert=planner is ManiSkill's motion planner and does not play env.name={name}")
    if kind == "planner":
        from embodied.envs.maniskill.motion_planner import PlannerExpert

        return PlannerExpert(env, tick)
    if name == "pointmass":
        from embodied.envs.pointmass.expert import PointMassExpert

        return PointMassExpert(env)
    if name == "maniskill" and is_bridge(env.config.task):
        from embodied.envs.maniskill.bridge.expert import BridgeExpert

        return BridgeExpert(env)
    if name == "maniskill":
        from embodied.envs.maniskill.expert import ManiSkillExpert

        return ManiSkillExpert(env)
    if name == "libero":
        from embodied.envs.libero.expert import LiberoExpert

        return LiberoExpert(env)
    raise ConfigError(f"there is no expert for env.name={name}; name a policy that solves it: checkpoint=runs/...")
