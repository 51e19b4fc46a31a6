"""A program with a fourth role: workers that score what sims saw before learners get it, in a process of their own."""

from dataclasses import replace

import numpy as np

from embodied.placement import Role
from embodied.runtime import Worker
from embodied.workflows.embodied import EmbodiedLoop
from embodied.workflows.horizon_collector import HorizonCollector

WORK = np.full((400, 400), 1e-3)  # a network's, so that scoring takes time


class Scorer(Worker):
    def score(self, shares):
        """Put as many trajectories as each share says from its channel into the learner's, with rewards added."""
        for unscored, count, scored in shares:
            for _ in range(count):
                played = unscored.get()
                bonus = np.float32((WORK @ WORK).sum() * 0)
                scored.put(replace(played, rewards=played.rewards + bonus), weight=played.num_steps)


class ScoredRollouts(HorizonCollector):
    def scored_by(self, scorers, cluster):
        self.scorers, self.scored = scorers, self.trajectories
        self.trajectories = [cluster.channel(f"unscored-{i}", capacity=None) for i in range(len(self.scored))]

    def collect(self, version):
        batch = super().collect(version)
        counts = [len(batch.sources_of(block)) for block in self.blocks]
        shares = list(zip(self.trajectories, counts, self.scored, strict=True))
        self.scorers.score.each([(shares[i :: len(self.scorers)],) for i in range(len(self.scorers))]).wait()
        return batch

    def update(self, batch, iteration, total):
        shares = [(c, batch.sources_of(block)) for c, block in zip(self.scored, self.blocks, strict=True)]
        return self.learners.update.each([(*share, batch.env_ids, iteration, total) for share in shares])


class ScoredLoop(EmbodiedLoop):
    roles = (*EmbodiedLoop.roles, Role("reward"))

    def __init__(self, config, cluster, *args, **options):
        super().__init__(config, cluster, *args, **options)
        self.scorers = cluster.launch("tests.scored_loop:Scorer", "reward")

    @property
    def groups(self):
        return [*super().groups, self.scorers]

    def what_to_learn_from(self, config, tasks):
        return ScoredRollouts(config, tasks)

    def start(self):
        spec = super().start()
        self.collection.scored_by(self.scorers, self.cluster)
        return spec
