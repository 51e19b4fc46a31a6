"""The loops: which roles there are, what flows between them, and what an iteration is.

`contract` is what a program declares, `rl_loop` the RL loop, `imitation` the loop that imitates. `collector` collects
PPO's batches, `group_collector` GRPO's, `relay` is the base of roles that pass batches on to learners, `evaluator`
evaluates. `workers` launches the roles, `rollout_manager` runs and replaces sim and policy workers, `answering` assigns
policy workers to sims. `shipped_roles` are those that a recipe adds, with workers in `network_roles` and
`scoring_roles`.
"""

__all__ = ["contract", "evaluator", "imitation", "relay", "rl_loop", "shipped_roles", "workers"]
