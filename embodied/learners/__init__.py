"""The learner's worker and its computations.

`worker` is the role, `rollout_buffer` the pieces that come to it, `train_batch` its batch, `update` an iteration of RL,
`divided_passes` passes that several ranks run together, `bc` and `text_imitation` imitation (of `examples`), `model`
the trained policy, with Adam, `sharding` weights split over several ranks, which communicate through
`embodied/runtime/collective.py`. `throughput` measures the training of language models.
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
