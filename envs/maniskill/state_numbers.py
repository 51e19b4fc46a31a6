"""The observed numbers of a ManiSkill env with their names, and its actions."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from gymnasium.spaces import Dict

from embodied.core.errors import ConfigError

if TYPE_CHECKING:
    from embodied.envs.maniskill.config import ManiSkillConfig


def numbers(env: Any, info: dict[str, Any], config: ManiSkillConfig) -> dict[str, Any]:
    """The observed numbers [N, D], tensors: ManiSkill's state, or its part that goes with images and, separately, the
    rest."""
    from mani_skill.utils import common

    parts = groups(env, info, config)
    return {name: common.flatten_state_dict(part, use_torch=True, device=env.device) for name, part in parts.items()}


def groups(env: Any, info: dict[str, Any], config: ManiSkillConfig) -> dict[str, dict[str, Any]]:
    """The same by ManiSkill's names; relative positions come last."""
    full = env.obs_mode == "state"  # some tasks compute it in their own way
    extra = {} if full else env._get_obs_extra(info)
    if config.state == "joints":  # e.g. PullCube-v1's goal tells the cube's initial position
        extra = {name: part for name, part in extra.items() if "tcp" in name and "_to_" not in name}
    parts = {"state": env._get_obs_state_dict(info) if full else {"agent": env._get_obs_agent(), "extra": extra}}
    if config.privileged:
        before = env._obs_mode, env.obs_mode_struct.state  # tasks read one or the other
        env._obs_mode, env.obs_mode_struct.state = "state", True
        try:
            parts["privileged"] = {name: part for name, part in env._get_obs_extra(info).items() if name not in extra}
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
        name.removesuffix("_pose").removesuffix("_pos"): part[..., :3]
        for name, part in extra.items()
        if getattr(part, "ndim", 0) == 2 and "_to_" not in name and (part.shape[-1] == 7 or name.endswith("_pos"))
    }
    return {f"{a}_to_{b}": places[b] - places[a] for a, b in combinations(places, 2)}


def widths(group: dict[str, Any], prefix: str = "") -> list[tuple[str, int]]:
    """Name and size of each part of a state, in their order."""
    sizes: list[tuple[str, int]] = []
    for name, value in group.items():
        if isinstance(value, dict):
            sizes += widths(value, f"{prefix}{name}.")
        else:
            shape = getattr(value, "shape", None)
            width = (len(value) if isinstance(value, list | tuple) else 1) if shape is None else math.prod(shape[1:])
            sizes += [(f"{prefix}{name}", width)] * bool(width)
    return sizes


# Actions: with several robots one vector for the policy, and a part for each robot in the env.


def action_bounds(env: Any) -> tuple[np.ndarray, np.ndarray]:
    """The smallest and the largest action [A], robot by robot."""
    space = env.single_action_space
    parts = list(space.values()) if isinstance(space, Dict) else [space]
    return np.concatenate([part.low for part in parts]), np.concatenate([part.high for part in parts])


def for_robots(env: Any, actions: Any) -> Any:
    """Converts actions [..., A] to the env's format: with several robots a dict of parts by robot."""
    space = env.single_action_space
    if not isinstance(space, Dict):
        return actions
    ends = np.cumsum([part.shape[0] for part in space.values()]).tolist()
    return {name: actions[..., begin:end] for name, begin, end in zip(space, [0, *ends], ends, strict=False)}
