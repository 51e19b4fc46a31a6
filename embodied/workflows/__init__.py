"""The loops: which roles there are, what flows between them, and what an iteration is.

`contract` is what a program declares, `embodied` the loop of RL, `supervised` that of imitation, `horizon_collector`
PPO's batches, `evaluator` evaluations, `workers` launches the roles, `weight_sync` publishes weights to them.
"""

__all__ = ["contract", "embodied", "evaluator", "horizon_collector", "supervised", "weight_sync", "workers"]
