"""The training speed of a language model: tokens a second, and MFU, the share of its devices' peak rate.

MFU counts two operations for each product of the forward pass and four of the backward pass, also for frozen weights.
Recomputed activations do not count. A device's peak rate is measured once, as the best rate of a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import numpy as np
import torch

from embodied.learners.model import Model
from embodied.runtime.collective import Collective

SIDES = {"cuda": 4096}  # side of the multiplied matrices
TRIES = 5


class Throughput:
    """The seconds of a learner's updates, and the operations of its network in them."""

    def __init__(self, model: Model) -> None:
        self.model, self.seconds, self.peak = model, 0.0, 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        started = perf_counter()
        yield
        self.seconds += perf_counter() - started

    def numbers(self, collective: Collective) -> dict[str, float]:
        """Numbers for the log over all ranks since the last call; all ranks take part. {} for robot policies."""
        if not self.model.policy.speaks:
            return {}
        tokens, products = self.model.policy.take_work()
        if not self.peak:
            dtype = (
                torch.bfloat16 if self.model.config.precision == "bf16" else next(self.model.policy.parameters()).dtype
            )
            self.peak = peak_rate(self.model.device, dtype)
        of_rank = np.array([[tokens, 2.0 * products, self.peak, self.seconds]])
        self.seconds = 0.0
        rows = np.concatenate(collective.gather(of_rank))
        trained, operations, peak, _ = rows.sum(axis=0).tolist()
        longest = float(rows[:, 3].max())
        if not trained:
            return {}
        return {"text/trainer_tokens_per_s": trained / longest, "text/mfu": operations / longest / peak}


@torch.no_grad()
def peak_rate(device: str, dtype: torch.dtype) -> float:
    """Operations a second of a product of two large matrices, the best of several tries."""
    side = SIDES.get(device, 512)
    matrix, best = torch.full((side, side), 0.01, dtype=dtype, device=device), float("inf")
    for _ in range(TRIES):
        started = perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for a GPU
        best = min(best, perf_counter() - started)
    return 2.0 * side**3 / best
