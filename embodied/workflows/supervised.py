"""The loop of supervised fine-tuning: no simulator gives anything to learn from, all others do what they do in RL.

The sims only play evaluations; an iteration is one pass of the learners over the demonstrations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from embodied.algorithms.config import SFTConfig
from embodied.core.errors import ConfigError
from embodied.core.types import EnvSpec, EpisodeResult
from embodied.datasets import read_dataset
from embodied.datasets.lerobot_layout import ACTION, CAMERA, STATE
from embodied.runtime import Channel, Handle, WorkerGroup
from embodied.workflows.embodied import EmbodiedLoop
from embodied.workflows.rollout_manager import RolloutManager

if TYPE_CHECKING:
    from embodied.config.recipe import RunConfig


class ImitationLoop(EmbodiedLoop):
    command = "sft"
    learner = "embodied.learners.bc:ImitationLearner"
    collects = False

    def what_to_learn_from(self, config: RunConfig, tasks: tuple[str, ...]) -> Recorded:
        return Recorded(config.sft)

    @property
    def algorithm(self):
        return self.config.sft

    def total_iterations(self) -> int:
        return self.config.sft.epochs


class Recorded:
    """Demonstrations on disk, which every learner reads for itself."""

    exhausted = ""
    noted = None
    finished: list[EpisodeResult] = []  # noqa: RUF012  no episode is played in an iteration

    def __init__(self, config: SFTConfig) -> None:
        self.config = config

    def start(self, rollouts: RolloutManager, learners: WorkerGroup, trajectories: list[Channel]) -> None:
        check_dataset(self.config, rollouts.spec, len(learners))
        self.learners = learners
        self.num_steps = learners.open_data().wait()[0]

    def collect(self, version: int) -> Recorded:
        return self

    def update(self, batch: Recorded, iteration: int, total: int) -> Handle:
        return self.learners.imitate(iteration, total)

    def numbers(self, batch: Recorded) -> dict[str, float]:
        return {"env_steps": self.num_steps}

    def save(self) -> dict[str, np.ndarray]:
        return {}


def check_dataset(config: SFTConfig, spec: EnvSpec, learners: int) -> None:
    """Refuse demonstrations of another robot or with other observations, and too few of them."""
    if spec.privileged_dim:
        raise ConfigError("demonstrations hold no privileged numbers; set env.privileged=false")
    dataset = read_dataset(config.data, images=False, names=config.names)
    wanted = {ACTION: (spec.action.dim,), **({STATE: (spec.state_dim,)} if spec.state_dim else {})}
    wanted |= {CAMERA + camera: tuple(size) for camera, size in spec.images.items()}
    there = {name: tuple(feature["shape"]) for name, feature in dataset.features.items()}
    odd = [
        f"{name} is {list(size)} here, {list(there[name]) if name in there else 'missing'} there"
        for name, size in wanted.items()
        if there.get(name) != size
    ]
    if odd:
        raise ConfigError(f"sft.data={config.data} holds demonstrations of another env: {'; '.join(odd)}")
    if (count := min(config.episodes or len(dataset), len(dataset))) < learners:
        raise ConfigError(f"{learners} learners share {count} demonstrations; collect more, or use fewer learners")
