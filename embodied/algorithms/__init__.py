"""What is learned from trajectories, as formulas on tensors: advantages, groups, losses, and their options.

`config` and `sft_config` hold the options, `advantages` GAE, `groups` the groups of GRPO and the prompts that they try,
`losses` PPO's and GRPO's.
"""

__all__ = ["advantages", "config", "groups", "losses", "sft_config"]
