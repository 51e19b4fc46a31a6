"""The learner: one replica of the policy, its optimizer, and PPO on its block of env rows.

Ranks see different items and take the same steps: gradients are sums over items divided by a count known before the
step, and everything that is normalised (advantages, observations, gradient norm) is normalised over all ranks.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from embodied.algorithms.config import AlgoConfig
from embodied.data import EnvSpec, Trajectory, Weights
from embodied.errors import CheckpointError
from embodied.learners.batch import merge
from embodied.learners.collective import Alone, Collective, join
from embodied.learners.config import LearnerConfig
from embodied.learners.model import Model
from embodied.learners.optimizer import Optimizer
from embodied.learners.sharding import leave, load_whole, shard, whole_tensors
from embodied.learners.update import prepare, update_policy
from embodied.policies import make_policy
from embodied.policies.folder import read_blobs
from embodied.runtime import Channel, Worker
from embodied.runtime.blobs import tensor_of


class LearnerWorker(Worker):
    def __init__(self, policy, algo: AlgoConfig, config: LearnerConfig, seed: int, meeting) -> None:
        self.policy_config = policy
        self.algo = algo
        self.config = config
        self.seed = seed
        self.meeting = meeting
        self.collective: Collective = Alone()

    def build(self, spec: EnvSpec) -> None:
        """The policy with its initial weights (the same on every rank) and a fresh optimizer."""
        self.policy = make_policy(self.policy_config, spec, self.seed).eval()
        self.model = Model(self.policy, self.config, self.tick)
        if self.config.shard:
            shard(self.policy, self.meeting, self.rank, self.world_size)
        self.collective = join(self.meeting, self.rank, self.world_size, self.model.device, self.timers)
        self.optimizer = Optimizer(self.policy, self.algo, self.collective)

    def update(
        self, trajectories: Channel, sources: tuple[str, ...], env_ids: np.ndarray, iteration: int, total: int
    ) -> dict[str, float]:
        """Receive this rank's trajectories of one rollout, those of `sources`, and do one PPO update with all ranks,
        which together have the env rows `env_ids`."""
        with self.timers.measure("wait"):
            parts = receive(trajectories, sources)
        whole = merge(parts)
        share = prepare(whole, self.algo, self.collective, env_ids, self.model.dtype)
        numbers = update_policy(self.model, self.optimizer, self.algo, share, self.seed, iteration, total)
        rows = self.policy.observation_moments(whole.obs)
        if rows is not None:
            self.policy.merge_observation_moments(np.concatenate(self.collective.gather(rows)))
        return numbers

    def publish(self, version: int, channels: tuple[Channel, ...]) -> None:
        """Hand the current weights to every policy worker as this version."""
        tensors = {name: tensor.detach().numpy().copy() for name, tensor in whole_tensors(self.policy)}
        if self.rank == 0:
            for channel in channels:
                channel.put(Weights(version, tensors))

    def save(self, folder: Path) -> None:
        """The policy folder and the optimizer, into a checkpoint that is being written; rank 0 writes."""
        try:
            if self.rank == 0:
                self.policy.save_pretrained(folder / "policy", whole_tensors(self.policy))
            elif self.config.shard:
                for _ in whole_tensors(self.policy):
                    pass
            self.optimizer.save(folder / "learner", write=self.rank == 0)
        except OSError as err:
            raise CheckpointError(
                f"the checkpoint could not be written: {err}; free some space or choose another run.dir"
            ) from None

    def load(self, checkpoint: Path) -> None:
        load_whole(self.policy, {name: tensor_of(blob) for name, blob in read_blobs(checkpoint / "policy").items()})
        self.optimizer.load(checkpoint / "learner")

    def close(self) -> None:
        if self.config.shard:
            leave()


def receive(trajectories: Channel, sources: tuple[str, ...]) -> list[Trajectory]:
    """One trajectory of each source; others are what sims that died have left."""
    missing, parts = set(sources), []
    while missing:
        part: Trajectory = trajectories.get()
        if part.source in missing:
            missing.remove(part.source)
            parts.append(part)
    return parts
