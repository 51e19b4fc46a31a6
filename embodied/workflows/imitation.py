"""The loop of supervised fine-tuning: batches come from a dataset; the rest is as in RL.

The sims only play evaluations; an iteration is one pass of the learners over the demonstrations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from embodied.core import rng
from embodied.core.types import Unit
from embodied.envs import env_class
from embodied.runtime import Handle
from embodied.workflows.collector import Batch, Collector
from embodied.workflows.demonstrations import open_data
from embodied.workflows.rl_loop import EVALUATION_ROLES, LEARNER, EmbodiedLoop, learner_arguments

if TYPE_CHECKING:
    from embodied.algorithms.config import SFTConfig
    from embodied.config.recipe import RunConfig
    from embodied.workflows.launched_workers import Workers


def imitator(config: RunConfig) -> str:
    """The import path of the learner's class, for conversations or demonstrations."""
    if env_class(config.env).speaks:
        return "embodied.learners.imitation:TextImitationLearner"
    return "embodied.learners.imitation:ImitationLearner"


def imitator_arguments(workers: Workers) -> tuple:
    config = workers.config
    env = (config.env,) if env_class(config.env).speaks else ()
    return *env, *learner_arguments(workers, config.sft)


def examples_of(sft: SFTConfig, seed: int, num_items: int, iteration: int) -> np.ndarray:
    """The numbers of an iteration's examples, in the order of its minibatches: a pass over all, or a part of one."""
    epoch, places = sft.minibatches(num_items, iteration)
    size = sft.minibatch_size
    return rng.permutation(seed, epoch, 0, num_items)[places.start * size : places.stop * size]


class DatasetBatches(Collector):
    """Demonstrations on disk, or answered prompts, instead of played episodes. Every learner reads its own."""

    def __init__(self, workers: Workers) -> None:
        """The learners open the dataset, if it fits the env."""
        super().__init__(workers)
        self.sft, self.sends_early = self.config.sft, False
        self.num_items = open_data(workers, self.sft)
        self.learned = 0  # items of the last iteration

    def total_iterations(self) -> int:
        """One per pass over the demonstrations, or per `sft.steps`."""
        return self.sft.iterations(self.num_items)

    def update(self, batch: Batch, iteration: int, total: int) -> Handle | None:
        """The examples of an iteration are a unit, which every learner gets: each knows which of them it has."""
        numbers = examples_of(self.sft, self.config.seed, self.num_items, iteration)
        self.learned = len(numbers)
        self._announce((rank, Unit((), numbers)) for rank in range(len(self.channels)))
        return super().update(batch, iteration, total)

    def metrics(self, batch: Batch) -> dict[str, float]:
        return {"env_steps": self.learned}


class ImitationLoop(EmbodiedLoop):
    """The embodied loop with learners that imitate, and batches from a dataset."""

    command = "sft"
    roles = (*EVALUATION_ROLES, replace(LEARNER, worker=imitator, arguments=imitator_arguments))
    plays = False
    make_collector = DatasetBatches
