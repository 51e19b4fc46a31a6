"""The loops: which roles there are, what flows between them, and what an iteration is.

`contract` is what a program declares, `embodied` the RL loop, `imitation` the loop that imitates. `horizon_collector`
collects PPO's batches, `group_collector` GRPO's, `evaluator` evaluates. `workers` launches the roles, `rollout_manager`
runs, pairs and replaces sim and policy workers, `prompt_routing` shares prompts out among several language engines.
"""

__all__ = ["contract", "embodied", "evaluator", "horizon_collector", "imitation", "workers"]
