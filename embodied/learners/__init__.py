"""The learner's worker and what it computes with.

`worker` is the role, `rollout_buffer` the pieces that come to it, `train_batch` its batch, `update` an iteration of RL,
`divided_passes` passes that several ranks run together, `bc` and `text_imitation` imitation (of `examples`), `model`
the policy as it is trained, with Adam, `sharding` weights split over several ranks, which agree by
`embodied/runtime/collective.py`. `throughput` says how fast language models are trained.
"""

__all__ = [
    "bc",
    "config",
    "divided_passes",
    "examples",
    "memory_estimate",
    "model",
    "rollout_buffer",
    "text_imitation",
    "train_batch",
    "update",
    "worker",
]
