"""The loops: which roles there are, what flows between them, and what an iteration is.

`contract` is what a program declares, `rl_loop` the RL loop, which collects PPO's batches, `relay` a role on their way
to learners, `imitation` the loop that imitates. `group_collector` collects GRPO's batches, `evaluator` evaluates.
`workers` launches the roles, `rollout_manager` runs and replaces sim and policy workers, `answering` says who answers
whom.
"""

__all__ = ["contract", "evaluator", "imitation", "relay", "rl_loop", "workers"]
