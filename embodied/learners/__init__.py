"""The learner's worker and its computations.

`worker` is the role. `rollout_buffer` collects the pieces it receives, `train_batch` makes its batch, `update` runs an
iteration of RL, `divided_passes` the passes that several ranks run together. `bc` and `text_imitation` imitate
(`examples`). `model` is the trained policy with Adam, `sharding` splits weights over ranks, which communicate through
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
