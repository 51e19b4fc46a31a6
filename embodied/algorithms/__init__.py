"""The algorithms: advantages, groups, losses, and their options.

`config` has the options, `advantages` GAE and group advantages, `group_pool` the groups of GRPO and their
prompts, `losses` the losses of PPO and GRPO.
"""

__all__ = ["advantages", "config", "group_pool", "losses"]
