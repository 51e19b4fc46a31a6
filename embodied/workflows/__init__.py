"""The training loops: their roles, the data between them, and the steps of an iteration.

`contract` has the declarations of a program, `rl_loop` the RL loop, `imitation` the imitation loop. `collector`
collects batches, of PPO (`horizon`) or GRPO (`groups`). `evaluator` evaluates. `workers` launches the roles and syncs
weights, `rollout_manager` runs and replaces sim and policy workers, and assigns policy workers to sims; `prompts` hands
prompts to several language engines. `roles` are the roles added by a recipe.
"""

__all__ = ["contract", "evaluator", "imitation", "relay", "rl_loop", "shipped_roles", "workers"]
