"""The learner's worker and what it computes with.

`worker` is the role, `update` an iteration of RL, `bc` and `text_imitation` imitation (of `examples`), `model` the
policy as it is trained, `optimizer` Adam and learning rates, `rollout_buffer` and its neighbours the batches,
`relay` a role before it, `sharding` weights split over several ranks, which agree by `embodied/runtime/collective.py`.
"""

__all__ = [
    "bc",
    "config",
    "examples",
    "memory_estimate",
    "model",
    "relay",
    "rollout_buffer",
    "text_imitation",
    "update",
    "worker",
]
