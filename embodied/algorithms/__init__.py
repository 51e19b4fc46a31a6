"""The formulas of learning from trajectories: advantages, groups, losses, and their options.

`config` and `sft_config` hold the options, `advantages` GAE, `groups` the groups of GRPO and their prompts, `losses`
PPO's and GRPO's.
"""

__all__ = ["advantages", "config", "groups", "losses", "sft_config"]
