"""Which scripts solve which tasks: experts for the toy and some tasks of ManiSkill and LIBERO. Imported only when asked
for.
"""

from __future__ import annotations

from embodied.envs.base import VectorEnv
from embodied.envs.bridge_tasks import is_bridge
from embodied.envs.pilots import Expert
from embodied.errors import ConfigError


def make_expert(env: VectorEnv) -> Expert:
    """The expert that plays the rows of this env."""
    name = env.config.name
    if name == "pointmass":
        from embodied.envs.pointmass_expert import PointMassExpert

        return PointMassExpert(env)
    if name == "maniskill" and is_bridge(env.config.task):
        from embodied.envs.bridge_expert import BridgeExpert

        return BridgeExpert(env)
    if name == "maniskill":
        from embodied.envs.maniskill_expert import ManiSkillExpert

        return ManiSkillExpert(env)
    if name == "libero":
        from embodied.envs.libero_expert import LiberoExpert

        return LiberoExpert(env)
    raise ConfigError(f"there is no expert for env.name={name}; name a policy that solves it: checkpoint=runs/...")
