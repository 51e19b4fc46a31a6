"""The learner's worker and what it computes with.

`worker` is the role, `update` an iteration of RL, `bc` and `text_imitation` imitation (of `examples`), `model` the
policy as it is trained, with Adam, `rollout_buffer` and its neighbours the batches, `sharding` weights split over
several ranks, which agree by `embodied/runtime/collective.py`.
"""

__all__ = [
    "bc",
    "config",
    "examples",
    "memory_estimate",
    "model",
    "rollout_buffer",
    "text_imitation",
    "update",
    "worker",
]
