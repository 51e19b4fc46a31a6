"""Actions of envs with several robots: one vector for the policy, a part for each robot in the env."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium.spaces import Dict


def action_bounds(env: Any) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest action [A]; of several robots one after the other."""
    space = env.single_action_space
    parts = list(space.values()) if isinstance(space, Dict) else [space]
    return np.concatenate([part.low for part in parts]), np.concatenate([part.high for part in parts])


def for_robots(env: Any, actions: Any) -> Any:
    """Actions [..., A] as the env takes them: where it has several robots, a part for each by its name."""
    space = env.single_action_space
    if not isinstance(space, Dict):
        return actions
    ends = np.cumsum([part.shape[0] for part in space.values()]).tolist()
    return {name: actions[..., begin:end] for name, begin, end in zip(space, [0, *ends], ends, strict=False)}
