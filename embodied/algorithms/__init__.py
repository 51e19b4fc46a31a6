"""What is learned from trajectories, as formulas on tensors: advantages, groups, losses, and their options.

`config` and `sft_config` hold the options, `advantages` GAE, `groups` the groups of GRPO, `losses` PPO's and GRPO's,
`prompt_pools` which prompts are tried again.
"""

__all__ = ["advantages", "config", "groups", "losses", "prompt_pools", "sft_config"]
