"""The learner's worker and its computations.

`learner_worker` is the role. `train_batch` makes its batch of the pieces it receives, `update` runs an iteration of RL,
`divided_passes` the passes that several ranks run together, `imitation` imitates. `model` is the trained policy with
Adam, whose weights `sharding` divides over ranks; these communicate through `embodied/runtime/collective.py`.
"""

__all__ = [
    "config",
    "divided_passes",
    "examples",
    "imitation",
    "learner_worker",
    "memory_estimate",
    "model",
    "train_batch",
    "update",
]
